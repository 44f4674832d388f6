"""The ranks watch each other: an error or the silence of one rank ends all of them, and all name it.

All have a row in the store at which they met. Each writes its own twice a second and reads that of the next rank, or
those of all where a collective of its own has broken. Who finds that a rank has failed writes it into the
store: what is written first stands, for every rank. On one process there is no watch.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import logging
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Literal

import torch.distributed as dist

from ignite_engine.errors import PeerFailed, one_line, raised_by_all_ranks
from ignite_engine.ranks import agreement

logger = logging.getLogger(__name__)

HEARTBEAT_TIMEOUT_S = 60.0
"""The default time without a heartbeat after which a rank has failed; native code may hold Python's lock long."""
BEAT_S = 0.5
SILENT_S = 2.0
"""A rank that is silent for so many seconds while a collective of its peers is broken is lost."""
_LONGEST_NOTE = 1000
_MAY_RAISE_S = 2.0
_MAY_LEAVE_S = 30.0
_VERDICT_S = 6.0
_SILENT = (
    "gave no sign of life for {:.0f} s: it was killed, ran out of memory, crashed in native code or is stopped, or its "
    "machine or the link to it is down"
)
_NO_STORE = "rank 0, or the launcher, is gone or stopped: the store of the ranks does not answer"


@dataclass(frozen=True)
class Failure:
    """The failure for which all ranks end.

    Attributes:
        line: one line that names the ranks that failed, and how.
        ranks: those that failed; empty where none can be named.
        kind: ``raised``: the rank may still leave by itself; ``left``: its function has ended; ``lost``: it is silent,
            or its peers wait for it.
    """

    line: str
    ranks: Sequence[int] = ()
    kind: Literal["raised", "left", "lost"] = "lost"


@dataclass(frozen=True)
class Row:
    """The state of a rank, as it writes it into the store.

    Attributes:
        beat: what it does, or how its function has ended.
        lost: with what a collective of it broke.
        left: its function has ended.
        said_at: on a clock of its own; a rank that lives never writes the same row twice.
    """

    beat: str
    lost: str | None = None
    left: bool = False
    said_at: float = 0.0


def verdict(
    rows: Mapping[int, Row], silent_s: Mapping[int, float], broken_s: float | None, limit_s: float
) -> Failure | None:
    """Which of the ranks that wrote ``rows`` has failed; None: none.

    Args:
        silent_s: for how long nothing new was heard of each.
        broken_s: for how long a collective has been broken, of which ``rows`` are all; None: none is.
        limit_s: a rank that is silent for so long has failed.
    """
    limit_s = limit_s if broken_s is None else min(SILENT_S, limit_s)
    waiting = [rank for rank, row in rows.items() if row.lost is not None and not row.left]
    if silent := [rank for rank, row in rows.items() if not row.left and silent_s[rank] >= limit_s]:
        failed, how = silent, f"{_named(silent)} {_SILENT.format(max(silent_s[rank] for rank in silent))}"
    elif broken_s is None or broken_s < SILENT_S + BEAT_S or not waiting:
        return None
    elif failed := [rank for rank in rows if rows[rank].left] or [rank for rank in rows if rank not in waiting]:
        how = f"{_named(failed)} did not come while {_named(waiting)} waited ({rows[waiting[0]].lost})"
    else:
        how = f"the ranks waited for each other ({rows[waiting[0]].lost})"
    named = failed or waiting
    beats = [rows[rank].beat if len(named) == 1 else f"rank {rank}: {rows[rank].beat}" for rank in named]
    has_left = any(rows[rank].left for rank in failed)
    line = f"{how}. Last heartbeat{'s' * (len(named) > 1)}: {'; '.join(beats)}"
    return Failure(line, failed, "left" if has_left else "lost")


