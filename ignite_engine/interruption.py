"""How a run is asked to stop, and how it says that it was."""

from __future__ import annotations

import signal as signals


class StopRequested(BaseException):
    """Raised by a signal handler inside the loader's ``next`` only, and caught there: the group was not consumed."""


class Interrupted(SystemExit):
    """Raised by ``Trainer.run()`` after a run that a signal stopped was saved on every rank.

    Args:
        signal: its number; the exit code is 128 + signal (130 for SIGINT, 143 for SIGTERM).
    """

    def __init__(self, signal: int) -> None:
        super().__init__(128 + signal)
        self.signal = signal

    def __str__(self) -> str:
        return f"interrupted by {signals.Signals(self.signal).name}"
