"""A copy of this repository in which a file is changed for the time of some tests."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Result:
    """What tests of a changed tree gave.

    Args:
        caught_by: the first test that failed; None: none did.
        how: ``failed``, ``passed``, ``out of time``, or ``not collected``, where the change breaks every import.
        last_line: of the error, or of pytest.
    """

    caught_by: str | None
    how: str
    last_line: str
    seconds: float


class Tree:
    """The files of the repository, those that git does not track included, in another folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        names = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            cwd=ROOT,
            capture_output=True,
            check=True,
        ).stdout
        for name in filter(None, names.decode().split("\0")):
            source, copy = ROOT / name, folder / name
            if source.is_symlink() or source.is_file():
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(source, copy, follow_symlinks=False)
        self._clock = int(time.time())

    @contextlib.contextmanager
    def changed(self, path: str, text: str) -> Iterator[None]:
        """Within it the file has another text."""
        before = (self.folder / path).read_text(encoding="utf-8")
        self._write(path, text)
        try:
            yield
        finally:
            self._write(path, before)

    def test(self, arguments: Sequence[str], *, timeout_s: float, variables: Mapping[str, str] | None = None) -> Result:
        """Run pytest, until the first test fails."""
        # a new one each time: processes that the tests before have left may still write to theirs
        temporary = Path(tempfile.mkdtemp(prefix="tmp_", dir=self.folder.parent))
        command = [sys.executable, "-m", "pytest", "-x", "-v", "--tb=line", "-p", "no:cacheprovider", "--no-header"]
        environment = (
            os.environ
            | {"PYTHONPATH": str(self.folder), "TMPDIR": str(temporary), "COLUMNS": "300"}
            | dict(variables or {})
        )
        started, output = time.monotonic(), self.folder.parent / "output.txt"
        with output.open("wb") as file:
            process = subprocess.Popen(
                [*command, *arguments],
                cwd=self.folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=_take_signals,
            )
            try:
                code: int | None = process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                code = None
            finally:
                with contextlib.suppress(ProcessLookupError):  # ranks that hang, too
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        seconds = time.monotonic() - started
        shutil.rmtree(temporary, ignore_errors=True)
        lines = output.read_text(encoding="utf-8", errors="replace").splitlines()
        return _result(code, lines, seconds)

    def _write(self, path: str, text: str) -> None:
        target = self.folder / path
        target.write_text(text, encoding="utf-8")
        self._clock += 2  # Python compares seconds and size to know a compiled module
        os.utime(target, (self._clock, self._clock))


def _take_signals() -> None:
    """As at a terminal: a shell has its jobs in the background ignore Ctrl-C, and tests send it."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGQUIT, signal.SIG_DFL)


def _result(code: int | None, lines: Sequence[str], seconds: float) -> Result:
    begun = [line.split(" ", 1)[0] for line in lines if line.startswith("tests/") and "::" in line]
    last = lines[-1].strip("= ") if lines else ""
    if code is None:
        return Result(None, "out of time", begun[-1] if begun else last, seconds)
    if code == 0:
        return Result(None, "passed", last, seconds)
    failed = [line.split(" ", 2) for line in lines if line.startswith(("FAILED ", "ERROR "))]
    if code != 1 or not failed:
        return Result(begun[-1] if begun else "collection", "not collected", last, seconds)
    return Result(failed[0][1], "failed", failed[0][2].removeprefix("- ") if len(failed[0]) > 2 else "", seconds)
