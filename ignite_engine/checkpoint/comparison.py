"""What differs between two checkpoints, part by part and tensor by tensor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ignite_engine.checkpoint.digests import tensor_bytes
from ignite_engine.checkpoint.nested import children, dotted, walk
from ignite_engine.checkpoint.shards import whole
from ignite_engine.errors import shortened


@dataclass
class PartDifference:
    """One part in two checkpoints; names are paths of its leaves, such as ``state.head.weight.exp_avg``."""

    part: str
    equal: int = 0
    """Leaves with the same bits."""
    values: dict[str, float] = field(default_factory=dict)
    """Tensors of one shape and type: the largest absolute difference, NaN where only one side has a NaN."""
    kinds: dict[str, str] = field(default_factory=dict)
    """Tensors of another shape or type, and leaves that are not tensors: ``before -> after``."""
    only_first: list[str] = field(default_factory=list)
    only_second: list[str] = field(default_factory=list)

    @property
    def same(self) -> bool:
        """Nothing differs."""
        return not (self.values or self.kinds or self.only_first or self.only_second)

    def __str__(self) -> str:
        words = [f"{self.equal} equal"]
        if self.values:
            worst = max(self.values, key=lambda name: (self.values[name] != self.values[name], self.values[name]))
            others = shortened(name for name in self.values if name != worst)
            also = f", also {others}" if others else ""
            words.append(f"{len(self.values)} differ: {worst} by {self.values[worst]:.3g}{also}")
        if self.kinds:
            words.append(
                f"{len(self.kinds)} changed: {shortened(f'{name} {kind}' for name, kind in self.kinds.items())}"
            )
        for names, which in ((self.only_first, "first"), (self.only_second, "second")):
            words += [f"{len(names)} only in the {which}: {shortened(names)}"] if names else []
        return "; ".join(words)


def compare(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[PartDifference]:
    """Compare the parts of two checkpoints, in the order of their names; one on one side only has no ``equal``."""
    return [_compare_part(part, first.get(part), second.get(part)) for part in sorted({*first, *second})]


def _compare_part(part: str, first: Any, second: Any) -> PartDifference:
    found = PartDifference(part)
    before, after = _leaves(first), _leaves(second)
    found.only_first = [name for name in before if name not in after]
    found.only_second = [name for name in after if name not in before]
    for name in (name for name in before if name in after):
        one, other = whole(before[name]), whole(after[name])
        if isinstance(one, Tensor) and isinstance(other, Tensor):
            if (one.shape, one.dtype) != (other.shape, other.dtype):
                found.kinds[name] = f"{_type_and_shape_text(one)} -> {_type_and_shape_text(other)}"
            elif _same_bits(one, other):
                found.equal += 1
            else:
                found.values[name] = _largest_difference(one, other)
        elif type(one) is type(other) and (one == other or (one != one and other != other)):  # both are NaN
            found.equal += 1
        else:
            found.kinds[name] = f"{_short_text(one)} -> {_short_text(other)}"
    return found


def _leaves(state: Any) -> dict[str, Any]:
    return {} if state is None else {dotted(path): value for path, value in walk(state, whole=_is_scalars)}


def _is_scalars(value: Any) -> bool:
    """A list of numbers or words is compared as one leaf."""
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


def _type_and_shape_text(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def _short_text(value: Any) -> str:
    text = _type_and_shape_text(value) if isinstance(value, Tensor) else repr(value)
    return text if len(text) <= 40 else text[:37] + "..."
