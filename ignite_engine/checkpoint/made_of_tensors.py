"""Tensor subclasses that are made of other tensors, such as torchao's: taken apart, and put together again."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor


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
