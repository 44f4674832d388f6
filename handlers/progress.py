"""Progress and time left of a run: one redrawn line on a terminal, a few plain lines elsewhere."""

from __future__ import annotations

import math
import os
import sys
from time import perf_counter
from typing import Any

import ignite.distributed as idist
from ignite.engine import Engine, Events

from ignite_engine.events import Phase, TrainingEvents

REDRAW_S = 0.1
LINE_S = 30.0
LINE_SHARE = 0.1
BAR_CELLS = 24


class Progress:
    """Prints epoch, iteration and total, the time left, and the last ``loss`` in ``state.metrics``, on stderr.

    On a terminal one line is redrawn, at most ten times a second, and cleared before the loggers print. Elsewhere a
    line is printed after each tenth of the run, and after 30 s without one. Rank 0 only; it reads nothing from the
    device, and between its lines costs a clock read and two comparisons. The time left is computed from the mean speed
    of this process, evaluations and checkpoints included.
    """

    def __init__(self) -> None:
        self._drawn = False
        self._next_time = self._next_iteration = 0.0
        self._started_at, self._first_iteration, self._printed_iteration = 0.0, 0, -1

    def attach(self, trainer: Engine, event: Any = Events.ITERATION_COMPLETED) -> None:
        if idist.get_rank() != 0:
            return
        trainer.add_event_handler(Events.STARTED, self._start)
        trainer.add_event_handler(event, self)
        trainer.add_event_handler(TrainingEvents.METRICS_READY, self._clear)
        trainer.add_event_handler(Events.COMPLETED, self._finish)

    def __call__(self, trainer: Engine) -> None:
        now = perf_counter()
        if now >= self._next_time or trainer.state.iteration >= self._next_iteration:
            self._print(trainer, now)

    def _start(self, trainer: Engine) -> None:
        self._started_at, self._first_iteration, self._printed_iteration = perf_counter(), trainer.state.iteration, -1
        self._schedule(trainer, self._started_at)

    def _schedule(self, trainer: Engine, now: float) -> None:
        terminal, total = sys.stderr.isatty(), total_iterations(trainer)
        self._next_time = now + (REDRAW_S if terminal else LINE_S)
        self._next_iteration = math.inf
        if total is not None and not terminal:
            tenth = total * LINE_SHARE
            self._next_iteration = (math.floor(trainer.state.iteration / tenth + 1e-9) + 1) * tenth

    def _print(self, trainer: Engine, now: float) -> None:
        self._schedule(trainer, now)
        self._printed_iteration = trainer.state.iteration
        line = self._line(trainer, now)
        if sys.stderr.isatty():
            columns = os.get_terminal_size(sys.stderr.fileno()).columns or 80
            sys.stderr.write(f"\r{line[: columns - 1]}\x1b[K")
            self._drawn = True
        else:
            sys.stderr.write(f"{line}\n")
        sys.stderr.flush()

    def _line(self, trainer: Engine, now: float) -> str:
        state, total = trainer.state, total_iterations(trainer)
        epochs = f"/{state.max_epochs}" if state.max_epochs else ""
        elapsed, done = now - self._started_at, state.iteration - self._first_iteration
        parts = [f"epoch {state.epoch}{epochs}"]
        if total is None:
            parts.append(f"iteration {state.iteration}")
        else:
            share = min(state.iteration / total, 1.0)
            filled = int(share * BAR_CELLS)
            bar = f" [{'#' * filled}{'.' * (BAR_CELLS - filled)}]" if sys.stderr.isatty() else ""
            parts.append(f"iteration {state.iteration}/{total}{bar} {share:.0%}")
        parts.append(f"elapsed {_clock(elapsed)}")
        if total is not None and done > 0:
            parts.append(f"ETA {_clock(elapsed / done * max(total - state.iteration, 0))}")
        if "loss" in state.metrics:
            parts.append(f"loss {state.metrics['loss']:.4g}")
        return "  ".join(parts)

    def _clear(self, trainer: Engine) -> None:
        if self._drawn:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()
            self._drawn = False

    _clear.phase = Phase.MEASURE  # type: ignore[attr-defined]  # before the loggers; read by the Trainer

    def _finish(self, trainer: Engine) -> None:
        if sys.stderr.isatty() or self._printed_iteration != trainer.state.iteration:
            self._print(trainer, perf_counter())
        if self._drawn:
            sys.stderr.write("\n")
            sys.stderr.flush()
            self._drawn = False


def total_iterations(trainer: Engine) -> int | None:
    """The iteration at which the run ends; None in the first pass over data of unknown length."""
    state = trainer.state
    if state.max_iters is not None:
        return int(state.max_iters)
    if state.max_epochs is None or not state.epoch_length:
        return None
    return int(state.max_epochs) * int(state.epoch_length)


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
