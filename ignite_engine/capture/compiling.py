"""Compiling a graph: how many there may be, how long it may take, and what is done where torch's cache is no use."""

from __future__ import annotations

import inspect
import logging
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, TypeVar

import torch
from torch._dynamo.exc import BackendCompilerFailed
from torch._inductor.cpp_builder import get_cpp_compiler
from torch._inductor.cpu_vec_isa import pick_vec_isa, supported_vec_isa_list, valid_vec_isa_list
from torch._inductor.exc import InvalidCxxCompiler
from torch._inductor.runtime.cache_dir_utils import default_cache_dir
from torch._inductor.utils import fresh_cache

from ignite_engine.errors import one_line

logger = logging.getLogger(__name__)
Graph = Callable[..., Any]
Result = TypeVar("Result")

MAX_GRAPHS = 4
"""Most graphs of one update in a run: shapes of batches, sets of trained parameters and optimizer settings together."""
LONGEST_S = 300.0
"""What ``auto`` spends on compiling in one process at most."""
_CACHE = "TORCHINDUCTOR_CACHE_DIR"
_AGAIN_S = 30.0
"""Seconds until a compilation is interrupted again, if the first interrupt came in code that drops exceptions."""


class NotCompiled(Exception):
    """A graph could not be compiled; one line, which names the line of the user's code where torch knows it."""


class _TookTooLong(BaseException):
    """A compilation has reached its limit; no ``Exception``, which torch would wrap or take for a defect of its own."""


class Compilations:
    """The graphs that an update has, by name, so that a resumed run has the same ones.

    Args:
        limit_s: for the compilations of this process together; None: no limit.
    """

    def __init__(self, limit_s: float | None) -> None:
        self.names: list[str] = []
        self._limit_s, self._left_s, self._compiled = limit_s, limit_s, 0

    def admits(self, name: str, *, kept: int = 0) -> bool:
        """Whether there is a graph of this name, or may be one, which is noted.

        Args:
            kept: so many graphs are for others.
        """
        if self._compiled + kept >= MAX_GRAPHS:
            return False
        if name in self.names:
            return True
        if len(self.names) + kept >= MAX_GRAPHS:
            return False
        self.names.append(name)
        if len(self.names) + kept == MAX_GRAPHS:
            logger.info("The update has %d graphs, all that it may have: others are not compiled.", len(self.names))
        return True

    def compile(self, call: Callable[[], Result]) -> Result:
        """What ``call`` returns, in which torch compiles a graph.

        Raises:
            NotCompiled: torch cannot, or the time is over.
        """
        self._compiled += 1
        began = time.perf_counter()
        logger.info("The update is being compiled, which takes from seconds to minutes.")
        try:
            with _interrupted_after(self._left_s):
                result = _without_broken_cache(call)
        except _TookTooLong:
            raise NotCompiled(f"compiling takes longer than {self._limit_s:g} s") from None
        except Exception as error:  # the plain way has just worked: it is torch.compile's
            raise NotCompiled(cause_of(error)) from error
        finally:
            took_s = time.perf_counter() - began
            if self._left_s is not None:
                self._left_s = max(self._left_s - took_s, 0.001)
        logger.info("Compiled in %.1f s.", took_s)
        return result


def compiled(function: Graph, device_type: str) -> Graph:
    """One graph, or an error: what would be compiled a second time changes from call to call.

    Args:
        device_type: of the tensors that it is called with.
    """
    # torch keeps graphs by code object, which all functions of one definition share
    own = FunctionType(function.__code__.replace(), function.__globals__, function.__name__, None, function.__closure__)
    # guards compare sizes and strides already; each call would compare them again
    options: dict[str, Any] = {"guard_filter_fn": _needed_guards, "size_asserts": False}
    if device_type == "cpu":  # Python calls the graph, and not each of its kernels: 12 us of 110
        options["cpp_wrapper"] = True
    result: Graph = torch.compile(own, fullgraph=True, dynamic=False, options=options, **_ONE_GRAPH)
    return result


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


def cause_of(error: Exception) -> str:
    """In a line, with the line of the user's code that torch names."""
    text = one_line(getattr(error, "inner_exception", error))  # of BackendCompilerFailed, whose first line is no cause
    if "from user code:" in str(error):
        places = [line.strip() for line in str(error).splitlines() if line.lstrip().startswith('File "')]
        if places:
            text = f"{text.rstrip('.')} ({places[-1]})"
    return text


def keep_compiled_code_in(folder: Path) -> None:
    """Have torch keep its cache of compiled code in a folder, unless ``TORCHINDUCTOR_CACHE_DIR`` names another one.

    torch sets that variable itself, to its default, when the first optimizer of a process is made.
    """
    default = os.path.abspath(default_cache_dir())
    if os.environ.get(_CACHE, default) == default:
        os.environ[_CACHE] = str(folder)


@cache
def compiler() -> str | None:
    """The C++ compiler that torch calls, with its version and the vector instructions; None: there is none."""
    try:
        command = [get_cpp_compiler(), "--version"]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, InvalidCxxCompiler, subprocess.CalledProcessError):
        return None
    return f"{done.stdout.partition(chr(10))[0].strip()}, {pick_vec_isa()}"


def _one_graph() -> dict[str, Any]:
    """Options of ``torch.compile`` since torch 2.13; before it 8 graphs are the limit."""
    options = {"isolate_recompiles": True, "recompile_limit": 1}
    return options if options.keys() <= inspect.signature(torch.compile).parameters.keys() else {}


_ONE_GRAPH = _one_graph()


def _without_broken_cache(call: Callable[[], Result]) -> Result:
    """``call()``, again with an empty cache in a temporary folder where the one on disk may have been the cause."""
    try:
        if not _knows_instructions():
            raise OSError("torch's trial of the processor's vector instructions has failed")
        return call()
    except (BackendCompilerFailed, OSError, ImportError) as error:
        logger.warning(
            "torch's cache of compiled code %sis perhaps full, damaged or not to be written (%s): compiled without it. "
            "Delete it.",
            *(f"in {path} " if (path := os.environ.get(_CACHE)) else "", cause_of(error)),
        )
    with fresh_cache():
        if not _knows_instructions():
            _try_instructions_again()
        return call()


def _knows_instructions() -> bool:
    """Whether torch compiles for the vector instructions that it has itself; with others the bits are others, too.

    It tries them by a library in the cache, and takes a library that cannot be written or loaded for an answer.
    """
    capability = torch.backends.cpu.get_cpu_capability().lower()
    return capability not in ("avx2", "avx512") or capability in str(pick_vec_isa())


def _try_instructions_again() -> None:
    for kind in {kind for instructions in supported_vec_isa_list for kind in type(instructions).__mro__}:
        for value in vars(kind).values():
            if hasattr(value, "cache_clear"):
                value.cache_clear()
    valid_vec_isa_list.cache_clear()


@contextmanager
def _interrupted_after(seconds: float | None) -> Iterator[None]:
    """Raise :class:`_TookTooLong`; no limit in other threads than the main one, and where the alarm is in use."""
    is_main = threading.current_thread() is threading.main_thread()
    if seconds is None or not is_main or signal.getitimer(signal.ITIMER_REAL)[0]:
        yield
        return

    def interrupt(*_: Any) -> None:
        raise _TookTooLong

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, seconds, _AGAIN_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before or signal.SIG_DFL)
