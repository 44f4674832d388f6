"""Processes for tests, forked from one server that has imported torch and the engine: milliseconds each, not an import.

- ``child(f)``: what ``f()`` answers in a process of its own.
- ``start(f)``: the same, to be watched and signalled; ``ended(f)`` where it is to be killed.
- ``ranks(n, f)``: what ``f(rank)`` answers on each of n gloo ranks, which stand ready between tests.
- ``start_ranks(n, f)``: ranks of their own, where some are to fail.

Functions travel by cloudpickle: one of a module by its name, a local one by value with what it refers to.
The server never trains, so nothing of one process is left for the next. All processes of a test session share it.
"""

import atexit
import contextlib
import faulthandler
import gc
import importlib
import os
import pickle
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import weakref
from datetime import timedelta
from multiprocessing.connection import Client, Connection, Listener, wait
from pathlib import Path

import cloudpickle

ROOT = Path(__file__).resolve().parents[2]
ADDRESS = "TEST_FORK_SERVER"
"""The environment variable with the server's socket."""
PRELOADED = (
    *("numpy", "pytest", "torch", "torch._dynamo", "torch.distributed.tensor.parallel", "torch.utils.data"),
    *("ignite_engine.handlers", "ignite_engine.cli", "ignite_engine.runs.recipe", "yaml"),
)
AFTER_SIGKILL_S = 30.0
"""For how long the end of a killed process is waited for."""


class ChildFailed(AssertionError):
    """A process raised, or ended otherwise than expected; with what it printed."""


