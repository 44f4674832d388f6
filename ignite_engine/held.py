"""What objects and functions of the user's hold, by name and to any depth, without a call of their code."""

from __future__ import annotations

import gc
from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from types import (
    FunctionType,
    MappingProxyType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
)
from typing import Any

import numpy as np
from ignite.engine import Engine
from torch import Tensor, nn
from torch.utils.data import Dataset, Sampler

from ignite_engine.peek import (
    KEYS,
    PLAIN,
    attributes_of,
    class_dict,
    dict_of,
    first,
    function_in,
    hooks_of,
    is_of_library,
    is_of_user,
    module_in,
    module_of,
    mro_of,
    name_of,
    names_in,
    reached,
)

_MOST_ELEMENTS, _MOST_IN_ALL = 10_000, 1_000_000
_MOST_OBJECTS = 50_000
_LONGEST_ROW = 100
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_OF_EVERY_MODULE = frozenset(vars(nn.Module())) - {*_HOOKS}
_OF_THE_ENGINE = ("ignite", "ignite_engine")
_OPEN = frozenset(("argparse", "builtins", "collections", "functools", "itertools", "types"))
_SETS = (set, frozenset)
_COLLECTIONS: tuple[Any, ...] = (list, tuple, deque, *_SETS)
_MAY_BE_EMPTY = frozenset((dict, OrderedDict, *_COLLECTIONS))
_NOT_IN_PYTHON = ("builtin_function_or_method", "cython_function_or_method")
_NOT_IN_TRAINING = frozenset(
    f"__{name}__"
    for name in (
        *("new", "init", "post_init", "init_subclass", "set_name", "del", "repr", "str", "format", "dir", "sizeof"),
        *("reduce", "reduce_ex", "getstate", "setstate", "getnewargs", "getnewargs_ex", "copy", "deepcopy"),
    )
) | {"extra_repr"}
"""Methods that make, print, copy and delete objects."""
_CALLED_BY_THE_ENGINE = ("forward", "step", "set_epoch")
UNORDERED = "{}"
"""In the name of what a set holds, which another process may hold in another order."""
_PARTIAL: dict[str, Any] = {key: vars(partial)[key] for key in ("func", "args", "keywords")}

Parts = Iterator[tuple[str, Any]]


def held(owners: Mapping[str, Any], kinds: tuple[type, ...]) -> Parts:
    """The objects of these kinds that the owners hold, each once, the nearest first.

    Looked at are attributes and slots, elements of collections, what functions and methods close over, have as defaults
    or use of their module, hooks of modules and parameters. A method, or an attribute of a class, counts when Python or
    a library calls it or a function that was looked at uses its name. Closed are tensors, engines, globals of installed
    packages, and what is of torch, NumPy, Ignite or this package and no module, data set or sampler. Of a collection
    the first 10,000 elements are looked at, and at most 50,000 objects in all, as it is asked at each save.

    Args:
        owners: objects by the first part of the name; they are open whatever they are of.
        kinds: what is found is not looked into.

    Yields:
        Names, such as ``model.0.noise`` and ``loss_fn.generators[0]``, no two alike, and objects.
    """
    return iter(_Walk(owners, kinds))


