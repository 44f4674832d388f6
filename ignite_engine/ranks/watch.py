"""The ranks watch each other: the error of one ends all of them and is named by all, and so is one that is silent.

Every rank has a thread that says twice a second what the rank does, and hears from rank 0
(:mod:`ignite_engine.ranks.heartbeats`) when a rank has failed: it raised, its process ended, nothing is heard of it, or
its peers' collective timed out waiting for it. It also ends a rank of ``multiprocessing`` whose parent was killed. On
one process there is no watch.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from multiprocessing.connection import wait
from pathlib import Path
from types import TracebackType
from typing import Literal

import torch.distributed as dist

from ignite_engine.errors import PeerFailed, one_line, raised_by_all_ranks
from ignite_engine.ranks import agreement, signals, watching
from ignite_engine.ranks.heartbeats import BEAT_S, ENDED, SILENT, SILENT_S, Failure, Hub, Link, Message, connect
from ignite_engine.ranks.stack import write_stack
from ignite_engine.ranks.watching import HEARTBEAT_TIMEOUT_S

logger = logging.getLogger(__name__)

_LONGEST_NOTE = 1000
_MAY_RAISE_S = 2.0
_MAY_LEAVE_S = 30.0
_VERDICT_S = 6.0


class Watch:
    """Watches the other ranks while it is entered; entering is a collective.

    Args:
        heartbeat_timeout_s: a rank of which nothing is heard for so long has failed.

    Raises:
        ValueError: it is shorter than two heartbeats.

    When a rank fails, each rank logs it in one line and calls those given to ``watching.on_failure``. The main thread
    gets :class:`~ignite_engine.errors.PeerFailed` instead of the error of a collective that broke. A rank whose main
    thread does not end within 2 s (30 s if it has raised, or the failed rank has not ended either) is ended with its
    stack logged. A silent process on this machine is killed.
    """

    def __init__(self, heartbeat_timeout_s: float = HEARTBEAT_TIMEOUT_S) -> None:
        if heartbeat_timeout_s < 2 * BEAT_S:
            raise ValueError(
                f"heartbeat_timeout must be at least {2 * BEAT_S:g} s, as heartbeats are {BEAT_S} s apart, "
                f"got {heartbeat_timeout_s:g}."
            )
        self.heartbeat_timeout_s = heartbeat_timeout_s
        self.rank = agreement.rank()
        self.failure: Failure | None = None
        self.callbacks: list[Callable[[str], None]] = []
        self._hub: Hub | None = None
        self._link: Link | None = None
        self._processes: list[_Process | None] = []
        self._run = 0
        self._position: Callable[[], str] | None = None
        self._watched = threading.current_thread()
        self._lock = threading.Lock()
        self._learned = threading.Event()
        self._decided, self._told = threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None
        self._parent = multiprocessing.parent_process()
        self._parent_seen = os.getppid()  # of multiprocessing's fork server it is that one
        self._left: set[int] = set()
        self._hub_heartbeat = "none"
        self._hub_left: Failure | None = None
        self._waits_for_verdict = self._raised = self._raised_own = self._leaving = False
        self._end_at = float("inf")
        self.ending: str | None = None
        self._code = 0

    # -- the main thread ------------------------------------------------------------------------------------------

    def __enter__(self) -> Watch:
        if self._connect():
            self._thread = threading.Thread(target=self._follow, name="watch", daemon=True)
            self._thread.start()
        watching.current = self
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        cause = error if error is None else self.cause_of(error)
        watching.current = None
        self._leave(cause)
        if cause is not None and cause is not error:
            raise cause from error

    def cause_of(self, error: BaseException) -> BaseException:
        """See :func:`ignite_engine.ranks.watching.cause_of`."""
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
        if self._link is not None and self.failure is None:
            if broken:
                self._waits_for_verdict = True
                self._link.send(lost=broken)
                if self._hub_left is not None:
                    self._learn(self._hub_left)
                self._learned.wait(_VERDICT_S)
            if self.failure is None:
                own = self._failure_of(error)
                self._learn(own)
                self._link.send(failed=asdict(own))
        if self.failure is not None:
            self._told.wait(_MAY_RAISE_S)
        if not broken or self.failure is None or (self.failure.raised and self.rank in self.failure.ranks):
            return error
        peer = PeerFailed(self.failure.line, self.failure.code)
        if self.failure.trace:
            peer.add_note(f"On rank {self.failure.ranks[0]}:\n{self.failure.trace}")
        return peer

    def begin_run(self, position: Callable[[], str]) -> Callable[[], str] | None:
        """A run begins: what a rank raised before is past, since all of them have gone on.

        Returns:
            The position of the run within which it begins, for :meth:`end_run`.
        """
        self._run += 1
        outer, self._position = self._position, position
        self._watched = threading.current_thread()
        if self.failure is not None and self.failure.raised:
            self.failure, self._end_at = None, float("inf")
            self._learned.clear()
            self._told.clear()
            self._decided.clear()
        self._raised = self._raised_own = self._waits_for_verdict = False
        if self._link is not None:
            self._link.send(run=self._run)
            self._link.send(beat=self._heartbeat())  # the last one, if this rank is killed before the next
        return outer

    def end_run(self, outer: Callable[[], str] | None) -> None:
        self._position = outer

    def _failure_of(self, error: BaseException) -> Failure:
        texts = (str(note) for note in getattr(error, "__notes__", ()))
        notes = "".join(f" ({text.rstrip('.')})" for text in texts if "\n" not in text and len(text) < _LONGEST_NOTE)
        trace = "".join(traceback.format_exception(error))[-20_000:]
        line = f"rank {self.rank} failed{self._at()}: {one_line(error)}{notes}"
        return Failure(line, (self.rank,), self._run, trace, kind="raised")

    def _at(self) -> str:
        return f" at {self._position()}" if self._position is not None else ""

    # -- connecting and leaving -----------------------------------------------------------------------------------

    def _connect(self) -> bool:
        processes = agreement.gather_objects(_Process.this())
        self._processes = processes
        known = [process for process in processes if process is not None]
        local = len(known) == len(processes) and len({process.network for process in known}) == 1
        offer: tuple[str, int, str] | None = None
        problem = ""
        if self.rank == 0:
            try:
                self._hub = Hub(len(processes), self.heartbeat_timeout_s, local=local)
                host = "127.0.0.1" if local else os.environ.get("MASTER_ADDR") or socket.gethostname()
                offer = (host, self._hub.port, self._hub.token)
            except OSError as error:
                problem = one_line(error)
        offer = agreement.broadcast_object(offer)
        if offer is not None:
            try:
                self._link = connect(offer[:2], offer[2], self.rank)
            except OSError as error:
                problem = f"rank {self.rank} cannot connect to {offer[0]}, port {offer[1]}: {one_line(error)}"
        problems = [reason for reason in agreement.gather_objects(problem) if reason]
        if problems:
            self._leave(None)
            if self.rank == 0:
                logger.warning(
                    "The ranks cannot watch each other (%s): what fails on one rank is not named by the others.",
                    problems[0],
                )
        return not problems

    def _leave(self, error: BaseException | None) -> None:
        if self._link is None:
            return
        self._leaving = True
        self._link.send(left=self.ending or "returned from its function", code=self._code)
        self._link.finish()
        if self._hub is not None:
            self._hub.close()
        if self._thread is not None:
            self._thread.join(BEAT_S)
        self._link.close()
        self._link = None

    # -- the thread -----------------------------------------------------------------------------------------------

    def _follow(self) -> None:
        link = self._link
        assert link is not None
        silent_s, before, beat_at, closed = 0.0, time.monotonic(), 0.0, False
        while not self._leaving and not closed:
            if time.monotonic() >= beat_at:
                link.send(beat=self._heartbeat())
                beat_at = time.monotonic() + BEAT_S
            try:
                heard = link.receive() if wait([link.socket], BEAT_S / 2) else None
            except (EOFError, OSError, ValueError):
                heard = None
                if not self._leaving and self.failure is None:
                    self._learn(self._failure_of_hub(ENDED))
                break
            now = time.monotonic()
            elapsed, before = min(now - before, BEAT_S), now  # not while this process itself was stopped
            silent_s = silent_s + elapsed if heard is None else 0.0
            for message in heard or ():
                self._hear(message)
                closed = closed or "closed" in message
            if silent_s >= (SILENT_S if self._waits_for_verdict else self.heartbeat_timeout_s):
                self._learn(self._failure_of_hub(SILENT.format(silent_s), kind="silent"))
            self._end_if_due()
            self._end_orphan()
        while not self._leaving:
            time.sleep(BEAT_S / 2)
            self._end_if_due()

    def _end_orphan(self) -> None:
        """A rank of ``mp.spawn`` whose parent was killed ends; nothing else tells it, and its peers wait for it."""
        if self._parent is None or (self._parent.is_alive() and os.getppid() in (self._parent.pid, self._parent_seen)):
            return
        pid, self._parent = self._parent.pid, None
        threading.Thread(target=signals.end_orphan, args=(pid,), name="orphan", daemon=True).start()

    def _failure_of_hub(self, how: str, kind: Literal["ended", "silent"] = "ended") -> Failure:
        return Failure(f"rank 0 {how}. Last heartbeat: {self._hub_heartbeat}", (0,), kind=kind)

    def _hear(self, message: Message) -> None:
        if "hub" in message:
            self._hub_heartbeat = message["hub"]
        elif "failure" in message:
            self._learn(Failure.of(message["failure"]))
        elif "closed" in message:
            self._hub_left = Failure(f"rank 0 {message['closed']}", (0,), code=message["code"] or 1)
            if self._waits_for_verdict:
                self._learn(self._hub_left)
        elif "left" in message:
            self._left.add(message["left"])
            if self.failure is not None and not self._raised and message["left"] in self.failure.ranks:
                self._end_at = min(self._end_at, time.monotonic() + _MAY_RAISE_S)

    def _heartbeat(self) -> str:
        """Where this rank is."""
        return self._position() if self._position is not None else "outside of run()"

    def _learn(self, failure: Failure) -> None:
        with self._lock:
            if self.failure is not None or (failure.raised and failure.run < self._run):
                return
            self.failure = failure
        if watching.learned is not None:
            watching.learned(failure)
        own = self.rank in failure.ranks
        if not (failure.raised and own):
            gone = not failure.raised or bool(self._left.intersection(failure.ranks))
            self._end_at = time.monotonic() + (_MAY_RAISE_S if gone and not self._raised else _MAY_LEAVE_S)
        if failure.kind == "silent":
            for rank in failure.ranks:
                if rank != self.rank:
                    self._kill(rank)
        # a thread of its own: whatever the main thread holds, the end is not delayed
        threading.Thread(target=self._tell, args=(failure,), name="failure", daemon=True).start()
        self._learned.set()

    def _tell(self, failure: Failure) -> None:
        try:
            if failure.raised and self.rank not in failure.ranks:
                self._decided.wait(BEAT_S)  # where all ranks raise the same, the error of each is enough
            if not (failure.raised and self._raised_own):
                self._say(failure)
        finally:
            self._told.set()

    def _say(self, failure: Failure) -> None:
        speaks, configured = self._speaks(failure), logger.hasHandlers()
        if speaks or configured:
            logger.error("%s", failure.line)
        if speaks and self.rank != 0 and configured:
            print(failure.line, file=sys.stderr, flush=True)  # the log of rank 0 alone is shown on the console
        if configured and failure.trace:
            logger.error("%s", failure.trace.rstrip(), extra={"console": False})
        if failure.kind in ("silent", "stuck") and not self._raised:
            write_stack(self._watched)
        if speaks:
            for callback in list(self.callbacks):
                callback(failure.line)

    def _speaks(self, failure: Failure) -> bool:
        """Whether this rank speaks and writes for all: rank 0, or the first that lives."""
        ended = () if failure.raised else failure.ranks
        return self.rank == next((rank for rank in range(len(self._processes)) if rank not in ended), 0)

    def _kill(self, rank: int) -> None:
        process, own = self._processes[rank], self._processes[self.rank]
        if process is None or own is None or process.network != own.network:  # the link may be what is down
            return
        if process.machine == own.machine and process.lives():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(process.pid, signal.SIGKILL)

    def _end_if_due(self) -> None:
        if time.monotonic() < self._end_at or self.failure is None:
            return

        def say() -> None:
            logger.error("Rank %d did not end by itself.", self.rank, extra={"console": False})
            write_stack(self._watched)
            time.sleep(0.1)
            for stream in (sys.stdout, sys.stderr):
                stream.flush()

        saying = threading.Thread(target=say, daemon=True)
        saying.start()
        saying.join(1.0)
        for process in multiprocessing.active_children():
            if process.daemon:  # as at any other end; a worker whose dataset never returns would stay
                process.kill()
        os._exit(self.failure.code)


# -- what happened, and where -----------------------------------------------------------------------------------------


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


@dataclass(frozen=True)
class _Process:
    """A process, and where it can be signalled and reached."""

    pid: int
    started: str
    machine: tuple[str, int]
    network: tuple[str, int]

    @classmethod
    def this(cls) -> _Process | None:
        """None: not on Linux, or not to be known."""
        try:
            boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
            spaces = {name: os.stat(f"/proc/self/ns/{name}").st_ino for name in ("pid", "net")}
            return cls(os.getpid(), _started(os.getpid()), (boot, spaces["pid"]), (boot, spaces["net"]))
        except OSError:
            return None

    def lives(self) -> bool:
        """Whether it is still the same process, of those on this machine."""
        try:
            return _started(self.pid) == self.started
        except OSError:
            return False


def _started(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
