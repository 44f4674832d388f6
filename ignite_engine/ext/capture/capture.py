"""The strategy of ``Update`` that computes a group by graphs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from operator import is_
from typing import Any

import torch
from ignite.engine import Engine
from torch import Tensor, nn
from torch._dynamo.exc import FailOnRecompileLimitHit
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from ignite_engine.events import TrainingEvents
from ignite_engine.ext.capture import step as steps
from ignite_engine.ext.capture.compiling import compiler, not_captured
from ignite_engine.ext.capture.gradients import GradientGraph, signature_of
from ignite_engine.ext.capture.step import StepGraph
from ignite_engine.step.accumulate import Accumulate, ForwardBackward
from ignite_engine.step.accumulate.forward_backward import listeners_of, means
from ignite_engine.step.device import to_device
from ignite_engine.step.losses import scalar
from ignite_engine.step.micro_batches import reducing_modules
from ignite_engine.step.precision import DTYPES, LossScaler, Precision

logger = logging.getLogger(__name__)

MAX_GRAPHS = 8
"""Most shapes of micro-batches, times sets of trained parameters and loss functions, in a process."""


class Capture:
    """The gradients of a group, and clip and step, as graphs.

    Args:
        plain: the strategy for a group in which a micro-batch weighs nothing.
        step: clip and step, where they are captured.

    Raises:
        ValueError: it is known to be impossible.
    """

    def __init__(
        self,
        plain: Accumulate,
        forward_backward: ForwardBackward,
        optimizers: Mapping[str, Optimizer],
        *,
        device: torch.device,
        precision: Precision,
        scaler: LossScaler | None,
        step: StepGraph | None,
    ) -> None:
        if callable(precision):
            raise not_captured("precision is a function")
        if reducing := reducing_modules(forward_backward.model):
            raise not_captured(f"{type(reducing[0]).__name__} reduces gradients over ranks; one process is captured")
        self._plain, self._forward_backward, self._optimizers = plain, forward_backward, optimizers
        self._device, self._dtype, self._scaler, self._step = device, DTYPES[precision], scaler, step
        self._factors: dict[float, Tensor] = {}
        self._graphs: dict[tuple[Any, ...], GradientGraph] = {}
        self._tensors: list[Tensor] = []
        """The parameters and buffers that the graphs were made for."""
        self._checked_at = -1
        """The id of torch's next hook when the trained parameters were looked up."""
        self._group_is_captured = False
        self.outside_of_run: str | None = None
        """Why a resumed run may have other bits, for the reproducibility report; None: it has the same."""

    def state_dict(self) -> dict[str, Any]:
        return {"compiler": compiler()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state["compiler"] != (now := compiler()):
            self.outside_of_run = f"was compiled by {state['compiler']} when the run was saved, and is by {now} now"
            logger.warning("The update's capture %s: it goes on with other bits.", self.outside_of_run)

    def run_starts(self) -> None:
        """A run starts: what is trained is looked up again."""
        self._checked_at = -1

    def __call__(self, engine: Engine, micro_batches: Sequence[Any], scales: list[float]) -> dict[str, Tensor]:
        self._group_is_captured = all(scales)
        if not self._group_is_captured:
            return self._plain(engine, micro_batches, scales)
        if RemovableHandle.next_id != self._checked_at:  # somebody may have added a hook
            self._check()
        state: Any = engine.state
        losses, extras = list[Tensor](), list[Mapping[str, Tensor]]()
        forward_starts, forward_completes, backward_completes = listeners_of(engine)
        on_host = self._device.type == "cpu"
        batches = micro_batches if on_host else to_device(micro_batches, self._device, state.iteration)
        for batch, scale in zip(batches, scales, strict=True):
            graph = self._graph_of(batch)
            if forward_starts:
                engine.fire_event(TrainingEvents.FORWARD_STARTED)
            if forward_completes:  # where one graph has both, the time of both is backward's
                engine.fire_event(TrainingEvents.FORWARD_COMPLETED)
            try:
                with torch.no_grad():
                    gradients, loss, extra = graph(batch, self._factor(scale))
            except FailOnRecompileLimitHit as error:
                raise not_captured("it changes from one iteration to another") from error
            for parameter, gradient in zip(graph.parameters, gradients, strict=True):
                if parameter.grad is None:
                    parameter.grad = gradient
                else:
                    parameter.grad.add_(gradient)
            losses.append(loss)
            if extra:
                extras.append({name: scalar(value) for name, value in extra.items()})
            state.micro_batches += 1
            if backward_completes:
                engine.fire_event(TrainingEvents.BACKWARD_COMPLETED)
        return means(losses, extras, scales)

    @property
    def clip_and_step(self) -> Callable[[Mapping[str, Optimizer]], tuple[bool, Tensor | None]] | None:
        """Clips and steps, see :class:`StepGraph`; None: the plain way does."""
        return self._step if self._group_is_captured else None

    def _factor(self, scale: float) -> Tensor:
        """What the loss is multiplied by: in fp16 by the loss scale, too."""
        if self._scaler is not None:
            return self._scaler.scale(torch.ones((), device=self._device)) * scale
        factor = self._factors.get(scale)
        if factor is None:
            if len(self._factors) > 64:
                self._factors.clear()
            factor = self._factors[scale] = torch.full((), scale, device=self._device)
        return factor

    def _graph_of(self, batch: Any) -> GradientGraph:
        """The graph for a micro-batch, compiled where it is the first of its kind."""
        model, loss_fn = self._forward_backward.model, self._forward_backward.loss_fn
        trainable = tuple([tensor.requires_grad for tensor in self._tensors])
        signature = (loss_fn, model.training, trainable, *signature_of(batch))
        graph = self._graphs.get(signature)
        if graph is None:
            if len(self._graphs) == MAX_GRAPHS:
                raise not_captured(f"it would need more than {MAX_GRAPHS} graphs: pad batches to fewer shapes")
            graph = GradientGraph(model, loss_fn, self._device, self._dtype, batch)
            self._graphs[signature] = graph
        return graph

    def _check(self) -> None:
        """Look up what is trained."""
        model = self._forward_backward.model
        tensors = [*model.parameters(), *model.buffers()]
        if len(tensors) != len(self._tensors) or not all(map(is_, tensors, self._tensors)):
            self._graphs.clear()
            self._tensors = tensors
        held = set(map(id, tensors))
        groups = [group for optimizer in self._optimizers.values() for group in optimizer.param_groups]
        trained = [parameter for group in groups for parameter in group["params"]]
        if any(id(parameter) not in held for parameter in trained):
            raise not_captured("an optimizer trains parameters that are not the model's")
        if any(_has_hooks(module) for module in model.modules()):
            raise not_captured("a module has hooks")
        if any(parameter._backward_hooks or parameter._post_accumulate_grad_hooks for parameter in trained):
            raise not_captured("a parameter has hooks of its gradient")
        if self._step is not None and (why := steps.why_not(self._optimizers.values())) is not None:
            logger.info("The optimizers' step is not captured: %s.", why)
            self._step = None
        self._checked_at = RemovableHandle.next_id


def _has_hooks(module: nn.Module) -> bool:
    return bool(
        module._forward_pre_hooks or module._forward_hooks or module._backward_pre_hooks or module._backward_hooks
    )
