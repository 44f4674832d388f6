"""``idist.Parallel`` whose parent waits after a signal until its ranks have saved, and exits with their code."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from ignite.distributed.launcher import Parallel as IgniteParallel
from torch.multiprocessing.spawn import ProcessExitedException

from ignite_engine.ranks import agreement

STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
SIGNALS = (*STOPS, signal.SIGUSR1)


class Parallel(IgniteParallel):
    """Launch a function on one process or many; arguments and use are those of ``idist.Parallel``.

    In addition, where it spawns the ranks itself (``nproc_per_node``): a free port instead of the fixed 2222, so that
    two runs can share a machine; SIGINT, SIGTERM, SIGHUP and SIGUSR1 to the parent are forwarded to every rank, and the
    parent waits for them; a rank that ends with ``SystemExit`` passes its code to the parent, which exits with it once
    every rank is done. (A child's own exit status would make torch send SIGTERM to its peers while they save.) A signal
    before the ranks train, while they import or build, ends them with code 128 + n.
    """

    def __init__(
        self,
        backend: str | None = None,
        nproc_per_node: int | None = None,
        *,
        init_method: str | None = None,
        **options: Any,
    ) -> None:
        one_node = options.get("nnodes", 1) in (None, 1)
        if nproc_per_node is not None and one_node and init_method in (None, "env://"):
            options["master_port"] = options.get("master_port") or free_port()
        super().__init__(backend=backend, nproc_per_node=nproc_per_node, init_method=init_method, **options)

    def __exit__(self, *error: Any) -> None:
        agreement.forget_groups()
        super().__exit__(*error)

    def run(self, func: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """Call ``func(local_rank, *args, **kwargs)`` on every rank.

        Raises:
            SystemExit: a rank ended with one; its code, the largest if they differ. Or a signal ended it.
        """
        if self._spawn_params is None or self.backend is None:
            super().run(func, *args, **kwargs)
            return
        codes = _Codes(multiprocessing.get_context("spawn").SimpleQueue())
        try:
            with _forwarding_signals():
                super().run(_rank_main, func, codes, *args, **kwargs)
        except ProcessExitedException as error:
            number = -error.exit_code if error.exit_code < 0 else error.exit_code - 128
            if number in STOPS:  # a signal ended it before it trained
                sys.exit(128 + number)
            raise
        if code := codes.largest():
            sys.exit(code)


class _Codes:
    """Exit codes on their way from the ranks to the parent.

    They are the first of our own objects that a rank unpickles, after its imports: there it lets signals in, which the
    parent blocks for the processes it starts, or an import would end with a traceback.
    """

    def __init__(self, queue: Any) -> None:
        self._queue = queue

    def __reduce__(self) -> tuple[Any, ...]:
        return _codes_of_rank, (self._queue,)

    def put(self, code: int) -> None:
        self._queue.put(code)

    def largest(self) -> int:
        """The largest code of all ranks, 0 if none ended with one."""
        largest = 0
        while not self._queue.empty():
            largest = max(largest, self._queue.get())
        return largest


def _codes_of_rank(queue: Any) -> _Codes:
    def leave(number: int, frame: Any) -> None:
        raise SystemExit(128 + number)

    signal.signal(signal.SIGINT, leave)  # SIGTERM ends it by itself, also while it waits for its peers
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # there is nothing to save yet
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    return _Codes(queue)


def _rank_main(local_rank: int, func: Callable[..., Any], codes: Any, *args: Any, **kwargs: Any) -> None:
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)  # a forked rank has unpickled nothing
        func(local_rank, *args, **kwargs)
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        codes.put(end.code if isinstance(end.code, int) else int(end.code is not None))
    except KeyboardInterrupt:  # torch's own launcher swallows it
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        codes.put(128 + signal.SIGINT)
    finally:
        agreement.forget_groups()


@contextmanager
def _forwarding_signals() -> Iterator[None]:
    """Forward signals to all children, from a thread; the main one blocks them, so that children start like that.

    Python's handlers run in the main thread only, which waits for the children; the number of a signal is written to
    the wakeup descriptor by whichever thread received it. Outside the main thread nothing can be forwarded.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    received, sender = socket.socketpair()
    sender.setblocking(False)
    before = {number: signal.signal(number, lambda number, frame: None) for number in SIGNALS}
    descriptor = signal.set_wakeup_fd(sender.fileno(), warn_on_full_buffer=False)
    thread = threading.Thread(target=_forward, args=(received,), name="signals", daemon=True)
    thread.start()
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        signal.set_wakeup_fd(descriptor)
        sender.close()
        thread.join()
        received.close()
        for number, handler in before.items():
            signal.signal(number, handler)


def _forward(received: socket.socket) -> None:
    while numbers := received.recv(64):
        for child in multiprocessing.active_children():
            for number in numbers:
                if child.pid is not None and number in SIGNALS:
                    os.kill(child.pid, number)


def free_port() -> int:
    """A TCP port of this machine that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
