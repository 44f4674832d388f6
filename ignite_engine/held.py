"""What objects and functions of the user's hold, by name and to any depth, without a call of their code."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
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


def parts_of(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """What an object holds directly."""
    kind = type(value)
    if issubclass(kind, FunctionType):
        yield from _of_function(name, value)
    elif issubclass(kind, MethodType):
        yield name, value.__self__
        yield name, value.__func__
    elif issubclass(kind, partial):
        yield name, value.func
        yield from _elements(name, value.args)
        yield from ((f"{name}.{key}", argument) for key, argument in value.keywords.items())
    elif issubclass(kind, type):
        yield from _of_class(name, value)
    elif issubclass(kind, dict):
        for place, (key, element) in enumerate(islice(dict.items(value), _MOST_ELEMENTS)):
            yield f"{name}[{repr(key) if type(key) in _PLAIN else place}]", element
    elif kind.__name__ in _NOT_IN_PYTHON:
        yield name, getattr(value, "__self__", None)
    else:
        for base in _COLLECTIONS:
            if issubclass(kind, base):
                elements = _elements(name, base.__iter__(value))
                yield from ((name + UNORDERED, part) for _, part in elements) if base in _SETS else elements
    yield from _attributes(name, value, kind)


def _elements(name: str, elements: Iterable[Any]) -> Iterator[tuple[str, Any]]:
    return ((f"{name}[{place}]", element) for place, element in enumerate(islice(elements, _MOST_ELEMENTS)))


def _attributes(name: str, value: Any, kind: type) -> Iterator[tuple[str, Any]]:
    try:
        own = {} if issubclass(kind, type) else vars(value)
    except (TypeError, ReferenceError):  # it has none, or is a proxy of what is gone
        own = {}
    if issubclass(kind, nn.Module):
        yield from ((f"{name}.{key}", module) for key, module in value._modules.items())
        own = {key: attribute for key, attribute in own.items() if key not in _OF_EVERY_MODULE}
    yield from ((f"{name}.{key}", attribute) for key, attribute in own.items())
    if is_of_user(kind.__module__):
        bases = (vars(base).items() for base in kind.__mro__ if is_of_user(base.__module__))
        for key, slot in (item for items in bases for item in items):
            if isinstance(slot, MemberDescriptorType):
                with suppress(AttributeError):  # it is not set
                    yield f"{name}.{key}", slot.__get__(value)
        yield name, kind


def _of_function(name: str, function: FunctionType) -> Iterator[tuple[str, Any]]:
    code = function.__code__
    if is_of_user(function.__module__ or ""):
        used = _names_in(code)
        for key in used:
            if isinstance(value := function.__globals__.get(key), ModuleType):
                if is_of_user(value.__name__):
                    yield from ((f"{name}.{key}.{other}", vars(value)[other]) for other in used if other in vars(value))
            elif value is not None:
                yield f"{name}.{key}", value
    arguments = zip(reversed(code.co_varnames[: code.co_argcount]), reversed(function.__defaults__ or ()), strict=False)
    yield from ((f"{name}.{key}", value) for key, value in arguments)
    yield from ((f"{name}.{key}", value) for key, value in (function.__kwdefaults__ or {}).items())
    for key, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        with suppress(ValueError):  # a variable that is not bound yet
            yield f"{name}.{key}", cell.cell_contents


def _names_in(code: CodeType) -> list[str]:
    """What it uses of its module or of objects, in functions within it, too."""
    inside = (_names_in(constant) for constant in code.co_consts if isinstance(constant, CodeType))
    return list(dict.fromkeys((*code.co_names, *(name for names in inside for name in names))))


def _of_class(name: str, kind: type) -> Iterator[tuple[str, Any]]:
    """The methods that are called once an object is there, and what they call of the class; its other attributes."""
    functions = dict[str, FunctionType]()
    for base in reversed(kind.__mro__):
        if is_of_user(base.__module__):
            for key, value in vars(base).items():
                value = getattr(value, "__func__", getattr(value, "fget", value))
                if isinstance(value, FunctionType):
                    functions[key] = value
                elif not key.startswith("__"):
                    yield f"{name}.{key}", value
    called = [key for key in functions if key == "forward" or (key.startswith("__") and key not in _MAKERS)]
    for key in called:  # it grows
        yield name, functions[key]
        called += [other for other in _names_in(functions[key].__code__) if other in functions and other not in called]
