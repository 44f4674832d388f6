"""Runs the tests that need a device, on this machine's if it has one, else on each fake one.

A test that is skipped fails, but on a real device those of the fake one.

Usage: ``python -m tests.device [--kind cuda|fake] [arguments of pytest]``.
"""

import os
import subprocess
import sys
from pathlib import Path

from tests.device.fake import KINDS, VARIABLE

ROOT = Path(__file__).resolve().parents[2]


def main(arguments):
    kinds = KINDS
    if arguments[:1] == ["--kind"]:
        kinds, arguments = (arguments[1],), arguments[2:]
    elif _has_accelerator():
        kinds = (None,)
    return max(_run(kind, arguments) for kind in kinds)


def _has_accelerator():
    """Asked in another process: a fake device is to be loaded before torch."""
    question = "import sys, torch; sys.exit(0 if torch.accelerator.is_available() else 1)"
    return subprocess.run([sys.executable, "-c", question]).returncode == 0


def markers_of(kind):
    """Of the tests that run on a device of this kind; None: this machine's."""
    return ["accelerator"] if kind == "fake" else ["accelerator", "cuda"]


def files_of(markers):
    """The files that have a test with one of these markers."""
    marks = [f"pytest.mark.{marker}" for marker in markers]
    return [
        str(path.relative_to(ROOT))
        for path in sorted((ROOT / "tests").rglob("test_*.py"))
        if any(mark in path.read_text(encoding="utf-8") for mark in marks)
    ]


def _run(kind, arguments):
    markers = markers_of(kind)
    files = files_of(markers)
    own = [argument for argument in arguments if argument.endswith(".py") or "::" in argument]
    print(f"Device: {kind or 'of this machine'}", flush=True)
    environment = os.environ | ({} if kind is None else {VARIABLE: kind})
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--no-skips"]
    command += ["-m", " or ".join(markers), *arguments, *([] if own else files)]
    return subprocess.run(command, cwd=ROOT, env=environment).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
