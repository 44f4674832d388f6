"""Joint decisions of all ranks, over a CPU group apart from the one that reduces gradients.

On one process every function here returns at once and nothing is created. Each is a collective: all ranks call it,
in the same order.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import pickle
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from ignite_engine import devices
from ignite_engine.errors import PeerFailed, one_line
from ignite_engine.ranks.exchange import Exchange

T = TypeVar("T")

STORES: Any = dist  # they are documented, but not exported for type checkers


def world_size() -> int:
    """The number of ranks in the default process group; 1 without one."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """This process's rank in the default process group; 0 without one."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def on_ranks(ranks: Sequence[int]) -> str:
    """For messages: `` on rank 1``, `` on ranks 0, 2``, `` on every rank``; nothing on one process."""
    if world_size() == 1:
        return ""
    if len(ranks) == world_size():
        return " on every rank"
    return f" on rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


# by the default group, which they must not outlive: that aborts the process at its exit
_groups: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[str, Any]] = weakref.WeakKeyDictionary()
_numbers = itertools.count()
_lent: set[tuple[str, int]] = set()


def _own_groups() -> dict[str, Any]:
    """This package's groups beside the current default group, by purpose."""
    assert dist.group.WORLD is not None
    return _groups.setdefault(dist.group.WORLD, {})


def cpu_group(purpose: str = "decisions") -> dist.ProcessGroup:
    """A gloo group of all ranks, made on first use (a collective), and again for each new default group.

    Args:
        purpose: one group for each; another thread needs its own, or the exchanges mix.
    """
    groups = _own_groups()
    if purpose not in groups:
        groups[purpose] = dist.new_group(backend="gloo", timeout=timeout())
    group: dist.ProcessGroup = groups[purpose]
    return group


@contextlib.contextmanager
def lent_group(purpose: str) -> Iterator[dist.ProcessGroup]:
    """A group that no other thread uses within it; a collective.

    One that was given back is lent again, as the threads of each gloo group wake up 100 times a second for ever.
    """
    number = next(candidate for candidate in itertools.count() if (purpose, candidate) not in _lent)
    _lent.add((purpose, number))
    try:
        yield cpu_group(f"{purpose} {number}")
    finally:
        _lent.discard((purpose, number))


def subgroup(parts: Sequence[Sequence[int]]) -> dist.ProcessGroup | None:
    """This rank's group, one of those for ``parts`` (a rank is in at most one); a collective of all ranks at first.

    It has the backend of the default group.
    """
    groups, key = _own_groups(), str(parts)
    if key not in groups:
        groups[key], _ = dist.new_subgroups_by_enumeration([list(part) for part in parts], timeout=timeout())
    group: dist.ProcessGroup | None = groups[key]
    return group


def timeout() -> timedelta:
    """How long a rank waits for the others, in the default group and therefore in every other one."""
    default = dist.group.WORLD
    assert default is not None
    for device in devices.kinds_of_groups():
        with contextlib.suppress(RuntimeError, AttributeError):  # no backend for it; or not torch's own any more
            return default._get_backend(device).options._timeout
    return timedelta(minutes=30)


def own_store(purpose: str) -> Any:
    """A part of the store at which the ranks met that is new with each call; a collective.

    Its connection is its own: on another one some thread may wait.
    """
    default: Any = dist.distributed_c10d._get_default_store()
    return STORES.PrefixStore(f"{purpose}_{next(_numbers)}", default.clone())


def forget_groups() -> None:
    """Drop the groups, before the default group is destroyed."""
    _groups.clear()


atexit.register(forget_groups)  # however this process was launched: a group that outlives the interpreter aborts it


def _exchange(kind: int | None, own: T) -> list[T]:
    """What every rank says, by rank, where there are several.

    Args:
        kind: the same on every rank: how many numbers they exchange, or None for an object.

    Raises:
        DistNetworkError: a rank has said something else.
    """
    groups = _own_groups()
    if "exchange" not in groups:
        groups["exchange"] = Exchange(rank(), world_size(), own_store("exchange"), timeout().total_seconds())
    said: list[tuple[int | None, T]] = [pickle.loads(each) for each in groups["exchange"](pickle.dumps((kind, own)))]
    if others := [peer for peer, (its_kind, _) in enumerate(said) if its_kind != kind]:
        raise dist.DistNetworkError(
            f"The exchange of rank {rank()} met another one{on_ranks(others)}: the ranks took different "
            "paths. Perhaps one caught an error, or a call that all ranks must make was made on some."
        )
    return [each for _, each in said]


