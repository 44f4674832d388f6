"""Objects, classes and code as Python itself keeps them: to read them calls no code of the user's."""

from __future__ import annotations

import dis
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import cache, cached_property, partial
from itertools import islice
from types import CodeType, FunctionType, GetSetDescriptorType, MemberDescriptorType
from typing import Any

import numpy as np
import torch
from torch import Tensor

_CLOSED = frozenset(("ignite", "ignite_engine", "torch", "torchdata", "numpy"))
_OF_PYTHON = os.path.dirname(os.__file__) + os.sep
SLOTS = (MemberDescriptorType, GetSetDescriptorType)
KEYS = frozenset((type(None), bool, int, float, complex, str, bytes))
PLAIN = KEYS | {Tensor, np.ndarray, *SLOTS}
_OF_A_PARAMETER = ("_backward_hooks", "_post_accumulate_grad_hooks")
_FUNCTION_IN = {staticmethod: "__func__", classmethod: "__func__", property: "fget", cached_property: "func"}
# read by Python's own parts of a class, an object and a partial, as a class may replace them with code
mro_of, class_dict, name_of, _class_module = (
    vars(type)[f"__{key}__"].__get__ for key in ("mro", "dict", "name", "module")
)


@cache
def is_of_user(module: str) -> bool:
    """Whether a module, by its name, is of no library."""
    file = _file_of(module)
    return not is_of_library(module) and "site-packages" not in file and "dist-packages" not in file


@cache
def is_of_library(module: str) -> bool:
    """Whether it is Python's, torch's, NumPy's, Ignite's or of this package, and no file of the user's named alike."""
    package, file = module.partition(".")[0], _file_of(module)
    return package in _CLOSED or (package in sys.stdlib_module_names and (not file or file.startswith(_OF_PYTHON)))


def _file_of(module: str) -> str:
    file = dict_of(sys.modules.get(module)).get("__file__")
    return file if isinstance(file, str) else ""


def module_of(kind: type) -> str:
    try:
        module = _class_module(kind)
    except AttributeError:  # it has none
        module = ""
    return module if type(module) is str else ""


def module_in(variables: dict[str, Any]) -> str:
    name = dict.get(variables, "__name__")
    return name if type(name) is str else ""


def first(elements: Callable[[], Iterable[Any]], most: int | None = None) -> list[Any]:
    """A copy, as other threads may change the collection meanwhile."""
    for _ in range(100):
        with suppress(RuntimeError):
            return [*islice(elements(), most)]
    raise RuntimeError("it changes all the time")


def dict_of(value: Any) -> dict[str, Any]:
    """Its attributes, where Python itself has them."""
    for base in mro_of(type(value)):
        slot = class_dict(base).get("__dict__")
        if type(slot) in SLOTS:
            with suppress(AttributeError):  # a proxy of what has none
                if issubclass(type(own := slot.__get__(value)), dict):
                    found: dict[str, Any] = own
                    return found
    return {}


def attributes_of(name: str, own: Any) -> list[tuple[str, Any]]:
    """Those that are not plain, by name; of a scripted module's, which are in no dict, none."""
    items = first(partial(dict.items, own)) if own and issubclass(type(own), dict) else ()
    others = [item for item in items if type(item[1]) not in PLAIN and issubclass(type(item[0]), str)]
    return [(f"{name}.{str.__str__(key)}", value) for key, value in others] if others else []


@cache
def names_in(code: CodeType) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """What it loads of its module and of objects, in functions within it, too."""
    loaded, attributes = list[str](), list[str]()
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            loaded.append(instruction.argval)
        elif instruction.opname in ("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR"):
            attributes.append(instruction.argval)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            for names, inner in zip((loaded, attributes), names_in(constant), strict=True):
                names += inner
    return tuple(dict.fromkeys(loaded)), tuple(dict.fromkeys(attributes))


def compiled(code: CodeType) -> Iterator[str]:
    """What a function's code consists of, with functions within it; the same in each process."""
    yield code.co_code.hex()
    yield repr(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from compiled(constant)
        else:
            yield repr(sorted(constant, key=repr) if isinstance(constant, frozenset) else constant)


def function_in(value: Any) -> Any:
    return getattr(value, _FUNCTION_IN[type(value)]) if type(value) in _FUNCTION_IN else value


def reached(key: str, values: Sequence[Any]) -> Iterator[Any]:
    """Of an attribute that several bases have the first, and the next ones as far as each calls the one after it."""
    for value in values:
        yield value
        if type(value) is not FunctionType:
            return
        calls_next = key in names_in(value.__code__)[1]
        if not calls_next and value.__code__.co_name == key:  # what is wrapped has another name
            return


def hooks_of(name: str, parameters: dict[str, Any]) -> list[tuple[str, Any]]:
    with torch._C.DisableTorchFunctionSubclass():
        return [
            (f"{name}.{key}.{kind}[{place}]", hook)
            for key, parameter in first(parameters.items)
            for kind in _OF_A_PARAMETER
            if parameter is not None
            for place, hook in enumerate((getattr(Tensor, kind).__get__(parameter) or {}).values())
        ]
