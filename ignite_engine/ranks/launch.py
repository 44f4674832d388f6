"""``idist.Parallel`` whose parent waits after a signal until its ranks have saved, and exits with their code."""

from __future__ import annotations

import builtins
import contextlib
import itertools
import logging
import math
import multiprocessing
import multiprocessing.connection
import os
import secrets
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

import ignite.distributed as idist
import torch.distributed as dist
from ignite.distributed.launcher import Parallel as IgniteParallel
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException

from ignite_engine import devices
from ignite_engine.errors import LaunchError, PeerFailed
from ignite_engine.ranks import agreement, signals
from ignite_engine.ranks.watching import HEARTBEAT_TIMEOUT_S, watched

logger = logging.getLogger(__name__)

_stores: Any = dist  # they are documented, but not exported for type checkers

_meetings = itertools.count()  # each in the same place on all ranks of torchrun

_FORCED_RANKS_MAY_END_S = 5.0
_PEERS_OF_A_FAILURE_MAY_END_S = 5.0
_TERMINATED_RANKS_MAY_END_S = 30.0
_AGENT_MAY_ANSWER_S = 3.0
_FIRST_POLL_S, _POLL_S = 0.001, 0.02
_FINAL_CODES = (2, 128 + signal.SIGINT, 128 + signal.SIGTERM)
"""Exit codes after which another attempt would end the same: a wrong config or arguments, and a stop."""


class Parallel(IgniteParallel):
    """Launch a function on one process or many; arguments and use are those of ``idist.Parallel``.

    Args:
        timeout: how long a rank waits for another one, in every group, the votes' included; seconds or a timedelta.
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
    parent are forwarded to every rank, and the parent waits for them; what it forwards is never taken for a second
    signal of the user. A second stop signal to the parent, 0.5 s or more after the first, ends them within 5 s.
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
                stack.enter_context(signals.ending_the_process())
                torchrun = "TORCHELASTIC_RUN_ID" in os.environ  # another launcher may end before its processes
                stack.enter_context(signals.listening(os.getppid() if torchrun else None))
                self._attempt = _connect(self.backend, self.init_method, self._timeout)
                stack.callback(_disconnect)
                stack.enter_context(_warnings_said_once())
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
                watched(idist.get_local_rank(), func, self._heartbeat_timeout_s, *args, **kwargs)
            except SystemExit as end:
                if self._attempt is not None and end.code in _FINAL_CODES:
                    self._attempt.set(f"code_{agreement.rank()}", str(end.code))
                raise
        else:
            assert self.backend is not None
            watching = (func, self._heartbeat_timeout_s, *args)
            Ranks(self.backend, self._spawn_params, self._timeout).run(watched, watching, kwargs)

    @property
    def _is_ours(self) -> bool:
        """Whether torch connects the ranks; Ignite launches the other kinds, and a process without a backend."""
        return self.backend is not None and dist.is_available() and dist.is_backend_available(self.backend)


def is_launched() -> bool:
    """Whether a launcher such as torchrun or SLURM has started this process as one rank of several."""
    return "RANK" in os.environ or int(os.environ.get("SLURM_NTASKS", "1")) > 1


# -- meeting the other ranks ------------------------------------------------------------------------------------------


def _connect(backend: str, init_method: str | None, timeout: timedelta | None) -> Any:
    """Join the other ranks, as the environment says; ``ignite.distributed`` takes the group over.

    Returns:
        Under torchrun the store of this attempt of its ranks, else None.

    Raises:
        LaunchError: it cannot be.
        SystemExit: torchrun has started ranks again that all of them had ended for good.
    """
    for name in (
        "auto_model",
        "auto_dataloader",
    ):  # Ignite gives a logger that is known no handler and level of its own
        logging.getLogger(f"ignite.distributed.auto.{name}")
    if dist.is_initialized():
        raise LaunchError(
            "This process has a process group already, of another Parallel or of its own: call the function without "
            "Parallel, or destroy the group before."
        )
    options: dict[str, Any] = {} if timeout is None else {"timeout": timeout}
    with signals.killing_the_process(), _one_line_where_they_cannot_meet():
        store = _store(options) if init_method in (None, "env://") else None
        if store is None:  # as torch and Ignite do it, under SLURM for instance
            idist.initialize(backend, init_method=init_method, **options)
            return None
        rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        local_rank = int(os.environ.setdefault("LOCAL_RANK", "0"))
        try:
            devices.set_current(local_rank, backend)
        except ValueError as error:
            raise LaunchError(str(error)) from None
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, **options)
        slurm = os.environ.pop("SLURM_JOB_ID", None)  # or Ignite takes SLURM's local rank: 0 on all of torchrun's
        idist.sync()
        if slurm is not None:
            os.environ["SLURM_JOB_ID"] = slurm
    return store if "TORCHELASTIC_RUN_ID" in os.environ else None


def _store(options: dict[str, Any]) -> Any:
    """Where ranks meet that torchrun or this module started, or a process alone; None: it is to be found by torch."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        if "TORCHELASTIC_RUN_ID" in os.environ:
            _check_agent_lives()
        store = _stores.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False, **options)
        # torch's own rendezvous keeps the keys of all groups in one place: a rank could meet one of them that is dead
        store = _stores.PrefixStore(f"meeting_{next(_meetings)}", store)
        rank = int(os.environ["RANK"])
        attempt = _part_of_this_attempt(store, rank, int(os.environ["WORLD_SIZE"]))
        _end_as_before(attempt, rank)
        return attempt
    return None if {"RANK", "WORLD_SIZE", "SLURM_JOB_ID"} & os.environ.keys() else _stores.HashStore()


