"""Forward, loss and backward of a micro-batch as one graph."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad
from torch.utils._pytree import tree_map_only

from ignite_engine import rng
from ignite_engine.ext.capture.compiling import call, compiled, not_captured
from ignite_engine.update.losses import LossFn, parts
from ignite_engine.update.without_trace import without_trace


class GradientGraph:
    """The graph for one set of trained parameters; torch compiles it for each shape of batches.

    The loss is computed once the plain way, which tells what gets a gradient.

    Args:
        dtype: of autocast; None: none.
        batch: an example, on the device.

    Raises:
        ValueError: it cannot be captured.
        Whatever loss_fn raises.
    """

    def __init__(
        self, model: nn.Module, loss_fn: LossFn, device: torch.device, dtype: torch.dtype | None, batch: Any
    ) -> None:
        loss_of = _Loss(model, loss_fn)
        self._buffers = dict(loss_of.named_buffers())
        named = {name: parameter for name, parameter in loss_of.named_parameters() if parameter.requires_grad}
        with rng.isolated(), without_trace(loss_of), torch.enable_grad():
            with nullcontext() if dtype is None else torch.autocast(device.type, dtype):
                loss, _ = parts(loss_of(tree_map_only(Tensor, torch.clone, batch)))  # it may write to the batch
            found = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
            replaced = [name for name, buffer in loss_of.named_buffers() if self._buffers[name] is not buffer]
        if replaced:
            raise not_captured(f"{replaced[0]} is another tensor after a forward, to which a graph can only write")
        self._trained = {name: named[name] for name, gradient in zip(named, found) if gradient is not None}
        self.parameters = list(self._trained.values())
        """Those that get a gradient, in the order of the gradients."""
        self._graph = compiled(_graph(loss_of, device.type, dtype), device.type)

    def __call__(self, batch: Any, scale: Tensor) -> tuple[list[Tensor], Tensor, Mapping[str, Tensor]]:
        """Gradients of ``scale`` times the loss, the loss, and what is reported beside it.

        A gradient may be in the memory of another one, or of ``scale``.
        """
        result: tuple[list[Tensor], Tensor, Mapping[str, Tensor]]
        result = call(self._graph, self._trained, self._buffers, batch, scale)
        return result


def _graph(loss: _Loss, device_type: str, dtype: torch.dtype | None) -> Any:
    def gradients_of(
        trained: Mapping[str, Tensor], buffers: Mapping[str, Tensor], batch: Any, scale: Tensor
    ) -> tuple[list[Tensor], Tensor, Mapping[str, Tensor]]:
        def scaled(trained: Any, buffers: Any, batch: Any) -> Any:
            # buffers are arguments: what a transform captures it may not write to
            with nullcontext() if dtype is None else torch.autocast(device_type, dtype):
                value, extra = parts(functional_call(loss, {**trained, **buffers}, (batch,)))
            return value * scale, (value, extra)

        gradients, (value, extra) = grad(scaled, has_aux=True)(trained, buffers, batch)
        return list(gradients.values()), value, extra

    return gradients_of


class _Loss(nn.Module):
    """The loss as a module, which can be called with other parameters in the place of the model's."""

    def __init__(self, model: nn.Module, loss_fn: LossFn) -> None:
        super().__init__()
        self.model, self.loss_fn = model, loss_fn

    def forward(self, batch: Any) -> Any:
        return self.loss_fn(self.model, batch)
