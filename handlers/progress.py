"""Progress and time left of a run: a redrawn line on a terminal, a few plain lines elsewhere."""

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

REDRAW_S, LINE_S, LINES_APART_S = 0.1, 30.0, 10.0
LINE_SHARE = 0.1
BAR_CELLS = 20


class Progress:
    """Shows epoch, iteration and total, the time left, iterations per second, and what the console shows, on stderr.

    On a terminal one line is redrawn, at most ten times a second, as wide as the terminal; it is cleared before
    loggers print. Elsewhere a line is printed after each tenth of the run, at least 10 s apart, after 30 s without a
    log point or a line, and at the end. Rank 0 only; it reads nothing from the device, and between its lines costs a
    clock read and two comparisons. The time left is computed from the mean speed of this process, evaluations and
    checkpoints included.

    Args:
        keys: of ``state.metrics``, as ``MetricLogger(console=...)`` takes them.
    """

    def __init__(self, keys: Sequence[str] | None = None) -> None:
        self.keys = keys
        self._stderr = Stream("stderr")
        self._drawn = False
        self._next_time = self._next_iteration = self._not_before = 0.0
        self._started_at, self._first_iteration, self._printed_iteration = 0.0, 0, -1

    def attach(self, engine: Engine, event: object = Events.ITERATION_COMPLETED) -> None:
        trainer = Trainer.of(engine)
        if agreement.rank() != 0:
            return
        trainer.add_event_handler(Events.STARTED, self._start)
        trainer.add_event_handler(event, self)
        trainer.add_event_handler(TrainingEvents.METRICS_READY, self._make_room)
        trainer.add_event_handler(Events.COMPLETED, self._finish)

    def __call__(self, trainer: Trainer) -> None:
        now = perf_counter()
        if now >= self._next_time or (trainer.state.iteration >= self._next_iteration and now >= self._not_before):
            self._print(trainer, now)

    def _start(self, trainer: Trainer) -> None:
        self._started_at, self._first_iteration, self._printed_iteration = perf_counter(), trainer.state.iteration, -1
        self._schedule(trainer, self._started_at)
        if self._stderr.is_terminal:
            # filters of the handlers, because filters of a logger do not see records of its children
            every = (*logging.getLogger().handlers, logging.lastResort)
            handlers = [handler for handler in every if isinstance(handler, logging.StreamHandler)]
            for handler in handlers:
                handler.addFilter(self._clear_before)

            def end(trainer: Trainer) -> None:
                for handler in handlers:
                    handler.removeFilter(self._clear_before)
                self._leave()

            trainer.call_at_end(end)

    def _schedule(self, trainer: Trainer, now: float) -> None:
        redrawn, total = self._stderr.is_terminal, trainer.last_iteration
        self._next_time = now + (REDRAW_S if redrawn else LINE_S)
        self._next_iteration, self._not_before = math.inf, now + LINES_APART_S
        if total is not None and not redrawn:
            tenth = total * LINE_SHARE
            self._next_iteration = (math.floor(trainer.state.iteration / tenth + 1e-9) + 1) * tenth

    def _print(self, trainer: Trainer, now: float) -> None:
        self._schedule(trainer, now)
        self._printed_iteration = trainer.state.iteration
        parts = self._parts(trainer, now)
        if not self._stderr.is_terminal:
            self._stderr.write("  ".join(parts) + "\n")
            return
        room = (os.get_terminal_size(sys.stderr.fileno()).columns or 80) - 1
        while len(line := "  ".join(parts)) > room and len(parts) > 1:
            parts.pop()
        self._stderr.write(f"\r{line[:room]}\x1b[K")
        self._drawn = True

    def _parts(self, trainer: Trainer, now: float) -> list[str]:
        """Where the run is, its times, its speed, and what was measured."""
        state, total = trainer.state, trainer.last_iteration
        elapsed, done = now - self._started_at, state.iteration - self._first_iteration
        epochs = f"/{state.max_epochs}" if state.max_epochs else ""
        where, times = f"epoch {state.epoch}{epochs}  iter {state.iteration}", [f"elapsed {_clock(elapsed)}"]
        if total is not None:
            share = min(state.iteration / total, 1.0)
            bar = f" [{'#' * int(share * BAR_CELLS):.<{BAR_CELLS}}]" if self._stderr.is_terminal else ""
            where += f"/{total}{bar} {share:.0%}"
            if done > 0:
                times.append(f"ETA {_clock(elapsed / done * max(total - state.iteration, 0))}")
        if done > 0 and elapsed > 0:
            times.append(f"{short(done / elapsed, 3)} it/s")
        return [where, *times, *shown(state.metrics, self.keys)]

    def _make_room(self, trainer: Trainer) -> None:
        """Before the loggers print at a log point, which is a sign of life as well."""
        self._clear()
        if not self._stderr.is_terminal:
            self._next_time = perf_counter() + LINE_S

    _make_room.phase = Phase.MEASURE  # type: ignore[attr-defined]  # before the loggers; read by the Trainer

    def _clear_before(self, record: logging.LogRecord) -> bool:
        self._clear()
        return True

    def _clear(self) -> None:
        if self._drawn:
            self._drawn = False
            self._stderr.write("\r\x1b[K")

    def _finish(self, trainer: Trainer) -> None:
        trained = trainer.state.iteration != self._first_iteration
        if trained and (self._stderr.is_terminal or self._printed_iteration != trainer.state.iteration):
            self._print(trainer, perf_counter())
        self._leave()

    def _leave(self) -> None:
        """Leave the line that is drawn as it is."""
        if self._drawn:
            self._drawn = False
            self._stderr.write("\n")


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