def _part_of_this_attempt(store: Any, rank: int, world_size: int) -> Any:
    """The part of a store that ranks of torchrun's earlier attempts do not know.

    Each of torchrun's agents counts restarts for itself, so the count is no name for an attempt. Rank 0 draws a name. A
    rank asks for it under a name of its own, new in each attempt, so that it is not answered by a rank 0 that is dead.

    Raises:
        LaunchError: a rank has not asked within the store's timeout; rank 0 names it.
    """
    name = secrets.token_hex(8)
    if rank > 0:
        store.set(f"question_{rank}", name)
        attempt = store.get(f"answer_{name}").decode()
        store.set(f"{attempt}/rank_{rank}", "")
        return _stores.PrefixStore(attempt, store)
    missing, deadline = list(range(1, world_size)), time.monotonic() + store.timeout.total_seconds()
    pause_s = _FIRST_POLL_S
    while missing:
        for other_rank in missing:
            if store.check([f"question_{other_rank}"]):  # it may be that of a dead rank: another one will follow
                store.set(f"answer_{store.get(f'question_{other_rank}').decode()}", name)
        missing = [other_rank for other_rank in missing if not store.check([f"{name}/rank_{other_rank}"])]
        if missing and time.monotonic() >= deadline:
            ranks = ", ".join(map(str, missing))
            raise LaunchError(
                f"The ranks cannot meet: of {world_size} ranks these did not come within "
                f"{store.timeout.total_seconds():g} s: {ranks}. See why in their logs."
            )
        time.sleep(pause_s if missing else 0.0)
        pause_s = min(2 * pause_s, _POLL_S)
    attempt = _stores.PrefixStore(name, store)
    attempt.set("code_before", str(_code_of_last_attempt(store)))
    store.set("last_attempt", f"{name} {world_size}")
    return attempt


def _code_of_last_attempt(store: Any) -> int:
    """With which all ranks of torchrun's attempt before this one have ended for good; 0: they have not."""
    if not store.check(["last_attempt"]):
        return 0
    name, ranks = store.get("last_attempt").decode().split()
    last, keys = _stores.PrefixStore(name, store), [f"code_{rank}" for rank in range(int(ranks))]
    return max(int(last.get(key)) for key in keys) if last.check(keys) else 0


