"""``idist.Parallel`` whose parent waits after a signal until its ranks have saved, and exits with their code."""

from __future__ import annotations

import builtins
import contextlib
import logging
import math
import multiprocessing
import multiprocessing.connection
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from multiprocessing import resource_tracker
from typing import Any

import ignite.distributed as idist
import torch.distributed as dist
from ignite.distributed.launcher import Parallel as IgniteParallel
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException

from ignite_engine.ranks import agreement, signals
from ignite_engine.ranks.joining import (
    End,
    Start,
    Work,
    connect,
    disconnect,
    one_line_where_they_cannot_meet,
    rank_main,
    warnings_said_once,
)
from ignite_engine.ranks.watch import HEARTBEAT_TIMEOUT_S, watched

logger = logging.getLogger(__name__)

_FORCED_RANKS_MAY_END_S = 5.0
_PEERS_OF_A_FAILURE_MAY_END_S = 5.0
_TERMINATED_RANKS_MAY_END_S = 30.0
_FINAL_CODES = (2, 128 + signal.SIGINT, 128 + signal.SIGTERM)
"""Exit codes after which another attempt would end the same: a wrong config or arguments, and a stop."""


class Parallel(IgniteParallel):
    """Launch a function on one process or many; arguments and use are those of ``idist.Parallel``.

    Args:
        timeout: how long a rank waits for another one, in every group, ours included; seconds or a timedelta.
            None: torch's own (30 min on gloo, 10 min on nccl).
        heartbeat_timeout: seconds without a sign of life from a rank, after which all ranks end; they watch each other
            while the function runs (:class:`~ignite_engine.ranks.watch.Watch`).

    In addition:

    - From the first line on, a signal ends a process with code 128 + n: not with 0, nor with a traceback.
    - Groups end with the ``with`` block, also under torchrun and SLURM.
    - Under torchrun its ranks are joined, and ``nproc_per_node`` with its options has no effect.
    - A rank whose launcher has died (this parent, or torchrun's agent) saves and ends, as on SIGTERM.
    - torchrun's ``--max-restarts`` works: ranks of one attempt never meet those of another.
    - Warnings are on stderr once, from rank 0, where logging is not set up; each rank's log has its own.

    Where it spawns the ranks itself (``nproc_per_node``): the parent hosts the store at which the ranks meet, on a port
    that is free, so that two runs can share a machine and rank 0 may die. SIGINT, SIGTERM, SIGHUP and SIGUSR1 to the
    parent are passed on to every rank, and the parent waits for them; Ctrl-Z stops them until the parent goes on. Each
    rank leads a session, so that a terminal's signals reach the parent alone, and does not count stops: a second one
    to the parent, 0.5 s or more after the first, ends all within 5 s. In another thread than the main one the parent
    passes nothing on, and the ranks stay in its session.
    A rank that ends with ``SystemExit`` passes its code to the parent, which exits with it once every rank is done.
    When a rank fails, the others have 5 s to end by themselves, then they get SIGTERM, and SIGKILL after 30 s more.

    Raises:
        TypeError: an option that does not exist.
        LaunchError: (when it is entered, or run) the ranks cannot meet, because the port is in use, say; one line.
    """

    def __init__(
        self,
        backend: str | None = None,
        nproc_per_node: int | None = None,
        *,
        init_method: str | None = None,
        timeout: float | timedelta | None = None,
        heartbeat_timeout: float = HEARTBEAT_TIMEOUT_S,
        **options: Any,
    ) -> None:
        known = {"nnodes", "node_rank", "master_addr", "master_port", "start_method", "daemon"}
        if unknown := sorted(options.keys() - known):
            raise TypeError(f"Parallel got {', '.join(unknown)}; its other options are {', '.join(sorted(known))}.")
        if nproc_per_node is not None and "TORCHELASTIC_RUN_ID" in os.environ:
            # each of torchrun's ranks would start a run of its own, all of them in one folder
            started = os.environ.get("LOCAL_WORLD_SIZE")
            if started != str(nproc_per_node) and os.environ.get("RANK", "0") == "0":
                logger.warning(
                    "nproc_per_node=%d has no effect: torchrun has started %s on this machine.", nproc_per_node, started
                )
            nproc_per_node, options = None, {}
        super().__init__(backend=backend, nproc_per_node=nproc_per_node, init_method=init_method, **options)
        self._timeout = timeout if isinstance(timeout, timedelta | None) else timedelta(seconds=timeout)
        self._heartbeat_timeout_s = heartbeat_timeout
        self._within = contextlib.ExitStack()
        self._attempt: Any = None

    def __enter__(self) -> Parallel:
        if not self._is_ours:
            super().__enter__()
        elif self._spawn_params is None:
            assert self.backend is not None
            with contextlib.ExitStack() as stack:
                stack.enter_context(signals.Ending())
                torchrun = "TORCHELASTIC_RUN_ID" in os.environ  # another launcher may end before its processes
                stack.enter_context(signals.listening(os.getppid() if torchrun else None))
                self._attempt = connect(self.backend, self.init_method, self._timeout)
                stack.callback(disconnect)
                stack.enter_context(warnings_said_once())
                self._within = stack.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        if not self._is_ours:
            super().__exit__(*error)
        self._within.close()

    def run(self, func: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """Call ``func(local_rank, *args, **kwargs)`` on every rank.

        Raises:
            SystemExit: a rank ended with one; its code, the largest if they differ. Or a signal ended it.
            ProcessRaisedException: (of torch) the error of the rank that failed first, with its traceback.
            ProcessExitedException: (of torch) a rank was killed.
        """
        if not self._is_ours:
            super().run(func, *args, **kwargs)
        elif self._spawn_params is None:
            try:
                self._watched(func, args, kwargs)(idist.get_local_rank())
            except SystemExit as end:
                if self._attempt is not None and end.code in _FINAL_CODES:
                    self._attempt.set(f"code_{agreement.rank()}", str(end.code))
                raise
        else:
            assert self.backend is not None
            Ranks(self.backend, self._spawn_params, self._timeout).run(self._watched(func, args, kwargs))

    def _watched(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Work:
        return partial(watched, self._heartbeat_timeout_s, func, args, kwargs)

    @property
    def _is_ours(self) -> bool:
        """Whether torch connects the ranks; Ignite launches the other kinds, and a process without a backend."""
        return self.backend is not None and dist.is_available() and dist.is_backend_available(self.backend)


@dataclass
class Rank:
    """A rank as its parent sees it.

    Attributes:
        number: in the whole group.
        report: the parent's end of the exit-report pipe.
        end: what it said, or else its exit status; None: it runs, or has ended since it was looked at.
        killed_by: the signal that ended it before it could say anything, unless this parent sent that.
        ended_here: this parent sent it SIGTERM or SIGKILL.
        over: its process had ended when it was looked at.
        sentinel: a descriptor that is readable when the process has ended.
    """

    number: int
    process: Any
    report: Any
    sentinel: int
    end: End | None = None
    killed_by: int | None = None
    ended_here: bool = False
    over: bool = False

    @property
    def runs(self) -> bool:
        return self.process.exitcode is None

    def look(self) -> None:
        """Take what the rank has said; when its process has exited without reporting, its status is what counts."""
        self.over = not self.runs
        with contextlib.suppress(EOFError, OSError):
            if self.end is None and self.report.poll():
                self.end = self.report.recv()
        if self.over and self.end is None:
            code = self.process.exitcode
            if code < 0:
                self.killed_by = None if self.ended_here else -code
                stopped = -code in signals.STOPS  # before it trained
                code = 128 + signals.treated_as(-code) if stopped else None
            self.end = End(code, time.time())

    @property
    def failed(self) -> bool:
        """Its peers cannot go on: it raised, was killed or interrupted, or exited unexpectedly."""
        if self.end is None:
            return False
        return self.end.code is None or self.end.interrupted or self.process.exitcode not in (None, 0)

    def send(self, number: int) -> None:
        if self.runs:
            os.kill(self.process.pid, number)


@dataclass
class Ranks:
    """The ranks of this machine, from their start until all have ended.

    Attributes:
        backend: None: they have no process group, as there is one rank.
        params: ``idist.Parallel``'s for processes that it starts; without ``nproc_per_node`` one rank that no other
            meets.
        environment: of every rank, in addition.
        ranks: as they are known now.
        stop: the first signal of the user that stops them; None: none has come.
    """

    backend: str | None
    params: Mapping[str, Any]
    timeout: timedelta | None
    environment: Mapping[str, object] = field(default_factory=dict)
    ranks: list[Rank] = field(default_factory=list)
    stop: int | None = None
    _first_stop_at: float = 0.0
    _forced_by: int | None = None
    _deadlines: list[tuple[float, Callable[[], None]]] = field(default_factory=list)
    _peer_failed: bool = False

    def run(self, work: Work) -> None:
        with contextlib.closing(self):
            with receiving_signals() as received:
                self.attempt(work, received)
            self.finish()

    def close(self) -> None:
        """Once all ranks have ended, and nothing is asked of them any more."""
        for rank in self.ranks:
            if rank.sentinel != rank.process.sentinel:
                os.close(rank.sentinel)
            rank.report.close()
            rank.process.close()

    def attempt(self, work: Work, received: socket.socket | None) -> None:
        """Start the ranks, and return when all of them have ended.

        Args:
            received: of :func:`receiving_signals`.
        """
        try:
            store = self._start(work, passes_on=received is not None)  # there as long as the ranks run
            while left := [rank for rank in self.ranks if not rank.over]:
                self._wait(left, received)
            del store
        finally:
            self._kill()

    def _start(self, work: Work, *, passes_on: bool) -> Any:
        """Returns:
        The store at which the ranks meet, if this process has it.
        """
        params = self.params
        nodes, node = params.get("nnodes", 1), params.get("node_rank", 0)
        per_node = params.get("nproc_per_node") or 1
        address, port = params.get("master_addr", "127.0.0.1"), params.get("master_port", 0)
        init_method, store = params.get("init_method"), None
        meets = params.get("nproc_per_node") is not None
        if meets and init_method in (None, "env://") and node == 0:
            with one_line_where_they_cannot_meet(address, port):
                store = agreement.STORES.TCPStore(address, port, is_master=True, wait_for_workers=False)
            port = store.port
        start_method = params.get("start_method", _start_method())
        context: Any = multiprocessing.get_context(start_method)
        starter = None if start_method == "forkserver" else os.getpid()
        resource_tracker.ensure_running()  # its start lets signals in again
        for local_rank in range(per_node):
            number = node * per_node + local_rank
            environment = {
                "RANK": number,
                "LOCAL_RANK": local_rank,
                "WORLD_SIZE": nodes * per_node,
                "MASTER_ADDR": address,
                "MASTER_PORT": port,
                "TORCHELASTIC_USE_AGENT_STORE": True,  # the store is this process's
            }
            environment = {**(environment if meets else {}), **self.environment}
            texts = {name: str(value) for name, value in environment.items()}
            start = Start(texts, starter, passes_on, self.backend, init_method, self.timeout)
            received, report = context.Pipe(duplex=False)
            daemon = params.get("daemon", False)
            process = context.Process(target=rank_main, args=(start, report, work), daemon=daemon)
            with signals.blocked():
                process.start()
            report.close()
            self.ranks.append(Rank(number, process, received, _sentinel(process, start_method)))
        return store

    def _wait(self, ranks: list[Rank], received: socket.socket | None) -> None:
        """Until something happens; then act on it.

        Args:
            ranks: not those that run: one that has ended since it was looked at has a sentinel, which says so.
        """
        sources = [rank.sentinel for rank in ranks] + [rank.report for rank in ranks if rank.end is None]
        sources += [received] if received is not None else []
        next_deadline = min((at for at, _ in self._deadlines), default=None)
        wait_s = None if next_deadline is None else max(next_deadline - time.monotonic(), 0.0)
        if received in multiprocessing.connection.wait(sources, wait_s) and received is not None:
            for number in received.recv(64):
                self._forward(number)
        for rank in self.ranks:
            rank.look()
        if any(rank.failed for rank in self.ranks):
            self._end_peers()
        for deadline in [entry for entry in self._deadlines if entry[0] <= time.monotonic()]:
            self._deadlines.remove(deadline)
            deadline[1]()

    def _end_peers(self) -> None:
        """Called whenever something has happened since a rank failed."""
        if not self._peer_failed:
            self._peer_failed = True
            self._after(_PEERS_OF_A_FAILURE_MAY_END_S, self._terminate)

    def _after(self, seconds: float, act: Callable[[], None]) -> None:
        self._deadlines.append((time.monotonic() + seconds, act))

    def _forward(self, number: int) -> None:
        now = time.monotonic()
        if number == signal.SIGTSTP:  # Ctrl-Z: the ranks are in sessions of their own
            self._send(signal.SIGSTOP)
            os.kill(os.getpid(), signal.SIGSTOP)
            self._send(signal.SIGCONT)
        elif number in signals.STOPS and self.stop is not None:
            if now - self._first_stop_at >= signals.FORCE_AFTER_S and self._forced_by is None:
                self._forced_by = number
                self._send(signals.FORCE)
                self._after(_FORCED_RANKS_MAY_END_S, self._kill)
        elif number in signals.SIGNALS:
            if number in signals.STOPS:
                self.stop, self._first_stop_at = number, now
            self._send(number)

    def _send(self, number: int) -> None:
        for rank in self.ranks:
            rank.send(number)

    def _terminate(self) -> None:
        for rank in self.ranks:
            if rank.runs:
                rank.ended_here = True
                rank.send(signal.SIGTERM)
                rank.send(signal.SIGCONT)  # one that is stopped receives nothing else
        self._after(_TERMINATED_RANKS_MAY_END_S, self._kill)

    def _kill(self) -> None:
        for rank in self.ranks:
            if rank.runs:
                rank.ended_here = True
                rank.send(signal.SIGKILL)
                rank.process.join()

    def finish(self) -> None:
        """Exit with the ranks' code, or raise what the first one that failed raised."""
        if self._forced_by is not None:
            sys.exit(128 + signals.treated_as(self._forced_by))
        ended = [(rank, rank.end) for rank in self.ranks if rank.end is not None and rank.end.code != 0]
        if not ended:
            return
        # its peers, which end with a bare 1, may have noticed it before this process did
        cause, end = min(
            ended,
            key=lambda rank_and_end: (
                rank_and_end[0].killed_by is None or self.has_aborted_for_a_peer(rank_and_end[0]),
                rank_and_end[1].code == 1,
                rank_and_end[1].at,
            ),
        )
        if end.code is not None:
            own = [end.code for rank, end in ended if end.code is not None and not rank.ended_here]
            sys.exit(max(own, default=end.code))  # the code of a peer that was ended here is of no interest
        pid = cause.process.pid
        if (number := cause.killed_by) is None:
            text = f"\n\n-- Rank {cause.number} ended with the following error:\n{end.traceback}"
            raise ProcessRaisedException(text, cause.number, pid)
        name = signals.name_of(number)
        text = f"Rank {cause.number} (process {pid}) was killed by {name}."
        raise ProcessExitedException(text, cause.number, pid, exit_code=-number, signal_name=name)

    def has_aborted_for_a_peer(self, rank: Rank) -> bool:
        """Whether a library has ended it after a peer had raised, which is the cause."""
        raised = [peer.end.at for peer in self.ranks if peer.end is not None and peer.end.traceback]
        return rank.killed_by == signal.SIGABRT and rank.end is not None and rank.end.at > min(raised, default=math.inf)


def _sentinel(process: Any, start_method: str) -> int:
    """A file descriptor that is ready when a process has ended; a pidfd, where there is one.

    The sentinel of multiprocessing is a pipe that loader workers hold, too, which may outlive their rank."""
    if start_method != "forkserver" and hasattr(os, "pidfd_open"):
        with contextlib.suppress(OSError):  # an older kernel
            return os.pidfd_open(process.pid)
    return int(process.sentinel)


@contextmanager
def receiving_signals() -> Iterator[socket.socket | None]:
    """A socket from which the numbers of received signals are read; they do nothing else. None outside the main thread.

    A signal that is ignored (``nohup``) stays so.
    """
    if threading.current_thread() is not threading.main_thread():
        yield None
        return
    received, sender = socket.socketpair()
    received.setblocking(False)
    sender.setblocking(False)
    numbers = (*signals.SIGNALS, signal.SIGTSTP)
    handled = [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, lambda number, frame: None) for number in handled}
    descriptor = signal.set_wakeup_fd(sender.fileno(), warn_on_full_buffer=False)
    try:
        yield received
    finally:
        signal.set_wakeup_fd(descriptor)
        for number, handler in before.items():
            signal.signal(number, handler)
        sender.close()
        received.close()


def _start_method() -> str:
    """As Ignite: in a notebook a function cannot be imported by a process that is spawned."""
    return "fork" if "__IPYTHON__" in builtins.__dict__ else "spawn"
