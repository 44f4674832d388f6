"""Means over an interval of what the update reports, and the sinks that write all metrics."""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from numbers import Number
from pathlib import Path
from typing import Any

import torch
from ignite.engine import Engine, Events

from ignite_engine import Phase, Trainer, TrainingEvents
from ignite_engine.handlers.history import History
from ignite_engine.handlers.meters import CHUNK, Meter, Running, packed, unpacked
from ignite_engine.handlers.sinks import ConsoleSink, JSONLSink, Sink, attach_sink
from ignite_engine.ranks import agreement
from ignite_engine.text import plain_metric
from ignite_engine.update import Update, Updates

Row = Mapping[str, Any]
logger = logging.getLogger(__name__)
_WATCHED = ("loss", "grad_norm")
"""Values whose first non-finite occurrence is reported."""
_COLUMNS = ("iteration", "epoch")
"""Columns that each line of a log has."""


class MetricLogger:
    """Mean over the interval of each value in ``state.output``; sinks write what is new in ``state.metrics``.

    What is in ``state.meters`` (:class:`~ignite_engine.handlers.Meter`) is written beside the means, by its name.

    Args:
        directory: gets a ``metrics.jsonl`` and a ``starts.jsonl`` (starts and stops); None: no files.
        sinks: further ones; an error in a sink is a warning, and training continues.
        console: print a line at each log point; a list: with these columns (:class:`ConsoleSink`).
        config: the settings of the run, kept in ``starts.jsonl`` with each start.
        name: in checkpoints; the interval's values are saved, so that a resumed run logs the same means.

    Between log points it keeps references to the last detached scalars and the sums of those before, on their device:
    no host sync, no collective. At a log point they are read and averaged over the ranks in one collective, meters
    included. A number that ``update`` returned is logged as ``loss``. The first loss that is not finite is a warning,
    at the log point after it, with its iteration and rank; so is the first such ``grad_norm`` of an Update without a
    loss scaler, and a run that ends with such a loss. What a non-finite policy leaves out is in no mean.
    """

    phase = Phase.MEASURE

    def __init__(
        self,
        directory: str | Path | None = None,
        *,
        sinks: Sequence[Sink] = (),
        console: bool | Sequence[str] = True,
        config: Mapping[str, Any] | None = None,
        name: str = "metric_logger",
    ) -> None:
        self.name = name
        self.sinks: list[Sink] = [*sinks]
        self.directory = None if directory is None else Path(directory).absolute()
        self.history = None if directory is None else History(directory, config)
        """Records the run's starts and ends in its folder."""
        if directory is not None:
            self.sinks.append(JSONLSink(Path(directory) / "metrics.jsonl", name=f"{name}/jsonl"))
        if console is not False:
            self.sinks.append(ConsoleSink(keys=None if console is True else console))
        self._rows: list[tuple[int, Row]] = []
        """The last values by iteration, which are not added up yet."""
        self._means: dict[str, Running] = {}
        self._meters: dict[str, Meter] = {}
        self._loaded: dict[str, dict[str, Any]] = {}
        """What a checkpoint had for meters, until they are there."""
        self._not_finite_at: int | None = None
        """The first iteration whose loss was not finite."""

    def attach(self, engine: Engine, event: Any = Events.ITERATION_COMPLETED) -> None:
        """Log at ``event``.

        Raises:
            ValueError: another MetricLogger of this trainer writes to the same directory.
        """
        trainer = Trainer.of(engine)
        self._refuse_a_second_writer(trainer)
        trainer.register(self.name, self)
        trainer.add_event_handler(Events.STARTED, self._start)
        trainer.add_event_handler(Events.ITERATION_COMPLETED, self._collect)
        trainer.add_event_handler(event, self)
        trainer.add_event_handler(Events.COMPLETED, self._write_rest)
        trainer.add_event_handler(TrainingEvents.METRICS_READY, self._make_plain)
        if self.history is not None:
            self.history.attach(trainer)
        for sink in self.sinks:
            attach_sink(sink, trainer)

    def __call__(self, trainer: Trainer) -> None:
        """Write the interval's means into ``state.metrics`` and start the next interval."""
        self._add_up()
        running, self._means = self._means, {}
        meters = self._meters = trainer.state.meters
        if not running and not meters:
            return
        self._join_loaded()
        of_meters = [number for meter in meters.values() for number in meter.reduced()]
        means = {name: mean.number() / mean.count for name, mean in running.items()}
        bad = [name in means and not math.isfinite(means[name]) for name in _WATCHED]
        first_bad = [running[name].bad_at() if is_bad else math.inf for name, is_bad in zip(_WATCHED, bad, strict=True)]
        rows = agreement.gather_floats([*means.values(), *of_meters, *first_bad])
        *columns, losses, norms = zip(*rows, strict=True)
        for key, column in zip(running, columns):
            trainer.state.metrics[key] = agreement.mean_of(column)
        for number, (name, meter) in enumerate(meters.items()):
            first = len(means) + 2 * number
            if (value := meter.over_ranks([(row[first], row[first + 1]) for row in rows])) is not None:
                trainer.state.metrics[name] = value
            meter.reset()
        is_known = isinstance(trainer.update, Update | Updates)
        if not is_known or trainer.update.scaler is not None:
            norms = (math.inf,)  # fp16 overflows and skips the step
        if min(norms) < min(losses):
            self._note_first(trainer, "gradient norm", trainer.state.metrics["grad_norm"], norms)
        else:
            self._note_first(trainer, "loss", trainer.state.metrics.get("loss", 0.0), losses)

    def state_dict(self) -> dict[str, Any]:
        """The values of the interval so far, those of meters, and the first iteration whose loss was not finite."""
        self._join_loaded()
        meters = {name: meter.state_dict() for name, meter in self._meters.items() if meter.count}
        means = {name: mean.state_dict() for name, mean in self._means.items()}
        return {
            "rows": _as_columns(self._rows),
            "means": means,
            "not_finite_at": self._not_finite_at,
            "meters": self._loaded | meters,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._rows, self._means = _as_rows(state["rows"]), {}
        for name, mean in state["means"].items():
            self._means[name] = Running("mean")
            self._means[name].load_state_dict(mean)
        self._not_finite_at = state["not_finite_at"]
        self._loaded = dict(state["meters"])
        for meter in self._meters.values():
            meter.reset()

    def _refuse_a_second_writer(self, trainer: Trainer) -> None:
        if self.directory is None:
            return
        for name, obj in trainer.registry.objects.items():
            directory = obj.directory if isinstance(obj, MetricLogger) else None
            if directory is not None and directory.resolve() == self.directory.resolve():
                raise ValueError(
                    f"The MetricLogger {name!r} writes to {directory} already: give this one another directory."
                )

    def _make_plain(self, trainer: Trainer) -> None:
        """On METRICS_READY, before the sinks: tensors and arrays become numbers, or lists of them.

        Raises:
            ValueError: a value is neither a number nor lists of them, or has the name of a column of the log.
        """
        metrics = trainer.state.metrics
        for name, value in metrics.fresh.items():
            if name in _COLUMNS:
                raise ValueError(f"A metric is called {name!r}, which is a column of the log: give it another name.")
            if type(value) is not float:
                metrics.fresh[name] = plain = plain_metric(name, value)
                dict.__setitem__(metrics, name, plain)

    def _add_up(self) -> None:
        rows, self._rows = self._rows, []
        for name in dict.fromkeys(name for _, row in rows for name in row):
            values = [row[name] for _, row in rows if name in row]
            iterations = [iteration for iteration, row in rows if name in row] if name in _WATCHED else None
            self._means.setdefault(name, Running("mean")).add(values, iterations)

    def _join_loaded(self) -> None:
        for name in self._loaded.keys() & self._meters.keys():
            self._meters[name].continue_from(self._loaded.pop(name))

    def begin_anew(self) -> None:
        """A run starts over: nothing was logged."""
        self._rows, self._means, self._not_finite_at, self._loaded = [], {}, None, {}
        for meter in self._meters.values():
            meter.reset()

    def _start(self, trainer: Trainer) -> None:
        self._meters = trainer.state.meters
        trainer.state.not_finite_at = self._not_finite_at
        names = trainer.update.updates if isinstance(trainer.update, Updates) else ()
        losses = [f"{name}/loss" for name in names] or (["loss"] if isinstance(trainer.update, Update) else [])
        for sink in self.sinks:
            if isinstance(sink, ConsoleSink):  # an evaluation may come before the first of them
                sink.columns.add(dict.fromkeys(losses))

    def _collect(self, trainer: Trainer) -> None:
        policy = trainer.update.non_finite
        if policy is not None and policy.leaves_out(trainer.state.iteration):
            return
        if self._loaded:
            self._join_loaded()
        if row := _scalars(trainer.state.output, fresh=type(trainer.update) in (Update, Updates)):
            self._rows.append((trainer.state.iteration, row))
            for meter in trainer.state.meters.values():
                if meter.of in row:
                    meter.take(row[meter.of])
            if len(self._rows) == CHUNK:
                self._add_up()

    def _note_first(self, trainer: Trainer, name: str, value: float, firsts: Sequence[float]) -> None:
        """Warn of the first value that is not finite; ``firsts`` are the iterations by rank."""
        first = min(firsts)
        if self._not_finite_at is None and first < math.inf:
            self._not_finite_at = trainer.state.not_finite_at = int(first)
            ranks = [rank for rank, iteration in enumerate(firsts) if iteration == first]
            is_of_all = trainer.update.rank_invariant  # each rank has the mean of all micro-batches
            if agreement.rank() == 0:
                logger.warning(
                    "The %s of iteration %d is %s%s, the first that is not finite; the run continues. "
                    "Check the data of that iteration, the learning rate and the precision.",
                    *(name, self._not_finite_at, value, "" if is_of_all else agreement.on_ranks(ranks)),
                )

    def _write_rest(self, trainer: Trainer) -> None:
        """Log the last, perhaps shorter interval of a completed run; a resumed run completes it otherwise."""
        if trainer.state.status != "completed":
            return
        self(trainer)
        loss = trainer.state.metrics.get("loss", 0.0)
        if self._not_finite_at is not None and not math.isfinite(loss) and agreement.rank() == 0:
            logger.warning(
                "The run has ended with a loss of %s, which was first not finite at iteration %d.",
                loss,
                self._not_finite_at,
            )

    _collect.phase = Phase.EVALUATE  # type: ignore[attr-defined]  # before any handler of this event reads the mean


def _as_columns(rows: Sequence[tuple[int, Row]]) -> list[Any]:
    """For each sequence of rows with the same names their iterations, and by name the values in one tensor."""
    columns: list[Any] = []
    for names, group in itertools.groupby(rows, key=lambda row: list(row[1])):
        iterations, values = zip(*group, strict=True)
        columns.append([list(iterations), {name: packed([row[name] for row in values]) for name in names}])
    return columns


def _as_rows(columns: Iterable[Any]) -> list[tuple[int, Row]]:
    """The rows of :func:`_as_columns`."""
    rows: list[tuple[int, Row]] = []
    for iterations, values in columns:
        by_name = {name: unpacked(column) for name, column in values.items()}
        rows += [(iteration, {name: by_name[name][at] for name in by_name}) for at, iteration in enumerate(iterations)]
    return rows


def _scalars(output: Any, *, fresh: bool) -> Row:
    """The numbers and tensors of one element in ``output`` by name, without graphs.

    Args:
        fresh: the tensors are in memory of their own; else they may be parts of larger ones, or parameters.
    """
    row: dict[str, Any] = {}
    if isinstance(output, list) and output and isinstance(output[0], Mapping):
        output = output[0]  # MONAI's: one for each sample, with the same loss
    pairs = output.items() if isinstance(output, Mapping) else (("loss", output),)
    for name, value in pairs:
        if isinstance(value, torch.Tensor):
            if value.numel() == 1:
                row[str(name)] = value if fresh else value.detach().clone()
        elif isinstance(value, Number):
            row[str(name)] = value
    return row
