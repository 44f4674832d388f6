"""The ranks watch each other: the error of one ends all of them and is named by all, and so is one that is silent.

Rank 0 hosts a store. There each rank writes twice a second a row that says what it does, and looks for the failure that
ends all of them: what is written first stands, for every rank. Rank 0 reads all rows, and says who is silent and whom
the others wait for; the others read its row. Each rank looks at the processes of its own machine. On one process there
is no watch.
"""

from __future__ import annotations

import contextlib
import faulthandler
import itertools
import json
import logging
import multiprocessing
import os
import select
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import torch.distributed as dist

from ignite_engine.errors import PeerFailed, one_line, raised_by_all_ranks
from ignite_engine.ranks import agreement, signals

logger = logging.getLogger(__name__)

HEARTBEAT_TIMEOUT_S = 60.0
"""A thread cannot say that it lives while native code of the main thread holds Python's lock."""
BEAT_S = 0.5
SILENT_S = 2.0
"""A rank of which nothing is heard for so long, while a collective of its peers has broken, is gone."""
_FIRST_PAUSE_S = 0.002
_CONNECT_S = 30.0
_LONGEST_NOTE = 1000
_LONGEST_TRACE = 20_000
_MAY_RAISE_S = 2.0
_MAY_LEAVE_S = 30.0
_MAY_HEAR_S = 10.0
"""For how long rank 0, whose store ends with its process, waits until the others have heard that it leaves."""
_VERDICT_S = 6.0

_ENDED = "exited without reporting: it was killed, ran out of memory, or crashed in native code"
_SILENT = "gave no sign of life for {:.0f} s: it is stopped or was killed, or its machine or the link to it is down"
_stores: dict[tuple[int, str, int], Any] = {}
"""This process's, by its number, the address and the port. They are kept: to make one torch looks up the names of
addresses, which may take seconds."""
_numbers = itertools.count()


@dataclass(frozen=True)
class Failure:
    """Why all ranks end.

    Attributes:
        line: one line that names the ranks that failed, and how. It is the same on every rank, but where rank 0 is gone
            each gives the last of its heartbeats that it has read.
        ranks: those that failed; empty where none can be named.
        run: the number of the run in which a rank raised; the next one forgets it.
        trace: the traceback of what was raised.
        code: the exit code of ranks that are ended for it.
        kind: ``raised``: the rank may still leave by itself; ``ended``: it has; ``silent``: nothing is heard of it, its
            process is stopped, if it lives; ``stuck``: it lives, and its peers wait for it.
    """

    line: str
    ranks: Sequence[int] = ()
    run: int = 0
    trace: str = ""
    code: int = 1
    kind: Literal["raised", "ended", "silent", "stuck"] = "ended"

    @property
    def raised(self) -> bool:
        return self.kind == "raised"


@dataclass(frozen=True)
class Row:
    """What a rank says of itself.

    Attributes:
        beat: what it does.
        lost: with what a collective of it broke.
        left: how its function has ended.
        code: the exit code that goes with it.
        alone: it has heard that rank 0 has left.
        count: of its rows; a rank that lives never writes the same one twice.
    """

    beat: str = "none"
    lost: str | None = None
    left: str | None = None
    code: int = 0
    alone: bool = False
    count: int = 0


