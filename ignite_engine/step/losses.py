"""What a loss function returns: scalars averaged over a group, and the error where it returns something else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

RESERVED = ("loss", "grad_norm")
"""Names in ``state.output`` that are the engine's own."""


def whole(value: Tensor) -> Tensor:
    """``value``, or the plain tensor that a DTensor stands for, in its graph; a collective unless it is replicated."""
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def scalar(value: Tensor) -> Tensor:
    """A reported value of one element: detached, floating, shape ``()``, whole, and not a view of a larger tensor."""
    value = whole(value.detach())
    if value.dim():
        value = value.reshape(())
    if not value.is_floating_point():
        value = value.float()  # a count is averaged too
    # a view would keep the whole tensor alive until the next log point
    return value if value.untyped_storage().nbytes() == value.itemsize else value.clone()


def unusable_result(result: Any) -> str | None:
    """Why what loss_fn returned cannot be trained on, as a sentence with the remedy; None: it can."""
    if isinstance(result, tuple) and len(result) != 2:
        return f"loss_fn returned a tuple of {len(result)}: return the loss, or (loss, {{name: detached scalar}})."
    loss, extra = result if isinstance(result, tuple) else (result, {})
    if not isinstance(loss, Tensor):
        return (
            f"loss_fn returned {_described(loss)}: return the mean loss over the micro-batch as a tensor of one "
            "element, without item() or float(), or (loss, {name: detached scalar})."
        )
    if loss.numel() != 1:
        return (
            f"loss_fn returned a loss of shape {tuple(loss.shape)}: return a tensor of one element, such as its mean()."
        )
    if not loss.requires_grad:
        return (
            "loss_fn returned a loss that depends on no parameter with requires_grad: compute it from the model's "
            "output, without detach() or torch.no_grad(), and train at least one parameter."
        )
    if not isinstance(extra, Mapping):
        return f"loss_fn returned (loss, {type(extra).__name__}): return (loss, {{name: detached scalar}})."
    for name, value in extra.items():
        if not isinstance(value, Tensor):
            return f"loss_fn returned {name!r} as {_described(value)}: return a tensor, such as torch.tensor(value)."
        if value.numel() != 1:
            return f"loss_fn returned {name!r} of shape {tuple(value.shape)}: return one element, such as its mean()."
    return None


def weighted(values: list[Tensor], scales: list[float]) -> Tensor:
    """The sum of ``values * scales``, shape ``()``; a value of scale zero is left out, as it may be NaN."""
    if 0.0 in scales:
        counted = [(value, scale) for value, scale in zip(values, scales, strict=True) if scale]
        if not counted:
            return torch.zeros_like(values[0])
        values, scales = [value for value, _ in counted], [scale for _, scale in counted]
    if len(values) == 1:
        return values[0] if scales[0] == 1.0 else values[0] * scales[0]
    if scales.count(scales[0]) == len(scales):
        summed = torch.stack(values)
        return summed.mean() if scales[0] * len(scales) == 1.0 else summed.sum() * scales[0]
    return torch.stack([value * scale for value, scale in zip(values, scales, strict=True)]).sum()


def weighted_by_name(extras: list[Mapping[str, Tensor]], scales: list[float]) -> dict[str, Tensor]:
    """:func:`weighted` for each name.

    Raises:
        ValueError: the names are not the same for each micro-batch, or one of them is taken.
    """
    names_of(extras, len(scales))
    return {name: weighted([named[name] for named in extras], scales) for name in extras[0]}


def names_of(extras: Sequence[Mapping[str, Tensor]], micro_batches: int) -> list[str]:
    """The names of the values beside the loss, sorted; none where none of the micro-batches has any.

    Raises:
        ValueError: they are not the same for each micro-batch, or one of them is taken.
    """
    if not extras:
        return []
    names = [sorted(named) for named in extras]
    if len(extras) < micro_batches or any(each != names[0] for each in names):
        raise ValueError(
            f"loss_fn must return the same names for each micro-batch of a group, got {names} for {micro_batches} of "
            "them: return a zero, or a NaN, where there is no value."
        )
    if taken := [name for name in RESERVED if name in extras[0]]:
        raise ValueError(
            f"loss_fn returned {taken[0]!r} beside the loss, a name that Update writes: choose another name."
        )
    return names[0]


def _described(value: Any) -> str:
    if isinstance(value, int | float):
        return f"the number {value!r}"
    return "None" if value is None else f"a {type(value).__name__}"
