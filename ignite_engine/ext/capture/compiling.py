"""Compiling one graph, and the error where it cannot be compiled."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Sequence
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch._inductor.cpp_builder import get_cpp_compiler
from torch._inductor.cpu_vec_isa import pick_vec_isa
from torch._inductor.exc import InvalidCxxCompiler

from ignite_engine.errors import one_line

logger = logging.getLogger(__name__)
Graph = Callable[..., Any]


def not_captured(why: str | Exception) -> ValueError:
    """The error of an update that cannot be captured."""
    cause = _cause_of(why) if isinstance(why, Exception) else why
    return ValueError(
        f"Update(accumulate='capture'), but the update cannot be captured: {cause.rstrip('.')}. Leave accumulate out."
    )


def compiled(function: Graph, device_type: str) -> Graph:
    """One graph: a call that would compile a second one raises ``FailOnRecompileLimitHit``.

    Args:
        device_type: of the tensors that it is called with.
    """
    # torch keeps graphs by code object, which all functions of one definition share
    own = FunctionType(function.__code__.replace(), function.__globals__, function.__name__, None, function.__closure__)
    # guards compare sizes and strides already; each call would compare them again
    options: dict[str, Any] = {"guard_filter_fn": _needed_guards, "size_asserts": False}
    if device_type == "cpu":  # Python calls the graph, and not each of its kernels: 12 us of 110
        options["cpp_wrapper"] = True
    # since torch 2.13; before it 8 graphs are the limit
    limit: dict[str, Any] = {"isolate_recompiles": True, "recompile_limit": 1}
    if not limit.keys() <= inspect.signature(torch.compile).parameters.keys():
        limit = {}
    result: Graph = torch.compile(own, fullgraph=True, dynamic=False, options=options, **limit)
    return result


def first_call(graph: Callable[[], Any]) -> Any:
    """What the graph returns, which this call compiles.

    Raises:
        ValueError: torch cannot compile it; one line, which names the line of the user's code where torch knows it.
    """
    logger.info("The update is being compiled, which takes from seconds to minutes.")
    try:
        return graph()
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # the loss has just been computed without torch.compile
        raise not_captured(error) from error


def compiler() -> str | None:
    """The C++ compiler that torch calls and the vector instructions that it compiles for; None: there is none."""
    try:
        return f"{get_cpp_compiler()}, {pick_vec_isa()}"
    except InvalidCxxCompiler:
        return None


def _needed_guards(guards: Sequence[Any]) -> list[bool]:
    """All but those on torch's own functions, classes and modules, which nobody changes during a run: a fifth."""
    return [
        guard.guard_type not in ("CLOSURE_MATCH", "MODULE_MATCH", "BUILTIN_MATCH", "CLASS_MATCH")
        or _package_of(guard.value) not in ("torch", "builtins")
        for guard in guards
    ]


def _package_of(value: Any) -> str:
    name = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None)
    return str(name).partition(".")[0]


def _cause_of(error: Exception) -> str:
    """In a line, with the line of the user's code that torch names."""
    text = one_line(getattr(error, "inner_exception", error))  # of BackendCompilerFailed, whose first line is no cause
    if "from user code:" in str(error):
        lines = [line.strip() for line in str(error).splitlines() if line.lstrip().startswith('File "')]
        if lines:
            text = f"{text.rstrip('.')} ({lines[-1]})"
    return text
