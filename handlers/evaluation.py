"""Evaluate while training: at any event, on one named set, without a trace in the run."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, nullcontext
from itertools import count
from numbers import Real
from typing import Any

import torch
from ignite.engine import Engine, Events

from ignite_engine import Phase, StopRequested, Trainer, TrainingEvents, agreement, rng
from ignite_engine.data import end_workers, length_of
from ignite_engine.evaluator import eval_mode
from ignite_engine.state import OngoingEvaluation


class Evaluation:
    """Run ``evaluator`` over ``data`` and publish its metrics as ``<name>/<metric>``.

    Args:
        evaluator: from ``create_evaluator``, or any Ignite engine.
        data: a loader; of this rank's share on several ranks.
        name: of the set; unique for each Evaluation of one trainer.
        limit: batches per evaluation, None for all.

    Modes are restored module by module and random numbers are isolated. A stop that comes during an evaluation on one
    process ends it at once without metrics; the resumed run evaluates again before it trains on. Attach it to
    ``Events.STARTED`` for a look before training, or to ``Events.COMPLETED`` for one at the end, which is left out
    where this iteration was evaluated already.
    """

    phase = Phase.EVALUATE

    def __init__(self, evaluator: Engine, data: Iterable[Any], *, name: str = "val", limit: int | None = None) -> None:
        if limit is not None and limit < 1:
            raise ValueError(f"limit must be at least 1 batch, or None for all, got {limit}.")
        self.evaluator, self.data, self.label, self.limit = evaluator, data, name, limit
        self.name = f"evaluation/{name}"
        self._pending = False
        self._evaluated_at = -1
        self._loaded = False

    def attach(self, trainer: Trainer, event: Any = Events.EPOCH_COMPLETED) -> None:
        """Evaluate at ``event``; several events: ``|``, or attach again."""
        trainer.register(self.name, self)
        if not trainer.has_event_handler(self._make_up, Events.STARTED):
            trainer.add_event_handler(Events.STARTED, self._make_up)
        trainer.add_event_handler(event, self)

    def __call__(self, trainer: Trainer) -> None:
        """Evaluate now, unless this iteration was."""
        state = trainer.state
        if self._evaluated_at == state.iteration or state.stopping:
            return
        self._pending = True
        with ExitStack() as undo:
            undo.callback(setattr, state, "evaluating", state.evaluating)
            state.evaluating = OngoingEvaluation(self.label, undo, self.evaluator)
            trainer.fire_event(TrainingEvents.EVALUATION_STARTED)
            if not self._run(trainer):
                return
            self._pending, self._evaluated_at = False, state.iteration
            for key, value in self.evaluator.state.metrics.items():
                number = _number(value)
                if number is not None:
                    state.metrics[f"{self.label}/{key}"] = number
            state.evaluations += 1
            trainer.fire_event(TrainingEvents.EVALUATION_COMPLETED)

    def state_dict(self) -> dict[str, Any]:
        """Whether an evaluation was begun and not finished; what was measured is in the log."""
        return {"pending": self._pending}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._pending, self._loaded = state["pending"], True

    def _make_up(self, trainer: Trainer) -> None:
        if trainer.state.iteration == 0 and not self._loaded:  # what an earlier run left
            self._pending, self._evaluated_at = False, -1
        self._loaded = False
        if self._pending:
            self(trainer)

    def _run(self, trainer: Trainer) -> bool:
        """Whether it went to its end."""
        batches = _Batches(self.data, self.limit, trainer, self.evaluator)
        model = getattr(self.evaluator, "model", None)
        with rng.isolated(), eval_mode(model) if model is not None else nullcontext():
            # anew each time: Ignite would keep the length of the first pass
            self.evaluator.state.max_epochs = self.evaluator.state.epoch_length = None
            self.evaluator.run(batches, max_epochs=1, epoch_length=batches.length)
        return not batches.broken_off


class _Batches:
    """The batches of one evaluation; on one process they end when a stop is asked for, in the middle of a wait too."""

    def __init__(self, data: Iterable[Any], limit: int | None, trainer: Trainer, evaluator: Engine) -> None:
        self.data, self.limit, self.trainer, self.evaluator = data, limit, trainer, evaluator
        sized = length_of(data)
        self.length = sized if limit is None or sized is None else min(sized, limit)
        self.breaks_off = agreement.world_size() == 1
        self.broken_off = False

    def __iter__(self) -> Iterator[Any]:
        iterator = iter(self.data)
        for _ in count() if self.limit is None else range(self.limit):
            if self.breaks_off and self.trainer.stop_requested:
                self._break_off(iterator)
                return
            try:
                self.trainer.fetching = self.breaks_off
                try:
                    batch = next(iterator, _END)
                finally:
                    self.trainer.fetching = False
            except StopRequested:
                self._break_off(iterator)
                return
            if batch is _END:
                return
            yield batch

    def _break_off(self, iterator: Any) -> None:
        self.broken_off = True
        end_workers(iterator, self.data)
        if self.evaluator.state.epoch_length is None:
            # else the end of data would be the end of a pass, whose metrics are computed, of no batch perhaps
            self.evaluator.state.epoch_length = sys.maxsize
        self.evaluator.terminate()


_END = object()


def _number(value: Any) -> float | None:
    if isinstance(value, torch.Tensor):
        return float(value) if value.numel() == 1 else None
    return float(value) if isinstance(value, Real) else None
