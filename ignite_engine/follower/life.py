"""Whether a run that another process trains goes on, as its folder shows."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from ignite_engine.checkpointing.filesystem import is_held
from ignite_engine.checkpointing.layout import scan
from ignite_engine.run_directory import RunDirectory

AGAIN_WITHIN_S = 60.0
"""A run that has failed may be started again within so long, as by ``restart_on="any"``."""


def has_stopped(status: object, silent_s: float, wait_s: float) -> bool:
    """Whether a run that nobody trains says so for good.

    Args:
        silent_s: since its last sign.
    """
    may_come_again = status == "failed" and silent_s <= min(AGAIN_WITHIN_S, wait_s / 2)
    return status in ("completed", "interrupted", "failed") and not may_come_again


def is_begun(run: RunDirectory) -> bool:
    """Whether the folder is, or was, that of a run."""
    is_used = is_held(run.path) or is_held(run.checkpoints)
    return is_used or bool(run.files_of_a_run()) or any(scan(run.path))


class Life:
    """Looks at the files and locks of a run; nothing is taken or changed.

    Args:
        wait_s: seconds without a sign of life after which a run that has not begun, or was killed, is given up.
    """

    def __init__(self, run: RunDirectory, wait_s: float) -> None:
        self.run, self.wait_s = run, wait_s
        self._stamps: Sequence[object] = ()
        self._seen = time.monotonic()

    def has_ended(self) -> bool:
        """Whether it says so itself, and nobody has started it again."""
        self._look()
        return not self._is_held() and has_stopped(self._status(), time.monotonic() - self._seen, self.wait_s)

    def _look(self) -> None:
        stamps = [_stamp(path) for path in (self.run.summary, self.run.metrics, self.run.history, self.run.checkpoints)]
        if self._is_held() or stamps != self._stamps:
            self._stamps, self._seen = stamps, time.monotonic()

    def is_silent(self) -> bool:
        """Whether there was no sign of it for ``wait_s``, as far as :meth:`has_ended` has looked."""
        return time.monotonic() - self._seen > self.wait_s

    def wait_anew(self) -> None:
        """Count ``wait_s`` from now on: nobody has looked for signs meanwhile."""
        self._seen = time.monotonic()

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
