"""Forward, loss and backward of a micro-batch as one graph."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad
from torch.utils._pytree import tree_flatten

from ignite_engine import devices
from ignite_engine.capture.compiling import compiled
from ignite_engine.step.losses import LossFn, parts
from ignite_engine.step.without_trace import without_trace

Gradients = list[Tensor]
Signature = tuple[Any, ...]


class GradientGraph:
    """The graph for one signature of a batch: its structure, shapes and types.

    torch would compile the second shape for all later ones, so that the bits of a short last batch would depend on what
    came before it.

    Args:
        model: what is trained, not wrapped.
        dtype: of autocast; None: none.
        batch: an example, on the device.

    Raises:
        Whatever loss_fn raises.
    """

    def __init__(
        self, model: nn.Module, loss_fn: LossFn, device: torch.device, dtype: torch.dtype | None, batch: Any
    ) -> None:
        self._loss, self._device, self._dtype = _Loss(model, loss_fn), device, dtype
        self.buffers = dict(self._loss.named_buffers())
        named = {name: parameter for name, parameter in self._loss.named_parameters() if parameter.requires_grad}
        before = self._generators()
        with without_trace(model), _same_attributes(self._loss), torch.enable_grad(), self._context():
            loss, _ = parts(self._loss(batch))
            self.draws = not all(map(torch.equal, before, self._generators()))
            """The loss draws random numbers."""
            gradients = torch.autograd.grad(loss.reshape(()), list(named.values()), allow_unused=True)
        self._expected = [loss.detach(), *(gradient for gradient in gradients if gradient is not None)]
        found = zip(named.items(), gradients, strict=True)
        self._trained = {name: parameter for (name, parameter), gradient in found if gradient is not None}
        self.parameters = list(self._trained.values())
        """Those that get a gradient, in the order of the gradients."""
        self._graph = compiled(self._function(), device.type)

    def __call__(self, batch: Any, scale: Tensor) -> tuple[Gradients, Tensor, Mapping[str, Tensor]]:
        """Gradients of ``scale`` times the loss, the loss, and what is reported beside it; under ``torch.no_grad()``.

        The first call compiles.
        """
        result: tuple[Gradients, Tensor, Mapping[str, Tensor]] = self._graph(self._trained, self.buffers, batch, scale)
        return result

    def agrees(self, batch: Any, tolerance: float) -> bool:
        """Whether the loss and each gradient of the example are the plain way's; two calls, which leave no trace.

        Args:
            tolerance: of the loss relative to it, and of each gradient relative to the joint norm of all of them.

        Raises:
            FailOnRecompileLimitHit: the second call would be another graph, as every later one would.
        """
        scale, error = torch.ones((), device=self._device), None
        with without_trace(self._loss.model), _same_attributes(self._loss), torch.no_grad():
            try:
                for _ in range(2):
                    gradients, loss, _ = self(batch, scale)
            except BaseException as raised:  # buffers are put back only where the body ends
                error = raised
        if error is not None:
            raise error
        (expected_loss, *expected), self._expected = self._expected, []
        if self.draws:
            return True
        # of all gradients together: a bias before a BatchNorm has one of nothing but rounding
        largest = tolerance * _joint_norm(expected) + 1e-6
        differences = [_joint_norm([one - other]) for one, other in zip(expected, gradients, strict=True)]
        close = [difference <= largest for difference in differences]
        return all(close) and float((loss - expected_loss).abs()) <= tolerance * float(expected_loss.abs()) + 1e-6

    def _generators(self) -> list[Tensor]:
        states = [torch.get_rng_state()]
        of_device = devices.generator_state(self._device)
        return states if of_device is None else [*states, of_device]

    def _context(self) -> Any:
        return nullcontext() if self._dtype is None else torch.autocast(self._device.type, self._dtype)

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


def _joint_norm(tensors: Sequence[Tensor]) -> float:
    return float(torch.stack([torch.linalg.vector_norm(tensor.float()) for tensor in tensors]).norm())


@contextmanager
def _same_attributes(module: nn.Module) -> Iterator[None]:
    """Put back numbers and words that modules note of their calls, such as how many there were."""
    noted = [
        (each, {name: value for name, value in vars(each).items() if isinstance(value, int | float | str | None)})
        for each in module.modules()
    ]
    try:
        yield
    finally:
        for each, values in noted:
            vars(each).update(values)


def signature_of(batch: Any, training: bool) -> Signature:
    """What a graph is compiled for."""
    if type(batch) in (tuple, list) and all([type(leaf) is Tensor for leaf in batch]):  # to flatten it takes 20 us
        return (training, type(batch), *[(leaf.shape, leaf.stride(), leaf.dtype) for leaf in batch])
    leaves, structure = tree_flatten(batch)
    tensors = ((leaf.shape, leaf.stride(), leaf.dtype) if isinstance(leaf, Tensor) else repr(leaf) for leaf in leaves)
    return (training, str(structure), *tensors)
