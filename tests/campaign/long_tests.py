"""The tests that are marked ``long``, one file at a time: neither ``make test`` nor CI runs them."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from functools import partial
from typing import Any

from tests.campaign.resuming import Difference
from tests.campaign.runs import Bench, Item
from tests.faults.fork_server import ROOT

TIMEOUT_S = 900.0
_MARK = "pytest.mark." + "long"  # in two parts, so that this file has none


def items() -> list[Item]:
    """Each file of tests that has the mark."""
    files = sorted(path for path in (ROOT / "tests").rglob("test_*.py") if _MARK in path.read_text(encoding="utf-8"))
    names = [str(path.relative_to(ROOT)) for path in files]
    return [Item("long tests", name, partial(_run, name)) for name in names]


def _run(name: str, bench: Bench) -> dict[str, Any]:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=short", name]
    command += ["-m", "long and not cuda and not accelerator", f"--basetemp={bench.folder / 'tests'}"]
    output = bench.folder / "output.txt"
    with output.open("wb") as file:
        process = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code: int | None = process.wait(TIMEOUT_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            code = None
    lines = output.read_text(encoding="utf-8", errors="replace").splitlines()
    passed = re.match(r"(\d+) passed", lines[-1]) if lines else None
    if code != 0 or passed is None:
        said = [line for line in lines if line.startswith(("FAILED", "ERROR"))] or lines[-1:]
        raise Difference(f"out of time after {TIMEOUT_S:.0f} s" if code is None else f"code {code}: {' '.join(said)}")
    return {"tests": int(passed[1])}
