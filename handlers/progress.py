"""Progress and time left of a run: a redrawn line on a terminal, a few plain lines elsewhere."""

from __future__ import annotations

import logging
import math
import os
import sys
from collections.abc import Sequence
from time import perf_counter

import ignite.distributed as idist
from ignite.engine import Engine, Events

from ignite_engine import Trainer
from ignite_engine.events import Phase, TrainingEvents
from ignite_engine.handlers.columns import Columns, head_of, short

REDRAW_S = 0.1
LINE_S = 30.0
LINE_SHARE = 0.1
LINES_APART_S = 10.0
BAR_CELLS = 24
NARROW_BAR_CELLS = 10
WIDE_COLUMNS = 100
logger = logging.getLogger(__name__)


class Progress:
    """Shows epoch, iteration and total, the time left, iterations per second, and what the console shows, on stderr.

    On a terminal one line is redrawn, at most ten times a second, as wide as the terminal; it is cleared before
    loggers print. Elsewhere a line is printed after each tenth of the run, at least
    10 s apart, after 30 s without a log point or a line, and at the end. Rank 0 only; it reads nothing from the device,
    and between its lines costs a clock read and two comparisons. The time left is computed from the mean speed of this
    process, evaluations and checkpoints included.

    Args:
        keys: of ``state.metrics``, as :class:`~ignite_engine.handlers.ConsoleSink` takes them; plain lines show
            ``loss`` alone.
    """

    def __init__(self, keys: Sequence[str] | None = None) -> None:
        self.columns = Columns(keys)
        self._drawn = self._gone = False
        self._next_time = self._next_iteration = self._not_before = 0.0
        self._started_at, self._first_iteration, self._printed_iteration, self._more_iterations = 0.0, 0, -1, 0

    def attach(self, engine: Engine, event: object = Events.ITERATION_COMPLETED) -> None:
        trainer = Trainer.of(engine)
        if idist.get_rank() != 0:
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
        # after a resume with other groups or ranks, iterations before and after are not of the same size
        state, position = trainer.state, trainer.progress
        of_now = position.epochs_completed * (state.epoch_length or 0) + position.epoch_iteration
        self._more_iterations = state.iteration - of_now if state.epoch_length else 0
        self._schedule(trainer, self._started_at)
        if _is_terminal():
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
        redrawn, total = _is_terminal(), self._total(trainer)
        self._next_time = now + (REDRAW_S if redrawn else LINE_S)
        self._next_iteration, self._not_before = math.inf, now + LINES_APART_S
        if total is not None and not redrawn:
            tenth = total * LINE_SHARE
            self._next_iteration = (math.floor(trainer.state.iteration / tenth + 1e-9) + 1) * tenth

    def _print(self, trainer: Trainer, now: float) -> None:
        self._schedule(trainer, now)
        self._printed_iteration = trainer.state.iteration
        if _is_terminal():
            columns = os.get_terminal_size(sys.stderr.fileno()).columns or 80
            self._drawn = self._write(f"\r{self._line(trainer, now, columns)[: columns - 1]}\x1b[K")
        else:
            self._write(f"{self._plain_line(trainer, now)}\n")

    def _write(self, text: str) -> bool:
        """Whether it could be written; a closed terminal, or a pipe without a reader, does not end the training."""
        if self._gone:
            return False
        try:
            sys.stderr.write(text)
            sys.stderr.flush()
        except (OSError, ValueError) as error:
            self._gone = True
            logger.warning("Progress is no longer shown, as stderr is gone: %s. Training continues.", error)
        return not self._gone

    def _line(self, trainer: Trainer, now: float, columns: int) -> str:
        """With the values that fit into ``columns``."""
        where, share, times = self._position(trainer, now)
        if share is not None:
            cells = BAR_CELLS if columns >= WIDE_COLUMNS else NARROW_BAR_CELLS
            filled = int(share * cells)
            where += f" [{'#' * filled}{'.' * (cells - filled)}] {share:.0%}"
        line = "  ".join([where, *times[-1:], *self._rate(trainer, now)])
        for value in self._values(trainer):
            if len(line) + 2 + len(value) >= columns:
                break
            line += f"  {value}"
        return line

    def _plain_line(self, trainer: Trainer, now: float) -> str:
        where, share, times = self._position(trainer, now)
        loss = trainer.state.metrics.get("loss")
        parts = [where if share is None else f"{where} {share:.0%}", *times]
        return "  ".join(parts if loss is None else [*parts, f"loss {short(loss)}"])

    def _position(self, trainer: Trainer, now: float) -> tuple[str, float | None, list[str]]:
        """Where the run is in words, the share of it that is done if that is known, and its times."""
        state, total = trainer.state, self._total(trainer)
        elapsed, done = now - self._started_at, state.iteration - self._first_iteration
        epochs = f"/{state.max_epochs}" if state.max_epochs else ""
        where, times = f"epoch {state.epoch}{epochs}  iter {state.iteration}", [f"elapsed {_clock(elapsed)}"]
        if total is None:
            return where, None, times
        if done > 0:
            times.append(f"ETA {_clock(elapsed / done * max(total - state.iteration, 0))}")
        return f"{where}/{total}", min(state.iteration / total, 1.0), times

    def _rate(self, trainer: Trainer, now: float) -> list[str]:
        """Iterations of this process in a second, once there is one."""
        done = trainer.state.iteration - self._first_iteration
        elapsed = now - self._started_at
        return [f"{short(done / elapsed, 'throughput/steps_per_s')} it/s"] if done > 0 and elapsed > 0 else []

    def _total(self, trainer: Trainer) -> int | None:
        """The iteration at which the run ends; None in the first pass over data of unknown length."""
        state = trainer.state
        if state.max_epochs is None or not state.epoch_length:
            return state.max_iters
        by_epochs = int(state.max_epochs) * int(state.epoch_length) + self._more_iterations
        return by_epochs if state.max_iters is None else min(by_epochs, state.max_iters)

    def _values(self, trainer: Trainer) -> list[str]:
        metrics = trainer.state.metrics
        self.columns.add(metrics)
        return [f"{head_of(key)} {short(metrics[key], key)}" for key in self.columns.chosen() if key in metrics]

    def _make_room(self, trainer: Trainer) -> None:
        """Before the loggers print at a log point, which is a sign of life as well."""
        self._clear()
        if not _is_terminal():
            self._next_time = perf_counter() + LINE_S

    _make_room.phase = Phase.MEASURE  # type: ignore[attr-defined]  # before the loggers; read by the Trainer

    def _clear_before(self, record: logging.LogRecord) -> bool:
        self._clear()
        return True

    def _clear(self) -> None:
        if self._drawn:
            self._drawn = False
            self._write("\r\x1b[K")

    def _finish(self, trainer: Trainer) -> None:
        trained = trainer.state.iteration != self._first_iteration
        if trained and (_is_terminal() or self._printed_iteration != trainer.state.iteration):
            self._print(trainer, perf_counter())
        self._leave()

    def _leave(self) -> None:
        """Leave the line that is drawn as it is."""
        if self._drawn:
            self._drawn = False
            self._write("\n")


def _is_terminal() -> bool:
    return not sys.stderr.closed and sys.stderr.isatty()


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
