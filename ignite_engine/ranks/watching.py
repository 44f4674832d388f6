"""What a run asks of the watch over the other ranks; on one process there is none, and its code is not loaded."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ignite_engine.errors import PeerFailed
from ignite_engine.ranks import agreement

if TYPE_CHECKING:
    from ignite_engine.ranks.heartbeats import Failure
    from ignite_engine.ranks.watch import Watch

HEARTBEAT_TIMEOUT_S = 60.0
"""A thread cannot say that it lives while native code of the main thread holds Python's lock."""

current: Watch | None = None
"""The one that is entered."""
learned: Callable[[Failure], None] | None = None
"""Called when this rank hears of a failure; for a supervisor that is not one of the ranks."""


def watched(local_rank: int, func: Callable[..., Any], heartbeat_timeout_s: float, *args: Any, **kwargs: Any) -> Any:
    """Call ``func(local_rank, *args, **kwargs)``, watching the other ranks if there are any; a collective."""
    with watching(heartbeat_timeout_s):
        return func(local_rank, *args, **kwargs)


@contextmanager
def watching(heartbeat_timeout_s: float = HEARTBEAT_TIMEOUT_S) -> Iterator[Watch | None]:
    """Watch the other ranks; None on one process. Within another it is that one."""
    if agreement.world_size() == 1:
        yield None
    elif current is not None:
        yield current
    else:
        from ignite_engine.ranks.watch import Watch

        with Watch(heartbeat_timeout_s) as watch:
            yield watch


@contextmanager
def watched_run(position: Callable[[], str]) -> Iterator[None]:
    """Watch the other ranks during a run.

    Args:
        position: where the run is, as text; called in another thread.
    """
    with watching() as watch:
        outer = watch.begin_run(position) if watch is not None else None
        try:
            yield
        finally:
            if watch is not None:
                watch.end_run(outer)


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
