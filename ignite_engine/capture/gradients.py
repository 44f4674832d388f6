"""Forward, loss and backward of a micro-batch as one graph."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad
from torch.utils._pytree import tree_flatten

from ignite_engine import devices
from ignite_engine.step.losses import LossFn, parts
from ignite_engine.step.without_trace import without_trace

Gradients = list[Tensor]
Graph = Callable[..., Any]
Signature = tuple[Any, ...]


class GradientGraphs:
    """One graph for each signature of a batch: its structure, shapes and types.

    torch would compile the second shape for all later ones, so that the bits of a short last batch would depend on what
    came before it.

    Args:
        model: what is trained, not wrapped.
        dtype: of autocast; None: none.
    """

    def __init__(self, model: nn.Module, loss_fn: LossFn, device: torch.device, dtype: torch.dtype | None) -> None:
        self.model, self.loss_fn, self._device, self._dtype = model, loss_fn, device, dtype
        self._loss = _Loss(model, loss_fn)
        self._graphs: dict[Signature, Graph] = {}
        self._trained: dict[str, Tensor] = {}
        self._buffers: dict[str, Tensor] = {}

    @property
    def parameters(self) -> list[Tensor]:
        """Those that get a gradient, in the order of the gradients."""
        return list(self._trained.values())

    def __contains__(self, signature: Signature) -> bool:
        return signature in self._graphs

    def __len__(self) -> int:
        return len(self._graphs)

    def probe(self, batch: Any, scale: Tensor) -> tuple[Tensor, Gradients, bool]:
        """Find out which parameters the loss depends on; leaves no trace in generators and buffers.

        Returns:
            The loss and the gradients of the uncaptured way, and whether it draws random numbers.

        Raises:
            Whatever loss_fn raises.
        """
        named = {name: each for name, each in self._loss.named_parameters() if each.requires_grad}
        before = self._generators()
        with without_trace(self.model), torch.enable_grad(), self._context():
            loss, _ = parts(self._loss(batch))
            draws = not all(map(torch.equal, before, self._generators()))
            found = torch.autograd.grad(loss.reshape(()) * scale, list(named.values()), allow_unused=True)
        gradients = dict(zip(named, found, strict=True))
        self._trained = {name: named[name] for name, gradient in gradients.items() if gradient is not None}
        self._buffers = dict(self._loss.named_buffers())
        self._graphs.clear()
        return loss.detach(), [gradient for gradient in found if gradient is not None], draws

    def __call__(
        self, batch: Any, scale: Tensor, signature: Signature
    ) -> tuple[Gradients, Tensor, Mapping[str, Tensor]]:
        """Gradients of ``scale`` times the loss, the loss, and what is reported beside it; compiles a new signature."""
        graph = self._graphs.get(signature)
        if graph is None:
            graph = self._graphs[signature] = compiled(self._graph())
        with torch.no_grad():
            result: tuple[Gradients, Tensor, Mapping[str, Tensor]] = graph(self._trained, self._buffers, batch, scale)
            return result

    def _generators(self) -> list[Tensor]:
        states = [torch.get_rng_state()]
        of_device = devices.generator_state(self._device)
        return states if of_device is None else [*states, of_device]

    def _context(self) -> Any:
        return nullcontext() if self._dtype is None else torch.autocast(self._device.type, self._dtype)

    def _graph(self) -> Graph:
        loss, device_type, dtype = self._loss, self._device.type, self._dtype

        def graph(
            trained: Mapping[str, Tensor], buffers: Mapping[str, Tensor], batch: Any, scale: Tensor
        ) -> tuple[Gradients, Tensor, Mapping[str, Tensor]]:
            def scaled(trained: Any, buffers: Any, batch: Any) -> Any:
                # buffers are arguments: what a transform captures it may not write to
                state = {**trained, **buffers}
                if dtype is None:
                    result = functional_call(loss, state, (batch,))
                else:
                    with torch.autocast(device_type, dtype):
                        result = functional_call(loss, state, (batch,))
                value, extra = parts(result)
                value = value.reshape(())
                return value * scale, (value, extra or {})  # None is no auxiliary value

            gradients, (value, extra) = grad(scaled, has_aux=True)(trained, buffers, batch)
            return list(gradients.values()), value, extra

        return graph


class _Loss(nn.Module):
    """The loss as a module, which can be called with other parameters in the place of the model's."""

    def __init__(self, model: nn.Module, loss_fn: LossFn) -> None:
        super().__init__()
        self.model, self.loss_fn = model, loss_fn

    def forward(self, batch: Any) -> Any:
        return self.loss_fn(self.model, batch)


def compiled(function: Graph) -> Graph:
    """One graph, or an error: what would be compiled a second time changes from call to call."""
    # torch keeps graphs by code object, which all functions of one definition share
    own = FunctionType(function.__code__.replace(), function.__globals__, function.__name__, None, function.__closure__)
    result: Graph = torch.compile(own, fullgraph=True, dynamic=False, **_ONE_GRAPH)
    return result


def _one_graph() -> dict[str, Any]:
    """Options of ``torch.compile`` since torch 2.13; before it 8 graphs are the limit."""
    options = {"isolate_recompiles": True, "recompile_limit": 1}
    return options if options.keys() <= inspect.signature(torch.compile).parameters.keys() else {}


_ONE_GRAPH = _one_graph()


def signature_of(batch: Any, training: bool) -> Signature:
    """What a graph is compiled for."""
    if type(batch) in (tuple, list) and all(type(leaf) is Tensor for leaf in batch):  # to flatten it takes 20 us
        return (training, type(batch), *((leaf.shape, leaf.stride(), leaf.dtype) for leaf in batch))
    leaves, structure = tree_flatten(batch)
    tensors = ((leaf.shape, leaf.stride(), leaf.dtype) if isinstance(leaf, Tensor) else repr(leaf) for leaf in leaves)
    return (training, str(structure), *tensors)
