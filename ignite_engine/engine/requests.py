"""What single ranks ask of the run while it is under way; all ranks do it at the same step boundary.

On several ranks one row of numbers goes around per iteration: it is sent at a boundary and read at the next, where what
any rank has asked for takes effect. It is exchanged at once, and waited for, where two iterations would be long (an
iteration takes more than :data:`SLOW_S`) or too late: at the first and the last boundary, at the ends of epochs and
windows, and at each boundary of a run whose ranks must end at the iteration at which one process would.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Hashable

from ignite_engine.ranks import agreement

STOP, END, SAVE, COLLECT = "stop", "end", "save", "collect"
KINDS = (STOP, END, SAVE, COLLECT)
SLOW_S = 0.5


class Requests:
    """What has been asked for, and what all ranks have agreed to do and have not done yet.

    A signal handler or another thread may ask between any two instructions of the main thread.
    """

    def __init__(self) -> None:
        self.single_process = True
        """There is no other rank to agree with."""
        self.exact = False
        """The run ends at the same iteration on any number of ranks: a request waits for the step boundary."""
        self.clocks: list[Hashable] = []
        """Those of the run's intervals: at its time each of them can be asked for."""
        self.asked: set[Hashable] = set()
        """By this rank, and not agreed on yet."""
        self.agreed: set[Hashable] = set()
        """By all ranks, and not done yet."""
        self.stop: tuple[str, int | None] | None = None
        """Reason and signal of the requested stop; once it is agreed on those of the first rank that asked."""
        self.end: bool | str = True
        """The option of ``terminate()``, likewise."""
        self.waiting_for_data = False
        """The main thread is inside the loader's ``next``: the one place where a signal may raise StopRequested."""
        self.checks: list[Callable[[], None]] = []
        """Called now and then while the run waits for a window, in which no event is fired; they may request a stop."""
        self._row: Callable[[], list[float]] | None = None
        self._at_once = self._ends_next = False
        self._seconds = math.inf
        self._sent_at = time.monotonic()

    def begin(self, *, exact: bool) -> None:
        """A run begins: drop what an earlier one was asked for."""
        self.single_process, self.exact = agreement.world_size() == 1, exact
        self.asked, self.agreed, self.stop, self.end = set(), set(), None, True
        self._row, self._at_once, self._ends_next = None, False, False
        self.iterations_begin()

    def iterations_begin(self) -> None:
        """The next boundary is the first one: it is not known how long an iteration takes."""
        self._seconds, self._sent_at = math.inf, time.monotonic()

    def request_stop(self, reason: str, signal: int | None) -> None:
        if self.stop is None:
            self.stop = (reason, signal)
        self.asked.add(STOP)

    def request_end(self, option: bool | str) -> None:
        """``terminate()`` was called on this rank, perhaps on no other."""
        self.end = option
        self.asked.add(END)

    def stops_waiting(self) -> bool:
        """Whether this rank is to stop, while it waits for a window."""
        for check in self.checks:
            check()
        return self.stop is not None

    def agree_at_next_boundary(self) -> None:
        """Exchange what is asked for there at once; every rank calls it at the same place."""
        self._at_once = True

    def agree(self, *, now: bool) -> set[Hashable]:
        """What all ranks do at this boundary; a collective.

        Args:
            now: exchange at once; the same on every rank.
        """
        if self.single_process:
            found, self.asked = self.asked, set()
        else:
            found, self._row = set() if self._row is None else self._read(self._row), None
            if self._ends_next:
                found.add(END)
            is_decided, self._at_once, self._ends_next = now or self._at_once or self.exact, False, False
            self.asked -= found
            row = self._send()
            if is_decided or self._seconds > SLOW_S:
                found_here = self._read(row)
                self.asked -= found_here
                if END in found_here - found and not is_decided:  # where the run ends does not depend on a clock
                    self._ends_next = True
                    found_here.remove(END)
                found |= found_here
            else:
                self._row = row
            if STOP in found:
                self.stop = next(stop for stop in agreement.gather_objects(self.stop) if stop is not None)
            if END in found:
                options = agreement.gather_objects(self.end)
                self.end = next((option for option in options if option is not True), True)
        self.agreed |= found
        return set(self.agreed)

    def done(self) -> None:
        """A boundary has done what was agreed on; a stop and an end stay for the rest of the run."""
        self.agreed -= {SAVE, COLLECT}

    def _send(self) -> Callable[[], list[float]]:
        now = time.monotonic()
        own = [float(kind in self.asked) for kind in (*KINDS, *self.clocks)]
        row = agreement.start_sum([now - self._sent_at, *own])
        self._sent_at = now
        return row

    def _read(self, row: Callable[[], list[float]]) -> set[Hashable]:
        seconds, *asked = row()
        self._seconds = seconds / agreement.world_size()
        return {kind for kind, ranks in zip((*KINDS, *self.clocks), asked, strict=False) if ranks}
