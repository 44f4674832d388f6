"""Whether a run that another process trains goes on."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from pathlib import Path

from ignite_engine.checkpointing.filesystem import is_held
from ignite_engine.checkpointing.layout import scan
from ignite_engine.run_directory import RunDirectory

AGAIN_WITHIN_S = 60.0
"""A run that has failed may be started again within so long, as by ``restart_on="any"``."""


def is_begun(run: RunDirectory) -> bool:
    """Whether the folder is, or was, that of a run."""
    is_used = is_held(run.path) or is_held(run.checkpoints)
    return is_used or bool(run.files_of_a_run()) or any(scan(run.path))


class Life(ABC):
    """Watches for signs of a run that another process trains; nothing is taken or changed.

    Args:
        wait_s: seconds without a sign of life after which a run that has not begun, or was killed, is given up.
    """

    def __init__(self, wait_s: float) -> None:
        self.wait_s = wait_s
        self._signs: object = None
        self._seen = time.monotonic()

    def has_ended(self) -> bool:
        """Whether it says so itself, and nobody has started it again."""
        status = self._look()
        may_come_again = status == "failed" and self._silent_s <= min(AGAIN_WITHIN_S, self.wait_s / 2)
        return status in ("completed", "interrupted", "failed") and not may_come_again

    def is_silent(self) -> bool:
        """Whether there was no sign of it for ``wait_s``, as far as :meth:`has_ended` has looked."""
        return self._silent_s > self.wait_s

    def wait_anew(self) -> None:
        """Count ``wait_s`` from now on: nobody has looked for signs meanwhile."""
        self._seen = time.monotonic()

    @property
    def _silent_s(self) -> float:
        return time.monotonic() - self._seen

    @abstractmethod
    def _look(self) -> object:
        """Look for signs; the status that a run leaves which nobody trains now."""

    def _notice(self, signs: object) -> None:
        """Any change of them is a sign of life."""
        if signs != self._signs:
            self._signs = signs
            self.wait_anew()


class LifeHere(Life):
    """As the run's files and locks show."""

    def __init__(self, run: RunDirectory, wait_s: float) -> None:
        super().__init__(wait_s)
        self.run = run

    def _look(self) -> str | None:
        self._notice(
            [_stamp(path) for path in (self.run.summary, self.run.metrics, self.run.history, self.run.checkpoints)]
        )
        if self._is_held():
            self.wait_anew()
            return None
        return self._status()

    def _is_held(self) -> bool:
        # of a run of a config or of fit(), and of Checkpoint alone
        return is_held(self.run.path) or is_held(self.run.checkpoints)

    def _status(self) -> str | None:
        if "status" in (summary := self.run.read_summary()):
            return str(summary["status"])
        history = self.run.read_history()
        return str(history[-1]["what"]) if history else None


def _stamp(path: Path) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size
