"""Evaluate while training: at any event, on one named set, without changing the run."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, ExitStack, closing, nullcontext
from typing import Any

from ignite.engine import Engine, Events
from ignite.engine.events import EventsList

from ignite_engine import Trainer, TrainingEvents, rng
from ignite_engine.checkpoint.states.generators import undrawn
from ignite_engine.checkpoint.states.model_and_optimizer import EvaluatedWeights
from ignite_engine.errors import check_type, is_whole
from ignite_engine.events import Phase
from ignite_engine.handlers.evaluation.batches import EvaluationBatches, check_loader, loader_of
from ignite_engine.handlers.evaluation.invariant import InvariantSums, dealing_of, unsummed
from ignite_engine.handlers.evaluation.progress import unsupported_reason
from ignite_engine.handlers.metric_values import publish
from ignite_engine.loop.evaluator import eval_mode, whole_pass
from ignite_engine.ranks import agreement
from ignite_engine.ranks.ddp import share_buffers
from ignite_engine.ranks.mesh import metrics_reduce
from ignite_engine.state import OngoingEvaluation, Start

logger = logging.getLogger(__name__)


class Evaluation:
    """Run ``evaluator`` over ``data`` and publish its metrics as ``<name>/<metric>``.

    Args:
        evaluator: from ``create_evaluator``, or any Ignite engine.
        data: a loader, on several ranks of this rank's share. A plain ``DataLoader`` is rebuilt as for training, so it
            is sharded over the ranks. A rank that has no batch takes the metrics of its peers, and ``evaluator`` does
            not run there; under FSDP2, or if the update is rank-invariant, each rank must have one. A function is
            called for the data of each evaluation, such as ``windows.again``; while a window is trained on its number
            is ``<name>/window``.
        name: of the set; unique for each Evaluation of one trainer.
        limit: batches per evaluation and rank, None for all. Where the update is rank-invariant: over all ranks.
        resumes: a stop keeps the batch and the metrics in the checkpoint, and the resumed run goes on from there.
            Values collected by other handlers of ``evaluator`` than Ignite's metrics are not saved.

    A metric that is not one number (a value per class, a confusion matrix, a report, a curve) is a list in the log,
    up to 1,000 numbers, and in :attr:`values` whole.

    The mode of each module is restored and random numbers are isolated. A stop that comes during an evaluation ends it
    without metrics, on one process at once, on several after the same number of batches; the resumed run repeats it
    before it trains. On ``Events.STARTED`` a run is evaluated before it trains, but not again when it is resumed. On
    ``Events.COMPLETED`` it is evaluated unless this iteration was; a finished run that is started again is.

    Raises:
        ValueError: a setting is out of its range, or (at STARTED or at the evaluation, on every rank) no rank has
            a batch.
    """

    phase = Phase.EVALUATE

    def __init__(
        self,
        evaluator: Engine,
        data: Iterable[Any] | Callable[[], Iterable[Any]],
        *,
        name: str = "val",
        limit: int | None = None,
        resumes: bool = False,
    ) -> None:
        check_type("evaluator", evaluator, isinstance(evaluator, Engine), "an engine, as create_evaluator() makes")
        is_data = isinstance(data, Iterable) or callable(data)
        check_type("data", data, is_data, "a loader or another iterable of batches, or a function that returns one")
        if limit is not None and not (is_whole(limit) and limit >= 1):
            raise ValueError(f"limit must be a whole number of at least 1 batch, or None for all, got {limit!r}.")
        self.evaluator, self.data, self.label, self.limit = evaluator, data, name, limit
        self.name = f"evaluation/{name}"
        self._changes = not isinstance(data, Iterable)
        if self._changes and resumes:
            raise ValueError("resumes is for an evaluation of one loader: leave it out for a function.")
        self._resumes = resumes
        self.values: dict[str, Any] = {}
        """All that the last evaluation has measured, by ``<name>/<metric>``, as the metrics gave it."""
        self._rebuilt: tuple[Any, Any] = (None, None)
        """``data``, and the loader that is iterated in its place."""
        self.begin_anew()

    def begin_anew(self) -> None:
        """A run starts over: nothing was evaluated."""
        self._evaluated_at: int | None = None
        """The iteration of the last evaluation in this run."""
        self._evaluated_before: int | None = None
        """The iteration of the last evaluation before the run was resumed."""
        self._unfinished_at: int | None = None
        """The iteration of an evaluation that was started and has not completed."""
        self._progress: dict[str, Any] | None = None
        """That of an unfinished one, by which it goes on."""
        self._rng: dict[str, Any] | None = None
        """The random numbers that it started with."""

    def attach(self, engine: Engine, event: Any = Events.EPOCH_COMPLETED) -> None:
        """Evaluate at ``event``; several events: ``|``, or attach again."""
        trainer = Trainer.of(engine)
        trainer.register(self.name, self)
        why = "the update is rank-invariant" if trainer.update.rank_invariant else None
        if self._resumes and (why := why or unsupported_reason(self.evaluator, sized=hasattr(self.data, "__len__"))):
            logger.warning("The evaluation of %s always starts at its first batch: %s.", self.label, why)
            self._resumes = False
        if not trainer.has_event_handler(self._start, Events.STARTED):
            trainer.add_event_handler(Events.STARTED, self._start)
        for part in event if isinstance(event, EventsList) else (event,):
            trainer.add_event_handler(part, self._at_the_start if part == Events.STARTED else self)

    def __call__(self, trainer: Trainer) -> None:
        """Evaluate now, unless this iteration was evaluated or a stop has interrupted its evaluation."""
        state = trainer.state
        known = [self._evaluated_at, self._unfinished_at]
        if state.status == "running":  # a finished run is started again to be evaluated
            known.append(self._evaluated_before)
        if state.iteration not in known and not state.stopping:
            self._rng, self._progress = rng.capture(), None
            self._evaluate(trainer)

    def state_dict(self) -> dict[str, Any]:
        """The iterations of the last evaluation and of an unfinished one, with the random numbers of the latter."""
        evaluated_at = self._evaluated_before if self._evaluated_at is None else self._evaluated_at
        rng_state = None if self._unfinished_at is None else self._rng
        progress = {} if self._progress is None else {"progress": self._progress}
        state = {"evaluated_at": evaluated_at, "unfinished_at": self._unfinished_at, "rng": rng_state}
        return {**state, **progress}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.begin_anew()
        self._evaluated_before, self._unfinished_at = state["evaluated_at"], state["unfinished_at"]
        self._rng = state["rng"]
        self._progress = state.get("progress")

    def _start(self, trainer: Trainer) -> None:
        invariant = trainer.update.rank_invariant
        if not self._changes:
            check_loader(self.label, self.loader(), on_each_rank=invariant)
        if invariant and agreement.rank() == 0:
            self._say_what_is_not_invariant()
        if self._unfinished_at == trainer.state.iteration:
            self._evaluate(trainer)

    def _at_the_start(self, trainer: Trainer) -> None:
        """On STARTED: a run that continues was evaluated when it began."""
        if trainer.state.start is Start.FRESH:
            self(trainer)

    def _evaluate(self, trainer: Trainer) -> None:
        state = trainer.state
        # its events are fired again where it is repeated
        with undrawn(trainer.registry.objects), ExitStack() as undo:
            if self._rng is not None:
                rng.restore(self._rng)
            data = self.loader() if isinstance(self.data, Iterable) else loader_of(self.data())
            self._unfinished_at = state.iteration
            share_buffers(trainer.update.model)
            undo.callback(setattr, state, "evaluating", state.evaluating)
            state.evaluating = OngoingEvaluation(self.label, undo, self.evaluator)
            if isinstance(evaluated := trainer.registry.objects.get("evaluated"), EvaluatedWeights):
                undo.enter_context(evaluated.in_place())
            trainer.fire_event(TrainingEvents.EVALUATION_STARTED)
            if not self._run(trainer, data):
                self._stop(trainer)
                return
            self._evaluated_at, self._unfinished_at = state.iteration, None
            self.values = {f"{self.label}/{key}": value for key, value in self.evaluator.state.metrics.items()}
            publish(state, self.values)
            if self._changes and state.windows > state.windows_completed:
                state.metrics[f"{self.label}/window"] = float(state.windows)
            state.evaluations += 1
            trainer.fire_event(TrainingEvents.EVALUATION_COMPLETED)

    def _run(self, trainer: Trainer, data: Any) -> bool:
        """Whether it completed."""
        evaluator = self.evaluator
        own = getattr(evaluator, "model", None)
        dealing = dealing_of(data, self.limit) if trainer.update.rank_invariant else None
        with eval_mode(own) if own is not None else nullcontext(), whole_pass(data, dealing):
            if self._rng is not None:
                rng.restore(self._rng)
            limit = self.limit if dealing is None else None
            batches = EvaluationBatches(data, self.label, limit, trainer, evaluator, on_each_rank=dealing is not None)
            if self._resumes:
                batches.keep_progress(self._progress)
            # at each evaluation: Ignite would keep the length of the first pass
            evaluator.state.max_epochs = evaluator.state.epoch_length = None
            sums: AbstractContextManager[None] = nullcontext()
            if dealing is not None:
                invariant, even = InvariantSums(evaluator, dealing), batches.epoch_length is not None
                sums = invariant.collecting(shares_after_the_last=even)
                batches.at_end = None if even else invariant.share
            holders = batches.holders()
            all_hold = len(holders) == agreement.world_size()
            reduce = nullcontext() if all_hold else metrics_reduce(holders)
            restoring = batches.progress.restoring() if batches.progress else nullcontext()
            with reduce, sums, restoring, closing(batches):
                if agreement.rank() in holders:
                    evaluator.run(batches, max_epochs=1, epoch_length=batches.epoch_length)
                else:
                    for _ in batches:  # there is none, but it exchanges along
                        pass
            if not all_hold and not batches.interrupted:
                evaluator.state.metrics = agreement.gather_objects(evaluator.state.metrics)[holders[0]]
        self._progress = batches.progress.saved if batches.progress is not None else None
        return not batches.interrupted

    def _say_what_is_not_invariant(self) -> None:
        found = [f"metric {name!r} cannot be computed from sums" for name in unsummed(self.evaluator)]
        if not self._changes and dealing_of(self.loader(), self.limit) is None:
            found = [f"its {type(self.loader()).__name__} is not made by loader()"]
        if found:
            logger.warning(
                "The evaluation of %s may not be bit-exact on another number of ranks: %s.",
                self.label,
                ", ".join(found),
            )

    def _stop(self, trainer: Trainer) -> None:
        """All ranks have interrupted the evaluation: nothing is trained before the run ends."""
        progress = trainer.progress
        if progress.updating:
            return
        if progress.group is not None:  # it comes again in the resumed run, and with it this event
            self._unfinished_at = None
        trainer.finish("a stop in an evaluation")  # all ranks are here; terminate() would first ask them

    def loader(self) -> Any:
        """What is iterated in the place of its loader."""
        if self._rebuilt[0] is not self.data:
            self._rebuilt = (self.data, loader_of(self.data))
        return self._rebuilt[1]
