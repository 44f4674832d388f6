"""Starts processes as ranks; after a signal the parent waits until they have saved, and exits with their code."""

from __future__ import annotations

import builtins
import contextlib
import logging
import os
import pickle
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from multiprocessing import resource_tracker
from multiprocessing.connection import wait
from pathlib import Path
from types import FrameType
from typing import Any

import ignite.distributed as idist
from torch.multiprocessing.spawn import (
    ProcessException,
    ProcessExitedException,
    ProcessRaisedException,
    start_processes,
)

from ignite_engine.errors import by_name, check_type
from ignite_engine.ranks import agreement, signals
from ignite_engine.ranks.exchange import listening
from ignite_engine.ranks.joining import Start, Work, is_launched, joined, rank_main
from ignite_engine.ranks.watch import HEARTBEAT_TIMEOUT_S, watching

logger = logging.getLogger(__name__)

SUPERVISORS = {"restarts": "ignite_engine.ext.recovery.supervisor:Supervisor"}
"""Supervisors that restart ranks, by the argument of ``Parallel`` that selects them."""
START_METHOD = "fork" if "__IPYTHON__" in builtins.__dict__ else "spawn"
"""As Ignite's: in a notebook a function cannot be imported by a process that is spawned."""
_FORCED_RANKS_MAY_END_S = 5.0
_PEERS_OF_A_FAILURE_MAY_END_S = 5.0
_TERMINATED_RANKS_MAY_END_S = 30.0
_POLL_S = 0.2


