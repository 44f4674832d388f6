"""Stop on SIGINT or SIGTERM at a step boundary, saved; on SIGUSR1 save and continue."""

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

    A signal only sets a flag; on one process it also interrupts a wait for the loader. A second signal 0.5 s or more
    after the first ends the run at once, without a save. SIGTERM after the last checkpoint is ignored: launchers send
    it to processes that are still exiting. The signal handlers are installed while ``run()`` runs and restored after
    it; but with ``Interrupted`` both signals stay ignored, as everything is saved and the process exits.
    """

    phase = Phase.EVALUATE - 1  # an evaluation at STARTED can be stopped too

    def __init__(self, *, exit: bool = True) -> None:
        self.exit = exit
        self._trainer: Trainer | None = None
        self._stopped_at: float | None = None
        self._saved = False
        self._pid = -1
        self._before: dict[int, Any] = {}

    def attach(self, trainer: Trainer, event: Any = Events.STARTED) -> None:
        """Handle signals from ``event`` on."""
        trainer.add_event_handler(event, self)
        trainer.add_event_handler(TrainingEvents.CHECKPOINT_SAVED, self._committed)

    def __call__(self, trainer: Trainer) -> None:
        """Install the signal handlers; only the main thread may."""
        self._trainer, self._stopped_at, self._saved, self._pid = trainer, None, False, os.getpid()
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
        if self._stopped_at is None:
            self._stopped_at = now
            self._trainer.request_stop(signal.Signals(number).name, number if self.exit else None)
            if self._trainer.fetching and idist.get_world_size() == 1:
                raise StopRequested
        elif now - self._stopped_at >= _FORCE_AFTER_S and not (self._saved and number == signal.SIGTERM):
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
