"""Nested states: mappings, lists, tuples and sets around leaves, walked and rebuilt."""

from __future__ import annotations

import sys
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor

from ignite_engine.errors import CheckpointError


def is_made_of_tensors(value: Any) -> bool:
    """Whether this is a tensor subclass with ``__tensor_flatten__``; not a DTensor, which is saved in pieces."""
    kind = type(value)
    return kind is not Tensor and hasattr(kind, "__tensor_flatten__") and not hasattr(value, "device_mesh")


def taken_apart(value: Any) -> tuple[dict[str, Tensor], Any]:
    """The inner tensors of a tensor subclass by name, and the context that its class needs."""
    names, context = value.__tensor_flatten__()
    return {name: getattr(value, name) for name in names}, context


def put_together(kind: Any, tensors: Mapping[str, Any], context: Any, like: Any) -> Any:
    """The tensor subclass ``kind`` around these tensors, with the size and strides of ``like``."""
    return kind.__tensor_unflatten__(dict(tensors), context, like.shape, like.stride())


def rebuilt_of(value: Any, leaf: Callable[[Tensor], Tensor]) -> Any:
    """The same tensor subclass with ``leaf(tensor)`` in the place of each inner tensor."""
    tensors, context = taken_apart(value)
    return put_together(type(value), {name: leaf(part) for name, part in tensors.items()}, context, value)


def name_of_class(value: Any) -> str:
    return f"{type(value).__module__}:{type(value).__qualname__}"


def known_class(name: str, base: type = Tensor) -> Any:
    """The class of this name, if its module is imported already; else None: no module is imported for a file."""
    module, _, qualified = name.partition(":")
    found: Any = sys.modules.get(module)
    for part in qualified.split("."):
        found = getattr(found, part, None)
    is_kind = isinstance(found, type) and issubclass(found, base)
    return found if is_kind and (base is not Tensor or hasattr(found, "__tensor_unflatten__")) else None


MAX_DEPTH = 100
Path = tuple[Any, ...]
"""The keys and indices that lead to a leaf; empty if the state itself is a leaf."""

_MAPPINGS = frozenset((dict, OrderedDict, Counter))
_SEQUENCES = frozenset((list, tuple, set))
_LEAVES = frozenset((type(None), bool, int, float, str, bytes, Tensor))


class TooDeep(ValueError):
    """A state is nested more than ``MAX_DEPTH`` deep; one that contains itself always is."""


def walk(state: Any, whole: Callable[[Any], bool] | None = None) -> list[tuple[Path, Any]]:
    """Each leaf with its path, in order; an empty container has none.

    Args:
        state: everything but a mapping, list, tuple or set is a leaf.
        whole: containers for which it returns True count as leaves.

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
    """Append the leaves of a container to a list; a generator per container would be ten times slower."""
    if len(path) >= MAX_DEPTH:
        raise TooDeep(f"{dotted(path[:3])}... is nested more than {MAX_DEPTH} deep, or contains itself")
    for key, child in inside:
        if type(child) in _LEAVES or (within := children(child)) is None or (whole is not None and whole(child)):
            leaves.append(((*path, key), child))
        else:
            _collect(within, whole, (*path, key), leaves)


def children(value: Any) -> Iterable[tuple[Any, Any]] | None:
    """The items of a container, by key or index; None for a leaf."""
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
    """As :func:`rebuilt`, but calls ``leaf(path, value)`` with the path as in :func:`walk`.

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
        if kind is OrderedDict:  # the _metadata attribute of a module's state_dict
            vars(copy).update(vars(value))
        return copy
    return kind(_rebuilt(child, leaf, (*path, index)) for index, child in enumerate(value))


def dotted(path: Iterable[Any]) -> str:
    """A path as text, ``state.0.weight``."""
    return ".".join(map(str, path))


def refused(path: Path, what: str) -> CheckpointError:
    """The error for a value that cannot be saved; the path begins with the name of the part."""
    part, *inside = path
    return CheckpointError(f"{part}{''.join(f'[{key!r}]' for key in inside)} is {what}")
