"""Stop on SIGINT, SIGTERM or SIGHUP at a step boundary, saved; on SIGUSR1 save and continue."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import threading
import time
from types import FrameType
from typing import Any

from ignite.engine import Engine, Events

from ignite_engine import Interrupted, Trainer, TrainingEvents
from ignite_engine.errors import StopRequested
from ignite_engine.events import Phase
from ignite_engine.ranks import agreement, signals

logger = logging.getLogger(__name__)


class GracefulStop:
    """The first SIGINT, SIGTERM or SIGHUP on any rank stops all ranks at the same iteration, where Checkpoint saves.

    Args:
        exit: ``run()`` then raises ``Interrupted`` (exit code 130 for SIGINT, 143 for SIGTERM and SIGHUP); False: it
            returns, with ``state.status == "interrupted"``. None: False in a notebook and at Python's prompt, which
            ``Interrupted`` would end or clutter, otherwise True.

    A signal only sets a flag and writes one line to stderr; on one process it also interrupts a wait for the loader. A
    second signal 0.5 s or more after the first ends the run at once, without a save, by ``Interrupted``, in an
    interactive session by KeyboardInterrupt. For the ranks that ``Parallel`` starts their parent counts them. SIGTERM
    after the last checkpoint is ignored: launchers send it to processes that are still exiting. SIGHUP stays ignored
    under ``nohup``.

    The signal handlers are installed while ``run()`` runs and restored after it; but with ``Interrupted`` the three
    stay ignored, as everything is saved and the process exits (in an interactive session they are restored). Signals
    can only be handled in the main thread: in another one this handler has no effect but a warning.
    """

    phase = Phase.PREPARE  # an evaluation at STARTED can be stopped too

    def __init__(self, *, exit: bool | None = None) -> None:
        self.exit = not _is_interactive() if exit is None else exit
        self._trainer: Trainer | None = None
        self._received: int | None = None
        """The first signal of this run that stops it."""
        self._received_at = 0.0
        self._saved = False
        self._pid = -1
        self._before: dict[int, Any] = {}

    def attach(self, engine: Engine, event: Any = Events.STARTED) -> None:
        """Handle signals from ``event`` on."""
        trainer = Trainer.of(engine)
        trainer.add_event_handler(event, self)
        trainer.add_event_handler(TrainingEvents.CHECKPOINT_SAVED, self._committed)

    def __call__(self, trainer: Trainer) -> None:
        """Install the signal handlers; only the main thread can."""
        if threading.current_thread() is not threading.main_thread():
            logger.warning(
                "GracefulStop has no effect: signals can only be handled in the main thread, and run() was called in "
                "another one (%s). The run continues without it; stop it with trainer.request_stop(reason).",
                threading.current_thread().name,
            )
            return
        self._trainer, self._received, self._saved, self._pid = trainer, None, False, os.getpid()
        trainer.call_at_end(self._restore)
        for number in (*signals.SIGNALS, signals.FORCE) if signals.parent_counts else signals.SIGNALS:
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        # a forked loader worker inherits this handler
        if os.getpid() != self._pid or self._trainer is None:
            return
        if number == signal.SIGUSR1:
            self._trainer.request_save()
            self._say(number, "Checkpoint saves at the next step boundary.")
        elif self._received is None and number != signals.FORCE:
            self._received, self._received_at = number, time.monotonic()
            self._trainer.request_stop(signal.Signals(number).name, signals.treated_as(number) if self.exit else None)
            self._say(
                number,
                "the run stops at the next step boundary, where Checkpoint saves. Another signal ends it at once, "
                "without a save.",
            )
            if self._trainer.requests.waiting_for_data:
                raise StopRequested
        elif signals.is_second(number, self._received_at):
            first = self._received or signal.SIGTERM
            ends = signals.treated_as(first if number == signals.FORCE else number)
            if ends != signal.SIGTERM or not self._saved:
                raise KeyboardInterrupt if _is_interactive() else Interrupted(ends)

    def _say(self, number: int, what: str) -> None:
        assert self._trainer is not None
        line = f"{signal.Signals(number).name} at iteration {self._trainer.state.iteration}: {what}\n"
        if agreement.rank() == 0:
            # logging may be what the signal has interrupted, with its stream locked; and the terminal may be gone
            with contextlib.suppress(OSError):
                os.write(2, line.encode())

    def _committed(self, trainer: Trainer) -> None:
        self._saved = trainer.state.stopping and trainer.state.saved_iteration == trainer.state.iteration

    def _restore(self, trainer: Trainer) -> None:
        stopped = trainer.state.status == "interrupted"
        exits = stopped and self.exit and not _is_interactive()
        before, self._before, self._trainer = self._before, {}, None
        for number, handler in before.items():
            if exits and number != signal.SIGUSR1:
                handler = signal.SIG_IGN
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


def _is_interactive() -> bool:
    """Python's prompt, IPython or a notebook: it outlives what a script exits with."""
    return hasattr(sys, "ps1")
