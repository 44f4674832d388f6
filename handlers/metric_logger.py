"""Means over an interval of what the update reports, and the log of everything that is measured."""

from __future__ import annotations

import contextlib
import datetime
import json
import logging
import math
from collections.abc import Mapping, Sequence
from numbers import Number
from pathlib import Path
from typing import Any

import torch
from ignite.engine import Engine, Events

from ignite_engine import Trainer, TrainingEvents
from ignite_engine.events import Phase
from ignite_engine.handlers.console import Stream, shown
from ignite_engine.handlers.log import Log
from ignite_engine.handlers.meters import Meter
from ignite_engine.ranks import agreement, attempt
from ignite_engine.state import Start
from ignite_engine.text import METRICS, STARTS, json_values, plain_metric
from ignite_engine.update import Update, Updates

logger = logging.getLogger(__name__)
_COLUMNS = ("iteration", "epoch")
"""Columns that each line of a log has."""


class MetricLogger:
    """Mean over the interval of each value in ``state.output``, and the log of what is new in ``state.metrics``.

    What is in ``state.meters`` (:class:`~ignite_engine.handlers.meters.Meter`) is written beside the means, by its
    name.

    Args:
        directory: gets a ``metrics.jsonl``, and a ``starts.jsonl`` with a line for each start and end of the run, of
            which a kill leaves none; None: no files.
        console: print a line at each log point: ``loss``, the update's other values, metrics of evaluations, ``lr`` and
            the throughput; a list: these values, patterns (``val/*``) too, and ``rate`` for the throughput.
        config: the settings of the run, kept in ``starts.jsonl`` with each start.
        name: in checkpoints; the interval's values are saved, so that a resumed run logs the same means.

    Between log points it keeps references to the last detached scalars and the sums of those before, on their device:
    no host sync, no collective. At a log point they are read and averaged over the ranks in one collective, meters
    included. A number that ``update`` returned is logged as ``loss``. The first one that is not finite is a warning at
    the log point after it, with its rank; so is a run that ends with such a loss. What a non-finite policy leaves out
    is in no mean.
    """

    phase = Phase.MEASURE

    def __init__(
        self,
        directory: str | Path | None = None,
        *,
        console: bool | Sequence[str] = True,
        config: Mapping[str, Any] | None = None,
        name: str = "metric_logger",
    ) -> None:
        self.name, self.console, self.config = name, console, config
        self.directory = None if directory is None else Path(directory).absolute()
        self._log = None if self.directory is None else Log(self.directory / METRICS)
        self._stdout = Stream("stdout")
        self._means: dict[str, Meter] = {}
        self._meters: dict[str, Meter] = {}
        self._loaded: dict[str, dict[str, Any]] = {}
        """What a checkpoint had for meters, until they are there."""
        self._not_finite_at: int | None = None
        """The first log point whose loss was not finite."""

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
        if self._log is not None:
            trainer.register(f"{self.name}/log", self._log, kind="log")
            trainer.add_event_handler(Events.STARTED, self._note_start)
        trainer.add_event_handler(TrainingEvents.METRICS_READY, self._write)

    def __call__(self, trainer: Trainer) -> None:
        """Write the interval's means into ``state.metrics`` and start the next interval."""
        means, self._means, self._meters = self._means, {}, trainer.state.meters
        self._join_loaded()
        named = [*means.items(), *self._meters.items()]
        if not named:
            return
        rows = agreement.gather_floats([value for _, meter in named for value in meter.reduced()])
        for place, (name, meter) in enumerate(named):
            of_ranks = [(row[2 * place], row[2 * place + 1]) for row in rows]
            is_mean = place < len(means)
            value = agreement.mean_of([a / b for a, b in of_ranks]) if is_mean else meter.over_ranks(of_ranks)
            if value is not None:
                trainer.state.metrics[name] = value
            if is_mean and name == "loss":
                self._warn_unless_finite(trainer, [total for total, _ in of_ranks])
            meter.reset()

    def state_dict(self) -> dict[str, Any]:
        """The values of the interval so far, those of meters, and the first log point whose loss was not finite."""
        self._join_loaded()
        meters = {name: meter.state_dict() for name, meter in self._meters.items() if meter.count}
        means = {name: mean.state_dict() for name, mean in self._means.items()}
        return {"means": means, "not_finite_at": self._not_finite_at, "meters": self._loaded | meters}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.begin_anew()
        self._means = {name: Meter("mean") for name in state["means"]}
        for name, mean in self._means.items():
            mean.load_state_dict(state["means"][name])
        self._not_finite_at, self._loaded = state["not_finite_at"], dict(state["meters"])

    def begin_anew(self) -> None:
        """A run starts over: nothing was logged."""
        self._means, self._not_finite_at, self._loaded = {}, None, {}
        for meter in self._meters.values():
            meter.reset()

    def _refuse_a_second_writer(self, trainer: Trainer) -> None:
        others = [obj for obj in trainer.registry.objects.values() if isinstance(obj, MetricLogger)]
        if self.directory is not None and self.directory in [other.directory for other in others]:
            raise ValueError(
                f"Another MetricLogger of this trainer writes to {self.directory}: give this one another directory."
            )

    def _start(self, trainer: Trainer) -> None:
        self._meters = trainer.state.meters
        trainer.state.not_finite_at = self._not_finite_at

    def _collect(self, trainer: Trainer) -> None:
        policy = trainer.update.non_finite
        if policy is not None and trainer.state.iteration in policy.journal:
            return
        if self._loaded:
            self._join_loaded()
        meters = trainer.state.meters.values()
        for name, value in _scalars(trainer.state.output, fresh=type(trainer.update) in (Update, Updates)):
            if name not in self._means:
                self._means[name] = Meter("mean")
            self._means[name].take(value)
            for meter in meters:
                if meter.of == name:
                    meter.take(value)

    _collect.phase = Phase.EVALUATE  # type: ignore[attr-defined]  # before any handler of this event reads the mean

    def _join_loaded(self) -> None:
        for name in self._loaded.keys() & self._meters.keys():
            self._meters[name].load_state_dict(self._loaded.pop(name))

    def _make_plain(self, trainer: Trainer) -> None:
        """On METRICS_READY, before anybody reads them: tensors and arrays become numbers, or lists of them.

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

    def _write(self, trainer: Trainer) -> None:
        state = trainer.state
        row = {"iteration": state.iteration, "epoch": state.epoch, **state.metrics.fresh}
        if self._log is not None:
            self._log.write(row)
        keys = None if self.console is True else self.console
        if keys is not False and agreement.rank() == 0 and (values := shown(row, keys)):
            self._stdout.write("  ".join([f"epoch {state.epoch}  iter {state.iteration}", *values]) + "\n")

    _write.phase = Phase.LOG  # type: ignore[attr-defined]  # after those who measure

    def _write_rest(self, trainer: Trainer) -> None:
        """Log the last, perhaps shorter interval of a completed run; a resumed run completes it otherwise."""
        if trainer.state.status != "completed":
            return
        self(trainer)
        loss = trainer.state.metrics.get("loss", 0.0)
        if self._not_finite_at is not None and not math.isfinite(loss) and agreement.rank() == 0:
            logger.warning(
                "The run has ended with a loss of %s, which was first not finite at iteration %d.",
                *(loss, self._not_finite_at),
            )

    def _warn_unless_finite(self, trainer: Trainer, losses: Sequence[float]) -> None:
        """Warn of the first loss that is not finite; ``losses`` are the sums of the ranks."""
        ranks = [rank for rank, loss in enumerate(losses) if not math.isfinite(loss)]
        if ranks and self._not_finite_at is None:
            self._not_finite_at = trainer.state.not_finite_at = trainer.state.iteration
            if agreement.rank() == 0:
                logger.warning(
                    "The loss up to iteration %d is %s%s, the first that is not finite; the run continues. "
                    "Check the data of these iterations, the learning rate and the precision.",
                    *(self._not_finite_at, losses[ranks[0]]),
                    "" if len(ranks) == len(losses) else agreement.on_ranks(ranks),
                )

    def _note_start(self, trainer: Trainer) -> None:
        trainer.registry.check_all_claimed()  # by then nothing refuses the start any more
        what = "started" if trainer.state.start is Start.FRESH else "resumed"
        self._note(trainer, what, attempt.current.reason, **({} if self.config is None else {"config": self.config}))
        trainer.call_at_end(lambda trainer: self._note(trainer, trainer.state.status, trainer.state.reason))

    _note_start.phase = Phase.LAST  # type: ignore[attr-defined]  # read by the Trainer

    def _note(self, trainer: Trainer, what: str, reason: str | None, **more: Any) -> None:
        if agreement.rank() != 0 or self.directory is None:
            return
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
        values = {"what": what, "iteration": trainer.state.iteration, "reason": reason, "at": now, **more}
        with contextlib.suppress(OSError):  # the log says that the folder cannot be written
            self.directory.mkdir(parents=True, exist_ok=True)
            with (self.directory / STARTS).open("a", encoding="utf-8") as file:
                file.write(json.dumps(json_values(values), default=str) + "\n")


def _scalars(output: Any, *, fresh: bool) -> list[tuple[str, Any]]:
    """The numbers and tensors of one element in ``output`` by name, without graphs.

    Args:
        fresh: the tensors are in memory of their own; else they may be parts of larger ones, or parameters.
    """
    if isinstance(output, list) and output and isinstance(output[0], Mapping):
        output = output[0]  # MONAI's: one for each sample, with the same loss
    found: list[tuple[str, Any]] = []
    for name, value in output.items() if isinstance(output, Mapping) else (("loss", output),):
        if isinstance(value, torch.Tensor):
            if value.numel() == 1:
                found.append((str(name), value if fresh else value.detach().clone()))
        elif isinstance(value, Number):
            found.append((str(name), value))
    return found
