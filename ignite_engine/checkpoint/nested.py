"""Nested states: mappings, lists, tuples and sets around leaves, walked and rebuilt."""

from __future__ import annotations

import sys
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from ignite_engine.errors import CheckpointError


def is_made_of_tensors(value: Any) -> bool:
    """Whether it is of a subclass that can be taken apart; a sharded tensor is saved as its pieces instead."""
    kind = type(value)
    return kind is not Tensor and hasattr(kind, "__tensor_flatten__") and not hasattr(value, "device_mesh")


def taken_apart(value: Any) -> tuple[dict[str, Tensor], Any]:
    """The tensors that it is made of by name, and what else its class needs."""
    names, context = value.__tensor_flatten__()
    return {name: getattr(value, name) for name in names}, context


def put_together(kind: Any, tensors: Mapping[str, Any], context: Any, like: Any) -> Any:
    """Of the size and the strides of ``like``."""
    return kind.__tensor_unflatten__(dict(tensors), context, like.shape, like.stride())


def rebuilt_of(value: Any, leaf: Callable[[Tensor], Tensor]) -> Any:
    """The same with ``leaf`` of each tensor that it is made of."""
    tensors, context = taken_apart(value)
    return put_together(type(value), {name: leaf(part) for name, part in tensors.items()}, context, value)


def name_of_class(value: Any) -> str:
    return f"{type(value).__module__}:{type(value).__qualname__}"


def known_class(name: str, base: type = Tensor) -> Any:
    """The class of this name, if a module that is imported already has it; else None: no file has a module imported."""
    module, _, qualified = name.partition(":")
    found: Any = sys.modules.get(module)
    for part in qualified.split("."):
        found = getattr(found, part, None)
    is_kind = isinstance(found, type) and issubclass(found, base)
    return found if is_kind and (base is not Tensor or hasattr(found, "__tensor_unflatten__")) else None


MAX_DEPTH = 100
Path = tuple[Any, ...]
"""The keys and indices that lead to a leaf; empty for a state that is one leaf."""

_MAPPINGS = frozenset((dict, OrderedDict, Counter))
_SEQUENCES = frozenset((list, tuple, set))
_LEAVES = frozenset((type(None), bool, int, float, str, bytes, Tensor))


class TooDeep(ValueError):
    """A state is nested more than ``MAX_DEPTH`` deep; one that contains itself always is."""


def walk(state: Any, whole: Callable[[Any], bool] | None = None) -> list[tuple[Path, Any]]:
    """Each leaf with its path, in order; an empty container has none.

    Args:
        state: whatever is not a mapping, list, tuple or set is a leaf.
        whole: containers for which it holds count as leaves.

    Raises:
        TooDeep: also of a state that contains itself.
    """
    inside = children(state)
    if inside is None or (whole is not None and whole(state)):
        return [((), state)]
    leaves: list[tuple[Path, Any]] = []
    _collect(inside, whole, (), leaves)
    return leaves


def _collect(
    inside: Iterable[tuple[Any, Any]],
    whole: Callable[[Any], bool] | None,
    path: Path,
    leaves: list[tuple[Path, Any]],
) -> None:
    """Append the leaves of a container to a list: a generator for each container would cost ten times as much."""
    if len(path) >= MAX_DEPTH:
        raise TooDeep(f"{dotted(path[:3])}... is nested more than {MAX_DEPTH} deep, or contains itself")
    for key, child in inside:
        if type(child) in _LEAVES or (within := children(child)) is None or (whole is not None and whole(child)):
            leaves.append(((*path, key), child))
        else:
            _collect(within, whole, (*path, key), leaves)


def children(value: Any) -> Iterable[tuple[Any, Any]] | None:
    """What is directly inside a container, by key or index; None for a leaf."""
    if isinstance(value, Mapping):
        return value.items()
    return enumerate(value) if isinstance(value, list | tuple | set | frozenset) else None


def rebuilt(state: Any, leaf: Callable[[Any], Any]) -> Any:
    """The same structure with ``leaf(value)`` in the place of each leaf.

    Only the built-in containers are rebuilt (``dict``, ``OrderedDict``, ``Counter``, ``list``, ``tuple``, ``set``);
    a value of any other type, their subclasses included, is a leaf.

    Raises:
        TooDeep: also of a state that contains itself.
    """
    return rebuilt_with_paths(state, lambda path, value: leaf(value))


def rebuilt_with_paths(state: Any, leaf: Callable[[Path, Any], Any]) -> Any:
    """As :func:`rebuilt`, with ``leaf(path, value)``; a path is that of :func:`walk`.

    Raises:
        TooDeep: also of a state that contains itself.
    """
    return _rebuilt(state, leaf, ())


def _rebuilt(value: Any, leaf: Callable[[Path, Any], Any], path: Path) -> Any:
    kind = type(value)
    if kind not in _MAPPINGS and kind not in _SEQUENCES:
        return leaf(path, value)
    if len(path) >= MAX_DEPTH:
        raise TooDeep(f"a state is nested more than {MAX_DEPTH} deep, or contains itself")
    if kind in _MAPPINGS:
        copy = kind({key: _rebuilt(child, leaf, (*path, key)) for key, child in value.items()})
        if kind is OrderedDict:  # a module's state_dict keeps its versions in an attribute
            vars(copy).update(vars(value))
        return copy
    return kind(_rebuilt(child, leaf, (*path, index)) for index, child in enumerate(value))


def replaced(parts: Mapping[str, Any], leaves: Mapping[tuple[str, Path], Any]) -> dict[str, Any]:
    """Named states with other leaves, by name and path; a state without any is the same object."""
    of_parts: dict[str, dict[Path, Any]] = {}
    for (part, path), value in leaves.items():
        of_parts.setdefault(part, {})[path] = value
    found = dict(parts)
    for part in of_parts.keys() & found.keys():
        values = of_parts[part]
        found[part] = rebuilt_with_paths(parts[part], lambda path, value: values.get(path, value))  # noqa: B023
    return found


def dotted(path: Iterable[Any]) -> str:
    """A path as text, ``state.0.weight``."""
    return ".".join(map(str, path))


# What a pack (``pack.py``) gives back as it was.
_LEAF_TYPES = frozenset((
    type(None), bool, int, float, complex, str, bytes, bytearray,
    torch.Size, torch.dtype, torch.device, Tensor, torch.nn.Parameter,
))  # fmt: skip
_TENSORS = frozenset((Tensor, torch.nn.Parameter))
_OTHER_LEAVES = _LEAF_TYPES - _TENSORS


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
