"""Means over an interval of what the update reports, and the sinks that write all metrics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Number
from pathlib import Path
from typing import Any

import torch
from ignite.engine import Events

from ignite_engine import Phase, Trainer
from ignite_engine.handlers.sinks import ConsoleSink, JSONLSink, Sink, attach_sink
from ignite_engine.ranks import agreement


class MetricLogger:
    """Mean over the interval of each value in ``state.output``; sinks write whatever is new in ``state.metrics``.

    Args:
        directory: gets a ``metrics.jsonl``; None: no file.
        sinks: further ones; an error in a sink is a warning, and training continues.
        console: print a line at each log point.
        name: in checkpoints; the interval's values are saved, so that a resumed run logs the same means.

    Between log points it keeps references to detached scalars: no host sync, no collective. At a log point they are
    stacked, read once and averaged over the ranks in one collective. A number that ``update`` returned is logged as
    ``loss``.
    """

    phase = Phase.MEASURE

    def __init__(
        self,
        directory: str | Path | None = None,
        *,
        sinks: Sequence[Sink] = (),
        console: bool = True,
        name: str = "metric_logger",
    ) -> None:
        self.name = name
        self.sinks: list[Sink] = [*sinks]
        if directory is not None:
            self.sinks.append(JSONLSink(Path(directory) / "metrics.jsonl", name=f"{name}/jsonl"))
        if console:
            self.sinks.append(ConsoleSink())
        self._interval: list[Any] = []

    def attach(self, trainer: Trainer, event: Any = Events.ITERATION_COMPLETED) -> None:
        """Log at ``event``."""
        trainer.register(self.name, self)
        trainer.add_event_handler(Events.STARTED, self._start)
        trainer.add_event_handler(Events.ITERATION_COMPLETED, self._collect)
        trainer.add_event_handler(event, self)
        trainer.add_event_handler(Events.COMPLETED, self._write_rest)
        for sink in self.sinks:
            attach_sink(sink, trainer)

    def __call__(self, trainer: Trainer) -> None:
        """Write the interval's means into ``state.metrics`` and start the next interval."""
        rows, self._interval = self._interval, []
        if not rows:
            return
        means = _means(rows)
        reduced = agreement.mean_floats(list(means.values()))
        for key, value in zip(means, reduced, strict=True):
            trainer.state.metrics[key] = value

    def state_dict(self) -> dict[str, Any]:
        """The values of the interval so far."""
        return {"interval": [dict(row) if isinstance(row, Mapping) else row for row in self._interval]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._interval = list(state["interval"])

    def _start(self, trainer: Trainer) -> None:
        if trainer.starts_fresh(self.name):
            self._interval = []

    def _collect(self, trainer: Trainer) -> None:
        if trainer.state.output is not None:
            self._interval.append(trainer.state.output)

    def _write_rest(self, trainer: Trainer) -> None:
        """Log the last, perhaps shorter interval of a completed run; a resumed run completes it otherwise."""
        if trainer.state.status == "completed":
            self(trainer)

    _collect.phase = Phase.EVALUATE  # type: ignore[attr-defined]  # before any handler of this event reads the mean


def _means(rows: list[Any]) -> dict[str, float]:
    named = [row if isinstance(row, Mapping) else {"loss": row} for row in rows]
    means: dict[str, float] = {}
    for key in dict.fromkeys(key for row in named for key in row):
        values = [row[key] for row in named if key in row]
        if isinstance(values[0], torch.Tensor):
            first = values[0]
            if all(v.shape == () and v.dtype is first.dtype and v.device == first.device for v in values):
                means[key] = torch.stack(values).detach().double().mean().item()
            elif values[0].numel() == 1:
                means[key] = (
                    torch.stack([v.detach().reshape(()).double().to(values[0].device) for v in values]).mean().item()
                )
        elif isinstance(values[0], Number):
            means[key] = float(sum(values)) / len(values)
    return means
