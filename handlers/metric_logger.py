"""Means over an interval of what the update reports, and the sinks that write all metrics."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from numbers import Number
from pathlib import Path
from typing import Any

import torch
from ignite.engine import Events

from ignite_engine import Phase, Trainer
from ignite_engine.handlers.history import History
from ignite_engine.handlers.media import MediaFiles
from ignite_engine.handlers.meters import Meter
from ignite_engine.handlers.sinks import ConsoleSink, JSONLSink, Sink, attach_sink
from ignite_engine.ranks import agreement

Row = Mapping[str, Any]
logger = logging.getLogger(__name__)


class MetricLogger:
    """Mean over the interval of each value in ``state.output``; sinks write whatever is new in ``state.metrics``.

    What is in ``state.meters`` (:class:`~ignite_engine.handlers.Meter`) is written beside the means, by its name.

    Args:
        directory: gets a ``metrics.jsonl``, a ``history.jsonl`` (starts and stops), and ``media`` for what is in
            ``state.media``; None: no files.
        sinks: further ones; an error in a sink is a warning, and training continues.
        console: print a line at each log point; a list: with these columns (:class:`ConsoleSink`).
        name: in checkpoints; the interval's values are saved, so that a resumed run logs the same means.

    Between log points it keeps references to detached scalars: no host sync, no collective. At a log point they are
    stacked, read once and averaged over the ranks in one collective, meters included. A number that ``update`` returned
    is logged as ``loss``. The first loss that is not finite is a warning, at the log point after it, with its iteration
    and rank; so is the first such ``grad_norm`` of an Update without a loss scaler, and a run that ends with such a
    loss. What a non-finite policy leaves out is in no mean.
    """

    phase = Phase.MEASURE

    def __init__(
        self,
        directory: str | Path | None = None,
        *,
        sinks: Sequence[Sink] = (),
        console: bool | Sequence[str] = True,
        name: str = "metric_logger",
    ) -> None:
        self.name = name
        self.sinks: list[Sink | MediaFiles] = [*sinks]
        self._history = None if directory is None else History(directory)
        if directory is not None:
            self.sinks.append(JSONLSink(Path(directory) / "metrics.jsonl", name=f"{name}/jsonl"))
            self.sinks.append(MediaFiles(directory, name=f"{name}/media"))
        if console is not False:
            self.sinks.append(ConsoleSink(keys=None if console is True else console))
        self._interval: list[tuple[int, Row]] = []
        self._meters: dict[str, Meter] = {}
        self._loaded: dict[str, list[Any]] = {}
        """What a checkpoint had for meters, until they are there."""
        self._not_finite_at: int | None = None
        """The first iteration whose loss was not finite."""

    def attach(self, trainer: Trainer, event: Any = Events.ITERATION_COMPLETED) -> None:
        """Log at ``event``."""
        trainer.register(self.name, self)
        trainer.add_event_handler(Events.STARTED, self._start)
        trainer.add_event_handler(Events.ITERATION_COMPLETED, self._collect)
        trainer.add_event_handler(event, self)
        trainer.add_event_handler(Events.COMPLETED, self._write_rest)
        if self._history is not None:
            self._history.attach(trainer)
        for sink in self.sinks:
            attach_sink(sink, trainer)

    def __call__(self, trainer: Trainer) -> None:
        """Write the interval's means into ``state.metrics`` and start the next interval."""
        interval, self._interval = self._interval, []
        meters = self._meters = trainer.state.meters
        if not interval and not meters:
            return
        self._join_loaded()
        means, first_bad = _means(interval)
        of_meters = [number for meter in meters.values() for number in meter.reduced(_given(meter, interval))]
        rows = agreement.gather_floats([*means.values(), *of_meters, *first_bad])
        *columns, losses, norms = zip(*rows, strict=True)
        for key, column in zip(means, columns):
            trainer.state.metrics[key] = agreement.mean_of(column)
        for number, (name, meter) in enumerate(meters.items()):
            first = len(means) + 2 * number
            if (value := meter.over_ranks([(row[first], row[first + 1]) for row in rows])) is not None:
                trainer.state.metrics[name] = value
            meter.values.clear()
        if getattr(trainer.update, "scaler", trainer) is not None:
            norms = (math.inf,)  # fp16 overflows and skips the step
        if min(norms) < min(losses):
            self._note_first(trainer, "gradient norm", trainer.state.metrics["grad_norm"], norms)
        else:
            self._note_first(trainer, "loss", trainer.state.metrics.get("loss", 0.0), losses)

    def state_dict(self) -> dict[str, Any]:
        """The values of the interval so far, those of meters, and the first iteration whose loss was not finite."""
        self._join_loaded()
        meters = {name: list(meter.values) for name, meter in self._meters.items() if meter.values}
        rows = [list(row) for row in self._interval]
        return {"interval": rows, "not_finite_at": self._not_finite_at, "meters": self._loaded | meters}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._interval = [(iteration, row) for iteration, row in state["interval"]]
        self._not_finite_at = state["not_finite_at"]
        self._loaded = dict(state.get("meters", {}))
        for meter in self._meters.values():
            meter.values.clear()

    def _join_loaded(self) -> None:
        for name in self._loaded.keys() & self._meters.keys():
            self._meters[name].values[:0] = self._loaded.pop(name)

    def _start(self, trainer: Trainer) -> None:
        if trainer.starts_fresh(self.name):
            self._interval, self._not_finite_at, self._loaded = [], None, {}
            for meter in trainer.state.meters.values():
                meter.values.clear()
        self._meters = trainer.state.meters
        trainer.state.not_finite_at = self._not_finite_at

    def _collect(self, trainer: Trainer) -> None:
        policy = getattr(trainer.update, "non_finite", None)
        if policy is not None and policy.leaves_out(trainer.state.iteration):
            return
        if row := _scalars(trainer.state.output):
            self._interval.append((trainer.state.iteration, row))

    def _note_first(self, trainer: Trainer, name: str, value: float, firsts: Sequence[float]) -> None:
        """Warn of the first value that is not finite; ``firsts`` are the iterations by rank."""
        first = min(firsts)
        if self._not_finite_at is None and first < math.inf:
            self._not_finite_at = trainer.state.not_finite_at = int(first)
            ranks = [rank for rank, each in enumerate(firsts) if each == first]
            if agreement.rank() == 0:
                logger.warning(
                    "The %s of iteration %d is %s%s, the first that is not finite; the run continues. "
                    "Check the data of that iteration, the learning rate and the precision.",
                    *(name, self._not_finite_at, value, agreement.on_ranks(ranks)),
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


def _scalars(output: Any) -> Row:
    """The numbers and tensors of one element in ``output`` by name, without graphs and larger tensors behind them."""
    row: dict[str, Any] = {}
    for name, value in output.items() if isinstance(output, Mapping) else (("loss", output),):
        if isinstance(value, torch.Tensor):
            if value.numel() == 1:
                if value.requires_grad:
                    value = value.detach()
                # a view would keep the whole tensor until the next log point, and in checkpoints
                row[name] = value if value.untyped_storage().nbytes() == value.itemsize else value.clone()
        elif isinstance(value, Number):
            row[name] = value
    return row


def _means(interval: Sequence[tuple[int, Row]]) -> tuple[dict[str, float], tuple[float, float]]:
    """Means by name, and the first iterations whose loss and whose gradient norm are not finite, or infinity."""
    means: dict[str, float] = {}
    firsts = {"loss": math.inf, "grad_norm": math.inf}
    for key in dict.fromkeys(key for _, row in interval for key in row):
        iterations = [iteration for iteration, row in interval if key in row]
        values = [row[key] for _, row in interval if key in row]
        stacked = _stacked(values)
        means[key] = stacked.mean().item()
        if key in firsts and not math.isfinite(means[key]):
            bad = [at for at, value in zip(iterations, stacked.tolist(), strict=True) if not math.isfinite(value)]
            firsts[key] = min(bad, default=math.inf)  # finite ones may have an infinite sum
    return means, (firsts["loss"], firsts["grad_norm"])


def _given(meter: Meter, interval: Sequence[tuple[int, Row]]) -> torch.Tensor:
    """What a meter was given since the last log point, on the host."""
    values = meter.values if meter.of is None else [row[meter.of] for _, row in interval if meter.of in row]
    return _stacked(values).cpu() if values else torch.empty(0, dtype=torch.float64)


def _stacked(values: Sequence[Any]) -> torch.Tensor:
    """Scalars as one tensor of doubles, on the device of the first."""
    first = values[0]
    if isinstance(first, torch.Tensor):
        if all(isinstance(v, torch.Tensor) and v.shape == () and v.dtype is first.dtype for v in values) and all(
            v.device == first.device for v in values
        ):
            return torch.stack(list(values)).double()
        return torch.stack([torch.as_tensor(v).reshape(()).double().to(first.device) for v in values])
    return torch.tensor([float(value) for value in values], dtype=torch.float64)
