"""Stop on SIGINT or SIGTERM at a clean edge, saved; save on SIGUSR1 and go on."""

from __future__ import annotations

import os
import signal
import time
from types import FrameType
from typing import Any

import ignite.distributed as idist
from ignite.engine import Events

from ignite_engine import Interrupted, Phase, StopRequested, Trainer, TrainingEvents

_FORCE_AFTER_S = 0.5


class GracefulStop:
    """The first SIGINT or SIGTERM, on any rank, stops all ranks at the same iteration; the Checkpoint saves there.

    Args:
        exit: ``run()`` then raises ``Interrupted`` (exit code 128 + signal); False: it returns, with
            ``state.status == "interrupted"``.

    A signal only sets a flag; while one process waits for its loader it also breaks that wait. The same or another
    signal 0.5 s or more after the first forces the end, without a save. SIGTERM after the committed save is ignored:
    launchers send it to those that still say goodbye. Handlers are installed while ``run()`` runs and put back after;
    but once ``Interrupted`` is raised both signals are ignored, as the process ends and all is saved.
    """

    phase = Phase.EVALUATE - 1  # an evaluation at STARTED hears signals, too

    def __init__(self, *, exit: bool = True) -> None:
        self.exit = exit
        self._trainer: Trainer | None = None
        self._first_s: float | None = None
        self._saved = False
        self._pid = -1
        self._before: dict[int, Any] = {}

    def attach(self, trainer: Trainer, event: Any = Events.STARTED) -> None:
        """Listen for signals from ``event`` on."""
        trainer.add_event_handler(event, self)
        trainer.add_event_handler(TrainingEvents.CHECKPOINT_SAVED, self._committed)

    def __call__(self, trainer: Trainer) -> None:
        """Install the signal handlers; only the main thread may."""
        self._trainer, self._first_s, self._saved, self._pid = trainer, None, False, os.getpid()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
            self._before[number] = signal.signal(number, self._on_signal)
        trainer.call_at_end(self._restore)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        # a forked loader worker inherits this handler
        if os.getpid() != self._pid or self._trainer is None:
            return
        if number == signal.SIGUSR1:
            self._trainer.request_save()
            return
        now = time.monotonic()
        if self._first_s is None:
            self._first_s = now
            self._trainer.request_stop(signal.Signals(number).name, number if self.exit else None)
            if self._trainer.fetching and idist.get_world_size() == 1:
                raise StopRequested
        elif now - self._first_s >= _FORCE_AFTER_S and not (self._saved and number == signal.SIGTERM):
            raise Interrupted(number)

    def _committed(self, trainer: Trainer) -> None:
        self._saved = trainer.state.stopping and trainer.state.saved_iteration == trainer.state.iteration

    def _restore(self, trainer: Trainer) -> None:
        stopped = self.exit and trainer.state.status == "interrupted"
        for number, handler in self._before.items():
            ignored = stopped and number in (signal.SIGINT, signal.SIGTERM)
            signal.signal(number, signal.SIG_IGN if ignored else handler)
        self._before = {}
        self._trainer = None
