"""The evaluations of a run: of its task's sets, at its events, and a first try of each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from ignite.engine import Engine, Events

from ignite_engine.data.source import OwnSource
from ignite_engine.errors import did_you_mean
from ignite_engine.events import Phase, TrainingEvents
from ignite_engine.handlers.evaluation import Evaluation
from ignite_engine.handlers.evaluation.dry_run import dry_run
from ignite_engine.loop.evaluator import create_evaluator
from ignite_engine.runs.config.named import Fault
from ignite_engine.runs.config.sections import Count, CountFrom0
from ignite_engine.runs.loaders import data_loader
from ignite_engine.runs.mean_loss import mean_loss
from ignite_engine.runs.task import Data
from ignite_engine.state import Start
from ignite_engine.trainer import Trainer

if TYPE_CHECKING:
    from ignite_engine.runs.run import Run


class Evaluations:
    """An :class:`Evaluation` of each validation set of the run's task, or of one set.

    Args:
        data: a set of the task; None: every validation set.
        name: of that set in metrics and checkpoints.
        at_start: before the first update, too.
        at_end: after the last update of a completed run, too, before its checkpoint.
        sanity_batches: of each set, tried before a fresh run trains, to find a wrong metric or ``predict``.
        progressive: each window before it is trained on, too, as the set ``progressive``.
        limit, resumes: as :class:`Evaluation` takes them.
        precision: None: as in training.
    """

    def __init__(
        self,
        run: Any,
        data: str | None = None,
        *,
        name: str | None = None,
        at_start: bool = False,
        at_end: bool = True,
        sanity_batches: CountFrom0 = 2,
        progressive: bool = False,
        limit: Count | None = None,
        resumes: bool = False,
        precision: Literal["fp32", "bf16", "fp16"] | None = None,
    ) -> None:
        self.run: Run = run
        self.at_start, self.at_end, self.progressive = at_start, at_end, progressive
        self.sanity_batches, self.limit, self.resumes = sanity_batches, limit, resumes
        self.precision = precision or run.settings.update.precision
        self.sets: Mapping[str, Data] = run.task.val_sets
        if data is not None:
            known = {**run.task.val_sets, **run.task.test_sets}
            if data not in known:
                raise Fault(("data", f"got {data!r}, expected a set of the task{did_you_mean(data, known)}"))
            self.sets = {name or data: known[data]}

    def of(self, sets: Mapping[str, Data]) -> list[Evaluation]:
        """An evaluation of each of these sets, by its name."""
        config, task = self.run.settings, self.run.task
        return [
            Evaluation(
                self.evaluator(),
                data_loader(config, task, dataset, training=False),
                name=name,
                limit=self.limit,
                resumes=self.resumes,
            )
            for name, dataset in sets.items()
        ]

    def attach(self, trainer: Trainer, event: Any = None) -> None:
        """Evaluate at ``event``, and where the settings say."""

        def is_fresh(engine: Engine, count: int) -> bool:
            return trainer.state.start is Start.FRESH

        def is_last_update(engine: Engine, count: int) -> bool:
            state = trainer.state
            at_end_of_epoch = trainer.progress.epoch_iteration == state.epoch_length
            return state.iteration == state.max_iters or (state.epoch == state.max_epochs and at_end_of_epoch)

        def is_last_epoch(engine: Engine, count: int) -> bool:
            return trainer.state.epoch == trainer.state.max_epochs

        def has_not_trained(engine: Engine, count: int) -> bool:
            state = trainer.state
            return state.start is not Start.FRESH and 0 < state.iteration == self.run.first_iteration

        events = [Events.COMPLETED(event_filter=has_not_trained)]
        if self.at_start:
            events.append(Events.STARTED(event_filter=is_fresh))
        if event is not None:
            events.append(event)
        if self.at_end:  # before the last checkpoint, which it may make the best; the last epoch may be cut short
            events.append(Events.ITERATION_COMPLETED(event_filter=is_last_update))
            events.append(Events.EPOCH_COMPLETED(event_filter=is_last_epoch))
        for evaluation in self.of(self.sets):
            if self.sanity_batches:
                trainer.add_event_handler(Events.STARTED(event_filter=is_fresh), self._try, evaluation)
            for each in events:
                evaluation.attach(trainer, each)
        if self.progressive:
            self._progressive().attach(trainer, TrainingEvents.WINDOW_STARTED)

    def _try(self, trainer: Trainer, evaluation: Evaluation) -> None:
        batches = min(self.sanity_batches, self.limit or self.sanity_batches)
        dry_run(evaluation, trainer, batches)

    _try.phase = Phase.PREPARE  # type: ignore[attr-defined]  # before any evaluation

    def evaluator(self) -> Engine:
        """A new evaluator with the metrics of the task."""
        task = self.run.task
        predict, metrics = (
            (task.predict, task.metrics) if task.predict is not None else mean_loss(task.loss_fn, task.weight_fn)
        )
        return create_evaluator(task.model, predict, metrics, precision=self.precision)

    def _progressive(self) -> Evaluation:
        """Evaluates each window before it is trained on."""
        task = self.run.task
        run: Any = self.run
        if not isinstance(run.loader, OwnSource):
            raise Fault(("progressive", "got true, but the task's train_set is not a Windows object."))
        evaluated = data_loader(self.run.settings, task, task.train_set, training=False)
        return Evaluation(
            self.evaluator(),
            lambda: evaluated.loader_of(run.loader.present),
            name="progressive",
            limit=self.limit,
        )
