"""A few batches of each evaluation before training: what is wrong with it ends the run in its first second."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from ignite.engine import Engine, Events
from ignite.metrics import Metric
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from ignite_engine import Phase, Trainer, rng
from ignite_engine.data.workers import begin_pass, end_workers
from ignite_engine.errors import metric_meant, one_line, shapes_of
from ignite_engine.evaluator import eval_mode, whole_pass
from ignite_engine.handlers.metric_values import number_of
from ignite_engine.ranks import agreement
from ignite_engine.ranks.mesh import metrics_of_this_rank
from ignite_engine.state import Start
from ignite_engine.states.generators import undrawn
from ignite_engine.states.metrics import metrics_of

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Trial:
    """What is tried of one set: an evaluator and a loader that nothing else uses, and batches of it.

    ``limit`` is that of its evaluations.
    """

    evaluator: Engine
    data: Iterable[Any]
    batches: int
    limit: int | None = None


class SanityCheck:
    """Evaluates a few batches of each set before a fresh run trains, and leaves nothing of it behind.

    Args:
        trials: by the name of the set.
        followed: by the setting that names it, a metric that something acts on, such as ``val/accuracy``.
        others_write: handlers of the user may write a metric that no evaluation does.
        error: makes the exception of a setting (``task``: a part of it) and a complaint.
        announce: takes the names of the numbers that evaluations will write.

    Each rank measures its own batches and nothing is exchanged but their number. A metric that cannot be computed of a
    few batches, as one that needs samples of each class, is on one process tried on the whole set before it is refused,
    and on several not judged. An error of ``predict``, of the loss function or of the data leaves as it was raised,
    with a note.
    """

    phase = Phase.PREPARE
    replayed = True

    def __init__(
        self,
        trials: Mapping[str, Trial],
        *,
        followed: Mapping[str, str],
        others_write: bool,
        error: Callable[[str, str], Exception],
        announce: Callable[[Mapping[str, float]], None] = lambda values: None,
    ) -> None:
        self.trials, self.error, self.announce = trials, error, announce
        self.followed, self.others_write = followed, others_write

    def attach(self, trainer: Trainer) -> None:
        trainer.add_event_handler(Events.STARTED, self)

    def __call__(self, trainer: Trainer) -> None:
        """Check now, unless the run continues one that was checked when it began."""
        if trainer.state.start is not Start.FRESH:
            return
        measured: dict[str, Any] = {}
        knows_all, update = True, trainer.update
        trials = self._read_again(trainer)
        for name, trial in trials.items():
            drawn, read = undrawn(trainer.registry.objects), whole_pass(trial.data)
            buffers = _buffers_of(getattr(update, "model", None), getattr(update, "loss_fn", None))
            with rng.isolated(), drawn, read, buffers, warnings.catch_warnings(action="ignore"):
                values = self._values(name, trial)
            trial.evaluator.state.batch = trial.evaluator.state.output = None  # they would be kept for the whole run
            knows_all = knows_all and values is not None
            measured |= {f"{name}/{key}": value for key, value in (values or {}).items()}
        # a metric may be unknown on one rank alone, which has tried all sets with its peers nevertheless
        if not all(row[0] for row in agreement.gather_floats([float(knows_all)])):
            return
        numbers = {name: number for name, value in measured.items() if (number := number_of(value, name)) is not None}
        self.announce(numbers)
        for setting, metric in self.followed.items():
            self._check_followed(setting, metric, measured, trials)

    def _read_again(self, trainer: Trainer) -> dict[str, Trial]:
        """The trials of sets that can be read from their beginning again, on all ranks; the others get a line."""
        if not self.trials:
            return {}
        with rng.isolated(), undrawn(trainer.registry.objects):
            once = [float(_is_read_once(trial.data)) for trial in self.trials.values()]
        kept = {}
        for (name, trial), column in zip(self.trials.items(), zip(*agreement.gather_floats(once)), strict=True):
            if not any(column):
                kept[name] = trial
            elif agreement.rank() == 0:
                logger.info("%r is not tried before training: what is read of it is gone for its evaluations.", name)
        return kept

    def _values(self, name: str, trial: Trial) -> Mapping[str, Any] | None:
        """What the evaluator measures; None: the set has no batch, or too few for a metric.

        Raises:
            Exception: ``error`` of a metric that cannot be used, or what ``predict`` or the data has raised.
        """
        batches, alone = _first(trial.data, trial.batches), agreement.world_size() == 1
        # where a forward waits for peers, each makes as many
        batches = batches[: int(min(row[0] for row in agreement.gather_floats([float(len(batches))])))]
        if not batches:
            return None
        try:
            return _run(trial.evaluator, batches)
        except Exception as raised:
            error = raised
        if (found := _metric_of(error)) is not None and found[1] == "completed":
            if not alone:
                return None
            try:
                return _run(trial.evaluator, trial.data, trial.limit)
            except Exception as raised:
                error = raised
        self._raise(name, trial.evaluator, error)
        return None

    def _raise(self, name: str, evaluator: Engine, error: Exception) -> None:
        if (found := _metric_of(error)) is None:
            error.add_note(
                f"Raised in the sanity check of {name!r}, before training: predict(model, batch) must return what the "
                "metrics take, most of them (predictions, targets)."
            )
            raise error
        metric, kind = found[0], type(found[0]).__name__
        names = [f"{key!r} ({kind})" for key, value in metrics_of(evaluator).items() if value is metric]
        complaint = self.error(
            "task",
            f"the metric {names[0] if names else kind} cannot use what predict returned for "
            f"{name!r}, {shapes_of(evaluator.state.output)}: {one_line(error)} Let predict(model, batch) return what "
            "the metrics take, most of them (predictions, targets), or give the metric an output_transform.",
        )
        # of a metric of the user's own the place in it matters
        raise complaint from (None if type(metric).__module__.startswith("ignite.") else error)

    def _check_followed(
        self, setting: str, metric: str, measured: Mapping[str, Any], tried: Mapping[str, Trial]
    ) -> None:
        group = metric.partition("/")[0]
        if metric in measured:
            value = measured[metric]
            if number_of(value, metric) is None:
                raise self.error(
                    setting,
                    f"got {metric!r}, which is {_kind_of(value)}, expected a metric that is one number: give "
                    "the metric an average, or follow another one.",
                )
        elif group in tried and not self.others_write:
            numbers = [key for key, value in measured.items() if number_of(value, key) is not None]
            near = metric_meant(metric, ["loss", *numbers])
            raise self.error(setting, f"got {metric!r}, expected a metric of this run{near}")


def _is_read_once(data: Any) -> bool:
    """Whether each pass goes on where the last one stopped: the data, or its stream of samples, gives one iterator."""
    parts = [data, getattr(data, "dataset", None)]
    if any(hasattr(part, "__next__") for part in parts):
        return True
    # the iterator of a DataLoader starts workers
    asked = [part for part in parts if isinstance(part, IterableDataset) or not isinstance(part, DataLoader | Dataset)]
    return any(hasattr(part, "__iter__") and iter(part) is iter(part) for part in asked)


def _kind_of(value: Any) -> str:
    shape = getattr(value, "shape", None)
    return f"a {type(value).__name__}" if shape is None else f"a {type(value).__name__} of shape {tuple(shape)}"


def _first(data: Iterable[Any], count: int) -> list[Any]:
    """The first batches of a pass, which is ended then."""
    iterator = begin_pass(data)
    try:
        return list(islice(iterator, count))
    finally:
        end_workers(iterator, data)


def _run(evaluator: Engine, batches: Iterable[Any], limit: int | None = None) -> Mapping[str, Any]:
    """Evaluate on this rank alone."""
    model, state = getattr(evaluator, "model", None), evaluator.state
    state.max_epochs = state.epoch_length = None
    evaluator.logger = logging.Logger("sanity check", logging.CRITICAL + 1)  # Ignite's own lines say less
    with ExitStack() as alone:  # not in predict, which may ask for its rank
        alone.enter_context(eval_mode(model) if model is not None else nullcontext())
        within = alone.enter_context(ExitStack())
        alone.enter_context(evaluator.add_event_handler(Events.ITERATION_STARTED, within.close))
        alone.enter_context(
            evaluator.add_event_handler(
                Events.ITERATION_COMPLETED, lambda: within.enter_context(metrics_of_this_rank())
            )
        )
        return evaluator.run(batches if limit is None else islice(batches, limit), max_epochs=1).metrics


def _metric_of(error: BaseException) -> tuple[Metric, str] | None:
    """The metric in which an error was raised, and which of its methods was called; None: elsewhere."""
    traceback = error.__traceback__
    while traceback is not None:
        frame = traceback.tb_frame
        if isinstance(owner := frame.f_locals.get("self"), Metric):
            return owner, frame.f_code.co_name
        traceback = traceback.tb_next
    return None


@contextmanager
def _buffers_of(*owners: Any) -> Iterator[None]:
    """Put back the buffers of modules, or of those with these methods, whose forward changes or replaces some."""
    roots = [getattr(owner, "__self__", owner) for owner in owners]
    modules = [module for root in roots if isinstance(root, nn.Module) for module in root.modules()]
    held = [(module, *named) for module in modules for named in module.named_buffers(recurse=False)]
    before = [buffer.detach().clone() for _, _, buffer in held]
    try:
        yield
    finally:
        with torch.no_grad():
            for (module, name, buffer), value in zip(held, before):
                if getattr(module, name) is not buffer:
                    setattr(module, name, buffer)
                if not torch.equal(buffer, value):
                    buffer.copy_(value)
