"""Waiting for a store that may be slow or never answer: in a thread that can be left behind, the ranks in step."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

from ignite_engine.mirror.remote import Torn, why
from ignite_engine.ranks import agreement

T = TypeVar("T")
STALLED_S = 300.0
"""Without a byte for so long, a transfer is given up."""
_TICK_S = 1.0


class Unreachable(Exception):
    """A mirror does not answer, or does not let us in; the message is one line."""


class Throttle:
    """Counts bytes, and waits where they would come faster than allowed; for several threads.

    Args:
        bytes_per_s: None: nothing waits.
    """

    def __init__(self, bytes_per_s: float | None = None) -> None:
        self.moved = 0
        self._moved_at = time.monotonic()
        self._bytes_per_s, self._free_at = bytes_per_s, 0.0
        self._lock = threading.Lock()

    def __call__(self, count: int) -> None:
        """These many bytes were moved."""
        now = time.monotonic()
        with self._lock:
            self.moved, self._moved_at = self.moved + count, now
            if self._bytes_per_s is None:
                return
            self._free_at = max(self._free_at, now) + count / self._bytes_per_s
            wait = self._free_at - now
        time.sleep(wait)

    @property
    def stalled_s(self) -> float:
        """Seconds since the last byte."""
        return time.monotonic() - self._moved_at


class Patience(Generic[T]):
    """A function that waits for a store, in a thread of its own that ends with the process.

    Args:
        function: gets what it calls with the bytes that it has moved.
        stalled_s: without a byte for so long it is left behind.
    """

    def __init__(self, function: Callable[[Throttle], T], stalled_s: float = STALLED_S) -> None:
        self.throttle = Throttle()
        self._function, self._stalled_s = function, stalled_s
        self._done = threading.Event()
        self._result: list[T] = []
        self._error: BaseException | None = None
        threading.Thread(target=self._run, name="mirror", daemon=True).start()

    def _run(self) -> None:
        try:
            self._result.append(self._function(self.throttle))
        except BaseException as error:
            self._error = error
        finally:
            self._done.set()

    def ended(self, seconds: float = _TICK_S) -> bool:
        """Whether it has ended, or is left behind, within so many seconds."""
        return self._done.wait(seconds) or self.throttle.stalled_s > self._stalled_s

    def result(self) -> T:
        """What the function returned.

        Raises:
            Torn: it did.
            Unreachable: it raised anything else, or has not ended.
        """
        if not self._done.is_set():
            raise Unreachable(f"no byte has come for {self._stalled_s:.0f} s")
        if isinstance(self._error, Torn):
            raise self._error
        if self._error is not None:
            raise Unreachable(why(self._error)) from self._error
        return self._result[0]


def patiently(function: Callable[[Throttle], T], stalled_s: float = STALLED_S) -> T:
    """Call a function that waits for a store, and leave it behind where it makes no progress.

    Raises:
        Torn, Unreachable: one line.
    """
    patience = Patience(function, stalled_s)
    while not patience.ended():
        pass
    return patience.result()


def together(function: Callable[[Throttle], T], stalled_s: float = STALLED_S) -> list[T]:
    """As :func:`patiently` on every rank; a collective, in which no exchange waits for the store.

    Returns:
        The (picklable) results of all ranks.

    Raises:
        Torn, Unreachable: one line, the same on all ranks.
    """
    patience = Patience(function, stalled_s)
    while not all(agreement.gather_objects(patience.ended())):
        pass
    mine: tuple[list[T], str | None, str | None] = ([], None, None)
    try:
        mine = ([patience.result()], None, None)
    except Torn as problem:
        mine = ([], str(problem), None)
    except Unreachable as problem:
        mine = ([], None, str(problem))
    ranks = agreement.gather_objects(mine)
    if failure := next((failure for _, _, failure in ranks if failure), None):
        raise Unreachable(failure)
    if torn := next((torn for _, torn, _ in ranks if torn), None):
        raise Torn(torn)
    return [result for results, _, _ in ranks for result in results]
