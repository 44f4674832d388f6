"""Forward, loss and backward of a micro-batch as one graph."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad
from torch.utils._pytree import tree_flatten, tree_leaves

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
        with self._without_trace(batch), torch.enable_grad(), self._context():
            loss, _ = parts(self._loss(batch))
            self.draws = not all(map(torch.equal, before, self._generators()))
            """The loss draws random numbers."""
            gradients = torch.autograd.grad(loss.reshape(()), list(named.values()), allow_unused=True)
            self._replaces_buffers = any(
                self.buffers.get(name) is not buffer for name, buffer in self._loss.named_buffers()
            )
            self._expected_buffers = self._values_of_buffers()
        self._expected = [loss.detach(), *(gradient for gradient in gradients if gradient is not None)]
        found = zip(named.items(), gradients, strict=True)
        self._trained = {name: parameter for (name, parameter), gradient in found if gradient is not None}
        self.parameters = list(self._trained.values())
        """Those that get a gradient, in the order of the gradients."""
        self._shared: list[int] = []
        """Gradients in the memory of something else, such as of ``scale``: whoever writes to them gets a copy."""
        self._graph = compiled(self._function(), device.type)

    def __call__(self, batch: Any, scale: Tensor) -> tuple[Gradients, Tensor, Mapping[str, Tensor]]:
        """Gradients of ``scale`` times the loss, the loss, and what is reported beside it; under ``torch.no_grad()``.

        The first call compiles.
        """
        gradients, loss, extra = self._graph(self._trained, self.buffers, batch, scale)
        for index in self._shared:
            gradients[index] = gradients[index].clone()
        return gradients, loss, extra

    def agrees(self, batch: Any, tolerance: float) -> bool:
        """Whether the loss, each gradient and the buffers are the plain way's; two calls, which leave no trace.

        Args:
            tolerance: of the loss and of a buffer relative to it, and of each gradient relative to the joint norm of
                all of them.

        Raises:
            FailOnRecompileLimitHit: the second call would be another graph, as every later one would.
        """
        scale, held = torch.ones((), device=self._device), list[Tensor]()
        for _ in range(2):
            with self._without_trace(batch), torch.no_grad():
                gradients, loss, _ = self(batch, scale)
                held += [*tree_leaves((self._trained, self.buffers, batch, scale)), *gradients]
                buffers = self._values_of_buffers()
        self._shared = _sharing(gradients, held[: -len(gradients)])
        (expected_loss, *expected), self._expected = self._expected, []
        expected_buffers, self._expected_buffers = self._expected_buffers, {}
        if self._replaces_buffers:  # which a graph would not
            return False
        if self.draws:
            return True
        # of all gradients together: a bias before a BatchNorm has one of nothing but rounding
        largest = tolerance * _joint_norm(expected) + 1e-6
        differences = [_joint_norm([one - other]) for one, other in zip(expected, gradients, strict=True)]
        close = [difference <= largest for difference in differences]
        close += [_is_close(one, buffers[name], tolerance) for name, one in expected_buffers.items()]
        return all(close) and float((loss - expected_loss).abs()) <= tolerance * float(expected_loss.abs()) + 1e-6

    @contextmanager
    def _without_trace(self, batch: Any) -> Iterator[None]:
        """A context after which generators, buffers, attributes and the batch are what they were."""
        error = None
        with _restoring_tensors(batch), without_trace(self._loss), _restoring_attributes(self._loss):
            try:
                yield
            except BaseException as raised:  # buffers are put back only where the body ends
                error = raised
        if error is not None:
            raise error

    def _values_of_buffers(self) -> dict[str, Tensor]:
        return {name: buffer.detach().clone() for name, buffer in self._loss.named_buffers()}

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


def _is_close(one: Tensor, other: Tensor, tolerance: float) -> bool:
    if torch.equal(one, other):
        return True
    if one.shape != other.shape or not one.is_floating_point():
        return False
    size = float(one.nan_to_num(0.0, 0.0, 0.0).abs().max())
    return torch.allclose(one, other, rtol=0.0, atol=tolerance * size + 1e-6, equal_nan=True)


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


@contextmanager
def _restoring_tensors(batch: Any) -> Iterator[None]:
    """Put back the tensors of a batch that the loss writes to."""
    noted = [(tensor, tensor.clone()) for tensor in tree_leaves(batch) if isinstance(tensor, Tensor)]
    try:
        yield
    finally:
        for tensor, value in noted:
            if not torch.allclose(tensor, value, rtol=0.0, atol=0.0, equal_nan=True):
                with torch.no_grad():
                    tensor.copy_(value)


@contextmanager
def _restoring_attributes(module: nn.Module) -> Iterator[None]:
    """Put back numbers and words that modules note of their calls, such as how many there were."""
    noted = [
        (child, {name: value for name, value in vars(child).items() if isinstance(value, int | float | str | None)})
        for child in module.modules()
    ]
    try:
        yield
    finally:
        for child, values in noted:
            vars(child).update(values)


def signature_of(batch: Any, training: bool) -> Signature:
    """What a graph is compiled for."""
    if type(batch) in (tuple, list) and all([type(leaf) is Tensor for leaf in batch]):  # to flatten it takes 20 us
        return (training, type(batch), *[(leaf.shape, leaf.stride(), leaf.dtype) for leaf in batch])
    leaves, structure = tree_flatten(batch)
    tensors = ((leaf.shape, leaf.stride(), leaf.dtype) if isinstance(leaf, Tensor) else repr(leaf) for leaf in leaves)
    return (training, str(structure), *tensors)


def unknown_part(batch: Any) -> str | None:
    """The type of an object in a batch of which the signature is another in each batch, such as a data class."""
    known = (Tensor, bool, int, float, complex, str, bytes, torch.dtype, torch.device, type(None))
    return next((type(leaf).__name__ for leaf in tree_leaves(batch) if not isinstance(leaf, known)), None)
