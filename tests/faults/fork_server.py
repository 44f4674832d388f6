"""Processes forked from one that has torch imported: a fresh one costs milliseconds, not an import.

A server is a process of its own that never trains, so that nothing of one run is left for the next. Its children lead a
session each, so that their whole group can be signalled, draw other random numbers, and end as programs do.
"""

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
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
AFTER_SIGKILL_S = 30.0
"""For how long the end of a killed child is waited for."""
COMMAND = ("ignite_engine.cli", "ignite_engine.runs.recipe")
"""What the command line imports before it trains."""


class Child:
    """A process that runs one function; ``pid`` leads its session."""

    def __init__(self, server, pid):
        self.pid = pid
        self._server = server
        self._code = None

    def poll(self, timeout_s=0.0):
        """Its exit code, -9 for SIGKILL, waiting so long; None if it still runs."""
        deadline = time.monotonic() + timeout_s
        while self._code is None:
            self._code = self._server.codes.pop(self.pid, None)
            if self._code is None and not self._server.receive(max(0.0, deadline - time.monotonic())):
                break
        return self._code

    def wait(self, timeout_s=120.0):
        """Its exit code.

        Raises:
            TimeoutError: it did not end, and is killed.
        """
        code = self.poll(timeout_s)
        if code is None:
            self.signal(signal.SIGKILL)
            self.poll(AFTER_SIGKILL_S)
            raise TimeoutError(f"A child did not end within {timeout_s} s.")
        return code

    def signal(self, number):
        """Signal its whole group, as a terminal does; nothing if it is gone."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, number)


class ForkServer:
    """Starts functions in children.

    Args:
        modules: imported once, before the first fork.
        environment: variables in addition to those of this process at each start.

    Attributes:
        codes: by process number the exit codes that nobody has asked for yet.
    """

    def __init__(self, modules, **environment):
        self.codes = {}
        self._modules, self._added = list(modules), environment
        self._begin()

    def _begin(self):
        command, pipe = [sys.executable, "-m", "tests.faults.fork_server", *self._modules], subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, bufsize=0, cwd=ROOT, env=self._environment())
        self._received, self._begun = b"", list[int]()
        self._selector = selectors.DefaultSelector()
        assert self._process.stdout is not None
        self._selector.register(self._process.stdout, selectors.EVENT_READ)

    def _environment(self):
        path = os.pathsep.join(each for each in (str(ROOT), os.environ.get("PYTHONPATH")) if each)
        return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, **self._added}

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        self.close()

    def load(self, modules):
        """Import these too before the next fork."""
        new = [name for name in modules if name not in self._modules]
        self._modules += new
        if new:
            self._ask({"modules": new})

    def start(self, function, *arguments, output, errors=None, folder=ROOT):
        """Call ``module:function`` with JSON arguments.

        Args:
            output: what it prints is appended there; the file is there at once.
            errors: and its standard error there, where it is another file.
            folder: its working directory.
        """
        output.touch()
        files = {"output": str(output), "errors": str(errors or output)}
        place = {"folder": str(folder), "environment": self._environment()}
        self._ask({"function": function, "arguments": arguments, **files, **place})
        while not self._begun:
            self.receive(None)
        return Child(self, self._begun.pop())

    def call(self, function, *arguments, output, timeout_s=120.0):
        """As ``start``, and the exit code."""
        return self.start(function, *arguments, output=output).wait(timeout_s)

    def _ask(self, request):
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request).encode() + b"\n")

    def receive(self, timeout_s):
        """Read which children have begun and ended, waiting so long for it, None: without a limit; False: nothing.

        Raises:
            RuntimeError: the server has ended; a new one has begun.
        """
        # not through a buffered file: it may read more than a line, and then the pipe is empty
        assert self._process.stdout is not None
        if not self._selector.select(timeout_s):
            return False
        if not (received := os.read(self._process.stdout.fileno(), 4096)):
            code = self._process.wait()
            self.close()
            self._begin()
            raise RuntimeError(f"The fork server ended with code {code}.")
        *lines, self._received = (self._received + received).split(b"\n")
        for line in lines:
            pid, _, code_of_it = line.partition(b" ")
            if code_of_it:
                self.codes[int(pid)] = int(code_of_it)
            else:
                self.codes.pop(int(pid), None)  # of an earlier process with its number
                self._begun.append(int(pid))
        return True

    def close(self):
        """End it, and every child that still runs."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._selector.close()
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.wait(timeout=30)
        self._process.stdout.close()


_shared = {}


def shared(modules=COMMAND, *, number=0):
    """The server that all tests of this process use, so that torch is imported once for them; it has these modules.

    Args:
        number: another one has other hashes, as another process of a user has.
    """
    if number not in _shared:
        _shared[number] = ForkServer(COMMAND)
        atexit.register(_shared[number].close)
    _shared[number].load(modules)
    return _shared[number]


def serve(modules):
    """Fork for each request on the standard input; leaves only in a child, or when the input ends.

    Answers with a line for each child: its number when it has begun, its number and exit code when it has ended.
    """
    _load(modules)
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # nothing that prints may answer
    children = {}  # by the descriptor that becomes readable when one ends
    received = b""
    with selectors.DefaultSelector() as selector:
        selector.register(0, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fd in children:
                    selector.unregister(key.fd)
                    pid = children.pop(key.fd)
                    os.close(key.fd)
                    print(pid, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), file=answers)
                    continue
                if not (more := os.read(0, 65536)):
                    return _end(children.values())
                *lines, received = (received + more).split(b"\n")
                for line in lines:
                    request = json.loads(line)
                    if "modules" in request:
                        _load(request["modules"])
                        continue
                    pid = _fork(request, [answers.fileno(), selector.fileno(), *children])
                    child = os.pidfd_open(pid)
                    children[child] = pid
                    selector.register(child, selectors.EVENT_READ)
                    print(pid, file=answers)


def _load(modules):
    for name in modules:
        importlib.import_module(name)
    gc.freeze()  # a collection in a child would touch, and so copy, all that the server made


def _end(children):
    for pid in children:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def _fork(request, descriptors):
    """A child that leads a session; its number."""
    begins, begun = os.pipe()
    if (pid := os.fork()) == 0:
        for descriptor in (*descriptors, begins):
            os.close(descriptor)
        os.setsid()
        os.close(begun)
        _leave(_child(request))
    os.close(begun)
    os.read(begins, 1)  # it leads a session, or has ended: a signal to its group misses it no more
    os.close(begins)
    return pid


def _child(request):
    append = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    for target, (path, flags) in enumerate(
        ((os.devnull, os.O_RDONLY), (request["output"], append), (request["errors"], append))
    ):
        opened = os.open(path, flags)
        os.dup2(opened, target)
        os.close(opened)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    _draw_other_numbers()
    module, _, name = request["function"].partition(":")
    try:
        result = getattr(importlib.import_module(module), name)(*request["arguments"])
    except SystemExit as left:
        result = left.code
        if isinstance(result, str):
            print(result, file=sys.stderr)
            result = 1
    except BaseException:
        traceback.print_exc()
        result = 1
    return result if isinstance(result, int) else 0


def _leave(code):
    """End as the interpreter does, without its freeing of every object: that would copy the pages of the server."""
    threading._shutdown()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
    os._exit(code)


def _draw_other_numbers():
    """Else all children would begin with the generators of the server, as no two programs do."""
    seed = time.time_ns() ^ os.getpid()
    random.seed(seed)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(seed % 2**32)
    if (torch := sys.modules.get("torch")) is not None:
        torch.manual_seed(seed % 2**63)


if __name__ == "__main__":
    serve(sys.argv[1:])
