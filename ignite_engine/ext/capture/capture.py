"""The strategy of ``Update`` that computes a group by graphs."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from operator import is_
from typing import TYPE_CHECKING, Any

import torch
from ignite.engine import Engine
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ignite_engine.events import TrainingEvents
from ignite_engine.ext.capture.compiling import compiler, not_captured
from ignite_engine.ext.capture.gradients import GradientGraph
from ignite_engine.ext.capture.step import StepGraph, check_optimizers
from ignite_engine.update.accumulation import Accumulation, Listeners
from ignite_engine.update.losses import scalar
from ignite_engine.update.micro_batches import reducing_modules
from ignite_engine.update.precision import DTYPES

if TYPE_CHECKING:
    from ignite_engine.update.one import Update

logger = logging.getLogger(__name__)


class Capture(Accumulation):
    """The gradients of a micro-batch, and clip and step, as graphs."""

    outside_of_run: str | None = None
    """Why a resumed run may have other bits, for the reproducibility report; None: it has the same."""

    def bind(self, update: Update) -> None:
        super().bind(update)
        if callable(update.precision):
            raise not_captured("precision is a function")
        if update.loss_parallel:
            raise not_captured("loss_parallel is on")
        if reducing := reducing_modules(update.model):
            raise not_captured(f"{type(reducing[0]).__name__} reduces gradients over ranks; one process is captured")
        if update.scaler is not None or update.non_finite is not None:
            raise not_captured("a step of fp16, or with non_finite, may be skipped")
        check_optimizers(update.optimizers.values())
        self._step = StepGraph(update.clip_norm, update.log_grad_norm)
        self._dtype = DTYPES[update.precision]
        self._graphs: dict[tuple[Any, ...], GradientGraph] = {}
        self._tensors: list[Tensor] = []
        """The parameters and buffers that the graphs were made for."""

    def stateful(self) -> list[tuple[str, Any, bool]]:
        return [("capture", self, True)]

    def state_dict(self) -> dict[str, Any]:
        return {"compiler": compiler()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state["compiler"] != (now := compiler()):
            self.outside_of_run = f"was compiled by {state['compiler']} when the run was saved, and is by {now} now"
            logger.warning("The update's capture %s: the run may have other bits.", self.outside_of_run)

    def run_started(self) -> None:
        self._checked_at = -1
        """The id of torch's next hook when the model was looked up."""

    def __call__(self, engine: Engine, micro_batches: Sequence[Any], scales: Sequence[float]) -> dict[str, Tensor]:
        if RemovableHandle.next_id != self._checked_at:  # somebody may have added a hook
            self._check()
        return super().__call__(engine, micro_batches, scales)

    def forward_backward(
        self, engine: Engine, batch: Any, scale: float, extras: list[Mapping[str, Tensor]], listeners: Listeners
    ) -> Tensor:
        update = self.update
        trained = (update.loss_fn, *[tensor.requires_grad for tensor in self._tensors])
        graph = self._graphs.get(trained)
        if graph is None:
            logger.info("The update is being compiled, which takes from seconds to minutes.")
            graph = GradientGraph(update.model, update.loss_fn, update.device, self._dtype, batch)
            self._graphs[trained] = graph
        if listeners[0]:
            engine.fire_event(TrainingEvents.FORWARD_STARTED)
        if listeners[1]:  # where one graph has both, the time of both is backward's
            engine.fire_event(TrainingEvents.FORWARD_COMPLETED)
        with torch.no_grad():
            gradients, loss, extra = graph(batch, torch.full((), scale, device=update.device))
        for parameter, gradient in zip(graph.parameters, gradients, strict=True):
            # not in place: it may be in the memory of another one
            parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
        if extra:
            extras.append({name: scalar(value) for name, value in extra.items()})
        return loss

    def clip_and_step(self) -> tuple[bool, Tensor | None]:
        self.update.stepping = True
        stepped, norm = self._step(self.update.optimizers)
        if stepped:
            return True, norm
        for parameter in self.update.parameters.all():
            if parameter.grad is not None:
                parameter.grad = parameter.grad.clone()
        return super().clip_and_step()

    def _check(self) -> None:
        """Look up what is trained.

        Raises:
            ValueError: it cannot be captured.
        """
        model, trained = self.update.model, self.update.parameters.all()
        tensors = [*model.parameters(), *model.buffers()]
        if len(tensors) != len(self._tensors) or not all(map(is_, tensors, self._tensors)):
            self._graphs.clear()
            self._tensors = tensors
        held = set(map(id, tensors))
        if any(id(parameter) not in held for parameter in trained):
            raise not_captured("an optimizer trains parameters that are not the model's")
        if any(map(_has_hooks, model.modules())):
            raise not_captured("a module has hooks")
        if any(parameter._backward_hooks or parameter._post_accumulate_grad_hooks for parameter in trained):
            raise not_captured("a parameter has hooks of its gradient")
        check_optimizers(self.update.optimizers.values())
        self._checked_at = RemovableHandle.next_id


def _has_hooks(module: nn.Module) -> bool:
    return bool(
        module._forward_pre_hooks or module._forward_hooks or module._backward_pre_hooks or module._backward_hooks
    )
