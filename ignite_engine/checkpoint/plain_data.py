"""What a checkpoint can hold: plain data, of which every tensor is found in one walk."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from ignite_engine.checkpoint.made_of_tensors import is_made_of_tensors, taken_apart
from ignite_engine.checkpoint.nested import MAX_DEPTH, Path, TooDeep, dotted
from ignite_engine.errors import CheckpointError

# What a pack (``pack.py``) gives back as it was.
_LEAVES = (
    type(None), bool, int, float, complex, str, bytes, bytearray,
    torch.Size, torch.dtype, torch.device, Tensor, torch.nn.Parameter,
)  # fmt: skip
_LEAF_TYPES = frozenset(_LEAVES)
_TENSORS = frozenset((Tensor, torch.nn.Parameter))
_OTHER_LEAVES = _LEAF_TYPES - _TENSORS
_MAPPINGS = frozenset((dict, OrderedDict, Counter))
_SEQUENCES = frozenset((list, tuple, set))


class TensorLeaf(NamedTuple):
    """A tensor in a state."""

    part: str
    path: Path
    """The keys and indices that lead to it within the part."""
    value: Tensor


def tensors_of(parts: Mapping[str, Any], other: Callable[[Any], bool] | None = None) -> list[TensorLeaf]:
    """All tensors in named parts, in order, if a checkpoint can hold the parts.

    Args:
        other: tensors for which it holds are found, too, whatever their type.

    Raises:
        CheckpointError: names the first value that is not plain data, by its path in the parts.
    """
    found: list[TensorLeaf] = []
    for part, state in parts.items():
        if not isinstance(part, str) or not part:
            raise CheckpointError(f"A part of a checkpoint is named by a non-empty string, got {part!r}.")
        if not part.isprintable():
            raise CheckpointError(f"A part of a checkpoint is named by printable text, got {part!r}.")
        try:
            _visit(part, (), state, other, found)
        except TooDeep as error:
            raise CheckpointError(f"The part {part!r} cannot be saved: {error}.") from None
    return found


def _visit(part: str, path: Path, value: Any, other: Callable[[Any], bool] | None, found: list[TensorLeaf]) -> None:
    kind = type(value)
    if kind in _MAPPINGS and (_LEAF_TYPES.issuperset(map(type, value)) or all(map(_is_key, value))):
        children = value.items()
    elif kind in _SEQUENCES:
        children = enumerate(value)
    else:
        if is_made_of_tensors(value):
            found.append(TensorLeaf(part, path, value))
            _visit(part, path, taken_apart(value), other, [])
            return
        if (is_other := other is not None and other(value)) or (_is_tensor(value) and not value.is_meta):
            found.append(TensorLeaf(part, path, value))
        if not is_other and (problem := _problem(value)):
            inside = "".join(f"[{key!r}]" for key in path)
            raise CheckpointError(f"{part}{inside} is {problem}")
        return
    if len(path) >= MAX_DEPTH:
        raise TooDeep(f"{dotted(path[:3])}... is nested more than {MAX_DEPTH} deep, or contains itself")
    for key, child in children:
        if (kind := type(child)) in _TENSORS and not child.is_meta:
            found.append(TensorLeaf(part, (*path, key), child))
        elif kind not in _OTHER_LEAVES:
            _visit(part, (*path, key), child, other, found)


def refuse_what_cannot_be_loaded(parts: Mapping[str, Any]) -> None:
    """Check that a checkpoint can hold these parts, before anything is written.

    Raises:
        CheckpointError: names the first value that is not plain data, by its path in the parts.
    """
    tensors_of(parts)


def _is_tensor(value: Any) -> bool:
    """A sharded one is none."""
    return isinstance(value, Tensor) and not hasattr(value, "device_mesh")


def _is_key(key: Any) -> bool:
    return type(key) in _LEAF_TYPES or (type(key) is tuple and all(map(_is_key, key)))


def _problem(value: Any) -> str | None:
    """The rest of a sentence about a value that a checkpoint cannot hold; None: it can."""
    kind = type(value)
    if is_lazy(value):
        return "a parameter of a lazy module, which has no values yet: call the model on a batch before training."
    if kind in _MAPPINGS:
        key = type(next(key for key in value if not _is_key(key)))
        what = f"a {kind.__qualname__} with a key of type {key.__module__}.{key.__qualname__}"
    elif kind not in _LEAF_TYPES and not _is_tensor(value) and not isinstance(value, Enum):
        what = f"a {kind.__module__}.{kind.__qualname__}"
    elif isinstance(value, Tensor) and value.is_meta:
        return "a tensor on the meta device, which has no values to save: give it some before training."
    else:
        return None
    return (
        f"{what}, which a checkpoint cannot hold: return tensors, numbers, strings, lists and dicts from state_dict() "
        "instead."
    )
