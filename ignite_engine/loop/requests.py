"""Requests of single ranks to a run; all ranks fulfil them at the same step boundary.

On several ranks one row of numbers goes around at each step boundary, and what any rank has asked for takes effect
there. It is waited for: over sockets of the main thread (``ranks/exchange.py``) that costs no more than to read it an
iteration later, and no rule is needed about where a later one would be too late.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable

from ignite_engine.ranks import agreement

STOP, END, SAVE, COLLECT = "stop", "end", "save", "collect"
KINDS = (STOP, END, SAVE, COLLECT)


class Requests:
    """What has been asked for, and what all ranks have agreed to do and have not done yet.

    A signal handler or another thread may ask between any two instructions of the main thread.
    """

    def __init__(self) -> None:
        self.single_process = True
        """Whether this is the only rank."""
        self.asked: set[str] = set()
        """Requests of this rank that are not agreed on yet."""
        self.agreed: set[str] = set()
        """Requests agreed on and not fulfilled yet; a stop and an end stay for the rest of the run."""
        self.stop: tuple[str, int | None] | None = None
        """Reason and signal of the requested stop; once it is agreed on those of the first rank that asked."""
        self.end: bool | str = True
        """The option of ``terminate()``, likewise."""
        self.reason: str | None = None
        """Of ``finish()``, likewise."""
        self.names_differ = False
        """Whether some ranks have written metrics that others have not."""
        self.waiting_for_data = False
        """The main thread is inside the loader's ``next``: the one place where a signal may raise StopRequested."""
        self.checks: list[Callable[[], None]] = []
        """Called now and then while the run waits for a window, in which no event is fired; they may request a stop."""

    def begin(self) -> None:
        """Drop the requests of an earlier run."""
        self.single_process = agreement.world_size() == 1
        self.asked, self.agreed, self.stop, self.end, self.reason = set(), set(), None, True, None

    def request_stop(self, reason: str, signal: int | None) -> None:
        if self.stop is None:
            self.stop = (reason, signal)
        self.asked.add(STOP)

    def request_end(self, option: bool | str, reason: str | None = None) -> None:
        """``terminate()`` or ``finish()`` was called on this rank, perhaps on no other."""
        self.end, self.reason = option, reason
        self.asked.add(END)

    def stops_waiting(self) -> bool:
        """Whether this rank is to stop, while it waits for a window."""
        for check in self.checks:
            check()
        return self.stop is not None

    def agree(self, written: Iterable[str]) -> set[str]:
        """What all ranks do at this boundary; a collective.

        Args:
            written: names of this rank's new metrics.
        """
        if self.single_process:
            found, self.asked = self.asked, set()
        else:
            names = float(zlib.crc32("\n".join(sorted(written)).encode()))
            rows = agreement.gather_floats([*(float(kind in self.asked) for kind in KINDS), names])
            *columns, names_of_all = zip(*rows, strict=True)
            self.names_differ = len(set(names_of_all)) > 1
            found = {kind for kind, asked in zip(KINDS, columns, strict=True) if any(asked)}
            self.asked -= found
            if STOP in found:
                self.stop = next(stop for stop in agreement.gather_objects(self.stop) if stop is not None)
            if END in found:
                of_all = agreement.gather_objects((self.end, self.reason))
                self.end = next((option for option, _ in of_all if option is not True), True)
                self.reason = next((reason for _, reason in of_all if reason is not None), None)
        self.agreed |= found
        return set(self.agreed)
