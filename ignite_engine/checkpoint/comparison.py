"""What differs between two checkpoints, part by part and tensor by tensor."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ignite_engine.checkpoint.digests import tensor_bytes
from ignite_engine.checkpoint.nested import children, dotted, walk
from ignite_engine.checkpoint.shards import whole
from ignite_engine.errors import shortened


def compare(first: Any, second: Any) -> tuple[bool, str]:
    """Whether a part is the same in two checkpoints, and a description of the differences.

    Args:
        first, second: states of the part; None: the checkpoint does not have it.

    Differences are named by path, such as ``state.head.weight.exp_avg``. For tensors of equal shape and type the
    largest absolute difference is given, NaN if only one of them has a NaN.
    """
    before, after = _leaves(first), _leaves(second)
    both = [name for name in before if name in after]
    apart: dict[str, float] = {}
    changed: list[str] = []
    for name in both:
        one, other = whole(before[name]), whole(after[name])
        are_tensors = isinstance(one, Tensor) and isinstance(other, Tensor)
        if are_tensors and (one.shape, one.dtype) == (other.shape, other.dtype):
            if not _same_bits(one, other):
                apart[name] = _largest_difference(one, other)
        elif are_tensors or type(one) is not type(other) or not (one == other or (one != one and other != other)):
            changed.append(f"{name} {_short_text(one)} -> {_short_text(other)}")
    words = [f"{len(both) - len(apart) - len(changed)} equal"]
    if apart:
        worst = max(apart, key=lambda name: (apart[name] != apart[name], apart[name]))
        others = shortened(name for name in apart if name != worst)
        words.append(f"{len(apart)} differ: {worst} by {apart[worst]:.3g}{f', also {others}' if others else ''}")
    lists = {
        "changed": changed,
        "only in the first": [name for name in before if name not in after],
        "only in the second": [name for name in after if name not in before],
    }
    words += [f"{len(names)} {what}: {shortened(names)}" for what, names in lists.items() if names]
    return len(words) == 1, "; ".join(words)


def _leaves(state: Any) -> dict[str, Any]:
    return {} if state is None else {dotted(path): value for path, value in walk(state, whole=_is_scalars)}


def _is_scalars(value: Any) -> bool:
    """Whether to compare a container as one leaf: a list of numbers or strings, or a set."""
    if isinstance(value, list | tuple):
        return not any(isinstance(item, Tensor) or children(item) is not None for item in value)
    return isinstance(value, set | frozenset)


def _same_bits(first: Tensor, second: Tensor) -> bool:
    dense = (tensor if tensor.layout == torch.strided else tensor.to_dense() for tensor in (first, second))
    return torch.equal(*(tensor_bytes(tensor) for tensor in dense))


def _largest_difference(first: Tensor, second: Tensor) -> float:
    wide = torch.complex128 if first.is_complex() else torch.float64
    one, other = (tensor.detach().to_dense().to(wide) for tensor in (first, second))
    apart = (one - other).abs()
    apart[(one == other) | (one.isnan() & other.isnan())] = 0.0  # inf - inf, and NaNs at the same place
    return float(apart.max())


def _short_text(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."
