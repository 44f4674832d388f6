"""Digests of the user's code, so that a run that is started again can say what of it has changed."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

from ignite_engine.peek import compiled
from ignite_engine.task import Task

_NOT_THE_USERS = ("torch", "ignite", "ignite_engine", "builtins", "functools")


def code_of(task: Task) -> dict[str, str]:
    """By what it is: the model's classes, and the functions that train and measure; helpers that they call are not."""
    modules = {type(module) for module in task.model.modules()}
    parts: dict[str, Any] = {
        "the model": sorted(modules, key=lambda kind: f"{kind.__module__}.{kind.__qualname__}"),
        "loss_fn": [task.loss_fn],
        "predict": [task.predict],
        "collate_fn": [task.collate_fn],
        "weight_fn": [task.weight_fn],
        "the train_set": [type(task.train_set)],
        "optimizer": [task.optimizer],
        "schedule": [task.schedule],
    }
    found = {name: [text for value in values for text in _texts(value)] for name, values in parts.items()}
    return {
        name: hashlib.sha256("\0".join(texts).encode("utf-8", "replace")).hexdigest()[:12]
        for name, texts in found.items()
        if texts
    }


def _texts(value: Any) -> Iterator[str]:
    """The source of a function or class of the user's, or what its compiled code consists of."""
    while hasattr(value, "func"):  # a partial
        value = value.func
    value = getattr(value, "__func__", value)
    if value is not None and not (inspect.isfunction(value) or inspect.isclass(value)):
        value = type(value)
    if value is None or str(value.__module__).partition(".")[0] in _NOT_THE_USERS:
        return
    try:
        yield inspect.getsource(value)
    except (OSError, TypeError):  # typed at the interpreter's prompt, say
        functions: list[Callable[..., Any]] = [value] if inspect.isfunction(value) else list(vars(value).values())
        for function in functions:
            if inspect.isfunction(function):
                yield from compiled(function.__code__)