def break_off() -> None:
    """End the exchange that waits for a failed rank; the next one starts anew if all ranks continue."""
    if (exchange := _own_groups().pop("exchange", None)) is not None:
        exchange.close()


def gather_floats(values: Sequence[float]) -> list[list[float]]:
    """The ``values`` of every rank, as many on each, by rank; in float64."""
    if world_size() == 1:
        return [list(values)]
    return _exchange(len(values), [float(value) for value in values])


def mean_of(column: Sequence[float]) -> float:
    """Mean of one value per rank; of equal ones it is exactly that value, which the rounded sum of three may miss."""
    first = column[0]
    return first if all(value == first for value in column) else sum(column) / len(column)


def broadcast_object(value: T) -> T:
    """The picklable ``value`` of rank 0."""
    return gather_objects(value if rank() == 0 else None)[0]  # type: ignore[return-value]  # rank 0's


def gather_objects(value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """The picklable ``value`` of every rank, by rank.

    Args:
        group: of all ranks, over CPU, in a thread of its own; None: in the main thread.
    """
    if world_size() == 1:
        return [value]
    if group is None:
        return _exchange(None, value)
    of_all = [value] * world_size()
    dist.all_gather_object(of_all, value, group=group)
    return of_all


def first_difference(values: Mapping[str, Any]) -> str | None:
    """What of ``values`` is not the same on every rank: ``lr is 0.1 on rank 0 and 0.2 on rank 1``; None: all is."""
    everyone = gather_objects(dict(values))
    for name in dict.fromkeys(name for rank_values in everyone for name in rank_values):
        first = everyone[0].get(name, _NOT_SET)
        for other, rank_values in enumerate(everyone):
            if repr(found := rank_values.get(name, _NOT_SET)) != repr(first):  # NaN is NaN
                return f"{name} is {first} on rank 0 and {found} on rank {other}"
    return None


_NOT_SET = "not set"


def agreed(
    work: Callable[[], T],
    *,
    failed: Callable[[str], Exception] | None = None,
    group: dist.ProcessGroup | None = None,
) -> list[T]:
    """Do ``work`` on every rank and exchange its (picklable) results; an error of any rank is raised on all of them.

    Args:
        work: it must not itself wait for a peer.
        failed: makes the error that is raised on all ranks of the causes, in a line that names their ranks. None: the
            errors themselves are raised.
        group: as of :func:`gather_objects`.

    Raises:
        Exception: what ``failed`` makes; without it this rank's own, or else that of the first rank that failed.
        PeerFailed: in the place of one that pickle cannot carry.
        BaseException: an interrupt of this process as it is; with ``failed`` the peers are told.
    """
    result, error = None, None
    try:
        result = work()
        if world_size() > 1:
            pickle.dumps(result)  # what cannot be sent is raised on all ranks, too
    except BaseException as raised:
        if failed is None and not isinstance(raised, Exception):
            raise
        result, error = None, raised
    told = None if error is None else (one_line(error), _portable(error) if failed is None else None)
    outcomes = gather_objects((result, told), group)
    if error is not None and (failed is None or not isinstance(error, Exception)):
        raise error
    causes = {peer: told for peer, (_, told) in enumerate(outcomes) if told is not None}
    if causes and failed is not None:
        lines = (line.rstrip(".") for line, _ in causes.values())
        named = lines if world_size() == 1 else (f"rank {peer}: {line}" for peer, line in zip(causes, lines))
        raise failed("; ".join(named)) from error
    for peer, (_, peers) in causes.items():
        assert peers is not None
        peers.add_note(f"Raised on rank {peer}.")
        raise peers
    return [answer for answer, _ in outcomes]  # type: ignore[misc]  # without an error there is a result


def _portable(error: BaseException) -> BaseException:
    """The error, or its text if it cannot be pickled."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return PeerFailed(f"Rank {rank()} failed: {one_line(error)}")
    return error


def together(work: Callable[[], T]) -> T:
    """As :func:`agreed`, but each rank keeps its own result, which need not be picklable."""
    results: list[T] = []
    agreed(lambda: results.append(work()))
    return results[0]


def on_rank_0(work: Callable[[], T], **how: Any) -> T:
    """As :func:`agreed`, for ``work`` of rank 0 alone, whose (picklable) result every rank gets."""
    return agreed(lambda: work() if rank() == 0 else None, **how)[0]  # type: ignore[return-value]  # rank 0's


def wait_for_all() -> None:
    """Return once every rank has called this."""
    gather_objects(None)