def _end_as_before(attempt: Any, rank: int) -> None:
    """torchrun starts its ranks again after any code but 0, also where they were stopped: then they end at once.

    Raises:
        SystemExit: with the code of the attempt before this one.
    """
    if not (code := int(attempt.get("code_before"))):
        return
    if rank == 0:
        logger.warning(
            "torchrun has started the ranks again, which had all ended with code %d (%s): they end at once. "
            "--max-restarts is for ranks that fail; a signal to torchrun itself starts none again.",
            *(code, "wrong config or arguments" if code == 2 else "a stop"),
        )
    sys.exit(code)


def _check_agent_lives() -> None:
    """Refuse to wait for torchrun's store where nobody listens: it was there before its ranks, so it is gone.

    A rank whose torchrun was killed before the rank's first line cannot know that by its parent's process id.

    Raises:
        LaunchError: the port is closed, 3 s long.
    """
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    until = time.monotonic() + _AGENT_MAY_ANSWER_S
    while True:
        try:
            socket.create_connection((address, port), timeout=_AGENT_MAY_ANSWER_S).close()
            return
        except ConnectionRefusedError as error:
            if time.monotonic() >= until:
                raise LaunchError(
                    f"The ranks cannot meet at {address}, port {port}: torchrun, which listened there, is gone."
                ) from error
            time.sleep(0.1)
        except OSError:  # torch's own attempt says why
            return


def _disconnect() -> None:
    agreement.forget_groups()
    idist.finalize()


@contextmanager
def _warnings_said_once() -> Iterator[None]:
    """Ranks but the first leave warnings to their logs, if there are any; without, errors alone are on stderr."""
    last = logging.lastResort
    if agreement.rank() == 0 or last is None:
        yield
        return
    level = last.level
    last.setLevel(logging.ERROR)
    logging.captureWarnings(True)
    try:
        yield
    finally:
        logging.captureWarnings(False)
        last.setLevel(level)


@contextmanager
def _one_line_where_they_cannot_meet(address: str | None = None, port: int | None = None) -> Iterator[None]:
    try:
        yield
    except dist.DistNetworkError as error:
        where = f"{address or os.environ.get('MASTER_ADDR')}, port {port or os.environ.get('MASTER_PORT')}"
        in_use = "EADDRINUSE" in str(error)
        reason = "the port is in use" if in_use else str(error).splitlines()[0].rstrip(".")
        remedy = "end what uses it, or give another port (master_port, or MASTER_PORT)"
        raise LaunchError(f"The ranks cannot meet at {where}: {reason}{'; ' + remedy if in_use else ''}.") from error


# -- ranks that are spawned here --------------------------------------------------------------------------------------


class _Place:
    """The environment in which a rank meets the others, and the process that starts it.

    It is the first of our own objects that a rank unpickles, after its imports: there it lets signals in, which the
    parent blocks for the processes it starts, or an import would end with a traceback.

    Args:
        starter: its process id; None: that of multiprocessing's fork server, which only the rank can see. A parent that
            was killed before the rank's first line is not the rank's parent there any more.
    """

    def __init__(self, environment: dict[str, str], starter: int | None) -> None:
        self.environment, self.starter = environment, starter

    def __reduce__(self) -> tuple[Any, ...]:
        return _place_in_rank, (self.environment, self.starter)


def _place_in_rank(environment: dict[str, str], starter: int | None) -> _Place:
    signals.let_signals_in()
    return _Place(environment, starter)


@dataclass(frozen=True)
class _End:
    """How a rank ended.

    Attributes:
        code: for the parent to exit with; None: it raised, or was killed.
        at: seconds since the epoch.
        traceback: of what it raised.
        interrupted: a signal ended it, outside of training; peers may wait for it to connect, which no error ends.
    """

    code: int | None
    at: float
    traceback: str = ""
    interrupted: bool = False