class _Walk:
    """Goes through what owners hold, once; :func:`held` tells its arguments."""

    def __init__(self, owners: Mapping[str, Any], kinds: tuple[type, ...]) -> None:
        self._owners, self._kinds = owners, kinds
        self._seen: dict[int, Any] = {}  # which keeps them alive, as an id is that of an object as long as it lives
        self._elements = 0
        self._used = {*_CALLED_BY_THE_ENGINE}
        self._unused: dict[str, list[tuple[str, Any]]] = {}

    def __iter__(self) -> Parts:
        names, waiting = set[str](), deque(self._owners.items())
        while waiting:
            name, value = waiting.popleft()
            kind = type(value)
            if id(value) in self._seen:
                continue
            self._seen[id(value)] = value
            if issubclass(kind, self._kinds):
                while name in names:
                    name += "'"
                names.add(name)
                yield name, value
            elif self._owners.get(name) is value or not _is_closed(value, kind):
                with suppress(Exception):  # whatever an object is, it ends no run
                    for part in self.parts_of(name, value):
                        if id(part[1]) not in self._seen and not _is_nothing(part[1]):
                            if len(self._seen) + len(waiting) >= _MOST_OBJECTS:
                                break
                            waiting.append(part)

    def parts_of(self, name: str, value: Any) -> Parts:
        """What an object holds directly."""
        kind = type(value)
        if issubclass(kind, FunctionType):
            return self._of_function(name, value)
        if issubclass(kind, type):
            return self._of_class(name, value)
        if issubclass(kind, MethodType):
            return iter(((name, value.__self__), (name, value.__func__)))
        if name_of(kind) in _NOT_IN_PYTHON:
            return iter(((name, getattr(value, "__self__", None)),))
        if issubclass(kind, MappingProxyType):
            return iter([(name, mapping) for mapping in gc.get_referents(value)])
        return self._of_object(name, value, kind)

    def _of_object(self, name: str, value: Any, kind: type) -> Parts:
        if issubclass(kind, partial):
            func, args, keywords = (slot.__get__(value) for slot in _PARTIAL.values())
            yield name, func
            yield from self._of_collection(name, args, tuple)
            yield from attributes_of(name, keywords)
        for base in (dict, *_COLLECTIONS):
            if issubclass(kind, base):
                yield from self._of_collection(name, value, base)
        own = dict_of(value)
        if issubclass(kind, nn.Module):
            yield from attributes_of(name, own.get("_modules", {}))
            if parameters := own.get("_parameters"):
                yield from hooks_of(name, parameters)
            own = {key: attribute for key, attribute in first(own.items) if key not in _OF_EVERY_MODULE}
        for key, attribute in attributes_of(name, own):
            if key.endswith("_hooks") and issubclass(type(attribute), dict):  # its keys count the hooks of all objects
                attribute = [hook for _, hook in first(partial(dict.items, attribute))]
            yield key, attribute
        for base in mro_of(kind):
            if "__slots__" in class_dict(base):
                for key, slot in class_dict(base).items():
                    if type(slot) is MemberDescriptorType:
                        with suppress(AttributeError):  # it is not set
                            yield f"{name}.{key}", slot.__get__(value)
        if is_of_user(module_of(kind)):
            yield name, kind

    def _of_collection(self, name: str, value: Any, base: Any) -> Parts:
        """Its first elements but for plain ones, of which it may have many."""
        most = min(_MOST_ELEMENTS, _MOST_IN_ALL - self._elements)
        elements = first(partial(dict.items if base is dict else base.__iter__, value), most)
        self._elements += len(elements)
        keys: Sequence[Any] = range(len(elements))
        if base is dict:
            keys, elements = [key for key, _ in elements], [element for _, element in elements]
        holds = () if PLAIN.issuperset(map(type, elements)) else [not _is_nothing(element) for element in elements]
        for place in (place for place, does_hold in enumerate(holds) if does_hold):
            key = repr(keys[place]) if type(keys[place]) in KEYS else place
            yield name + (UNORDERED if base in _SETS else f"[{key}]"), elements[place]

    def _of_function(self, name: str, function: FunctionType) -> Parts:
        code = function.__code__
        if is_of_user(module_in(function.__globals__)):
            loaded, attributes = names_in(code)
            yield from _of_module(name, function.__globals__, loaded, attributes, set())
            for key in attributes:
                self._used.add(key)
                yield from self._unused.pop(key, ())
        names = code.co_varnames[: code.co_argcount]
        arguments = zip(reversed(names), reversed(function.__defaults__ or ()), strict=False)
        yield from ((f"{name}.{key}", value) for key, value in arguments)
        yield from attributes_of(name, function.__kwdefaults__ or {})
        for key, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            with suppress(ValueError):  # a variable that is not bound yet
                yield f"{name}.{key}", cell.cell_contents
        yield from attributes_of(name, vars(function))

    def _of_class(self, name: str, kind: type) -> Parts:
        """The methods that are called once an object is there, and its other attributes that are used."""
        bases = [(class_dict(base), is_of_user(module_of(base))) for base in mro_of(kind) if base is not object]
        of_library = {key for own, of_user in bases if not of_user for key in own}
        by_key: dict[str, list[Any]] = {}
        for own in (own for own, of_user in bases if of_user):
            for key, value in first(own.items):
                by_key.setdefault(key, []).append(function_in(value))
        for key, values in by_key.items():
            is_special = key.startswith("__") and key.endswith("__")
            is_function = type(values[0]) is FunctionType
            if key in _NOT_IN_TRAINING or (is_special and not is_function):
                continue
            parts = [(name if is_function else f"{name}.{key}", value) for value in reached(key, values)]
            if is_special or key in of_library or key in self._used:
                yield from parts
            else:
                self._unused.setdefault(key, []).extend(parts)


def parts_of(name: str, value: Any) -> list[tuple[str, Any]]:
    """What an object holds directly."""
    return [*_Walk({}, ()).parts_of(name, value)]


def _is_closed(value: Any, kind: type) -> bool:
    if issubclass(kind, (Tensor, np.ndarray, ModuleType, Engine)):
        return True
    if issubclass(kind, FunctionType):
        return str(value.__module__).partition(".")[0] in _OF_THE_ENGINE
    if issubclass(kind, type):
        return not is_of_user(module_of(value))
    if issubclass(kind, (nn.Module, Dataset, Sampler)):
        return False
    module = module_of(kind)
    return is_of_library(module) and module.partition(".")[0] not in _OPEN


def _is_nothing(value: Any) -> bool:
    """Whether it is plain, empty, or a short row of plain values."""
    kind = type(value)
    if kind not in _MAY_BE_EMPTY or len(value) > _LONGEST_ROW:
        return kind in PLAIN
    elements = dict.values(value) if issubclass(kind, dict) else value
    try:
        return PLAIN.issuperset(map(type, elements))
    except RuntimeError:  # another thread changes it
        return False


def _of_module(
    name: str, variables: dict[str, Any], loaded: Sequence[str], attributes: Sequence[str], seen: set[int]
) -> Parts:
    """Its variables of these names, and those of the user's modules in it."""
    for key in loaded:
        value = dict.get(variables, key)
        if not issubclass(type(value), ModuleType):
            yield f"{name}.{key}", value
        elif id(value) not in seen and is_of_user(module_in(inner := dict_of(value))):
            seen.add(id(value))
            yield from _of_module(f"{name}.{key}", inner, attributes, attributes, seen)
