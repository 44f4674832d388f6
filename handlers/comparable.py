"""Values and functions that settings are made of, in a form that can be compared with that of an earlier start."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import fields, is_dataclass
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import numpy as np
import torch

from ignite_engine.peek import compiled, is_of_user

FUNCTIONS = (FunctionType, partial, MethodType)
OTHER = object()
"""Stands for a value that is not plain."""
_PLAIN = (bool, int, float, str, type(None))
_MOST_ELEMENTS = 1000


def fingerprint(function: Any) -> str:
    """A hash of what a function does: its code, and what is plain of its defaults, arguments and variables."""
    return hashlib.sha256(repr(_described(function, set())).encode()).hexdigest()


def _described(value: Any, seen: set[int]) -> Any:
    """Plain values in lists; each function and collection once."""
    parts: list[Any]
    if isinstance(value, FunctionType) and is_of_user(value.__module__ or ""):
        code = value.__code__
        parts = [*compiled(code), value.__defaults__, value.__kwdefaults__, *map(value.__globals__.get, code.co_names)]
        for cell in value.__closure__ or ():
            with suppress(ValueError):  # a variable that is not bound yet
                parts.append(cell.cell_contents)
    elif isinstance(value, partial):
        parts = [value.func, value.args, value.keywords]
    elif isinstance(value, MethodType):
        parts = [value.__func__, getattr(value.__self__, "__dict__", {})]
    elif isinstance(value, Mapping):
        parts = [part for item in value.items() for part in item]
    elif isinstance(value, list | tuple):
        parts = [*value]
    else:
        found = plain(value)
        return getattr(value, "__qualname__", type(value).__name__) if found is OTHER else found
    if id(value) in seen:
        return ""
    seen.add(id(value))
    return [_described(part, seen) for part in parts]


def plain(value: Any) -> Any:
    """A value that can be compared and saved; :data:`OTHER`: it has none."""
    if isinstance(value, torch.Tensor | np.ndarray) and math.prod(value.shape) <= _MOST_ELEMENTS:
        return value.tolist()
    if isinstance(value, set | frozenset) and is_plain(list(value)):
        return sorted(value, key=repr)
    if is_dataclass(value) and not isinstance(value, type):
        value = {field.name: getattr(value, field.name) for field in fields(value)}
    return value if is_plain(value) else OTHER


def is_plain(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(is_plain(part) for item in value.items() for part in item)
    return all(map(is_plain, value)) if isinstance(value, list | tuple) else isinstance(value, _PLAIN)