class Parallel:
    """Start the ranks of one machine, or join those that torchrun or SLURM has started; use it as ``idist.Parallel``.

    Args:
        backend: of the process group; None: there is none, as there is one process.
        nproc_per_node: how many ranks are started here; under torchrun it has no effect. None: none are.
        start_method: how, ``fork`` or ``spawn``. None: ``spawn``, and ``fork`` in a notebook and with ``restarts``.
        timeout: how long a rank waits for another one; seconds or a timedelta. None: torch's own (30 min on gloo, 10
            min on nccl).
        heartbeat_timeout: seconds without a heartbeat of a rank, after which all ranks end.
        restarts: how often in an hour all ranks may be started again, after one was killed by a signal or hangs. The
            function begins anew: ``checkpoint.resume()`` in it continues the run. None: never.

    From the first line on, a signal ends a process with code 128 + n: not with 0, nor with a traceback. Groups end with
    the ``with`` block. A rank whose launcher has died (this parent, or torchrun's agent) saves and ends, as on SIGTERM;
    on Linux. Warnings are on stderr once, from rank 0, where logging is not set up; each rank's log has its own.

    Where it starts the ranks itself: the parent hosts the store at which the ranks meet, on a port that is free, so
    that two runs can share a machine and rank 0 may die. SIGINT, SIGTERM, SIGHUP and SIGUSR1 to the parent are passed
    on to every rank, and the parent waits for them; Ctrl-Z stops them until the parent goes on. Each rank leads a
    session, so that a terminal's signals reach the parent alone, and does not count stops: a second one to the parent,
    0.5 s or more after the first, ends all within 5 s. In another thread than the main one the parent passes nothing
    on, and the ranks stay in its session.
    A rank that ends with ``SystemExit`` passes its code to the parent, which exits with it once every rank is done.
    When a rank fails (an exception, code 1, a signal), the others have 5 s to end by themselves, then they get SIGTERM,
    and SIGKILL after 30 s more.

    Raises:
        TypeError, ValueError: an argument is not what it should be.
        LaunchError: (when it is entered, or run) the ranks cannot meet; or this process cannot fork them. One line.
    """

    def __init__(
        self,
        backend: str | None = None,
        nproc_per_node: int | None = None,
        *,
        start_method: str | None = None,
        timeout: float | timedelta | None = None,
        heartbeat_timeout: float = HEARTBEAT_TIMEOUT_S,
        restarts: int | None = None,
    ) -> None:
        if backend is not None and backend not in idist.available_backends():
            raise ValueError(f"backend must be one of {', '.join(idist.available_backends())}, got {backend!r}.")
        if nproc_per_node is not None and (backend is None or nproc_per_node < 1):
            raise ValueError(f"nproc_per_node must be at least 1, and needs a backend, got {nproc_per_node}.")
        if nproc_per_node is not None and "TORCHELASTIC_RUN_ID" in os.environ:
            # each of torchrun's ranks would start a run of its own, all of them in one folder
            started = os.environ.get("LOCAL_WORLD_SIZE")
            if started != str(nproc_per_node) and os.environ.get("RANK", "0") == "0":
                logger.warning(
                    "nproc_per_node=%d has no effect: torchrun has started %s on this machine.", nproc_per_node, started
                )
            nproc_per_node = None
        self._backend, self._count, self._start_method = backend, nproc_per_node, start_method or START_METHOD
        self._timeout = timeout if isinstance(timeout, timedelta | None) else timedelta(seconds=timeout)
        self._heartbeat_timeout_s = heartbeat_timeout
        self._within = contextlib.ExitStack()
        self._supervisor: Any = None
        if restarts is not None:
            check_type("start_method", start_method, start_method in (None, "fork"), "fork, which restarts need")
            supervisor = by_name("Parallel's", "restarts", SUPERVISORS)(restarts)
            if not is_launched():
                self._supervisor = supervisor
            elif os.environ.get("RANK", "0") == "0":
                logger.warning("restarts has no effect: the launcher that started this rank restarts it.")

    def __enter__(self) -> Parallel:
        if self._backend is not None and self._count is None and self._supervisor is None:
            if "TORCHELASTIC_RUN_ID" in os.environ:  # another launcher may end before its processes
                signals.end_with_parent()
            self._within.enter_context(joined(self._backend, self._timeout))
        return self

    def __exit__(self, *error: object) -> None:
        self._within.close()

    def run(self, func: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """Call ``func(local_rank, *args, **kwargs)`` on every rank, with ``restarts`` until it has ended there.

        Raises:
            SystemExit: a rank ended with one; its code, the largest if they differ. Or a signal ended it.
            ProcessRaisedException: (of torch) the error of the rank that failed first, with its traceback.
            ProcessExitedException: (of torch) a rank was killed; with ``restarts`` the message says why the ranks are
                not started again.
        """
        work = partial(_watched, self._heartbeat_timeout_s, func, args, kwargs)
        try:
            if self._supervisor is not None:
                self._supervisor.run(self._backend, self._count or 1, self._timeout, work)
            elif self._count is None:
                work(idist.get_local_rank())
            else:
                ranks = Ranks(self._backend, self._count, self._timeout, self._start_method)
                with ranks.passing_signals_on():
                    ranks.attempt(work)
                ranks.finish()
        except ProcessException as error:  # its message says what happened, not the way from there to here
            raise error.with_traceback(None) from None


def _watched(timeout_s: float, func: Any, args: Any, kwargs: Any, local_rank: int) -> None:
    with watching(timeout_s):
        func(local_rank, *args, **kwargs)


class Ranks:
    """The ranks on this machine, from their start to their end.

    Args:
        backend: None: they have no process group, as there is one rank.

    Attributes:
        processes: of the ranks.
        stop: the first signal of the user that stops them; None: none has come.
    """

    def __init__(self, backend: str | None, count: int, timeout: timedelta | None, start_method: str) -> None:
        self.processes: list[Any] = []
        self.stop: int | None = None
        self._backend, self._count, self._timeout, self._start_method = backend, count, timeout, start_method
        self._error_files: list[Path] = []
        self._ended_here: set[int] = set()
        self._stopped_at = 0.0
        self._forced_by: int | None = None
        self._forced_at = self._failed_at = float("inf")

    def attempt(self, work: Work, **environment: object) -> None:
        """Start the ranks, and return when all of them have ended."""
        self._ended_here, self._failed_at = set(), float("inf")
        try:
            store = self._start(work, environment)  # there as long as the ranks run
            if self.stop is not None:
                self._send(self.stop)  # it has come before they could get it
            while running := [process for process in self.processes if process.exitcode is None]:
                wait([process.sentinel for process in running], _POLL_S)  # a process that outlives it may hold it
                self._end_late()
            del store
        finally:
            self._kill()

    def _start(self, work: Work, environment: Mapping[str, object]) -> Any:
        """Returns:
        The store at which the ranks meet, if they do.
        """
        server = None if self._backend is None else listening()
        if server is not None:
            place = {"WORLD_SIZE": self._count, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": server.getsockname()[1]}
            # the store is this process's
            environment = {**place, "TORCHELASTIC_USE_AGENT_STORE": True, **environment}
        texts = {name: str(value) for name, value in environment.items()}
        start = Start(texts, _is_main_thread(), self._backend, self._timeout)
        resource_tracker.ensure_running()  # its start lets signals in again
        with signals.blocked():
            started = start_processes(rank_main, (start, work), self._count, False, False, self._start_method)
            self.processes, self._error_files = started.processes, [Path(name) for name in started.error_files]
        if server is None:
            return None
        # the ranks wait meanwhile: its thread may hold a lock of the C library, which a fork would find held for ever
        meeting = {"is_master": True, "wait_for_workers": False, "master_listen_fd": server.detach()}
        return agreement.STORES.TCPStore("127.0.0.1", place["MASTER_PORT"], **meeting)

    @contextmanager
    def passing_signals_on(self) -> Iterator[None]:
        """Within it signals to this process go to the ranks alone; outside the main thread none are passed on.

        A signal that is ignored (``nohup``) stays so.
        """
        numbers = (*signals.SIGNALS, signal.SIGTSTP) if _is_main_thread() else ()
        handled = [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]
        before = {number: signal.signal(number, self._pass_on) for number in handled}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if number == signal.SIGTSTP:  # Ctrl-Z: the ranks are in sessions of their own
            self._send(signal.SIGSTOP)
            os.kill(os.getpid(), signal.SIGSTOP)
            self._send(signal.SIGCONT)
        elif number == signal.SIGUSR1:
            self._send(number)
        elif self.stop is None:
            self.stop, self._stopped_at = number, now
            self._send(number)
        elif now - self._stopped_at >= signals.FORCE_AFTER_S and self._forced_by is None:
            self._forced_by, self._forced_at = number, now
            self._send(signals.FORCE)

    def _end_late(self) -> None:
        """End ranks that have had their time since a second stop, or since another one has failed."""
        now = time.monotonic()
        if any(process.exitcode == 1 or (process.exitcode or 0) < 0 for process in self.processes):
            self._failed_at = min(self._failed_at, now)
            self._end_peers(now - self._failed_at)
        if now >= self._forced_at + _FORCED_RANKS_MAY_END_S:
            self._kill()

    def _end_peers(self, failed_s: float) -> None:
        """End the other ranks; called repeatedly after a rank has failed."""
        if failed_s >= _PEERS_OF_A_FAILURE_MAY_END_S + _TERMINATED_RANKS_MAY_END_S:
            self._kill()
        elif failed_s >= _PEERS_OF_A_FAILURE_MAY_END_S and not self._ended_here:
            self._ended_here.update(self._send(signal.SIGTERM))
            self._send(signal.SIGCONT)  # one that is stopped receives nothing else

    def _send(self, number: int) -> list[int]:
        """Send a signal to the running ranks; returns which."""
        running = [rank for rank, process in enumerate(self.processes) if process.exitcode is None]
        for rank in running:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.processes[rank].pid, number)
        return running

    def _kill(self) -> None:
        killed = self._send(signal.SIGKILL)
        self._ended_here.update(killed)
        for rank in killed:
            self.processes[rank].join()

    @property
    def killed(self) -> dict[int, int]:
        """Ranks that a signal has ended which asks for no stop and which is not from here, and that signal.

        Not those that a library has ended after a peer had raised, which is the cause.
        """
        codes = {rank: process.exitcode or 0 for rank, process in enumerate(self.processes)}
        by_others = {rank: -code for rank, code in codes.items() if code < 0 and rank not in self._ended_here}
        found = {rank: number for rank, number in by_others.items() if number not in signals.STOPS}
        is_cause = not any(path.exists() for path in self._error_files)
        return {rank: number for rank, number in found.items() if is_cause or number != signal.SIGABRT}

    @property
    def codes(self) -> list[int]:
        """The exit codes of ranks that were not ended here; one that was stopped before it trained has the signal's."""
        found = [process.exitcode for rank, process in enumerate(self.processes) if rank not in self._ended_here]
        return [code if code >= 0 else 128 + signals.treated_as(-code) for code in found]

    def finish(self) -> None:
        """Exit with the ranks' code, or raise what the first one that failed raised."""
        if self._forced_by is not None:
            sys.exit(128 + signals.treated_as(self._forced_by))
        for rank, number in self.killed.items():
            pid, name = self.processes[rank].pid, signals.name_of(number)
            text = f"Rank {rank} (process {pid}) was killed by {name}."
            raise ProcessExitedException(text, rank, pid, exit_code=-number, signal_name=name)
        if raised := [path for path in self._error_files if path.exists()]:
            first = min(raised, key=lambda path: path.stat().st_mtime_ns)
            rank, trace = self._error_files.index(first), pickle.loads(first.read_bytes())
            for path in raised:
                path.unlink()
            text = f"\n\n-- Rank {rank} ended with the following error:\n{trace}"
            raise ProcessRaisedException(text, rank, self.processes[rank].pid)
        if code := max(self.codes, default=1):
            sys.exit(code)


def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
