"""What a run may depend on and no checkpoint holds: a guess at its causes, for whoever looks for a difference."""

from __future__ import annotations

import inspect
import random
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from ignite_engine.states.model_and_optimizer import unwrap

if TYPE_CHECKING:
    from ignite_engine.trainer import Trainer

_LIBRARIES = frozenset({"ignite_engine", "ignite", "torch", "torchdata", "numpy", "builtins"})
_SCALARS = (bool, int, float, str, type(None))
_LARGEST_TENSOR = 1 << 18
_LONGEST_LIST = 1000
_NOTHING = ModuleType("nothing")


def unsaved_state(trainer: Trainer) -> dict[str, Any]:
    """Plain values that the user's code may change while it trains, by the place where they are held.

    Looked at are the loss or update function, its module's globals, the dataset, handlers without a state of their
    own, and in the model's modules non-persistent buffers and attributes. Numbers, strings, small tensors, generators
    and small collections of them count; anything else, and what is inside libraries, is passed over.
    """
    found: dict[str, Any] = {}
    for label, obj in _places(trainer):
        if trainer.registry.holds(obj):
            continue
        for name, value in _held_by(obj):
            plain = _plain(value)
            if plain is not None:
                found.setdefault(f"{label}{name}", plain)
        for name, value in _globals_of(obj):
            plain = _plain(value)
            if plain is not None:
                found.setdefault(name, plain)
    return found


def _places(trainer: Trainer) -> Iterator[tuple[str, Any]]:
    """The user's own objects and functions, each with what a person calls it."""
    update = trainer.update
    for name in ("loss_fn", "weight_fn"):
        if (function := getattr(update, name, None)) is not None:
            yield f"{name}: ", function
    if _is_users(update):
        yield "update: ", update
    model = getattr(update, "model", None)
    if isinstance(model, nn.Module):
        for name, module in unwrap(model).named_modules():
            yield f"model{'.' * bool(name)}{name}.", module
    source = trainer.position.source
    dataset = getattr(source.data if source is not None else None, "dataset", None)
    dataset = getattr(dataset, "dataset", dataset)  # loader() puts one around the user's
    if dataset is not None:
        yield f"{type(dataset).__name__}.", dataset
    for event in trainer.listened_events():
        for entry in trainer.plan(event).entries:
            owner = getattr(entry.handler, "__self__", entry.handler)
            if _is_users(owner):
                name = getattr(owner, "__qualname__", type(owner).__name__)
                yield (f"{name}: " if inspect.isfunction(owner) else f"{name}."), owner


def _held_by(obj: Any) -> Iterator[tuple[str, Any]]:
    """Names and values: an object's attributes, a function's closure."""
    if isinstance(obj, nn.Module):
        buffers = ((name, obj._buffers[name]) for name in obj._non_persistent_buffers_set)
        yield from buffers
        hidden = vars(nn.Module()).keys()
        yield from ((name, value) for name, value in vars(obj).items() if name not in hidden)
    elif not inspect.isroutine(obj) and hasattr(obj, "__dict__"):
        yield from vars(obj).items()
    function = _function_of(obj)
    if function is not None:
        cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        yield from ((name, cell.cell_contents) for name, cell in cells if _is_filled(cell))


def _globals_of(obj: Any) -> Iterator[tuple[str, Any]]:
    """The globals of the module in which a user's function, or the class of an object, was written."""
    function = _function_of(obj)
    module = function.__module__ if function is not None else type(obj).__module__
    if function is not None or _is_users(obj):
        for name, value in vars(sys.modules.get(module, _NOTHING)).items():
            if not name.startswith("__"):
                yield f"{module}.{name}", value


def _function_of(obj: Any) -> FunctionType | None:
    """The user's function behind a function, a method or a partial."""
    function = inspect.unwrap(getattr(obj, "func", obj)) if callable(obj) else None
    function = getattr(function, "__func__", function)
    return function if isinstance(function, FunctionType) and _is_users(function) else None


def _is_filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:
        return False


def _is_users(obj: Any) -> bool:
    """Whether it is no library's."""
    module = getattr(obj, "__module__", None) or type(obj).__module__
    file = getattr(sys.modules.get(module), "__file__", None) or ""
    return module.split(".")[0] not in _LIBRARIES and "site-packages" not in file


def _plain(value: Any, depth: int = 0) -> Any:
    """A copy made of scalars, tensors and containers, or None for what is none of them (or is None)."""
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
        return {str(key): each for key, each in _items(value.items(), depth)}
    if depth < 3 and isinstance(value, list | tuple | set | frozenset | deque) and len(value) <= _LONGEST_LIST:
        ordered = sorted(value, key=repr) if isinstance(value, set | frozenset) else value
        return [each for _, each in _items(((0, each) for each in ordered), depth)]
    return None


def _items(items: Iterable[tuple[Any, Any]], depth: int) -> Iterator[tuple[Any, Any]]:
    for key, value in items:
        plain = _plain(value, depth + 1)
        if plain is not None:
            yield key, plain
