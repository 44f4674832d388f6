"""What a loss function returns: scalars averaged over a group, and the error where it returns something else."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor


class NamedLosses(Protocol):
    """A named tuple."""

    def _asdict(self) -> dict[str, Any]: ...


Loss = Tensor | Mapping[str, Tensor] | NamedLosses
LossFn = Callable[[Any, Any], Loss | tuple[Loss, Mapping[str, Tensor]]]

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
        value = whole(value)
    if value.dim():
        value = value.reshape(())
    if not value.is_floating_point():
        return value.float()  # a count is averaged too
    return value if is_fresh else value.clone()


def parts(result: Any) -> tuple[Tensor, Mapping[str, Tensor] | None]:
    """The loss, and what is reported beside it, of what a loss function returned.

    Losses by name, in a mapping or a named tuple, are summed in their order and reported as ``loss/<name>``.

    Raises:
        ValueError: it cannot be trained on; the remedy.
    """
    loss, extra = result, None
    if isinstance(result, tuple) and not hasattr(result, "_fields"):
        if len(result) != 2:
            raise ValueError(
                f"loss_fn returned a tuple of {len(result)}: return the loss, (loss, {{name: detached scalar}}), or "
                "losses that are summed by name, {name: loss}."
            )
        loss, extra = result
        if not isinstance(extra, Mapping):
            raise ValueError(
                f"loss_fn returned (loss, {type(extra).__name__}): return (loss, {{name: detached scalar}})."
            )
        for name, value in extra.items():
            _check_one_element(repr(name), value)
    named = loss._asdict() if isinstance(loss, tuple) and hasattr(loss, "_asdict") else loss
    if not isinstance(named, Mapping):
        _check_one_element("the mean loss", loss)
        return whole(loss).reshape(()), extra
    if "loss" in named or not named:
        has = "'loss' among them" if named else "none"
        raise ValueError(
            f"loss_fn returned losses by name, which are summed, with {has}: return the loss, or "
            "(loss, {name: detached scalar}), where the other values are no losses."
        )
    beside = extra or {}
    for name, value in named.items():
        _check_one_element(f"the loss {name!r}", value)
        if f"loss/{name}" in beside:
            raise ValueError(
                f"loss_fn returned 'loss/{name}' beside the loss {name!r}, which has that name: choose another."
            )
    by_name = {f"loss/{name}": whole(value).reshape(()) for name, value in named.items()}
    total, *others = by_name.values()
    for other in others:
        total = total + other
    return total, {**by_name, **beside}


def _check_one_element(what: str, value: Any) -> None:
    if not isinstance(value, Tensor):
        given = f"the number {value!r}" if isinstance(value, int | float) else f"a {type(value).__name__}"
        raise ValueError(
            f"loss_fn returned {what} as {given if value is not None else None}: return a tensor of one element, such "
            "as torch.tensor(value), and the mean loss over the micro-batch without item() or float()."
        )
    if value.numel() != 1:
        raise ValueError(
            f"loss_fn returned {what} of shape {tuple(value.shape)}: return one element, such as its mean()."
        )


def weighted(values: Sequence[Tensor], scales: Sequence[float]) -> Tensor:
    """The sum of ``values * scales``, shape ``()``; a value of scale zero is left out, as it may be NaN."""
    if 0.0 in scales:
        counted = [(value, scale) for value, scale in zip(values, scales, strict=True) if scale]
        if not counted:
            return torch.zeros_like(values[0])
        values, scales = [value for value, _ in counted], [scale for _, scale in counted]
    if len(values) == 1:
        return values[0] if scales[0] == 1.0 else values[0] * scales[0]
    if scales.count(scales[0]) == len(scales):
        summed = torch.stack(list(values))
        return summed.mean() if scales[0] * len(scales) == 1.0 else summed.sum() * scales[0]
    return torch.stack([value * scale for value, scale in zip(values, scales, strict=True)]).sum()


def weighted_by_name(extras: Sequence[Mapping[str, Tensor]], scales: Sequence[float]) -> dict[str, Tensor]:
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
    if len(extras) < micro_batches or any(named != names[0] for named in names):
        raise ValueError(
            f"loss_fn must return the same names for each micro-batch of a group, got {names} for {micro_batches} of "
            "them: return a zero, or a NaN, where there is no value."
        )
    if taken := [name for name in RESERVED if name in extras[0]]:
        raise ValueError(
            f"loss_fn returned {taken[0]!r} beside the loss, a name that Update writes: choose another name."
        )
    return names[0]
