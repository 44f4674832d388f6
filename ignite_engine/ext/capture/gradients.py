"""Forward, loss and backward of a micro-batch as one graph."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only

from ignite_engine import rng
from ignite_engine.ext.capture.compiling import compiled, first_call, not_captured
from ignite_engine.update.losses import LossFn, parts
from ignite_engine.update.without_trace import without_trace

Gradients = list[Tensor]


class GradientGraph:
    """The graph for one signature of a batch: its structure, shapes and types.

    torch would compile the second shape for all later ones, so that the bits of a short last batch would depend on what
    came before it. The graph is compiled here, after the loss was computed once the plain way, which tells what
    gets a gradient.

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
        self._loss, self._device, self._dtype = _Loss(model, loss_fn), device, dtype
        self._buffers = dict(self._loss.named_buffers())
        named = {name: parameter for name, parameter in self._loss.named_parameters() if parameter.requires_grad}
        with rng.isolated(), without_trace(self._loss), torch.enable_grad():
            loss = self._loss_of(_copy(batch))
            found = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
            replaced = [name for name, buffer in self._loss.named_buffers() if self._buffers[name] is not buffer]
        if replaced:
            raise not_captured(f"{replaced[0]} is another tensor after a forward, to which a graph can only write")
        self._trained = {name: named[name] for name, gradient in zip(named, found) if gradient is not None}
        self.parameters = list(self._trained.values())
        """Those that get a gradient, in the order of the gradients."""
        self._shared: list[int] = []
        """Gradients in the memory of something else, such as of ``scale``: whoever writes to them gets a copy."""
        self._graph = compiled(self._function(), device.type)
        scale, example = torch.ones((), device=device), _copy(batch)
        with rng.isolated(), without_trace(self._loss), torch.no_grad():
            gradients, *_ = first_call(lambda: self(example, scale))
        self._shared = _sharing(gradients, tree_leaves((self._trained, self._buffers, example, scale)))

    def __call__(self, batch: Any, scale: Tensor) -> tuple[Gradients, Tensor, Mapping[str, Tensor]]:
        """Gradients of ``scale`` times the loss, the loss, and what is reported beside it."""
        gradients, loss, extra = self._graph(self._trained, self._buffers, batch, scale)
        for index in self._shared:
            gradients[index] = gradients[index].clone()
        return gradients, loss, extra

    def _loss_of(self, batch: Any) -> Tensor:
        with nullcontext() if self._dtype is None else torch.autocast(self._device.type, self._dtype):
            result = self._loss(batch)
        return parts(result)[0]

    def _function(self) -> Any:
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


def _copy(batch: Any) -> Any:
    """A batch to which the loss may write."""
    return tree_map_only(Tensor, torch.clone, batch)


def _sharing(gradients: Gradients, held: Sequence[Any]) -> list[int]:
    """Which gradients are in the memory of something that is held, of another one, or whose elements are in one place.

    To add to such a gradient, or to clip it, would change the other too.
    """
    taken = {value.untyped_storage().data_ptr() for value in held if isinstance(value, Tensor)}
    found = []
    for index, gradient in enumerate(gradients):
        storage = gradient.untyped_storage()
        if storage.data_ptr() in taken or storage.nbytes() < gradient.numel() * gradient.element_size():
            found.append(index)
        taken.add(storage.data_ptr())
    return found


def signature_of(batch: Any) -> tuple[Any, ...]:
    """What of a batch a graph is compiled for.

    Raises:
        ValueError: the batch has an object in which torch finds no tensors, such as a data class.
    """
    if type(batch) in (tuple, list) and all([type(leaf) is Tensor for leaf in batch]):  # to flatten it takes 20 us
        return (type(batch), *[(leaf.shape, leaf.stride(), leaf.dtype) for leaf in batch])
    leaves, structure = tree_flatten(batch)
    known = (bool, int, float, complex, str, bytes, torch.dtype, torch.device, type(None))
    signature: list[Any] = [str(structure)]
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            signature.append((leaf.shape, leaf.stride(), leaf.dtype))
        elif isinstance(leaf, known):
            signature.append(repr(leaf))
        else:
            kind = type(leaf).__name__
            raise not_captured(
                f"a batch has a {kind}, in which torch finds no tensors: a dict, list or named tuple is known"
            )
    return tuple(signature)
