"""Metrics over the batches that are trained on, of the predictions that the training forward has made."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from ignite.engine import Engine, Events
from ignite.metrics import Metric
from ignite.utils import apply_to_tensor
from torch import Tensor

from ignite_engine import Trainer, TrainingEvents, Update, Updates
from ignite_engine.errors import check_type
from ignite_engine.events import Phase
from ignite_engine.handlers.metric_values import publish
from ignite_engine.ranks import agreement
from ignite_engine.ranks.mesh import metrics_reduce
from ignite_engine.update.micro_batches import group_of

logger = logging.getLogger(__name__)


class TrainingMetrics:
    """Ignite's metrics over what is trained on, without a second forward; written as ``<name>/<metric>``.

    The loss function hands over what the metrics take, usually predictions and targets::

        training = TrainingMetrics({"accuracy": Accuracy()})

        def loss_fn(model, batch):
            predictions = model(batch[0])
            training.record((predictions, batch[1]))
            return cross_entropy(predictions, batch[1])

    Args:
        metrics: by name; they belong to this object alone.
        name: of the group; unique for each TrainingMetrics of one trainer.

    The values are those since they were written last, over all ranks; a resumed run goes on with them. What a step was
    skipped for, or a rank without data repeats, is not in them. Nothing is recorded outside of training. What an
    iteration records is kept on its device until its step.
    """

    phase = Phase.MEASURE

    def __init__(self, metrics: Mapping[str, Metric], *, name: str = "train") -> None:
        is_named = isinstance(metrics, Mapping) and all(isinstance(metric, Metric) for metric in metrics.values())
        check_type("metrics", metrics, is_named, "a mapping of names to metrics of Ignite")
        check_type("name", name, isinstance(name, str), "a word")
        self.metrics, self.label = metrics, name
        self.name = f"training_metrics/{name}"
        self.values: dict[str, Any] = {}
        """What was written last, by ``<name>/<metric>``, as the metrics gave it."""
        self._engine = Engine(lambda engine, batch: None)
        for key, metric in metrics.items():
            metric.attach(self._engine, key)
        self._engine.fire_event(Events.EPOCH_STARTED)
        self._forward: int | None = None
        """Number of the micro-batch whose forward runs; None: none does."""
        self._pending: dict[int, list[Any]] = {}
        """What the iteration has recorded, by micro-batch: one that is computed again replaces what it has recorded."""
        self._recorded = 0
        """Records in the metrics since they were written last."""

    def record(self, output: Any) -> None:
        """In the loss function: what the metrics take of this micro-batch; tensors are detached."""
        if self._forward is not None:
            self._pending.setdefault(self._forward, []).append(apply_to_tensor(output, Tensor.detach))

    def attach(self, engine: Engine, event: Any = Events.EPOCH_COMPLETED) -> None:
        """Write at ``event``."""
        trainer = Trainer.of(engine)
        check_type("the trainer's update", trainer.update, isinstance(trainer.update, Update | Updates), "an Update")
        trainer.register(self.name, self)
        for key, metric in self.metrics.items():
            trainer.register(f"{self.name}/{key}", metric)
        trainer.add_event_handler(Events.STARTED, self._start)
        trainer.add_event_handler(Events.ITERATION_STARTED, self._discard)
        trainer.add_event_handler(TrainingEvents.FORWARD_STARTED, self._begin_forward)
        trainer.add_event_handler(TrainingEvents.FORWARD_COMPLETED, self._end_forward)
        trainer.add_event_handler(TrainingEvents.OPTIMIZER_STEP_COMPLETED, self._take)
        trainer.add_event_handler(event, self)

    def __call__(self, trainer: Trainer) -> None:
        """Write the values since the last call, and begin anew; a collective."""
        holders = [rank for rank, (count,) in enumerate(agreement.gather_floats([float(self._recorded)])) if count]
        if not holders:
            if agreement.rank() == 0:
                logger.warning(
                    "TrainingMetrics(name=%r) has nothing to measure: call its record((predictions, targets)) in the "
                    "loss function, and leave out Update(accumulate='capture'), whose graphs do not call it.",
                    self.label,
                )
            return
        engine, all_hold = self._engine, len(holders) == agreement.world_size()
        with metrics_reduce() if all_hold else metrics_reduce(holders):
            if agreement.rank() in holders:
                engine.fire_event(Events.EPOCH_COMPLETED)
        if not all_hold:
            engine.state.metrics = agreement.gather_objects(engine.state.metrics)[holders[0]]
        self.values = {f"{self.label}/{key}": value for key, value in engine.state.metrics.items()}
        publish(trainer.state, self.values)
        self.begin_anew()

    def state_dict(self) -> dict[str, Any]:
        """The metrics are parts of their own."""
        return {"recorded": self._recorded}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._recorded = state["recorded"]

    def begin_anew(self) -> None:
        """A run starts over: nothing was measured."""
        self._recorded = 0
        self._engine.fire_event(Events.EPOCH_STARTED)  # at which Ignite's metrics reset themselves

    def _start(self, trainer: Trainer) -> None:
        self._discard()

    def _discard(self) -> None:
        self._forward = None
        self._pending.clear()

    def _begin_forward(self, trainer: Trainer) -> None:
        self._forward = trainer.state.micro_batches
        self._pending.pop(self._forward, None)

    def _end_forward(self) -> None:
        self._forward = None

    def _take(self, trainer: Trainer) -> None:
        real = len(group_of(trainer, trainer.state.batch).real)
        for outputs in list(self._pending.values())[:real]:
            for output in outputs:
                self._recorded += 1
                self._engine.state.output = output
                self._engine.fire_event(Events.ITERATION_COMPLETED)
        self._pending.clear()
