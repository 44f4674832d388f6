"""The effect of signals on a process outside of a run, and at the start of a rank.

A rank that this machine's parent starts leads a session: what a terminal sends reaches the parent alone, which passes
it on, and counts what the user sends. A rank may get a signal twice all the same, where one is sent to every process
(by SLURM at a time limit, say): it ends at once by FORCE only.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from torch.multiprocessing import _prctl_pr_set_pdeathsig  # type: ignore[attr-defined]

from ignite_engine.errors import Interrupted

STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
SIGNALS = (*STOPS, signal.SIGUSR1)
FORCE_AFTER_S = 0.5
"""A second stop signal ends the run at once if it comes at least so many seconds after the first."""
FORCE = signal.SIGUSR2
"""The signal by which a parent ends its ranks at once; kills where it is not handled."""

parent_counts = False
"""Whether this process is a rank whose parent passes on what it receives, and counts it."""

_DEFAULTS = (signal.SIG_DFL, signal.default_int_handler)


def treated_as(number: int) -> int:
    """The signal whose exit code is used, as 128 + it: a closed terminal (SIGHUP) is a SIGTERM."""
    return signal.SIGTERM if number == signal.SIGHUP else number


def name_of(number: int) -> str:
    """``SIGKILL``; a number without a name is ``signal 35``."""
    return signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"


def is_second(number: int, first_at: float) -> bool:
    """Whether a signal ends the process at once, as the first stop came at ``first_at``, in monotonic seconds."""
    return number == FORCE or not (parent_counts or time.monotonic() - first_at < FORCE_AFTER_S)


class Ending:
    """A handler that raises :class:`Interrupted`; see :func:`stops_go_to`.

    A process forked from the one that made it, such as a loader worker, is killed.

    Attributes:
        raised_at: when it did, in monotonic seconds; None: not yet.
    """

    def __init__(self) -> None:
        self.raised_at: float | None = None
        self._pid = os.getpid()

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._pid:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        elif self.raised_at is None or is_second(number, self.raised_at):
            self.raised_at = time.monotonic()
            raise Interrupted(treated_as(number))


@contextmanager
def stops_go_to(handler: Any) -> Iterator[None]:
    """Within it ``handler`` gets a stop that nothing else handles; SIGUSR1, which asks to save, is ignored.

    SIG_DFL kills: for a main thread that waits in C++, where Python's handlers wait. Handlers that are not Python's own
    stay as they are, and ignored signals stay ignored (``nohup``). Outside the main thread, which alone may handle
    signals, it does nothing.
    """
    before: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():
        for number, wants in {**dict.fromkeys(STOPS, handler), signal.SIGUSR1: _ignore}.items():
            if (found := signal.getsignal(number)) in _DEFAULTS or isinstance(found, Ending):
                before[number] = found
                signal.signal(number, wants)
    try:
        yield
    finally:
        for number, found in before.items():
            if signal.getsignal(number) in (handler, _ignore):  # not handlers that were installed since
                signal.signal(number, found)


def _ignore(number: int, frame: FrameType | None) -> None:
    """Not SIG_IGN, which processes started from here would inherit."""


@contextmanager
def blocked() -> Iterator[None]:
    """Block signals in this thread, and in processes started from it, within the body."""
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def begin_rank(*, passed_on: bool) -> None:
    """In a rank that was started with signals blocked: from here on one kills it, until more is known.

    The exit status then names the signal; the parent exits with 128 + it.

    Args:
        passed_on: the parent passes on what it receives.
    """
    global parent_counts
    parent_counts = passed_on
    if passed_on and os.getsid(0) != os.getpid():
        os.setsid()
    for number in (*STOPS, signal.SIGTSTP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGUSR1, _ignore)  # there is nothing to save yet
    end_with_parent()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


def ignore_all() -> None:
    """Ignore all signals, as the process is ending."""
    for handler in (_ignore, signal.SIG_IGN):  # Python complains of one that came before, and finds SIG_IGN
        for number in SIGNALS:
            signal.signal(number, handler)


def end_with_parent() -> None:
    """Send this process a SIGTERM when its parent ends; on Linux only."""
    _prctl_pr_set_pdeathsig(signal.SIGTERM)
