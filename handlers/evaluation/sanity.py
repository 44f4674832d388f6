"""A few batches of each evaluation before training: what is wrong with it ends the run in its first second."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from itertools import islice
from typing import Any

from ignite.engine import Engine, Events
from ignite.metrics import Metric
from torch.utils.data import DataLoader, Dataset, IterableDataset

from ignite_engine import Phase, Trainer, rng
from ignite_engine.checkpoint.states.generators import undrawn
from ignite_engine.checkpoint.states.metrics import metrics_of
from ignite_engine.data.workers import begin_pass, end_workers
from ignite_engine.errors import one_line, shapes_of
from ignite_engine.evaluator import buffers_kept, eval_mode, whole_pass
from ignite_engine.ranks import agreement
from ignite_engine.ranks.mesh import metrics_of_this_rank
from ignite_engine.state import Start

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Trial:
    """What is tried of one set: an evaluator and a loader that nothing else uses, and how many batches of it."""

    evaluator: Engine
    data: Iterable[Any]
    batches: int


class SanityCheck:
    """Evaluates a few batches of each set before a fresh run trains, and leaves nothing of it behind.

    Args:
        trials: by the name of the set.
        error: makes the exception of a setting (``task``: a part of it) and a complaint.

    Each rank measures its own batches and nothing is exchanged but their number. A metric that cannot be computed of a
    few batches is not judged. An error of ``predict``, the loss function or the data leaves as it was raised,
    with a note.
    """

    phase = Phase.PREPARE

    def __init__(self, trials: Mapping[str, Trial], *, error: Callable[[str, str], Exception]) -> None:
        self.trials, self.error = trials, error

    def attach(self, trainer: Trainer) -> None:
        trainer.add_event_handler(Events.STARTED, self)

    def __call__(self, trainer: Trainer) -> None:
        """Check now, unless the run continues one that was checked when it began."""
        if trainer.state.start is not Start.FRESH:
            return
        update = trainer.update
        for name, trial in self._read_again(trainer).items():
            drawn, read = undrawn(trainer.registry.objects), whole_pass(trial.data)
            buffers = buffers_kept(update.model, update.loss_fn)
            with rng.isolated(), drawn, read, buffers, warnings.catch_warnings(action="ignore"):
                self._try(name, trial)
            trial.evaluator.state.batch = trial.evaluator.state.output = None  # they would be kept for the whole run

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

    def _try(self, name: str, trial: Trial) -> None:
        """Evaluate.

        Raises:
            Exception: ``error`` of a metric that cannot be used, or what ``predict`` or the data has raised.
        """
        batches = _first(trial.data, trial.batches)
        # where a forward waits for peers, each makes as many
        batches = batches[: int(min(row[0] for row in agreement.gather_floats([float(len(batches))])))]
        if batches:
            try:
                _run(trial.evaluator, batches)
            except Exception as error:
                self._raise(name, trial.evaluator, error)

    def _raise(self, name: str, evaluator: Engine, error: Exception) -> None:
        if (found := _metric_of(error)) is None:
            error.add_note(
                f"Raised in the sanity check of {name!r}, before training: predict(model, batch) must return what the "
                "metrics take, most of them (predictions, targets)."
            )
            raise error
        if found[1] == "completed":  # of too few batches, as one that needs samples of each class
            return
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


def _is_read_once(data: Any) -> bool:
    """Whether each pass goes on where the last one stopped: the data, or its stream of samples, gives one iterator."""
    parts = [data, getattr(data, "dataset", None)]
    if any(hasattr(part, "__next__") for part in parts):
        return True
    # the iterator of a DataLoader starts workers
    asked = [part for part in parts if isinstance(part, IterableDataset) or not isinstance(part, DataLoader | Dataset)]
    return any(hasattr(part, "__iter__") and iter(part) is iter(part) for part in asked)


def _first(data: Iterable[Any], count: int) -> list[Any]:
    """The first batches of a pass, which is ended then."""
    iterator = begin_pass(data)
    try:
        return list(islice(iterator, count))
    finally:
        end_workers(iterator, data)


def _run(evaluator: Engine, batches: Iterable[Any]) -> None:
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
        evaluator.run(batches, max_epochs=1)


def _metric_of(error: BaseException) -> tuple[Metric, str] | None:
    """The metric in which an error was raised, and which of its methods was called; None: elsewhere."""
    traceback = error.__traceback__
    while traceback is not None:
        frame = traceback.tb_frame
        if isinstance(owner := frame.f_locals.get("self"), Metric):
            return owner, frame.f_code.co_name
        traceback = traceback.tb_next
    return None
