"""A rank that this machine's launcher starts: what it does, how it ends, and how the launcher sees it."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import ignite.distributed as idist

from ignite_engine.errors import PeerFailed
from ignite_engine.ranks import agreement, signals
from ignite_engine.ranks.joining import connect, warnings_said_once


class Place:
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


def _place_in_rank(environment: dict[str, str], starter: int | None) -> Place:
    signals.let_signals_in()
    return Place(environment, starter)


@dataclass(frozen=True)
class End:
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


def rank_main(
    place: Place,
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
                connect(*connection)  # type: ignore[arg-type]  # it is not None
            try:
                with warnings_said_once():
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
        report.send(End(code, time.time(), text, interrupted()))
    if code is None:
        sys.exit(1)


def _never() -> bool:
    return False


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
                stopped = signals.origin(-code) in signals.STOPS  # before it trained
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
