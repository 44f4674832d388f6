"""What differs between two checkpoints, part by part and tensor by tensor."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

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
    """Tensors of another shape or type, and leaves that are no tensors: ``before -> after``."""
    only_first: list[str] = field(default_factory=list)
    only_second: list[str] = field(default_factory=list)

    @property
    def same(self) -> bool:
        """Nothing differs."""
        return not (self.values or self.kinds or self.only_first or self.only_second)

    def __str__(self) -> str:
        told = [f"{self.equal} equal"]
        if self.values:
            worst = max(self.values, key=lambda name: (self.values[name] != self.values[name], self.values[name]))
            others = shortened(name for name in self.values if name != worst)
            also = f", also {others}" if others else ""
            told.append(f"{len(self.values)} differ: {worst} by {self.values[worst]:.3g}{also}")
        if self.kinds:
            told.append(
                f"{len(self.kinds)} changed: {shortened(f'{name} {kind}' for name, kind in self.kinds.items())}"
            )
        for names, which in ((self.only_first, "first"), (self.only_second, "second")):
            told += [f"{len(names)} only in the {which}: {shortened(names)}"] if names else []
        return "; ".join(told)


def compare(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[PartDifference]:
    """Compare the parts of two checkpoints, in the order of their names; a part of one side alone has no ``equal``."""
    return [_compare_part(part, first.get(part), second.get(part)) for part in sorted({*first, *second})]


def _compare_part(part: str, first: Any, second: Any) -> PartDifference:
    found = PartDifference(part)
    before, after = dict(_leaves(first)), dict(_leaves(second))
    found.only_first = [name for name in before if name not in after]
    found.only_second = [name for name in after if name not in before]
    for name in (name for name in before if name in after):
        one, other = before[name], after[name]
        if isinstance(one, Tensor) and isinstance(other, Tensor):
            if (one.shape, one.dtype) != (other.shape, other.dtype):
                found.kinds[name] = f"{_kind(one)} -> {_kind(other)}"
            elif _same_bits(one, other):
                found.equal += 1
            else:
                found.values[name] = _largest_difference(one, other)
        elif _same_values(one, other):
            found.equal += 1
        else:
            found.kinds[name] = f"{_shown(one)} -> {_shown(other)}"
    return found


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    children: Iterator[tuple[Any, Any]] | None = None
    if isinstance(value, Mapping):
        children = iter(value.items())
    elif isinstance(value, list | tuple) and any(isinstance(each, Mapping | Tensor | list | tuple) for each in value):
        children = iter(enumerate(value))
    if children is None:
        if value is not None or path:
            yield path, value
        return
    for key, child in children:
        yield from _leaves(child, f"{path}.{key}" if path else str(key))


def _same_bits(first: Tensor, second: Tensor) -> bool:
    return torch.equal(_bytes(first), _bytes(second))


def _bytes(tensor: Tensor) -> Tensor:
    whole = tensor.detach() if tensor.layout == torch.strided else tensor.detach().to_dense()
    return whole.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


def _largest_difference(first: Tensor, second: Tensor) -> float:
    wide = torch.complex128 if first.is_complex() else torch.float64
    one, other = (each.detach().to_dense().to(wide) for each in (first, second))
    apart = (one - other).abs()
    apart[(one == other) | (one.isnan() & other.isnan())] = 0.0  # inf - inf, and NaNs at the same place
    return float(apart.max())


def _same_values(first: Any, second: Any) -> bool:
    return type(first) is type(second) and (first == second or (first != first and second != second))


def _kind(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def _shown(value: Any) -> str:
    text = _kind(value) if isinstance(value, Tensor) else repr(value)
    return text if len(text) <= 40 else text[:37] + "..."
