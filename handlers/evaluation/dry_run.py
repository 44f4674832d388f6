"""An evaluation that is broken off after a few batches: what is wrong with it ends a run in its first second."""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Iterator
from itertools import islice
from typing import Any

from torch.utils.data import DataLoader, Dataset, IterableDataset

from ignite_engine import Trainer
from ignite_engine.checkpoint.states.generators import undrawn
from ignite_engine.data.workers import begin_pass, end_workers
from ignite_engine.errors import shapes_of
from ignite_engine.handlers.evaluation.handler import Evaluation
from ignite_engine.loop.evaluator import eval_mode, whole_pass
from ignite_engine.ranks import agreement

logger = logging.getLogger(__name__)


def dry_run(evaluation: Evaluation, trainer: Trainer, batches: int) -> None:
    """Evaluate at most so many batches, on each rank as many as all have, and leave nothing of it behind.

    A collective. No metric is computed: of a few batches some cannot be. Data that can be read only once gets a line.
    An error of ``predict``, a metric or the data leaves as it was raised, with a note.
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
        except Exception as error:
            error.add_note(
                f"Raised in the sanity check of {evaluation.label!r}, before training, where predict returned "
                f"{shapes_of(engine.state.output)}: predict(model, batch) must return what the metrics take, most of "
                "them (predictions, targets)."
            )
            raise
        finally:
            engine.logger = ours
    engine.state.batch = engine.state.output = None  # they would be kept until the evaluation


def _is_read_once(data: Any) -> bool:
    """Whether each pass goes on where the last one stopped: the data, or its stream of samples, gives one iterator."""
    parts = [data, getattr(data, "dataset", None)]
    if any(hasattr(part, "__next__") for part in parts):
        return True
    # the iterator of a DataLoader starts workers
    asked = [part for part in parts if isinstance(part, IterableDataset) or not isinstance(part, DataLoader | Dataset)]
    return any(hasattr(part, "__iter__") and iter(part) is iter(part) for part in asked)
