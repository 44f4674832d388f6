"""``idist.Parallel`` whose parent waits after a signal until its ranks have saved, and exits with their code."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from ignite.distributed.launcher import Parallel as IgniteParallel

from ignite_engine.ranks import agreement

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


class Parallel(IgniteParallel):
    """Launch a function on one process or many; arguments and use are those of ``idist.Parallel``.

    In addition, where it spawns the ranks itself (``nproc_per_node``): a free port instead of the fixed 2222, so that
    two runs can share a machine; SIGINT, SIGTERM, SIGHUP and SIGUSR1 to the parent are forwarded to every rank, and the
    parent waits for them; a rank that ends with ``SystemExit`` passes its code to the parent, which exits with it once
    every rank is done. (A child's own exit status would make torch send SIGTERM to its peers while they save.)
    """

    def __init__(self, backend: str | None = None, nproc_per_node: int | None = None, **options: Any) -> None:
        if nproc_per_node is not None and options.get("nnodes", 1) in (None, 1) and options.get("master_port") is None:
            options["master_port"] = free_port()
        super().__init__(backend=backend, nproc_per_node=nproc_per_node, **options)

    def run(self, func: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """Call ``func(local_rank, *args, **kwargs)`` on every rank.

        Raises:
            SystemExit: a rank ended with one; its code, the largest if they differ.
        """
        if self._spawn_params is None or self.backend is None:
            super().run(func, *args, **kwargs)
            return
        codes = multiprocessing.get_context("spawn").SimpleQueue()
        with _forwarding_signals():
            super().run(_rank_main, func, codes, *args, **kwargs)
        code = 0
        while not codes.empty():
            code = max(code, codes.get())
        if code:
            sys.exit(code)


def _rank_main(local_rank: int, func: Callable[..., Any], codes: Any, *args: Any, **kwargs: Any) -> None:
    try:
        func(local_rank, *args, **kwargs)
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        codes.put(end.code if isinstance(end.code, int) else int(end.code is not None))
    finally:
        agreement.forget_groups()


@contextmanager
def _forwarding_signals() -> Iterator[None]:
    def forward(number: int, frame: Any) -> None:
        for child in multiprocessing.active_children():
            if child.pid is not None:
                os.kill(child.pid, number)

    before = {number: signal.signal(number, forward) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def free_port() -> int:
    """A TCP port of this machine that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
