"""What objects and functions of the user's hold, by name and to any depth, without a call of their code."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import cache, partial
from itertools import islice
from types import CodeType, FunctionType, MemberDescriptorType, MethodType, ModuleType
from typing import Any

import numpy as np
from ignite.engine import Engine
from torch import Tensor, nn
from torch.utils.data import Dataset, Sampler

_MOST_ELEMENTS = 1000
_MOST_OBJECTS = 20_000
_PLAIN = frozenset((type(None), bool, int, float, complex, str, bytes))
_OF_EVERY_MODULE = frozenset(vars(nn.Module())) - {"_forward_hooks", "_forward_pre_hooks"}
_OF_THE_ENGINE = ("ignite", "ignite_engine", "handlers")
_LIBRARIES = frozenset((*_OF_THE_ENGINE, "torch", "torchdata", "numpy", "builtins")) | sys.stdlib_module_names
_OPEN = frozenset(("builtins", "collections", "functools", "itertools", "types"))
_SETS = (set, frozenset)
_COLLECTIONS: tuple[Any, ...] = (list, tuple, deque, *_SETS)
_NOT_IN_PYTHON = ("builtin_function_or_method", "cython_function_or_method")
_MAKERS = frozenset(("__new__", "__init__", "__post_init__", "__init_subclass__", "__set_name__"))
"""Methods that have run when an object is there."""
UNORDERED = "{}"
"""In the name of what a set holds, which another process may hold in another order."""


def held(owners: Mapping[str, Any], kinds: tuple[type, ...]) -> Iterator[tuple[str, Any]]:
    """The objects of these kinds that the owners hold, each once, the nearest first.

    Looked at are attributes and slots, elements of collections, what functions and methods close over, have as defaults
    or use of their module, hooks of modules. Closed are tensors, engines, and what is of torch, NumPy, Ignite or this
    package and no module, data set or sampler. Of a collection the first elements are looked at, and at most 20,000
    objects in all, as it is asked at each save.

    Args:
        owners: objects by the first part of the name; they are open whatever they are of.
        kinds: what is found is not looked into.

    Yields:
        Names, such as ``model.0.noise`` and ``loss_fn.generators[0]``, no two alike, and objects.
    """
    seen: dict[int, Any] = {}  # which keeps them alive, as an id is that of an object as long as it lives
    names = set[str]()
    waiting = deque(owners.items())
    while waiting and len(seen) < _MOST_OBJECTS:
        name, value = waiting.popleft()
        kind = type(value)
        if kind in _PLAIN or id(value) in seen:
            continue
        seen[id(value)] = value
        if issubclass(kind, kinds):
            while name in names:
                name += "'"
            names.add(name)
            yield name, value
        elif owners.get(name) is value or not _is_closed(value, kind):
            waiting.extend(parts_of(name, value))


@cache
def is_of_user(module: str) -> bool:
    """Whether a module, by its name, is of no library."""
    file = getattr(sys.modules.get(module), "__file__", None) or ""
    return module.partition(".")[0] not in _LIBRARIES and "site-packages" not in file and "dist-packages" not in file


def _is_closed(value: Any, kind: type) -> bool:
    if issubclass(kind, Tensor | np.ndarray | ModuleType | Engine):
        return True
    if issubclass(kind, FunctionType):
        return str(value.__module__).partition(".")[0] in _OF_THE_ENGINE
    if issubclass(kind, type):
        return not is_of_user(value.__module__)
    if issubclass(kind, nn.Module | Dataset | Sampler):
        return False
    package = kind.__module__.partition(".")[0]
    return package in _LIBRARIES and package not in _OPEN


def parts_of(name: str, value: Any) -> list[tuple[str, Any]]:
    """What an object holds directly."""
    kind = type(value)
    if issubclass(kind, FunctionType):
        return _of_function(name, value)
    if issubclass(kind, type):
        return _of_class(name, value)
    if issubclass(kind, MethodType):
        return [(name, value.__self__), (name, value.__func__)]
    if kind.__name__ in _NOT_IN_PYTHON:
        return [(name, getattr(value, "__self__", None))]
    found: list[tuple[str, Any]] = []
    if issubclass(kind, partial):
        found.append((name, value.func))
        found += [(f"{name}[{place}]", element) for place, element in enumerate(value.args)]
        found += [(f"{name}.{key}", element) for key, element in value.keywords.items()]
    elif issubclass(kind, dict):
        for place, (key, element) in enumerate(islice(dict.items(value), _MOST_ELEMENTS)):
            found.append((f"{name}[{repr(key) if type(key) in _PLAIN else place}]", element))
    else:
        for base in _COLLECTIONS:
            if issubclass(kind, base):
                elements = islice(base.__iter__(value), _MOST_ELEMENTS)
                is_set = base in _SETS
                found = [
                    (name + UNORDERED if is_set else f"{name}[{place}]", element)
                    for place, element in enumerate(elements)
                ]
    try:
        own = vars(value)
    except (TypeError, ReferenceError):  # it has none, or is a proxy of what is gone
        own = {}
    if issubclass(kind, nn.Module):
        found += [(f"{name}.{key}", module) for key, module in value._modules.items()]
        own = {key: attribute for key, attribute in own.items() if key not in _OF_EVERY_MODULE}
    found += [(f"{name}.{key}", attribute) for key, attribute in own.items()]
    if is_of_user(kind.__module__):
        for base in kind.__mro__:
            if is_of_user(base.__module__):
                for key, slot in vars(base).items():
                    if isinstance(slot, MemberDescriptorType):
                        with suppress(AttributeError):  # it is not set
                            found.append((f"{name}.{key}", slot.__get__(value)))
        found.append((name, kind))
    return found


def _of_function(name: str, function: FunctionType) -> list[tuple[str, Any]]:
    code, found = function.__code__, list[tuple[str, Any]]()
    if is_of_user(function.__module__ or ""):
        used = _names_in(code)
        for key in used:
            value = function.__globals__.get(key)
            if not isinstance(value, ModuleType):
                found.append((f"{name}.{key}", value))
            elif is_of_user(value.__name__):
                found += [(f"{name}.{key}.{other}", vars(value)[other]) for other in used if other in vars(value)]
    arguments = zip(reversed(code.co_varnames[: code.co_argcount]), reversed(function.__defaults__ or ()), strict=False)
    found += [(f"{name}.{key}", value) for key, value in arguments]
    found += [(f"{name}.{key}", value) for key, value in (function.__kwdefaults__ or {}).items()]
    for key, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        with suppress(ValueError):  # a variable that is not bound yet
            found.append((f"{name}.{key}", cell.cell_contents))
    return found + [(f"{name}.{key}", value) for key, value in vars(function).items()]


@cache
def _names_in(code: CodeType) -> tuple[str, ...]:
    """What it uses of its module or of objects, in functions within it, too."""
    names = list(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            names += _names_in(constant)
    return tuple(dict.fromkeys(names))


def _of_class(name: str, kind: type) -> list[tuple[str, Any]]:
    """The methods that are called once an object is there, and what they call of the class; its other attributes."""
    functions, found = dict[str, FunctionType](), list[tuple[str, Any]]()
    for base in reversed(kind.__mro__):
        if is_of_user(base.__module__):
            for key, value in vars(base).items():
                value = getattr(value, "__func__", getattr(value, "fget", value))
                if isinstance(value, FunctionType):
                    functions[key] = value
                elif not key.startswith("__"):
                    found.append((f"{name}.{key}", value))
    called = [key for key in functions if key == "forward" or (key.startswith("__") and key not in _MAKERS)]
    for key in called:  # it grows
        found.append((name, functions[key]))
        called += [other for other in _names_in(functions[key].__code__) if other in functions and other not in called]
    return found
