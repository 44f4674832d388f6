"""Evaluate while training: at any event, on one named set, without a trace in the run."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, nullcontext
from numbers import Real
from pathlib import Path
from typing import Any

import torch
from ignite.engine import Engine, Events
from ignite.engine.events import EventsList
from torch import nn

from ignite_engine import Phase, StopRequested, Trainer, TrainingEvents, rng
from ignite_engine.data.source import DataSource, length_of
from ignite_engine.data.workers import begin_pass, end_workers
from ignite_engine.evaluator import eval_mode, whole_pass
from ignite_engine.handlers.evaluation.progress_file import EvaluationProgress, OngoingProgress
from ignite_engine.ranks import agreement
from ignite_engine.ranks.ddp_buffers import share_buffers
from ignite_engine.state import OngoingEvaluation, Start
from ignite_engine.states.model_and_optimizer import unwrap


class Evaluation:
    """Run ``evaluator`` over ``data`` and publish its metrics as ``<name>/<metric>``.

    Args:
        evaluator: from ``create_evaluator``, or any Ignite engine.
        data: a loader; of this rank's share on several ranks.
        name: of the set; unique for each Evaluation of one trainer.
        limit: batches per evaluation, None for all.
        progress: directory in which an evaluation keeps how far it has come, for long ones: cut off or killed, it goes
            on from there in the resumed run, to the same bits. What other handlers of ``evaluator`` than Ignite's
            metrics have gathered is not kept.
        progress_every: batches between two writes of it.

    Modes are restored module by module and random numbers are isolated. A stop that comes during an evaluation ends it
    without metrics, on one process at once, on several where the loader has a length; the resumed run evaluates again
    before it trains on. Attach it to ``Events.STARTED`` for a look before training, or to ``Events.COMPLETED`` for one
    at the end, which is left out where this iteration was evaluated already.
    """

    phase = Phase.EVALUATE

    def __init__(
        self,
        evaluator: Engine,
        data: Iterable[Any],
        *,
        name: str = "val",
        limit: int | None = None,
        progress: str | Path | None = None,
        progress_every: int = 100,
    ) -> None:
        if limit is not None and limit < 1:
            raise ValueError(f"limit must be at least 1 batch, or None for all, got {limit}.")
        if progress_every < 1:
            raise ValueError(f"progress_every must be at least 1 batch, got {progress_every}.")
        self.evaluator, self.data, self.label, self.limit = evaluator, data, name, limit
        self.name = f"evaluation/{name}"
        self._progress = None if progress is None else EvaluationProgress(progress, name, progress_every)
        self._pending = False
        self._rng: dict[str, Any] | None = None
        """What the pending evaluation drew its random numbers from."""
        self._evaluated_at = self._cut_at = self._began_at = -1
        self._evaluated_before = -1
        """The iteration that the resumed checkpoint's process has evaluated."""

    def attach(self, trainer: Trainer, event: Any = Events.EPOCH_COMPLETED) -> None:
        """Evaluate at ``event``; several events: ``|``, or attach again."""
        trainer.register(self.name, self)
        if not trainer.has_event_handler(self._make_up, Events.STARTED):
            trainer.add_event_handler(Events.STARTED, self._make_up)
            if self._progress is not None:
                self._progress.usable(self.evaluator, self._model(trainer), sized=length_of(self.data) is not None)
        for each in event if isinstance(event, EventsList) else (event,):
            trainer.add_event_handler(each, self._at_the_start if each == Events.STARTED else self)

    def _at_the_start(self, trainer: Trainer) -> None:
        """On STARTED: a run that continues was evaluated when it began."""
        if trainer.state.start in (Start.FRESH, Start.RESET):
            self(trainer)

    def __call__(self, trainer: Trainer) -> None:
        """Evaluate now, unless this iteration was evaluated already."""
        iteration, status = trainer.state.iteration, trainer.state.status
        # a finished run is started again to be evaluated
        before = self._evaluated_before if status == "running" else -1
        if iteration not in (self._evaluated_at, self._cut_at, before) and not trainer.state.stopping:
            self._rng = rng.capture()
            self._evaluate(trainer)

    def state_dict(self) -> dict[str, Any]:
        """What was evaluated last; whether one was begun and not finished, and from which random numbers."""
        drawn_from = self._rng if self._pending else None
        evaluated_at = max(self._evaluated_at, self._evaluated_before)
        return {"pending": self._pending, "rng": drawn_from, "evaluated_at": evaluated_at}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._pending, self._rng = state["pending"], state["rng"]
        self._evaluated_before = state["evaluated_at"]

    def _make_up(self, trainer: Trainer) -> None:
        self._began_at = trainer.state.iteration
        if trainer.state.start is Start.FRESH:  # what an earlier run left
            self._pending = False
            self._evaluated_at = self._cut_at = self._evaluated_before = -1
        if self._pending:
            self._evaluate(trainer)

    def _evaluate(self, trainer: Trainer) -> None:
        state, self._pending = trainer.state, True
        share_buffers(getattr(trainer.update, "model", None))
        with ExitStack() as undo:
            undo.callback(setattr, state, "evaluating", state.evaluating)
            state.evaluating = OngoingEvaluation(self.label, undo, self.evaluator)
            trainer.fire_event(TrainingEvents.EVALUATION_STARTED)
            if not self._run(trainer):
                self._cut_at = state.iteration
                self._stop(trainer)
                return
            self._pending, self._evaluated_at = False, state.iteration
            for key, value in self.evaluator.state.metrics.items():
                number = _number(value)
                if number is not None:
                    state.metrics[f"{self.label}/{key}"] = number
            state.evaluations += 1
            trainer.fire_event(TrainingEvents.EVALUATION_COMPLETED)

    def _run(self, trainer: Trainer) -> bool:
        """Whether it went to its end."""
        model, evaluator = self._model(trainer), self.evaluator
        own = getattr(evaluator, "model", None)
        with rng.isolated(), eval_mode(own) if own is not None else nullcontext(), whole_pass(self.data):
            if self._rng is not None:
                rng.restore(self._rng)
            batches = _Batches(self.data, self.limit, trainer, evaluator)
            if self._progress is not None and self._progress.usable(evaluator, model, sized=batches.sized):
                batches.take_up(self._progress, model)
            # anew each time: Ignite would keep the length of the first pass
            evaluator.state.max_epochs = evaluator.state.epoch_length = None
            with batches.progress.restoring() if batches.progress else nullcontext():
                evaluator.run(batches, max_epochs=1, epoch_length=batches.length)
        if batches.progress is not None and not batches.broken_off:
            batches.progress.complete()
        return not batches.broken_off

    def _stop(self, trainer: Trainer) -> None:
        """All ranks have broken off: the next edge is to be the last, and nothing is trained before it."""
        trainer.vote_at_next_boundary()
        if trainer.state.iteration == self._began_at and trainer.state.status == "running":
            trainer.terminate()  # before the first update there is no edge

    def _model(self, trainer: Trainer) -> Any:
        model = getattr(self.evaluator, "model", None) or getattr(trainer.update, "model", None)
        return unwrap(model) if isinstance(model, nn.Module) else None