class Rows:
    """What a rank knows of all ranks, and whom it says to have failed.

    Args:
        timeout_s: a rank of which nothing is heard for so long has failed.
    """

    def __init__(self, ranks: int, timeout_s: float) -> None:
        self.rows = [Row() for _ in range(ranks)]
        self.timeout_s = timeout_s
        self._heard_at, self._moved_at, self._whole_at = [0.0] * ranks, [0.0] * ranks, 0.0

    def hear(self, rank: int, row: Row, now: float) -> None:
        """Take a row that was read ``now``, on a clock that stands while this process is stopped."""
        before, self.rows[rank] = self.rows[rank], row
        if row.count != before.count:
            self._heard_at[rank] = now
        if row.beat != before.beat:
            self._moved_at[rank] = now

    def forget(self, now: float) -> None:
        """What broke until ``now`` is past."""
        self._whole_at = now

    def limit_s(self, *, broken: bool) -> float:
        """For how long a rank may be silent, or else has failed; less where a collective has broken."""
        return min(SILENT_S, self.timeout_s) if broken else self.timeout_s

    def verdict(self, heard: Collection[int], ended: Collection[int], now: float) -> Failure | None:
        """Who has failed; None: nobody.

        Args:
            heard: the ranks whose rows are read.
            ended: those whose processes have ended.
        """
        left = [rank for rank in heard if self.rows[rank].left is not None]
        for rank in ended:
            if rank not in left:
                return Failure(f"rank {rank} {_ENDED}. {self._heartbeats([rank])}", [rank])
        present = [rank for rank in heard if rank not in left]
        broken = [rank for rank in present if self.rows[rank].lost is not None]
        if not broken:
            self._whole_at = now
        limit_s, waited_s = self.limit_s(broken=bool(broken)), now - self._whole_at
        if silent := [rank for rank in present if now - self._heard_at[rank] >= limit_s]:
            return self.silent(silent, now)
        if left and waited_s >= BEAT_S:
            how = "; ".join(f"rank {rank} {self.rows[rank].left}" for rank in left)
            code = max(self.rows[rank].code for rank in left)
            # where rank 0 has left no rank knows of all that wait
            waiting = "" if 0 in left else f", while {_named(broken)} waited for it"
            return Failure(f"{how}{waiting}", left, code=code or 1)
        if waited_s >= SILENT_S + BEAT_S and len(heard) == len(self.rows):
            return self._stuck(broken, [rank for rank in present if rank not in broken], now)
        return None

    def silent(self, ranks: list[int], now: float) -> Failure:
        seconds = max(now - self._heard_at[rank] for rank in ranks)
        line = f"{_named(ranks)} {_SILENT.format(seconds)}. {self._heartbeats(ranks)}"
        return Failure(line, ranks, kind="silent")

    def _stuck(self, broken: list[int], others: list[int], now: float) -> Failure:
        """All live, but a collective timed out, or a connection between two of them has ended."""
        what = self.rows[broken[0]].lost
        if not any("timed out" in str(self.rows[rank].lost).lower() for rank in broken):
            line = f"{_named(broken)} lost a connection to a rank that still answers rank 0 ({what})"
            return Failure(f"{line}. {self._heartbeats(broken)}", kind="stuck")
        if not others:
            return Failure(f"the ranks waited for each other ({what}). {self._heartbeats(broken)}", kind="stuck")
        seconds = min(now - self._moved_at[rank] for rank in others)
        line = f"{_named(others)} did not come while {_named(broken)} waited ({what}), and did the same thing for"
        return Failure(f"{line} {seconds:.1f} s. {self._heartbeats(others)}", others, kind="stuck")

    def _heartbeats(self, ranks: list[int]) -> str:
        if len(ranks) == 1:
            return f"Last heartbeat: {self.rows[ranks[0]].beat}"
        return "Last heartbeats: " + "; ".join(f"rank {rank}: {self.rows[rank].beat}" for rank in ranks)


