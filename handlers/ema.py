"""An exponential moving average of the weights, used in their place during evaluations."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from ignite.engine import Engine, Events
from torch import Tensor, nn

from ignite_engine import Trainer, TrainingEvents, Updates
from ignite_engine.checkpoint.nested import is_made_of_tensors
from ignite_engine.checkpoint.states.model_and_optimizer import ModelState, clean_name, reshard, unwrap
from ignite_engine.errors import StateMismatch, is_number, leave_out
from ignite_engine.events import Phase
from ignite_engine.handlers.never_stepped import warn_where_never_stepped


class EMA:
    """Keep a moving average of all floating-point parameters: ``average = decay * average + (1 - decay) * weights``.

    Args:
        decay: from 0 (the weights themselves) to below 1; 0.999 remembers about the last 1,000 updates.
        warmup: the decay of update n, counted from 0, is at most ``(1 + n) / (10 + n)``, so that the initial weights do
            not dominate the average of a short run.
        evaluate: names of the evaluations that use the average; None: all of them.
        name: in checkpoints; a second average needs its own.

    It is updated by applied optimizer steps only, without a host sync, in fp32 where the parameters have a lower
    precision. Buffers and frozen quantized weights are not averaged; the model's own are used. During an evaluation the
    model's parameters hold the average; they are restored however the evaluation ends, and a checkpoint saved meanwhile
    holds the trained parameters. This needs memory for one more copy of the parameters.

    In a checkpoint ``weights`` maps the names of the model's state to the averages, so that
    ``{**parts["model"], **parts["ema"]["weights"]}`` is the averaged model. ``evaluate`` on a checkpoint uses it too.

    Raises:
        ValueError: ``decay`` is out of its range; two averages are configured for the same evaluation.
        TypeError: (in ``attach``) the trainer's update has no model.
    """

    serves_evaluation = True
    """Its state is loaded even if the checkpoint is only evaluated."""

    def __init__(
        self,
        decay: float = 0.999,
        *,
        warmup: bool = True,
        evaluate: Collection[str] | None = None,
        name: str = "ema",
    ) -> None:
        if not (is_number(decay) and 0 <= decay < 1):
            raise ValueError(f"decay must be a number of at least 0 and below 1, got {decay!r}; 0.999 is usual.")
        if isinstance(evaluate, str):
            raise ValueError(f"evaluate must be a collection of names, got {evaluate!r}; write ({evaluate!r},).")
        self.decay, self.warmup, self.evaluate, self.name = decay, warmup, evaluate, name
        self.updates = 0
        """Applied optimizer steps included so far."""
        self._model: nn.Module | None = None
        self._is_of_steps = True
        self._averages: dict[str, Tensor] = {}
        self._pairs: list[tuple[list[Tensor], list[Tensor]]] = []

    def attach(self, engine: Engine, event: Any = TrainingEvents.OPTIMIZER_STEP_COMPLETED) -> None:
        """Update the average at ``event``; of a trainer with several updates, at that of one of them.

        Raises:
            ValueError: it has several, and ``event`` does not say which.
        """
        trainer = Trainer.of(engine)
        model = trainer.update.model
        if model is None:
            raise TypeError(
                "EMA needs to know the model: make the Trainer from an Update, or a BaseUpdate with a 'model'; to "
                "another engine attach Checkpoint(directory, to_save={'model': model, 'optimizer': optimizer}) before."
            )
        if isinstance(trainer.update, Updates) and event is TrainingEvents.OPTIMIZER_STEP_COMPLETED:
            name = list(trainer.update.updates)[-1]
            raise ValueError(
                "An iteration has several updates, so say after which the average is updated: "
                f"EMA(...).attach(trainer, trainer.update.stepped({name!r}))."
            )
        self._model, self._is_of_steps = unwrap(model), event == TrainingEvents.OPTIMIZER_STEP_COMPLETED
        trainer.register(self.name, self, shared=True, kind="average")
        trainer.add_event_handler(Events.STARTED, self._start)
        trainer.add_event_handler(event, self)
        trainer.add_event_handler(TrainingEvents.EVALUATION_STARTED, self._swap_in)
        warn_where_never_stepped(trainer, f"EMA {self.name!r}")

    @torch.no_grad()
    def __call__(self, trainer: Trainer) -> None:
        """Include the weights of the update just made; an average of later steps begins with them."""
        if not self.updates and self._is_of_steps and trainer.state.optimizer_steps > 1:
            self._reset()
        decay = min(self.decay, (1 + self.updates) / (10 + self.updates)) if self.warmup else self.decay
        for averages, followed in self._pairs:
            dtype = averages[0].dtype
            parameters = followed
            if followed[0].dtype != dtype or hasattr(followed[0], "to_local"):
                parameters = [_local(parameter).to(dtype) for parameter in followed]
            torch._foreach_lerp_(averages, parameters, 1.0 - decay)
        self.updates += 1

    def state_dict(self) -> dict[str, Any]:
        """The averages by the names of the model's state, tied ones under each of theirs; and ``updates``."""
        if not self._averages:
            self._reset()
        weights = {name: self._averages[first] for name, first, _ in self._named()}
        return {"updates": self.updates, "weights": weights}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the averages; ``decay`` is the one given now.

        Raises:
            StateMismatch: the model has other parameters than the averaged one.
        """
        saved: Mapping[str, Tensor] = state["weights"]
        here = {name: parameter.shape for name, _, parameter in self._named()}
        different = [name for name in {**here, **saved} if name not in saved or here.get(name) != saved[name].shape]
        if different:
            raise StateMismatch(
                f"The model is not the one that was averaged ({', '.join(different[:3])} differ): build it as it was "
                f"saved, or leave the average out with {leave_out(self.name)}."
            )
        self._reset()
        with torch.no_grad():
            for name, average in self._averages.items():
                average.copy_(saved[name])
        self.updates = state["updates"]

    def is_evaluated(self, name: str) -> bool:
        """Whether the evaluation of that name uses the average, once there is one."""
        return bool(self.updates) and (self.evaluate is None or name in self.evaluate)

    def begin_anew(self) -> None:
        """A run starts over: so does the average, at the weights that it starts with."""
        self._averages = {}

    def _start(self, trainer: Trainer) -> None:
        if not self._averages:
            self._reset()

    def _swap_in(self, trainer: Trainer) -> None:
        evaluation = trainer.state.evaluating
        if evaluation is None or not self.is_evaluated(evaluation.name):
            return
        registered = trainer.registry.objects.get("model")
        state = registered if isinstance(registered, ModelState) else None  # a user's update may save it by itself
        if state is not None and state.swapped_out:
            raise ValueError(
                f"Two EMA handlers would replace the weights in the evaluation {evaluation.name!r}: "
                "give each EMA its own evaluations with evaluate=(...)."
            )
        kept = {first: parameter.detach().clone() for _, first, parameter in self._named()}
        evaluation.undo.callback(self._put_back, state, kept)
        if state is not None:
            state.swapped_out = {name: kept[first] for name, first, _ in self._named()}
        self._set(self._averages)

    def _put_back(self, state: ModelState | None, kept: Mapping[str, Tensor]) -> None:
        self._set(kept)
        if state is not None:
            state.swapped_out = {}

    @torch.no_grad()
    def _set(self, values: Mapping[str, Tensor]) -> None:
        """Copy ``values`` into the parameters, in place."""
        own = {first: parameter for _, first, parameter in self._named()}
        torch._foreach_copy_([_local(own[name]) for name in values], [_local(value) for value in values.values()])

    @torch.no_grad()
    def _reset(self) -> None:
        """Start the average at the current weights."""
        self.updates, self._averages = 0, {}
        groups: dict[Any, tuple[list[Tensor], list[Tensor]]] = {}
        for _, first, parameter in self._named():
            if first in self._averages:
                continue
            wide = torch.promote_types(parameter.dtype, torch.float32)
            self._averages[first] = average = parameter.detach().clone().to(wide)
            kind = (parameter.dtype, parameter.device, type(parameter.data))
            averages, parameters = groups.setdefault(kind, ([], []))
            averages.append(_local(average))
            parameters.append(parameter)
        self._pairs = list(groups.values())

    def _named(self) -> Iterator[tuple[str, str, nn.Parameter]]:
        """Name in the model's state, first name of the same (perhaps tied) parameter, and the parameter."""
        if self._model is None:
            raise RuntimeError("EMA has no model yet: call attach(trainer) first.")
        reshard(self._model)
        first_names: dict[int, str] = {}
        for name, parameter in self._model.named_parameters(remove_duplicate=False):
            is_quantized = is_made_of_tensors(parameter) and not parameter.requires_grad
            if (parameter.is_floating_point() or parameter.is_complex()) and not is_quantized:
                first = first_names.setdefault(id(parameter), clean_name(name))
                yield clean_name(name), first, parameter

    # an evaluation of the same event uses the average with the newest weights
    _start.phase = Phase.PREPARE  # type: ignore[attr-defined]
    phase = Phase.PREPARE


def _local(tensor: Tensor) -> Tensor:
    """This rank's part of a sharded tensor."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor
