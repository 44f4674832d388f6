"""Checks what a loss function returns, and averages it over a group."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import compress
from typing import Any

import torch
from torch import Tensor

from ignite_engine.errors import shapes_of

LossFn = Callable[[Any, Any], Tensor | tuple[Tensor, Mapping[str, Tensor]]]

RESERVED = ("loss", "grad_norm")
"""Names in ``state.output`` that are the engine's own."""


def whole(value: Tensor) -> Tensor:
    """``value``, or the plain tensor that a DTensor stands for, in its graph; a collective unless it is replicated."""
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def scalar(value: Tensor) -> Tensor:
    """A reported value of one element: detached, floating, shape ``()``, whole, and in memory of its own."""
    # only what an operation has made, other than a view, is known to share no memory with a parameter or buffer, nor to
    # be a part of a larger tensor, which it would keep alive until the next log point
    is_fresh = value.requires_grad and not value.is_leaf and not value._is_view()
    value = value.detach()
    if type(value) is not Tensor:
        value = whole(value).as_subclass(Tensor)
    if value.dim():
        value = value.reshape(())
    if not value.is_floating_point():
        return value.float()  # a count is averaged too
    return value if is_fresh else value.clone()


def parts(result: Any) -> tuple[Tensor, Mapping[str, Tensor]]:
    """The loss, and what is reported beside it, of what a loss function returned.

    Raises:
        ValueError: it cannot be trained on; the remedy.
    """
    loss, extra = result if type(result) is tuple and len(result) == 2 else (result, {})
    values = [loss, *extra.values()] if isinstance(extra, Mapping) else [None]
    if any(not isinstance(value, Tensor) or value.numel() != 1 for value in values):
        raise ValueError(
            f"loss_fn returned {shapes_of(result)}: return the mean loss over the micro-batch, a tensor of one element "
            "without item(); or a pair of it and what is only reported, (loss, {name: detached scalar}), such as "
            "torch.tensor(value). Add several losses up."
        )
    for name in RESERVED:
        if name in extra:
            raise ValueError(f"loss_fn returned {name!r}, which Update writes itself: choose another name.")
    return whole(loss).reshape(()), extra


def weighted(values: Sequence[Tensor], scales: Sequence[float]) -> Tensor:
    """The sum of ``values * scales``, shape ``()``; a value of scale zero is left out, as it may be NaN."""
    if 0.0 in scales:
        values, scales = [*compress(values, scales)] or [torch.zeros_like(values[0])], [*filter(None, scales)] or [1.0]
    if scales.count(scales[0]) < len(scales):
        return torch.stack([value * scale for value, scale in zip(values, scales, strict=True)]).sum()
    total = values[0] if len(values) == 1 else torch.stack([*values]).sum()
    return total if scales[0] == 1.0 else total * scales[0]


def names_of(extras: Sequence[Mapping[str, Tensor]], micro_batches: int) -> list[str]:
    """The names of the values beside the loss, sorted; none where none of the micro-batches has any.

    Raises:
        ValueError: they are not the same for each micro-batch.
    """
    names = [sorted(named) for named in extras]
    if extras and (len(extras) < micro_batches or any(others != names[0] for others in names)):
        raise ValueError(
            f"loss_fn must return the same names for each micro-batch of a group, got {names} for {micro_batches} of "
            "them: return a zero, or a NaN, where there is no value."
        )
    return names[0] if names else []
