"""Digests of what each iteration is made of, in the order in which one thing causes the next."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ignite.engine import Events
from torch import Tensor

from ignite_engine import rng
from ignite_engine.checkpointing.digests import digests, hashed
from ignite_engine.events import Phase, TrainingEvents
from ignite_engine.ext.replay.iteration import local, rates_of, samples_of, weights_now
from ignite_engine.ext.replay.logged import Kept, LoggedMetrics
from ignite_engine.states.model_and_optimizer import ModelState, OptimizerState
from ignite_engine.trainer import Trainer

Pieces = dict[str, str]
_ELSEWHERE = ("trainer", "data", "rng")
"""Parts of the registry that other pieces cover."""


@dataclass(frozen=True)
class FirstPiece:
    """The first piece that differs between two runs; ``first`` and ``second`` are its digests or values."""

    iteration: int
    rank: int
    what: str
    first: str
    second: str

    def __str__(self) -> str:
        return f"iteration {self.iteration}: {self.what} ({_short(self.first)} and {_short(self.second)})"


class Steps:
    """Writes down the pieces of each iteration: samples, batch, generators, weights, gradients, rates, loss, states.

    Attributes:
        pieces: by iteration and name.
    """

    def __init__(self) -> None:
        self.pieces: dict[int, Pieces] = {}

    def attach(self, trainer: Trainer) -> None:
        """Attach it last."""
        trainer.add_event_handler(Events.ITERATION_STARTED, self._before)
        trainer.add_event_handler(TrainingEvents.OPTIMIZER_STEP_STARTED, self._gradients)
        trainer.add_event_handler(Events.ITERATION_COMPLETED, self._after)
        trainer.add_event_handler(TrainingEvents.RESUME_POINT, self._others)

    def _before(self, trainer: Trainer) -> None:
        pieces = self.pieces[trainer.state.iteration] = {}
        samples = samples_of(trainer)
        if samples is not None:
            pieces["the samples of the batch"] = json.dumps(samples)
        batch = trainer.state.batch
        for name, value in digests(list(batch) if isinstance(batch, list) else batch).items():
            pieces[f"the bytes of the batch{_of(name)}"] = value
        for name, value in digests(rng.capture()).items():
            pieces[f"the random generator {name}"] = value
        for name, tensor in weights_now(trainer).items():
            pieces[f"{name} before the step"] = _hash(tensor)

    def _gradients(self, trainer: Trainer) -> None:
        pieces = self.pieces[trainer.state.iteration]
        for name, parameter in _parameters(trainer):
            if parameter.grad is not None:
                pieces[f"the gradient of {name}"] = _hash(local(parameter.grad))
        pieces |= {f"the rate {name}": repr(rate) for name, rate in rates_of(trainer).items()}

    def _after(self, trainer: Trainer) -> None:
        pieces, output = self.pieces[trainer.state.iteration], trainer.state.output
        for name, value in (output if isinstance(output, Mapping) else {"loss": output}).items():
            is_tensor = isinstance(value, Tensor)
            pieces[f"the output {name}"] = repr(value.tolist()) if is_tensor and value.numel() == 1 else str(value)
        for part, obj in trainer.registry.objects.items():
            if isinstance(obj, OptimizerState):
                for name, value in digests(obj.state_dict()).items():
                    pieces[f"the state of {part}{_of(name)}"] = value

    def _others(self, trainer: Trainer) -> None:
        pieces = self.pieces.get(trainer.state.iteration, {})
        pieces |= {f"{name} after the step": _hash(tensor) for name, tensor in weights_now(trainer).items()}
        for part, obj in trainer.registry.objects.items():
            logs = isinstance(obj, Kept | LoggedMetrics)
            if not logs and part not in _ELSEWHERE and not isinstance(obj, ModelState | OptimizerState):
                for name, value in digests(obj.state_dict()).items():
                    pieces[f"the state of {part}{_of(name)}"] = value

    _before.phase = _gradients.phase = _after.phase = _others.phase = Phase.LAST  # type: ignore[attr-defined]


def first_piece(first: Mapping[int, Pieces], second: Mapping[int, Pieces], rank: int = 0) -> FirstPiece | None:
    """The first piece that differs in the first iteration with any; None: there is none."""
    for iteration in sorted(first.keys() & second.keys()):
        one, other = first[iteration], second[iteration]
        what = next((what for what in {**one, **other} if one.get(what) != other.get(what)), None)
        if what is not None:
            return FirstPiece(iteration, rank, what, one.get(what, "missing"), other.get(what, "missing"))
    return None


def _parameters(trainer: Trainer) -> Iterator[tuple[str, Tensor]]:
    objects, kinds = trainer.registry.objects, trainer.registry.kinds
    known: dict[int, str] = {}
    for part in objects:
        if kinds.get(part) == "model":
            model: Any = getattr(objects[part], "model", objects[part])
            known |= {id(parameter): name for name, parameter in model.named_parameters()}
    optimizers = trainer.update.optimizers
    groups = [group for optimizer in optimizers.values() for group in optimizer.param_groups]
    for place, parameter in enumerate(parameter for group in groups for parameter in group["params"]):
        yield known.get(id(parameter), f"parameter {place}").removeprefix("module."), parameter


def _hash(tensor: Tensor) -> str:
    value = tensor.detach()
    return f"{int(hashed(value.to_dense() if value.is_sparse else value)) % 2**64:016x}"


def _of(name: str) -> str:
    return f", {name}" if name else ""


def _short(text: str) -> str:
    text = text.removeprefix("sha256:")
    return text if len(text) <= 48 else f"{text[:45]}..."
