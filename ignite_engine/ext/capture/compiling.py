"""Compiling a graph, and the error where it cannot be compiled."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException
from torch._inductor.cpp_builder import get_cpp_compiler
from torch._inductor.cpu_vec_isa import pick_vec_isa
from torch._inductor.exc import InvalidCxxCompiler

from ignite_engine.errors import one_line

Graph = Callable[..., Any]


def not_captured(why: str) -> ValueError:
    """The error of an update that cannot be captured."""
    return ValueError(
        f"Update(accumulate='capture'), but the update cannot be captured: {why.rstrip('.')}. Leave accumulate out."
    )


def compiled(function: Any, device_type: str) -> Graph:
    """A graph for each shape of its arguments, 8 at most; compiled when it is called.

    Args:
        device_type: of the tensors that it is called with.
    """
    # torch keeps graphs by code object, which all functions of one definition share
    own = FunctionType(function.__code__.replace(), function.__globals__, function.__name__, None, function.__closure__)
    # guards compare sizes and strides already; each call would compare them again
    options: dict[str, Any] = {"size_asserts": False}
    if device_type == "cpu":  # Python calls the graph, and not each of its kernels: 12 us of 110
        options["cpp_wrapper"] = True
    graph: Graph = torch.compile(own, fullgraph=True, dynamic=False, options=options)
    return graph


def call(graph: Graph, *arguments: Any) -> Any:
    """What the graph returns, which this call may compile.

    Raises:
        ValueError: torch cannot compile it; one line, which names the line of the user's code where torch knows it.
    """
    try:
        return graph(*arguments)
    except FailOnRecompileLimitHit as error:
        raise not_captured("it would need more than 8 graphs: pad batches to fewer shapes") from error
    except TorchDynamoException as error:
        raise not_captured(_cause_of(error)) from error


def compiler() -> str | None:
    """The C++ compiler that torch calls and the vector instructions that it compiles for; None: there is none."""
    try:
        return f"{get_cpp_compiler()}, {pick_vec_isa()}"
    except InvalidCxxCompiler:
        return None


def _cause_of(error: Exception) -> str:
    """In a line, with the line of the user's code that torch names."""
    text = one_line(getattr(error, "inner_exception", error))  # of BackendCompilerFailed, whose first line is no cause
    lines = [line.strip() for line in str(error).splitlines() if line.lstrip().startswith('File "')]
    return f"{text.rstrip('.')} ({lines[-1]})" if lines else text