class Child:
    """A process that leads a session, so that its whole group can be signalled as by a terminal.

    Attributes:
        output: the file of what it prints; ``errors`` that of its standard error, which may be the same one.
    """

    def __init__(self, function, arguments=(), *, folder=ROOT, output=None, errors=None):
        if output is None:
            descriptor, output = tempfile.mkstemp(prefix="child_", dir=_folder())
            os.close(descriptor)
        self.output, self.errors = Path(output), Path(errors or output)
        for path in (self.output, self.errors):
            path.touch()  # it may be read before the process has begun
        self._code = self._answer = self._error = None
        self.connection = Client(_server(), "AF_UNIX")
        paths = {"folder": str(folder), "output": str(self.output), "errors": str(self.errors)}
        request = {**paths, "environment": dict(os.environ), "client": os.getpid()}
        self.connection.send({**request, "call": cloudpickle.dumps((function, arguments))})
        self.pid = self.connection.recv()

    @property
    def returncode(self):
        return self.poll()

    def poll(self, timeout_s=0.0):
        """Its exit code, -9 for SIGKILL, waiting so long; None if it still runs."""
        deadline = time.monotonic() + timeout_s
        while self._code is None and self.connection.poll(max(0.0, deadline - time.monotonic())):
            try:
                kind, value = self.connection.recv()
            except EOFError:  # its code was read by whom it answers, as a standing rank's is
                kind, value = "code", -signal.SIGKILL
            setattr(self, f"_{kind}", value)
        return self._code

    def wait(self, timeout_s=60.0):
        """Its exit code; TimeoutError with the stacks of its group, and it is killed, where it does not end."""
        if self.poll(timeout_s) is None:
            self.signal(signal.SIGABRT)  # faulthandler writes the stacks
            self.poll(1.0)
            self.signal(signal.SIGKILL)
            self.poll(AFTER_SIGKILL_S)
            raise TimeoutError(f"a process did not end within {timeout_s} s: {self.said()}")
        return self._code

    def answer(self, timeout_s=60.0):
        """What the function returned; ChildFailed where it raised or was killed."""
        if self.wait(timeout_s) != 0:
            raise ChildFailed(self._error or f"a process ended with code {self._code}: {self.said()}")
        return None if self._answer is None else pickle.loads(self._answer)

    def signal(self, number):
        """Signal its whole group, as a terminal does; nothing if it is gone."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, number)

    def said(self):
        """What it has printed until now."""
        texts = [self.output.read_text(errors="replace")]
        return "".join(texts + ([self.errors.read_text(errors="replace")] if self.errors != self.output else []))


def start(function, *arguments, **places):
    """A new process that calls ``function(*arguments)``: a ``Child``, which takes the keywords."""
    return Child(function, arguments, **places)


def child(function, *arguments, timeout_s=60.0):
    """What ``function(*arguments)`` answers in a new process; ChildFailed where it raises or dies."""
    return start(function, *arguments).answer(timeout_s)


def ended(function, *arguments, timeout_s=60.0):
    """How a new process ended: its exit code (-9 is SIGKILL), and its answer, None where it has none."""
    process = start(function, *arguments)
    code = process.wait(timeout_s)
    return code, process.answer() if code == 0 else None


def wait_until(condition, process=None, timeout_s=60.0):
    """Poll until ``condition()`` is true, and return that; the process, a ``Child``, must be alive all the while."""
    deadline = time.monotonic() + timeout_s
    while not (found := condition()):
        if process is not None and process.poll() is not None and not (found := condition()):
            raise ChildFailed(f"it ended early with code {process.poll()}: {process.said()}")
        if found:
            break
        assert time.monotonic() < deadline, "what the test waits for did not happen"
        time.sleep(0.01)
    return found


# ----------------------------------------------------------------------------------------------------------- ranks

USES = 24
"""After so many a world is started anew: the groups that it has made keep threads, which wake up all the time."""
_worlds, _uses = {}, {}


def ranks(count, function, *arguments, timeout_s=60.0):
    """What ``function(rank, *arguments)`` answers on each of ``count`` gloo ranks, by rank.

    The ranks stand ready: they are started by the first test that asks for so many, and anew after a failure; with
    TEST_FRESH_WORLDS in the environment for each call.

    Raises:
        ChildFailed: of the first rank that raised or died, with its traceback.
    """
    world = _worlds.pop(count, None) or start_ranks(count, _stand_ready)
    request = cloudpickle.dumps((function, arguments, dict(os.environ), os.getcwd()))
    for rank in world:
        rank.signal(signal.SIGCONT)
        rank.connection.send_bytes(request)
    answers = _answers_of(world, timeout_s)
    _uses[count] = _uses.get(count, 0) + 1
    if os.environ.get("TEST_FRESH_WORLDS") or _uses[count] % USES == 0:
        _end(world)
    else:
        _worlds[count] = world
        for rank in world:
            rank.signal(signal.SIGSTOP)  # its threads wake up 100 times a second
    return answers


def start_ranks(count, function, *arguments, joined=True, **places):
    """As many ``Child`` that call ``function(rank, *arguments)``, joined in a gloo group or in none."""
    store = tempfile.mktemp(prefix="store_", dir=_folder()) if joined else None
    return [start(_as_rank, rank, count, store, function, arguments, **places) for rank in range(count)]


def _answers_of(world, timeout_s):
    answers, failed = dict[int, object](), dict[int, str]()
    deadline = time.monotonic() + timeout_s
    while len(answers) + len(failed) < len(world) and time.monotonic() < deadline:
        waiting = {child.connection: rank for rank, child in enumerate(world) if rank not in {**answers, **failed}}
        for connection in wait(list(waiting), max(0.0, deadline - time.monotonic())):
            kind, value = connection.recv()
            rank = waiting[connection]
            if kind == "answer":
                answers[rank] = pickle.loads(value)
            else:
                failed[rank] = value if kind == "error" else f"ended with code {value}: {world[rank].said()}"
                deadline = min(deadline, time.monotonic() + 2.0)  # its peers may wait for it
    if len(answers) < len(world):
        _end(world)
        texts = [f"rank {rank} failed: {text}" for rank, text in failed.items()]
        raise ChildFailed("\n".join(texts) or f"no answer within {timeout_s} s: {[each.said() for each in world]}")
    return [answers[rank] for rank in range(len(world))]


def _end(world):
    for each in world:
        each.signal(signal.SIGKILL)
    for each in world:
        each.poll(AFTER_SIGKILL_S)


def _as_rank(rank, count, store, function, arguments):
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    if store is None:
        return function(rank, *arguments)
    dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=count, timeout=timedelta(seconds=60))
    result = function(rank, *arguments)
    _leave_groups()
    dist.destroy_process_group()
    return result


def _leave_groups():
    from ignite_engine.ranks import agreement
    from ignite_engine.ranks.mesh import use_mesh

    use_mesh(None)
    agreement.forget_groups()


def _stand_ready(rank):
    """Call what is asked for, again and again."""
    import torch.distributed as dist

    while True:
        try:
            request = _connection.recv_bytes()
        except EOFError:
            os._exit(0)
        function, arguments, environment, folder = cloudpickle.loads(request)
        os.environ.clear()
        os.environ.update(environment)
        os.chdir(folder)
        _as_new()
        try:
            answer = pickle.dumps(function(rank, *arguments))
            _leave_groups()
            dist.barrier()
        except BaseException:
            _connection.send(("error", traceback.format_exc()))
        else:
            _connection.send(("answer", answer))


def _as_new():
    """What a test may have changed in a process that stands ready."""
    import logging

    import torch

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_DFL if number != signal.SIGINT else signal.default_int_handler)
    for handler in list(logging.getLogger("ignite_engine").handlers):
        logging.getLogger("ignite_engine").removeHandler(handler)
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(False)
    torch.manual_seed(0)
    random.seed(0)
    gc.collect()


# ---------------------------------------------------------------------------------------------------------- server

_connection: Connection | None = None
"""In a child: where its answer goes."""


def _folder():
    """Where sockets and outputs of this session lie."""
    return Path(_server()).parent


def _server():
    """The address of the server, which the first process of the session starts."""
    if ADDRESS not in os.environ:
        serve()
    return os.environ[ADDRESS]


def serve():
    """Start the server; it ends with this process."""
    folder = tempfile.mkdtemp(prefix="fork_server_")
    os.environ[ADDRESS] = f"{folder}/socket"
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    command = [sys.executable, "-m", "tests.kit.processes", os.environ[ADDRESS]]
    server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT, env=environment)
    server.stdout.read(1)  # it listens, and imports

    def end():
        server.stdin.close()
        server.wait(30)

    atexit.register(end)


def _serve(address):
    """Fork for each connection; leaves only in a child, or when the input ends."""
    with Listener(address, "AF_UNIX", backlog=64) as listener:
        os.write(1, b".")
        os.dup2(2, 1)
        for name in PRELOADED:
            importlib.import_module(name)
        importlib.import_module("tests.kit.processes")  # the children know this module by its name
        for reference in list(weakref.finalize._registry):  # torch's: 40 ms at the end of each child
            reference.atexit = False
        gc.collect()
        gc.freeze()  # a collection in a child would touch, and so copy, all that the server made
        socket, kept = listener._listener._socket, dict[int, _Kept]()
        while True:
            ready = wait([socket, 0, *kept])
            if 0 in ready:
                return
            for descriptor in ready:
                if descriptor in kept:
                    over = kept[descriptor]
                    over.end(client_is_gone=descriptor == over.client)
                    for watched in (over.process, over.client):
                        del kept[watched]
                        os.close(watched)
            if socket in ready:
                with contextlib.suppress(EOFError, OSError):
                    new = _Kept(listener.accept(), [socket, *(each.connection for each in kept.values())])
                    kept |= {new.process: new, new.client: new}


class _Kept:
    """A child as the server sees it: it is killed where its client ends, and its end is told."""

    def __init__(self, connection, of_others):
        self.connection, request = connection, connection.recv()
        self.client = os.pidfd_open(request["client"])
        begins, begun = os.pipe()
        goes_on, told = os.pipe()
        if (pid := os.fork()) == 0:
            os.setsid()
            for descriptor in (begins, begun, told):
                os.close(descriptor)
            for other in of_others:
                other.close()
            os.read(goes_on, 1)  # its number was sent: an answer comes after that
            os.close(goes_on)
            sys.modules["tests.kit.processes"]._connection = connection
            _leave(_child(request, connection))
        os.close(begun)
        os.close(goes_on)
        os.read(begins, 1)  # it leads a session, or has ended: a signal to its group misses it no more
        os.close(begins)
        self.pid, self.process = pid, os.pidfd_open(pid)
        with contextlib.suppress(OSError):
            connection.send(pid)
        os.close(told)

    def end(self, *, client_is_gone):
        """The child has ended, or its client has."""
        if client_is_gone:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
        code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        with contextlib.suppress(OSError):
            self.connection.send(("code", code))
        self.connection.close()


def _child(request, connection):
    append = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    files = ((os.devnull, os.O_RDONLY), (request["output"], append), (request["errors"], append))
    for target, (path, flags) in enumerate(files):
        opened = os.open(path, flags)
        os.dup2(opened, target)
        os.close(opened)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"], PYTHONFAULTHANDLER="1")
    faulthandler.enable()
    _draw_other_numbers()
    try:
        function, arguments = cloudpickle.loads(request["call"])
        answer = function(*arguments)
        connection.send(("answer", pickle.dumps(answer)))
        return 0
    except SystemExit as left:
        if isinstance(left.code, str):
            print(left.code, file=sys.stderr)
        return left.code if isinstance(left.code, int) else int(left.code is not None)
    except BaseException:
        traceback.print_exc()
        connection.send(("error", traceback.format_exc()))
        return 1


def _leave(code):
    """End as the interpreter does, without its freeing of every object: that would copy the pages of the server."""
    threading._shutdown()  # waits for threads, as the end of a program does
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
    os._exit(code)


def _draw_other_numbers():
    """Else all children would begin with the generators of the server, as no two programs do."""
    import numpy
    import torch

    seed = time.time_ns() ^ os.getpid()
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed % 2**63)


if __name__ == "__main__":
    _serve(sys.argv[1])