class _Batches:
    """The batches of one evaluation. They end where all ranks have heard of a stop: on one process in the middle of a
    wait, too; on several at a batch that every rank comes to.
    """

    def __init__(self, data: Iterable[Any], limit: int | None, trainer: Trainer, evaluator: Engine) -> None:
        self.data, self.limit, self.trainer, self.evaluator = data, limit, trainer, evaluator
        sized = length_of(data)
        self.length = sized if limit is None or sized is None else min(sized, limit)
        self.alone, self.broken_off = agreement.world_size() == 1, False
        lengths = agreement.gather_floats([-1.0 if self.length is None else float(self.length)])
        self.common = int(min(row[0] for row in lengths))
        """Batches that every rank has; below 0 where a rank does not know."""
        self.progress: OngoingProgress | None = None
        self._vote = agreement.Vote()

    @property
    def sized(self) -> bool:
        """Every rank knows how many batches it has."""
        return self.common >= 0

    def take_up(self, progress: EvaluationProgress, model: nn.Module) -> None:
        """Keep the progress from now on; begin where it stands."""
        self.source = DataSource(self.data, None)
        self.source.pass_number = _pass_of(self.data)
        iteration = self.trainer.state.iteration
        self.progress = progress.begin(self.evaluator, model, self.source, iteration=iteration, limit=self.limit)

    def __iter__(self) -> Iterator[Any]:
        progress, batches = self.progress, self.progress.start if self.progress else 0
        iterator = begin_pass(self.data) if progress is None else iter(self.source)
        if progress is not None:
            progress.restore_rng()
        self._vote.restart(batches)
        while self.limit is None or batches < self.limit:
            if self._ends(batches):
                self._break_off(iterator)
                return
            try:
                self.trainer.requests.waiting_for_data = self.alone
                try:
                    batch = next(iterator, _END)
                finally:
                    self.trainer.requests.waiting_for_data = False
            except StopRequested:
                if progress is not None and self.source.sampler is not None:  # no other is sure to have drawn nothing
                    progress.write(batches)
                self._break_off(iterator)
                return
            if batch is _END:
                return
            yield batch
            batches += 1

    def _ends(self, batches: int) -> bool:
        """Whether to break off after so many; keeps the progress where it is time to."""
        if not self.alone and batches >= self.common:
            return False
        due = self.progress is not None and self.progress.due(batches)
        stops = bool(self._vote.poll(batches, int(self.trainer.stop_requested), now=due))
        if self.progress is not None and (due or stops):
            self.progress.write(batches)
        return stops

    def _break_off(self, iterator: Any) -> None:
        self.broken_off = True
        end_workers(iterator, self.data)
        if self.evaluator.state.epoch_length is None:
            # else the end of data would be the end of a pass, whose metrics are computed, of no batch perhaps
            self.evaluator.state.epoch_length = sys.maxsize
        self.evaluator.terminate()


def _pass_of(data: Any) -> int:
    sampler = getattr(data, "sampler", data)
    number = getattr(sampler, "pass_number", getattr(sampler, "epoch", 0))
    return number if isinstance(number, int) else 0


_END = object()


def _number(value: Any) -> float | None:
    if isinstance(value, torch.Tensor):
        return float(value) if value.numel() == 1 else None
    return float(value) if isinstance(value, Real) else None