def _named(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else "ranks " + ", ".join(map(str, ranks))


class Watch:
    """Watches the other ranks while it is entered; entering is a collective.

    Args:
        heartbeat_timeout_s: a rank of which nothing is heard for so long has failed.

    Raises:
        ValueError: it is shorter than two heartbeats.

    When a rank fails, each rank logs it in one line and calls those given to :func:`on_failure`. The main thread gets
    :class:`~ignite_engine.errors.PeerFailed` instead of the error of a collective that broke. A rank whose main thread
    does not end within 2 s (30 s if it has raised, or the failed rank has not ended either) is ended with its stack
    logged. A silent process on this machine is killed. A rank of ``multiprocessing`` whose parent was killed is ended.
    """

    def __init__(self, heartbeat_timeout_s: float = HEARTBEAT_TIMEOUT_S) -> None:
        if heartbeat_timeout_s < 2 * BEAT_S:
            raise ValueError(
                f"heartbeat_timeout must be at least {2 * BEAT_S:g} s, as heartbeats are {BEAT_S} s apart, "
                f"got {heartbeat_timeout_s:g}."
            )
        self.rank = agreement.rank()
        self.failure: Failure | None = None
        self.callbacks: list[Callable[[str], None]] = []
        self.ending: str | None = None
        """How the function of this rank ends, if not by an exception."""
        self._rows = Rows(agreement.world_size(), heartbeat_timeout_s)
        self._store: Any = None
        self._pidfds: dict[int, int] = {}
        self._ended = select.poll()
        """Says which of them are of processes that have ended."""
        self._is_alone = False
        self._threads: list[threading.Thread] = []
        self._run = self._count = self._code = 0
        self._position: Callable[[], str] | None = None
        self._watched = threading.current_thread()
        self._parent = multiprocessing.parent_process()
        self._parent_seen = os.getppid()  # of multiprocessing's fork server it is that one
        self._lock = threading.Lock()
        self._news, self._over = threading.Event(), threading.Event()
        self._learned, self._decided, self._told = threading.Event(), threading.Event(), threading.Event()
        self._proposed: Failure | None = None
        self._lost: str | None = None
        self._raised = self._raised_own = self._leaving = False
        self._learned_at = self._end_at = float("inf")
        self._now_s = self._answered_at = 0.0  # on a clock that stands while this process is stopped, by Ctrl-Z say

    # -- the main thread ------------------------------------------------------------------------------------------

    def __enter__(self) -> Watch:
        global current
        try:
            self._connect()
        except (dist.DistError, PeerFailed) as error:
            self._store = None
            if self.rank == 0:
                logger.warning(
                    "The ranks cannot watch each other (%s): what fails on one rank is not named by the others.",
                    one_line(error),
                )
        else:
            self._threads = [threading.Thread(target=work, daemon=True) for work in (self._follow, self._guard)]
            for thread in self._threads:
                thread.start()
        current = self
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        global current
        cause = error if error is None else self.cause_of(error)
        current, self._leaving = None, True
        self._news.set()
        for thread in self._threads:  # the first one may wait for a store that does not answer
            thread.join(_MAY_HEAR_S + _MAY_RAISE_S)
            self._over.set()
        if cause is not None and cause is not error:
            raise cause from error

    def _connect(self) -> None:
        """Meet the others at rank 0's store.

        Raises:
            DistError, PeerFailed: a rank cannot; on all ranks.
        """
        machine = _machine()
        processes = agreement.gather_objects((os.getpid(), machine))
        local = machine is not None and all(its_machine == machine for _, its_machine in processes)
        address = "127.0.0.1" if local else os.environ.get("MASTER_ADDR") or socket.gethostname()

        def meet(name: str, address: str, port: int) -> tuple[str, int]:
            key = (os.getpid(), address, port)
            if key not in _stores:
                waits = {"timeout": timedelta(seconds=_CONNECT_S), "wait_for_workers": False}
                _stores[key] = agreement.STORES.TCPStore(address, port, is_master=self.rank == 0, **waits)
            self._store = agreement.STORES.PrefixStore(name, _stores[key])
            self._say_row()
            return name, int(_stores[key].port)

        name, port = agreement.on_rank_0(lambda: meet(f"watch_{next(_numbers)}", "127.0.0.1", 0))
        agreement.together(lambda: meet(name, address, port) if self.rank else None)
        for rank, (pid, its_machine) in enumerate(processes):
            if rank != self.rank and machine is not None and its_machine == machine:
                with contextlib.suppress(OSError, AttributeError):  # an older kernel, or another system
                    self._pidfds[rank] = os.pidfd_open(pid)
                    self._ended.register(self._pidfds[rank], select.POLLIN)

    def cause_of(self, error: BaseException) -> BaseException:
        """See :func:`cause_of`."""
        if isinstance(error, PeerFailed) or raised_by_all_ranks(error):
            return error
        broken = broken_collective(error) if isinstance(error, Exception) else None
        self._raised, self._raised_own = True, not broken
        self._decided.set()
        if self._end_at != float("inf"):
            self._end_at = time.monotonic() + _MAY_LEAVE_S
        if isinstance(error, SystemExit | KeyboardInterrupt) and self.ending is None:
            self._code = _exit_code(error)
            self.ending = f"{_called(error)}{self._at()}"
        if not isinstance(error, Exception):
            return error
        if self._threads and self.failure is None:
            if broken:
                self._lost = broken
                self._news.set()
                self._learned.wait(_VERDICT_S)
            if self.failure is None:
                self._proposed = own = self._failure_of(error)
                self._news.set()
                if not self._learned.wait(_MAY_RAISE_S):
                    self._learn(own)
        if self.failure is not None:
            self._told.wait(_MAY_RAISE_S)
        if not broken or self.failure is None or (self.failure.raised and self.rank in self.failure.ranks):
            return error
        peer = PeerFailed(self.failure.line, self.failure.code)
        if self.failure.trace:
            peer.add_note(f"On rank {self.failure.ranks[0]}:\n{self.failure.trace}")
        return peer

    @contextmanager
    def run(self, position: Callable[[], str]) -> Iterator[None]:
        """Within it is a run: what a rank raised before is past, since all of them have gone on."""
        outer, self._position = self._position, position
        self._watched = threading.current_thread()
        self._run += 1
        self._proposed = self._lost = None
        self._rows.forget(self._now_s)
        if self.failure is not None and self.failure.raised:
            self.failure, self._end_at = None, float("inf")
            for event in (self._learned, self._told, self._decided):
                event.clear()
        self._raised = self._raised_own = False
        self._news.set()  # the last heartbeat, if this rank is killed before the next
        try:
            yield
        finally:
            self._position = outer

    def _failure_of(self, error: BaseException) -> Failure:
        texts = (str(note) for note in getattr(error, "__notes__", ()))
        notes = "".join(f" ({text.rstrip('.')})" for text in texts if "\n" not in text and len(text) < _LONGEST_NOTE)
        trace = "".join(traceback.format_exception(error))[-_LONGEST_TRACE:]
        line = f"rank {self.rank} failed{self._at()}: {one_line(error)}{notes}"
        return Failure(line, [self.rank], self._run, trace, kind="raised")

    def _at(self) -> str:
        return f" at {self._position()}" if self._position is not None else ""

    # -- the thread that uses the store ---------------------------------------------------------------------------

    def _follow(self) -> None:
        pause_s, leaves_at = _FIRST_PAUSE_S, float("inf")
        while True:
            if leaving := self._leaving:
                leaves_at = min(leaves_at, time.monotonic() + (_MAY_HEAR_S if self.failure is None else 2 * BEAT_S))
            try:
                self._exchange(leaving)
            except dist.DistError:
                if leaving:  # rank 0 has heard it, and has ended
                    break
                self._go_on_alone()
            else:
                known = all(row.alone or row.left is not None for row in self._rows.rows)
                if leaving and (self.rank or known or time.monotonic() >= leaves_at):
                    break
            pause_s = _FIRST_PAUSE_S if self._news.wait(pause_s) else min(2 * pause_s, BEAT_S)
            self._news.clear()
        self._over.set()
        self._kill_silent()
        self._store = None
        for pidfd in self._pidfds.values():
            os.close(pidfd)

    def _exchange(self, leaving: bool) -> None:
        """Say what this rank does, hear what the others do, and whether one has failed.

        Raises:
            DistError: the store is gone.
        """
        over = {pidfd for pidfd, _ in self._ended.poll(0)}
        ended = [rank for rank, pidfd in self._pidfds.items() if pidfd in over]
        if 0 in ended and not self._is_alone:
            self._go_on_alone()
        if self._is_alone:
            ended = [0]
        run, failed = self._run, self.failure.ranks if self.failure is not None else ()
        heard = sorted({0, self.rank, *ended, *failed}) if self.rank else range(len(self._rows.rows))
        self._say_row(leaving)
        for rank, text in zip(heard, self._store.multi_get([f"row_{rank}" for rank in heard]), strict=True):
            self._rows.hear(rank, Row(**json.loads(text)), self._now_s)
        self._answered_at = self._now_s
        verdict = self._rows.verdict(heard, ended, self._now_s) if self.failure is None else None
        proposed = self._proposed or verdict
        written = "" if proposed is None else json.dumps(asdict(proposed))
        if standing := self._store.compare_set(f"failure_{run}", "", written):
            self._learn(Failure(**json.loads(standing)))
        if self.rank and self._rows.rows[0].left is not None and not self._is_alone:
            self._is_alone = True
            self._say_row(leaving)  # rank 0 waits for that
            self._go_on_alone()
        if not self._raised and any(rank in ended or self._rows.rows[rank].left for rank in failed):
            self._end_at = min(self._end_at, time.monotonic() + _MAY_RAISE_S)

    def _say_row(self, leaving: bool = False) -> None:
        self._count += 1
        beat = self._position() if self._position is not None else "outside of run()"
        left = (self.ending or "returned from its function") if leaving else None
        row = Row(beat, self._lost, left, self._code, self._is_alone, self._count)
        self._store.set(f"row_{self.rank}", json.dumps(asdict(row)))

    def _go_on_alone(self) -> None:
        """Rank 0 has left, or its process has ended: nothing more is heard than is known."""
        self._is_alone = True
        self._store = agreement.STORES.HashStore()
        for rank, row in enumerate(self._rows.rows):
            self._store.set(f"row_{rank}", json.dumps(asdict(row)))
        self._news.set()

    # -- the thread that waits for nothing ------------------------------------------------------------------------

    def _guard(self) -> None:
        before = time.monotonic()
        while not self._over.wait(BEAT_S / 2):
            now = time.monotonic()
            self._now_s += min(now - before, BEAT_S)
            before = now
            if self.rank and self._now_s - self._answered_at >= self._rows.limit_s(broken=self._lost is not None):
                self._learn(self._rows.silent([0], self._now_s))
            if now >= self._learned_at + 2 * BEAT_S:  # the others know it, too: what breaks then is no news
                self._kill_silent()
            if self.failure is not None and now >= self._end_at:
                self._end(self.failure)
            self._end_orphan()

    def _end_orphan(self) -> None:
        """A rank of ``mp.spawn`` whose parent was killed ends; nothing else tells it, and its peers wait for it."""
        if self._parent is None or (self._parent.is_alive() and os.getppid() in (self._parent.pid, self._parent_seen)):
            return
        pid, self._parent = self._parent.pid, None
        threading.Thread(target=signals.end_orphan, args=(pid,), name="orphan", daemon=True).start()

    def _learn(self, failure: Failure) -> None:
        with self._lock:
            if self.failure is not None or (failure.raised and failure.run < self._run):
                return
            self.failure, self._lost, self._learned_at = failure, None, time.monotonic()
        if learned is not None:
            learned(failure)
        if not (failure.raised and self.rank in failure.ranks):
            self._end_at = time.monotonic() + (_MAY_LEAVE_S if failure.raised or self._raised else _MAY_RAISE_S)
        if failure.kind in ("silent", "stuck") and not self._raised:
            _write_stack(self._watched)
        # a thread of its own: whatever the main thread holds, the end is not delayed
        threading.Thread(target=self._tell, args=(failure,), name="failure", daemon=True).start()
        self._learned.set()

    def _kill_silent(self) -> None:
        if self.failure is not None and self.failure.kind == "silent":
            for pidfd in [self._pidfds[rank] for rank in self.failure.ranks if rank in self._pidfds]:
                with contextlib.suppress(OSError):
                    signal.pidfd_send_signal(pidfd, signal.SIGKILL)

    def _tell(self, failure: Failure) -> None:
        try:
            if failure.raised and self.rank not in failure.ranks:
                self._decided.wait(BEAT_S)  # where all ranks raise the same, the error of each is enough
            if not (failure.raised and self._raised_own):
                self._say(failure)
        finally:
            self._told.set()

    def _say(self, failure: Failure) -> None:
        dead = () if failure.raised else failure.ranks
        # rank 0, or the first that lives, speaks and writes for all
        speaks = self.rank == next((rank for rank in range(len(self._rows.rows)) if rank not in dead), 0)
        configured = logger.hasHandlers()
        if speaks or configured:
            logger.error("%s", failure.line)
        if speaks and self.rank != 0 and configured:
            print(failure.line, file=sys.stderr, flush=True)  # the log of rank 0 alone is shown on the console
        if configured and failure.trace:
            logger.error("%s", failure.trace.rstrip(), extra={"console": False})
        if speaks:
            for callback in list(self.callbacks):
                callback(failure.line)

    def _end(self, failure: Failure) -> None:
        """End this process, whose main thread waits for a rank that has failed."""

        def say() -> None:
            logger.error("Rank %d did not end by itself.", self.rank, extra={"console": False})
            _write_stack(self._watched)
            time.sleep(0.1)
            for stream in (sys.stdout, sys.stderr):
                stream.flush()

        saying = threading.Thread(target=say, daemon=True)
        saying.start()
        saying.join(1.0)
        for process in multiprocessing.active_children():
            if process.daemon:  # as at any other end; a worker whose dataset never returns would stay
                process.kill()
        os._exit(failure.code)


def _write_stack(thread: threading.Thread) -> None:
    """Have a thread write its stack, the innermost line first, to this rank's log file, or to stderr without one.

    No other thread reads it: in CPython 3.11 both ``sys._current_frames`` and ``faulthandler.dump_traceback`` have
    ended ranks whose threads ran.
    """
    files = [handler for handler in logging.getLogger().handlers if isinstance(handler, logging.FileHandler)]
    file = next((handler.stream for handler in reversed(files) if handler.stream is not None), sys.stderr)
    if thread.ident is not None and thread.is_alive():
        with contextlib.suppress(OSError, ValueError, RuntimeError, AttributeError):  # the file is closed, or is none
            faulthandler.register(signal.SIGUSR2, file, all_threads=False)
            signal.pthread_kill(thread.ident, signal.SIGUSR2)


def _machine() -> tuple[str, int, int] | None:
    """Where the processes can be seen and reached from this one; None: not on Linux, or not to be known."""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return (boot, os.stat("/proc/self/ns/pid").st_ino, os.stat("/proc/self/ns/net").st_ino)
    return None


# -- what happened ----------------------------------------------------------------------------------------------------


def broken_collective(error: BaseException) -> str | None:
    """What torch says of a collective that broke because of a peer; None: the error has another cause."""
    cause: BaseException | None = error
    while cause is not None:
        text = str(cause)
        if isinstance(cause, dist.DistError) or (isinstance(cause, RuntimeError) and "gloo/" in text):
            return text.partition("] ")[2].partition(". ")[0].rstrip(".") if text.startswith("[") else one_line(cause)
        cause = cause.__cause__ or cause.__context__
    return None


def _called(error: SystemExit | KeyboardInterrupt) -> str:
    return f"called sys.exit({error.code!r})" if type(error) is SystemExit else f"was {str(error) or 'interrupted'}"


def _exit_code(error: SystemExit | KeyboardInterrupt) -> int:
    if isinstance(error, KeyboardInterrupt):
        return 128 + signal.SIGINT
    return error.code if isinstance(error.code, int) else int(error.code is not None)


# -- what a run asks, on one process too ------------------------------------------------------------------------------

current: Watch | None = None
"""The one that is entered."""
learned: Callable[[Failure], None] | None = None
"""Called when this rank hears of a failure; for a supervisor that is not one of the ranks."""


def watched(
    heartbeat_timeout_s: float,
    func: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    local_rank: int,
) -> None:
    """Call ``func(local_rank, *args, **kwargs)``, watching the other ranks if there are any; a collective."""
    with watching(heartbeat_timeout_s):
        func(local_rank, *args, **kwargs)


@contextmanager
def watching(heartbeat_timeout_s: float = HEARTBEAT_TIMEOUT_S) -> Iterator[Watch | None]:
    """Watch the other ranks; None on one process. Within another it is that one."""
    if agreement.world_size() == 1:
        yield None
    elif current is not None:
        yield current
    else:
        with Watch(heartbeat_timeout_s) as watch:
            yield watch


@contextmanager
def watched_run(position: Callable[[], str]) -> Iterator[None]:
    """Watch the other ranks during a run.

    Args:
        position: where the run is, as text; called in another thread.
    """
    with watching() as watch, contextlib.nullcontext() if watch is None else watch.run(position):
        yield


@contextmanager
def on_failure(callback: Callable[[str], None]) -> Iterator[None]:
    """Within it, call ``callback(line)`` when a rank fails: in another thread, on one rank that lives."""
    if (watch := current) is None:
        yield
        return
    watch.callbacks.append(callback)
    try:
        yield
    finally:
        watch.callbacks.remove(callback)


def cause_of(error: BaseException) -> BaseException:
    """What to raise for ``error``, of which all ranks are told here: itself, or a :class:`PeerFailed`, chained to it,
    where it is the consequence of another rank's failure."""
    return error if current is None else current.cause_of(error)


def known_failure() -> str | None:
    """The line that names the rank that failed; None: none has, as far as this rank knows."""
    return None if current is None or current.failure is None else current.failure.line


def reason_of(error: BaseException) -> str:
    """Why a run failed, for its summary; on several ranks it names the one that did."""
    if isinstance(error, PeerFailed):
        return str(error)
    if (line := known_failure()) is not None:
        return line
    if (watch := current) is not None and watch.ending is not None:
        return f"rank {watch.rank} {watch.ending}"
    return f"{type(error).__name__}: {error}"
