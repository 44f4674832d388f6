"""Progress and time left of a run, in a line that is redrawn on a terminal."""

from __future__ import annotations

import logging
import math
import os
import sys
from collections.abc import Sequence
from time import perf_counter

from ignite.engine import Engine, Events

from ignite_engine import Trainer
from ignite_engine.events import Phase, TrainingEvents
from ignite_engine.handlers.console import Stream, shown
from ignite_engine.ranks import agreement
from ignite_engine.text import short

REDRAW_S = 0.1
BAR_CELLS = 20


class Progress:
    """Shows epoch, iteration and total, the time left, iterations per second, and what the console shows, on stderr.

    One line is redrawn, at most ten times a second, as wide as the terminal; it is cleared before loggers print.
    Where stderr is no terminal nothing is shown. Rank 0 only; it reads nothing from the device. The time left is
    computed from the mean speed of this process, evaluations and checkpoints included.

    Args:
        keys: of ``state.metrics``, as ``MetricLogger(console=...)`` takes them.
    """

    def __init__(self, keys: Sequence[str] | None = None) -> None:
        self.keys = keys
        self._stderr = Stream("stderr")
        self._is_drawn = False
        self._next_time, self._started_at, self._first_iteration = math.inf, 0.0, 0

    def attach(self, engine: Engine, event: object = Events.ITERATION_COMPLETED) -> None:
        trainer = Trainer.of(engine)
        if agreement.rank() == 0:
            trainer.add_event_handler(Events.STARTED, self._start)
            trainer.add_event_handler(event, self)
            trainer.add_event_handler(TrainingEvents.METRICS_READY, self._make_room)
            trainer.add_event_handler(Events.COMPLETED, self._draw_the_end)

    def __call__(self, trainer: Trainer) -> None:
        if perf_counter() >= self._next_time:
            self._draw(trainer)

    def _start(self, trainer: Trainer) -> None:
        self._started_at, self._first_iteration, self._next_time = perf_counter(), trainer.state.iteration, math.inf
        if not self._stderr.is_terminal:
            return
        self._next_time = self._started_at + REDRAW_S
        # filters of the handlers, because filters of a logger do not see records of its children
        every = (*logging.getLogger().handlers, logging.lastResort)
        handlers = [handler for handler in every if isinstance(handler, logging.StreamHandler)]
        for handler in handlers:
            handler.addFilter(self._clear_before)

        def end(trainer: Trainer) -> None:
            for handler in handlers:
                handler.removeFilter(self._clear_before)
            self._leave("\n")

        trainer.call_at_end(end)

    def _draw(self, trainer: Trainer) -> None:
        now = perf_counter()
        self._next_time = now + REDRAW_S
        parts = self._parts(trainer, now)
        room = (os.get_terminal_size(sys.stderr.fileno()).columns or 80) - 1
        while len(line := "  ".join(parts)) > room and len(parts) > 1:
            parts.pop()
        self._stderr.write(f"\r{line[:room]}\x1b[K")
        self._is_drawn = True

    def _parts(self, trainer: Trainer, now: float) -> list[str]:
        """Where the run is, its times, its speed, and what was measured."""
        state, total = trainer.state, trainer.last_iteration
        elapsed, done = now - self._started_at, state.iteration - self._first_iteration
        epochs = f"/{state.max_epochs}" if state.max_epochs else ""
        where, times = f"epoch {state.epoch}{epochs}  iter {state.iteration}", [f"elapsed {_clock(elapsed)}"]
        if total is not None:
            share = min(state.iteration / total, 1.0)
            where += f"/{total} [{'#' * int(share * BAR_CELLS):.<{BAR_CELLS}}] {share:.0%}"
            if done > 0:
                times.append(f"ETA {_clock(elapsed / done * max(total - state.iteration, 0))}")
        if done > 0 and elapsed > 0:
            times.append(f"{short(done / elapsed, 3)} it/s")
        return [where, *times, *shown(state.metrics, self.keys)]

    def _make_room(self) -> None:
        self._leave("\r\x1b[K")

    _make_room.phase = Phase.MEASURE  # type: ignore[attr-defined]  # before the loggers; read by the Trainer

    def _clear_before(self, record: logging.LogRecord) -> bool:
        self._make_room()
        return True

    def _draw_the_end(self, trainer: Trainer) -> None:
        if self._next_time < math.inf and trainer.state.iteration != self._first_iteration:
            self._draw(trainer)

    def _leave(self, text: str) -> None:
        """Where a line is drawn, write ``text``: it clears the line, or leaves it as it is."""
        if self._is_drawn:
            self._is_drawn = False
            self._stderr.write(text)


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
