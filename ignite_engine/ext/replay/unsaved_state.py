"""State that a run may depend on and no checkpoint holds: candidate causes of a difference after a resume."""

from __future__ import annotations

import inspect
import random
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from ignite_engine.engine.bus import events_with_handlers, handlers_of
from ignite_engine.states.generators import ModelGenerators
from ignite_engine.states.model_and_optimizer import unwrap

if TYPE_CHECKING:
    from ignite_engine.trainer import Trainer

_SCALARS = (bool, int, float, str, type(None))
_LARGEST_TENSOR = 1 << 18
_LONGEST_LIST = 1000
_LIBRARIES = {"torch", "torchdata", "numpy", "ignite", "ignite_engine", *sys.stdlib_module_names} - {"__main__"}


def unsaved_state(trainer: Trainer) -> dict[str, Any]:
    """Plain values that the user's objects hold and no checkpoint does, by the place where they are held.

    Looked at are attributes of the loss or update function, the dataset, handlers without a state of their own, and the
    model's modules (also their non-persistent buffers). Numbers, strings, small tensors, generators and small
    collections of them count; anything else, and what is inside libraries, is passed over.
    """
    found: dict[str, Any] = {}
    parts = [obj for obj in trainer.registry.objects.values() if isinstance(obj, ModelGenerators)]
    saved = {id(generator) for part in parts for generator in part.found().values()}
    for label, obj in _objects_of_user(trainer):
        if trainer.registry.holds(obj):
            continue
        for name, value in _attributes(obj):
            plain = None if id(value) in saved else _plain_copy(value)
            if plain is not None:
                found.setdefault(f"{label}.{name}", plain)
    return found


def _objects_of_user(trainer: Trainer) -> Iterator[tuple[str, Any]]:
    """The user's own objects, each with its name."""
    update = trainer.update
    for name in ("loss_fn", "weight_fn"):
        if (function := getattr(update, name, None)) is not None:
            yield name, getattr(function, "__self__", function)
    if _is_users(update):
        yield "update", update
    model = getattr(update, "model", None)
    if isinstance(model, nn.Module):
        for name, module in unwrap(model).named_modules():
            yield f"model{'.' * bool(name)}{name}", module
    source = trainer.progress.source
    dataset = getattr(source.data if source is not None else None, "dataset", None)
    dataset = getattr(dataset, "dataset", dataset)  # loader() wraps the user's
    if dataset is not None:
        yield type(dataset).__name__, dataset
    for event in events_with_handlers(trainer):
        for attached, _, _ in handlers_of(trainer, event):
            handler = getattr(attached, "handler", attached)
            owner = getattr(handler, "__self__", handler)
            if _is_users(owner):
                yield getattr(owner, "__qualname__", type(owner).__name__), owner


def _attributes(obj: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(obj, nn.Module):
        yield from ((name, obj._buffers[name]) for name in obj._non_persistent_buffers_set)
        own = vars(nn.Module()).keys()
        yield from ((name, value) for name, value in vars(obj).items() if name not in own)
    elif not inspect.isroutine(obj) and hasattr(obj, "__dict__"):
        yield from vars(obj).items()


def _is_users(obj: Any) -> bool:
    """Whether it was not defined in a library."""
    module = getattr(obj, "__module__", None) or type(obj).__module__
    return str(module).partition(".")[0] not in _LIBRARIES


def _plain_copy(value: Any, depth: int = 0) -> Any:
    """A copy made of scalars, tensors and containers, or None for anything else (and for None)."""
    if isinstance(value, _SCALARS):
        return value
    if isinstance(value, Tensor | np.ndarray):
        size = value.numel() if isinstance(value, Tensor) else value.size
        grows = isinstance(value, Tensor) and value.requires_grad
        return value if size <= _LARGEST_TENSOR and not grows else None
    if isinstance(value, torch.Generator):
        return value.get_state()
    if isinstance(value, random.Random):
        return [repr(value.getstate())]
    if isinstance(value, np.random.Generator):
        return [repr(value.bit_generator.state)]
    if isinstance(value, np.random.RandomState):
        return [repr(value.get_state(legacy=False))]
    if type(value).__module__ == "itertools" and type(value).__name__ == "count":
        return repr(value)
    if depth < 3 and isinstance(value, Mapping) and len(value) <= _LONGEST_LIST:
        return {str(key): element for key, element in _items(value.items(), depth)}
    if depth < 3 and isinstance(value, list | tuple | set | frozenset | deque) and len(value) <= _LONGEST_LIST:
        ordered = sorted(value, key=repr) if isinstance(value, set | frozenset) else value
        return [element for _, element in _items(((0, element) for element in ordered), depth)]
    return None


def _items(items: Iterable[tuple[Any, Any]], depth: int) -> Iterator[tuple[Any, Any]]:
    for key, value in items:
        plain = _plain_copy(value, depth + 1)
        if plain is not None:
            yield key, plain