def _rank_main(
    place: _Place,
    connection: tuple[str | None, str | None, timedelta | None],
    report: Any,
    func: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> None:
    signal.set_wakeup_fd(-1)  # a forked rank has its parent's
    signals.let_signals_in()  # and has unpickled nothing
    os.environ.update(place.environment)
    code: int | None = 0
    text = ""
    interrupted = _never
    try:
        with signals.ending_the_process() as interrupted, signals.listening(place.starter or os.getppid()):
            signals.receive_forwarded()
            if connection[0] is not None:
                _connect(*connection)  # type: ignore[arg-type]  # it is not None
            try:
                with _warnings_said_once():
                    func(int(os.environ.get("LOCAL_RANK", "0")), *args, **kwargs)
            finally:
                signals.ignore_all()
                agreement.forget_groups()
            idist.finalize()
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr, flush=True)
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except KeyboardInterrupt:
        code = 128 + signal.SIGINT
    except PeerFailed as error:  # which is in the log; the rank that failed reports why
        code = error.code
    except Exception:
        code, text = None, traceback.format_exc()
    # a code is not the process's own exit status: none of its peers is ended because of it, they may be saving
    with contextlib.suppress(OSError):  # the parent is gone
        report.send(_End(code, time.time(), text, interrupted()))
    if code is None:
        sys.exit(1)


def _never() -> bool:
    return False


@dataclass
class _Rank:
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
    end: _End | None = None
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
                stopped = signals.origin(-code) in signals.STOPS  # before it trained
                code = 128 + signals.treated_as(-code) if stopped else None
            self.end = _End(code, time.time())

    @property
    def failed(self) -> bool:
        """Its peers cannot go on: it raised, was killed or interrupted, or exited unexpectedly."""
        if self.end is None:
            return False
        return self.end.code is None or self.end.interrupted or self.process.exitcode not in (None, 0)

    def send(self, number: int) -> None:
        if self.runs:
            os.kill(self.process.pid, number)


