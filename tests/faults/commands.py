"""The command line in a forked process, and its ranks too: none of them imports torch anew."""

from __future__ import annotations

import os
import resource
import tempfile
from pathlib import Path
from typing import Any

import pytest

from ignite_engine import cli
from ignite_engine.cli import verify_resume
from ignite_engine.ranks import launch
from tests.faults.fork_server import shared


def main(arguments: list[str]) -> int:
    """The command; ranks that it starts are forked instead of spawned."""
    launch._start_method = lambda: "fork"
    return cli.main(arguments)


def main_on_a_full_disk(arguments: list[str]) -> int:
    """As ``main``, and no file may grow above 8 KiB."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, 8192))
    return main(arguments)


def fork_the_runs_of_verify_resume(patch: pytest.MonkeyPatch) -> None:
    """Its three processes are forked too."""

    def start(runs: Any, command: list[str]) -> tuple[int, str]:
        output = runs.folder / "output.txt"
        output.unlink(missing_ok=True)
        child = shared().start("ignite_engine.cli:main", command[3:], output=output, folder=Path.cwd())
        return child.wait(), output.read_text()

    patch.setattr(verify_resume._ThreeRuns, "_start", start)


class Command:
    """The command in a process group of its own, as a terminal starts it, with what tests use of a ``Popen``.

    Args:
        folder: its working directory.
        function: what calls it, with ``arguments``.
    """

    def __init__(self, folder: Path, *arguments: str, function: str = "tests.faults.commands:main") -> None:
        self._said = Path(tempfile.mkdtemp(dir=folder.parent, prefix="said_"))
        files = {"output": self._said / "output.txt", "errors": self._said / "errors.txt"}
        self._child = shared().start(function, arguments, folder=folder, **files)
        self.pid = self._child.pid

    @property
    def returncode(self) -> int | None:
        return self._child.poll()

    def poll(self) -> int | None:
        return self._child.poll()

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def communicate(self, timeout: float = 120.0) -> tuple[str, str]:
        """Its output and its errors, when it has ended."""
        self._child.wait(timeout)
        return (self._said / "output.txt").read_text(), (self._said / "errors.txt").read_text()
