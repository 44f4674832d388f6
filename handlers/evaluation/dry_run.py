"""An evaluation that is broken off after a few batches: what is wrong with it ends a run in its first second."""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

from ignite.engine import Engine
from ignite.metrics import Metric
from torch.utils.data import DataLoader, Dataset, IterableDataset

from ignite_engine import Trainer
from ignite_engine.checkpoint.states.generators import undrawn
from ignite_engine.checkpoint.states.metrics import metrics_of
from ignite_engine.data.workers import begin_pass, end_workers
from ignite_engine.errors import one_line, shapes_of
from ignite_engine.handlers.evaluation.handler import Evaluation
from ignite_engine.loop.evaluator import eval_mode, whole_pass
from ignite_engine.ranks import agreement

logger = logging.getLogger(__name__)


def dry_run(evaluation: Evaluation, trainer: Trainer, batches: int, error: Callable[[str, str], Exception]) -> None:
    """Evaluate a few batches, and leave nothing of it behind; a collective.

    Args:
        batches: at most so many; on each rank as many as all have.
        error: makes the exception of a setting (``task``: a part of it) and a complaint.

    No metric is computed: of a few batches some cannot be. Data that can be read only once gets a line. An error of
    ``predict``, the loss function or the data leaves as it was raised, with a note.

    Raises:
        Exception: ``error`` of a metric that cannot be used, or what ``predict`` or the data has raised.
    """
    engine, data = evaluation.evaluator, evaluation.loader()
    ours, model = engine.logger, getattr(engine, "model", trainer.update.model)
    quiet, drawn = warnings.catch_warnings(action="ignore"), undrawn(trainer.registry.objects)
    with drawn, eval_mode(model), whole_pass(data), quiet:
        if any(row[0] for row in agreement.gather_floats([float(_is_read_once(data))])):
            if agreement.rank() == 0:
                name = evaluation.label
                logger.info("The sanity check leaves out %r: its data can be read only once.", name)
            return
        iterator = begin_pass(data)
        try:
            few = list(islice(iterator, batches))
        finally:
            end_workers(iterator, data)
        few = few[: int(min(row[0] for row in agreement.gather_floats([float(len(few))])))]

        def broken_off() -> Iterator[Any]:
            yield from few
            engine.terminate(skip_completed=True)  # the end of the data would be that of a pass, whose metrics compute

        engine.logger = logging.Logger("dry run", logging.CRITICAL + 1)  # Ignite's own lines say less
        engine.state.max_epochs = engine.state.epoch_length = None
        try:
            engine.run(broken_off(), max_epochs=1, epoch_length=sys.maxsize)
        except Exception as raised:
            _raise(evaluation.label, engine, raised, error)
        finally:
            engine.logger = ours
    engine.state.batch = engine.state.output = None  # they would be kept until the evaluation


def _raise(name: str, engine: Engine, raised: Exception, error: Callable[[str, str], Exception]) -> None:
    if (metric := _metric_of(raised)) is None:
        raised.add_note(
            f"Raised in the sanity check of {name!r}, before training: predict(model, batch) must return what the "
            "metrics take, most of them (predictions, targets)."
        )
        raise raised
    kind = type(metric).__name__
    names = [f"{key!r} ({kind})" for key, value in metrics_of(engine).items() if value is metric]
    complaint = error(
        "task",
        f"the metric {names[0] if names else kind} cannot use what predict returned for "
        f"{name!r}, {shapes_of(engine.state.output)}: {one_line(raised)} Let predict(model, batch) return what "
        "the metrics take, most of them (predictions, targets), or give the metric an output_transform.",
    )
    # of a metric of the user's own the place in it matters
    raise complaint from (None if type(metric).__module__.startswith("ignite.") else raised)


def _is_read_once(data: Any) -> bool:
    """Whether each pass goes on where the last one stopped: the data, or its stream of samples, gives one iterator."""
    parts = [data, getattr(data, "dataset", None)]
    if any(hasattr(part, "__next__") for part in parts):
        return True
    # the iterator of a DataLoader starts workers
    asked = [part for part in parts if isinstance(part, IterableDataset) or not isinstance(part, DataLoader | Dataset)]
    return any(hasattr(part, "__iter__") and iter(part) is iter(part) for part in asked)


def _metric_of(error: BaseException) -> Metric | None:
    """The metric in which an error was raised; None: elsewhere."""
    traceback = error.__traceback__
    while traceback is not None:
        if isinstance(owner := traceback.tb_frame.f_locals.get("self"), Metric):
            return owner
        traceback = traceback.tb_next
    return None