class Ranks:
    """The ranks of this machine, from their start until all have ended.

    Args:
        backend: None: they have no process group, as there is one rank.
        params: ``idist.Parallel``'s for processes that it starts; without ``nproc_per_node`` one rank that no other
            meets.
        environment: of every rank, in addition.

    Attributes:
        ranks: as they are known now.
        stop: the first signal of the user that stops them; None: none has come.
    """

    def __init__(
        self,
        backend: str | None,
        params: Mapping[str, Any],
        timeout: timedelta | None,
        environment: Mapping[str, object] | None = None,
    ) -> None:
        self._backend, self._params, self._timeout = backend, params, timeout
        self._environment = environment or {}
        self.ranks: list[_Rank] = []
        self.stop: int | None = None
        self._first_stop_at = 0.0
        self._forced_by: int | None = None
        self._deadlines: list[tuple[float, Callable[[], None]]] = []
        self._peer_failed = False

    def run(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        with receiving_signals() as received:
            self.attempt(func, args, kwargs, received)
        self.finish()

    def attempt(
        self,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        received: socket.socket | None,
    ) -> None:
        """Start the ranks, and return when all of them have ended.

        Args:
            received: of :func:`receiving_signals`.
        """
        try:
            store = self._start(func, args, kwargs)  # the ranks meet there as long as they run
            while left := [rank for rank in self.ranks if not rank.over]:
                self._wait(left, received)
            del store
        finally:
            self._kill()

    def _start(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        params = self._params
        nodes, node = params.get("nnodes", 1), params.get("node_rank", 0)
        local_ranks = params.get("local_ranks") or range(params.get("nproc_per_node") or 1)
        address, port = params.get("master_addr", "127.0.0.1"), params.get("master_port", 0)
        init_method, store = params.get("init_method"), None
        meets = params.get("nproc_per_node") is not None
        if meets and init_method in (None, "env://") and node == 0:
            with _one_line_where_they_cannot_meet(address, port):
                store = _stores.TCPStore(address, port, is_master=True, wait_for_workers=False)
            port = store.port
        start_method = params.get("start_method", _start_method())
        context: Any = multiprocessing.get_context(start_method)
        starter = None if start_method == "forkserver" else os.getpid()
        resource_tracker.ensure_running()  # its start lets signals in again
        for number, local_rank in enumerate(local_ranks, start=node * len(local_ranks)):
            environment = {
                "RANK": number,
                "LOCAL_RANK": local_rank,
                "WORLD_SIZE": nodes * len(local_ranks),
                "MASTER_ADDR": address,
                "MASTER_PORT": port,
                "TORCHELASTIC_USE_AGENT_STORE": True,  # the store is this process's
            }
            environment = {**(environment if meets else {}), **self._environment}
            place = _Place({name: str(value) for name, value in environment.items()}, starter)
            received, report = context.Pipe(duplex=False)
            process = context.Process(
                target=_rank_main,
                args=(place, (self._backend, init_method, self._timeout), report, func, args, kwargs),
                daemon=params.get("daemon", False),
            )
            with signals.blocked():
                process.start()
            report.close()
            self.ranks.append(_Rank(number, process, received, self._sentinel(process)))
        return store

    def _sentinel(self, process: Any) -> int:
        return int(process.sentinel)

    def _wait(self, ranks: list[_Rank], received: socket.socket | None) -> None:
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
        for deadline in [each for each in self._deadlines if each[0] <= time.monotonic()]:
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
        if number not in signals.SIGNALS:
            return
        now = time.monotonic()
        if number in signals.STOPS:
            if self.stop is None:
                self.stop, self._first_stop_at = number, now
            elif now - self._first_stop_at >= signals.FORCE_AFTER_S and self._forced_by is None:
                self._forced_by = number
                self._after(_FORCED_RANKS_MAY_END_S, self._kill)
        for rank in self.ranks:
            rank.send(signals.FORWARDED[number])

    def _terminate(self) -> None:
        for rank in self.ranks:
            if rank.runs:
                rank.ended_here = True
                rank.send(signal.SIGKILL if _is_stopped(rank.process.pid) else signal.SIGTERM)
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
            key=lambda each: (
                each[0].killed_by is None or self.has_aborted_for_a_peer(each[0]),
                each[1].code == 1,
                each[1].at,
            ),
        )
        if end.code is not None:
            own = [end.code for rank, end in ended if end.code is not None and not rank.ended_here]
            sys.exit(max(own, default=end.code))  # that of a peer which was ended here is of no interest
        pid = cause.process.pid
        if (number := cause.killed_by) is None:
            text = f"\n\n-- Rank {cause.number} ended with the following error:\n{end.traceback}"
            raise ProcessRaisedException(text, cause.number, pid)
        name = signals.name_of(number)
        text = f"Rank {cause.number} (process {pid}) was killed by {name}."
        raise ProcessExitedException(text, cause.number, pid, exit_code=-number, signal_name=name)

    def has_aborted_for_a_peer(self, rank: _Rank) -> bool:
        """Whether a library has ended it after a peer had raised, which is the cause."""
        raised = [peer.end.at for peer in self.ranks if peer.end is not None and peer.end.traceback]
        return rank.killed_by == signal.SIGABRT and rank.end is not None and rank.end.at > min(raised, default=math.inf)


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
    handled = [number for number in signals.SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
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


def _is_stopped(pid: int) -> bool:
    """Whether a process is stopped (SIGSTOP, Ctrl-Z): it would not receive SIGTERM. False where it is not known."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "Tt"
    except OSError:
        return False


def free_port() -> int:
    """A TCP port of this machine that is free now, for a launcher that needs one in advance."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
