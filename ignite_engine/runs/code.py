"""The user's code: its commit, and digests, so that a run that is started again can say what of it has changed."""

from __future__ import annotations

import hashlib
import inspect
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from ignite_engine.task import Task

_NOT_THE_USERS = ("torch", "ignite", "ignite_engine", "builtins", "functools")
_GIT = ("git", "--no-optional-locks", "-c", "core.fsmonitor=false")
_TIMEOUT_S = 3.0


def commit_of_code() -> dict[str, Any]:
    """``commit``, and whether tracked files differ from it (``dirty``); empty without git or a repository.

    The repository is that of the program, or of the working directory if the program is part of a library.
    """
    program = Path(getattr(sys.modules.get("__main__"), "__file__", None) or "")
    is_script = program.suffix == ".py" and "site-packages" not in program.parts and program.name != "__main__.py"
    folder = program.resolve().parent if is_script else Path.cwd()

    def git(*arguments: str) -> str:
        command = [*_GIT, "-C", str(folder), *arguments]
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_TIMEOUT_S, check=True
        )
        return done.stdout.strip()

    try:
        return {"commit": git("rev-parse", "HEAD"), "dirty": bool(git("status", "--porcelain", "-uno"))}
    except (OSError, subprocess.SubprocessError):
        return {}


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
    """The source of a function or class of the user's."""
    while hasattr(value, "func"):  # a partial
        value = value.func
    value = getattr(value, "__func__", value)
    if value is not None and not (inspect.isfunction(value) or inspect.isclass(value)):
        value = type(value)
    if value is None or str(value.__module__).partition(".")[0] in _NOT_THE_USERS:
        return
    with suppress(OSError, TypeError):  # typed at the interpreter's prompt, say
        yield inspect.getsource(value)
