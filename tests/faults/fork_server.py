"""Processes forked from one that has torch imported: a fresh one costs milliseconds, not an import.

A server is a process of its own that never trains, so that nothing of one run is left for the next. Its children lead a
session each, so that their whole group can be signalled, draw other random numbers, and end as programs do.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import json
import os
import random
import selectors
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, Self

ROOT = Path(__file__).resolve().parents[2]
AFTER_SIGKILL_S = 30.0
"""For how long the end of a killed child is waited for."""


class Child:
    """A process that runs one function; ``pid`` leads its session."""

    def __init__(self, server: ForkServer, pid: int) -> None:
        self.pid = pid
        self._server = server
        self._code: int | None = None

    def poll(self, timeout_s: float = 0.0) -> int | None:
        """Its exit code, -9 for SIGKILL, waiting so long; None if it still runs."""
        if self._code is None and self._server.has_answer(timeout_s):
            self._code = self._server.answer()
        return self._code

    def wait(self, timeout_s: float = 120.0) -> int:
        """Its exit code.

        Raises:
            TimeoutError: it did not end; it is killed, and so is its server if it does not hear of that.
        """
        code = self.poll(timeout_s)
        if code is None:
            self.signal(signal.SIGKILL)
            if self.poll(AFTER_SIGKILL_S) is None:
                self._server.drop()
            raise TimeoutError(f"A child did not end within {timeout_s} s.")
        return code

    def signal(self, number: int) -> None:
        """Signal its whole group, as a terminal does; nothing if it is gone."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, number)


class ForkServer:
    """Starts functions in children, one at a time.

    Args:
        modules: imported once, before the first fork.
        environment: variables in addition to this process's.
    """

    def __init__(self, modules: Sequence[str], **environment: str) -> None:
        command = [sys.executable, "-m", "tests.faults.fork_server", *modules]
        path = os.pathsep.join(each for each in (str(ROOT), os.environ.get("PYTHONPATH")) if each)
        variables = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, **environment}

        def launch() -> subprocess.Popen[bytes]:
            pipe = subprocess.PIPE
            return subprocess.Popen(command, stdin=pipe, stdout=pipe, bufsize=0, cwd=ROOT, env=variables)

        self._launch = launch
        self._begin()

    def _begin(self) -> None:
        self._process = self._launch()
        self._received = b""
        self._selector = selectors.DefaultSelector()
        assert self._process.stdout is not None
        self._selector.register(self._process.stdout, selectors.EVENT_READ)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def start(self, function: str, *arguments: Any, output: Path) -> Child:
        """Call ``module:function`` with JSON arguments; what it prints is appended to ``output``."""
        assert self._process.stdin is not None
        request = {"function": function, "arguments": arguments, "output": str(output)}
        self._process.stdin.write(json.dumps(request).encode() + b"\n")
        return Child(self, self.answer())

    def call(self, function: str, *arguments: Any, output: Path, timeout_s: float = 120.0) -> int:
        """As ``start``, and the exit code."""
        return self.start(function, *arguments, output=output).wait(timeout_s)

    def has_answer(self, timeout_s: float | None) -> bool:
        """Wait so long for the next answer, None: without a limit.

        Raises:
            RuntimeError: the server has ended; a new one has begun.
        """
        # not through a buffered file: it may read the exit code with the process number, and then the pipe is empty
        assert self._process.stdout is not None
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while b"\n" not in self._received:
            if not self._selector.select(None if deadline is None else max(0.0, deadline - time.monotonic())):
                return False
            if not (received := os.read(self._process.stdout.fileno(), 4096)):
                code = self._process.wait()
                self.drop()
                raise RuntimeError(f"The fork server ended with code {code}.")
            self._received += received
        return True

    def answer(self) -> int:
        self.has_answer(None)
        line, _, self._received = self._received.partition(b"\n")
        return int(line)

    def drop(self) -> None:
        """Begin again with a new server: what the present one still answers is of a child that was given up."""
        self._process.kill()
        self.close()
        self._begin()

    def close(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._selector.close()
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.wait(timeout=30)
        self._process.stdout.close()


def serve(modules: Sequence[str]) -> None:
    """Fork for each line of the standard input; leaves only in a child, or when the input ends."""
    for name in modules:
        importlib.import_module(name)
    gc.freeze()  # a collection in a child would touch, and so copy, all that the server made
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # nothing that prints may answer
    for line in sys.stdin:
        request = json.loads(line)
        begins, begun = os.pipe()
        pid = os.fork()
        if pid == 0:
            answers.close()
            os.close(begins)
            os.setsid()
            os.close(begun)
            _leave(_child(request))
        os.close(begun)
        os.read(begins, 1)  # it leads a session, or has ended: a signal to its group misses it no more
        os.close(begins)
        print(pid, file=answers)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), file=answers)


def _child(request: dict[str, Any]) -> int:
    for target, flags in ((0, os.O_RDONLY), (1, os.O_WRONLY), (2, os.O_WRONLY)):
        path = os.devnull if target == 0 else request["output"]
        opened = os.open(path, flags | (os.O_CREAT | os.O_APPEND if target else 0))
        os.dup2(opened, target)
        os.close(opened)
    _draw_other_numbers()
    module, _, name = request["function"].partition(":")
    try:
        result = getattr(importlib.import_module(module), name)(*request["arguments"])
    except SystemExit as left:
        result = left.code
    except BaseException:
        traceback.print_exc()
        result = 1
    return result if isinstance(result, int) else 0


def _leave(code: int) -> NoReturn:
    """End as the interpreter does, without its freeing of every object: that would copy the pages of the server."""
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads, as the end of a program does
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
    os._exit(code)


def _draw_other_numbers() -> None:
    """Else all children would begin with the generators of the server, as no two programs do."""
    seed = time.time_ns() ^ os.getpid()
    random.seed(seed)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(seed % 2**32)
    if (torch := sys.modules.get("torch")) is not None:
        torch.manual_seed(seed % 2**63)


if __name__ == "__main__":
    serve(sys.argv[1:])