def _named(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else "ranks " + ", ".join(map(str, ranks))


@dataclass
class _Case:
    """What this rank knows of failures in one run: the next one forgets it, as all ranks have gone on.

    Attributes:
        number: of the run.
        failure: that which stands.
        lost: with what a collective of this rank broke, at ``lost_at``.
        raised: set when the main thread raises, whatever it is; ``is_own``: it is no broken collective.
        told: set when the failure is known and logged.
    """

    number: int
    failure: Failure | None = None
    lost: str | None = None
    lost_at: float = 0.0
    is_own: bool = False
    raised: threading.Event = field(default_factory=threading.Event)
    told: threading.Event = field(default_factory=threading.Event)


class Watch:
    """Watches the other ranks while it is entered; entering is a collective.

    Args:
        heartbeat_timeout_s: a rank of which nothing is heard for so long has failed.

    Raises:
        ValueError: it is shorter than two heartbeats.

    One rank that lives logs the failure in one line and calls those given to :func:`on_failure`. The main thread gets
    :class:`~ignite_engine.errors.PeerFailed` instead of the error of a collective that broke. A rank whose main thread
    does not end within 2 s (30 s where a rank has raised) is ended with its stack logged.
    """

    def __init__(self, heartbeat_timeout_s: float = HEARTBEAT_TIMEOUT_S) -> None:
        if heartbeat_timeout_s < 2 * BEAT_S:
            raise ValueError(
                f"heartbeat_timeout must be at least {2 * BEAT_S:g} s, as heartbeats are {BEAT_S} s apart, "
                f"got {heartbeat_timeout_s:g}."
            )
        self.rank, self._ranks = agreement.rank(), range(agreement.world_size())
        self._left: str | None = None
        self._case = _Case(0)
        self._timeout_s = heartbeat_timeout_s
        self._heard: dict[int, tuple[Row, float]] = {}
        """By rank, its newest row and when it was first seen."""
        self._store = agreement.own_store("watch")
        self._position: Callable[[], str] | None = None
        self._watched = threading.current_thread()
        self._follower = threading.Thread(target=self._follow, name="watch", daemon=True)
        self._news, self._over = threading.Event(), threading.Event()
        self._now_s = 0.0  # on a clock that stands while this process is stopped, by Ctrl-Z say

    @property
    def failure(self) -> Failure | None:
        """The failure for which all ranks end, if any."""
        return self._case.failure

    # -- the main thread ------------------------------------------------------------------------------------------

    def __enter__(self) -> Watch:
        global current
        self._say()
        agreement.wait_for_all()  # each has a row from here on
        self._follower.start()
        current = self
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        global current
        cause = error if error is None else self.cause_of(error)
        current = None
        self._over.set()
        self._news.set()
        self._follower.join(_MAY_RAISE_S)  # its store may not answer
        if self.failure is not None and self.rank == 0:
            time.sleep(2 * BEAT_S)  # the store may end with this process, and the others must read this first
        if cause is not None and cause is not error:
            raise cause from error

    def cause_of(self, error: BaseException) -> BaseException:
        """See :func:`cause_of`."""
        if isinstance(error, PeerFailed) or raised_by_all_ranks(error):
            return error
        case, broken = self._case, broken_collective(error)
        case.is_own = not broken
        case.raised.set()
        if not isinstance(error, Exception):
            self._left = self._left or f"raised {error!r}{self._at()}"
            return error
        if broken and case.failure is None:
            case.lost_at, case.lost = self._now_s, broken
            self._news.set()
            if not case.told.wait(_VERDICT_S) and case.failure is None:
                self._learn(case, Failure(f"{_NO_STORE} ({broken})", [0]))
        elif case.failure is None:
            texts = [str(note).rstrip(".") for note in getattr(error, "__notes__", ())]
            notes = "".join(f" ({text})" for text in texts if "\n" not in text and len(text) < _LONGEST_NOTE)
            line = f"rank {self.rank} failed{self._at()}: {one_line(error)}{notes}"
            self._learn(case, Failure(line, [self.rank], "raised"))
            self._news.set()
        case.told.wait(_MAY_RAISE_S)
        agreement.break_off()
        failure = case.failure
        if not broken or failure is None or (failure.kind == "raised" and self.rank in failure.ranks):
            return error
        return PeerFailed(failure.line)

    @contextmanager
    def run(self, position: Callable[[], str]) -> Iterator[None]:
        """Within it is a run, which begins a case of its own."""
        outer, self._position = self._position, position
        self._watched = threading.current_thread()
        self._case = _Case(self._case.number + 1)
        self._news.set()  # the last heartbeat, if this rank is killed before the next
        try:
            yield
        finally:
            self._position = outer

    def _at(self) -> str:
        return f" at {self._position()}" if self._position is not None else ""

    # -- the thread that uses the store ---------------------------------------------------------------------------

    def _follow(self) -> None:
        before, leaves = time.monotonic(), False
        with contextlib.suppress(dist.DistError):  # the store is gone, with rank 0 or with the launcher
            while not leaves:
                leaves, now = self._over.is_set(), time.monotonic()
                self._now_s += min(now - before, BEAT_S)
                before, case = now, self._case
                self._say(leaves)
                self._judge(case)
                if not leaves:
                    self._news.wait(BEAT_S)
                self._news.clear()

    def _say(self, leaves: bool = False) -> None:
        """Write this rank's row."""
        beat = self._position() if self._position is not None else "outside of run()"
        if leaves:
            beat = self._left or "returned from its function"
        row = Row(beat, self._case.lost, leaves, time.monotonic())
        self._store.set(f"row_{self.rank}", json.dumps(asdict(row)))

    def _judge(self, case: _Case) -> None:
        """Look for a failed rank, or for a failure that another rank has written."""
        ranks, broken_s = [(self.rank + 1) % len(self._ranks)], None
        if case.lost is not None:
            ranks, broken_s = list(self._ranks), self._now_s - case.lost_at
        for rank, text in zip(ranks, self._store.multi_get([f"row_{rank}" for rank in ranks]), strict=True):
            row = Row(**json.loads(text))
            if rank not in self._heard or row != self._heard[rank][0]:
                self._heard[rank] = row, self._now_s
        rows = {rank: self._heard[rank][0] for rank in ranks}
        silent_s = {rank: self._now_s - self._heard[rank][1] for rank in ranks}
        found = case.failure or verdict(rows, silent_s, broken_s, self._timeout_s)
        written = self._first_written(f"failure_{case.number}", json.dumps(asdict(found)) if found else "")
        if written and case.failure is None:
            self._learn(case, Failure(**json.loads(written)))

    def _first_written(self, name: str, text: str) -> str:
        """Write ``text`` where nothing is written yet; what stands there."""
        return str(self._store.compare_set(name, "", text).decode())

    # -- once a rank has failed -----------------------------------------------------------------------------------

    def _learn(self, case: _Case, failure: Failure) -> None:
        case.failure = failure
        if learned is not None:
            learned(failure)
        if failure.kind == "lost" and not case.raised.is_set():
            _write_stack(self._watched)
        for work in (self._tell, self._end_blocked):  # whatever the main thread holds, the end is not delayed
            threading.Thread(target=work, args=(case, failure), name="failure", daemon=True).start()

    def _tell(self, case: _Case, failure: Failure) -> None:
        is_raised = failure.kind == "raised"
        if is_raised and self.rank not in failure.ranks:
            case.raised.wait(BEAT_S)  # where all ranks raise the same, the error of each is enough
        living = [rank for rank in self._ranks if is_raised or rank not in failure.ranks]
        speaks, configured = self.rank == living[0], logger.hasHandlers()
        if not (is_raised and case.is_own):
            if speaks or configured:
                logger.error("%s", failure.line)
            if speaks and self.rank != 0 and configured:
                print(failure.line, file=sys.stderr, flush=True)  # the log of rank 0 alone is shown on the console
            for callback in list(_callbacks) if speaks else ():
                callback(failure.line)
        case.told.set()

    def _end_blocked(self, case: _Case, failure: Failure) -> None:
        """End this process if its main thread is blocked by a failed rank."""
        learned_at = time.monotonic()
        self._over.wait(2 * BEAT_S)  # then the others know it, too: what breaks by a kill, or here, is no news
        if not case.raised.is_set():
            agreement.break_off()
        while not self._over.wait(BEAT_S) and case is self._case:
            may_s = _MAY_LEAVE_S if failure.kind == "raised" or case.raised.is_set() else _MAY_RAISE_S
            if time.monotonic() >= learned_at + may_s:
                break
        else:
            return
        threading.Timer(1.0, os._exit, [1]).start()
        logger.error("Rank %d did not end by itself.", self.rank, extra={"console": False})
        _write_stack(self._watched)
        time.sleep(0.1)
        for process in multiprocessing.active_children():
            if process.daemon:  # as at any other end; a worker whose dataset never returns would stay
                process.kill()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(1)


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


def broken_collective(error: BaseException) -> str | None:
    """What torch says of a collective that broke because of a peer; None: the error has another cause."""
    cause: BaseException | None = error
    while cause is not None:
        text = str(cause)
        if isinstance(cause, dist.DistError) or (isinstance(cause, RuntimeError) and "gloo/" in text):
            return text.partition("] ")[2].partition(". ")[0].rstrip(".") if text.startswith("[") else one_line(cause)
        cause = cause.__cause__ or cause.__context__
    return None


# -- what a run asks, on one process too ------------------------------------------------------------------------------

current: Watch | None = None
"""The active watch of this process."""
learned: Callable[[Failure], None] | None = None
"""Called when this rank hears of a failure; for a supervisor that is not one of the ranks."""
_callbacks: list[Callable[[str], None]] = []


@contextmanager
def watching(heartbeat_timeout_s: float = HEARTBEAT_TIMEOUT_S) -> Iterator[Watch | None]:
    """Watch the other ranks; None on one process. Within another it is that one."""
    if agreement.world_size() == 1 or current is not None:
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
    _callbacks.append(callback)
    try:
        yield
    finally:
        _callbacks.remove(callback)


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
    return known_failure() or f"{type(error).__name__}: {error}"
