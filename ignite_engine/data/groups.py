"""Forms the next group of each rank: from data of its own, on which the ranks agree, or as a share of one global order.

With ``global_micro_batches`` an iteration is the next so many batches of one order, of which each rank computes a
share. Batches are then counted over all ranks, and what is saved of the position is the number of samples
that were consumed, so it means the same on any number of ranks.
"""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ignite_engine.data.readers import Indexed, Replayed
from ignite_engine.data.sampler import Dealing
from ignite_engine.errors import PeerFailed, StopRequested, one_line
from ignite_engine.ranks import agreement, mesh
from ignite_engine.update.micro_batches import Group, check_weight, share

if TYPE_CHECKING:
    from ignite_engine.data.source import DataSource

_ERROR, _STOP = 1, 2
_DIFFER = (
    "The order of the data on rank {} is not that of rank {}, and each rank takes its share of one order: give "
    "loader() as many samples and the same seed on every rank, and a sampler whose order does not depend on the rank.",
    "The dataset on rank {} is not that of rank {}, and each rank takes its share of one dataset, so samples would be "
    "lost: give every rank the whole dataset; or, where each rank has a shard of its own, a DataLoader with a sampler "
    "of your own, such as sampler=range(len(shard)).",
)
"""What is wrong where the keys of two ranks (:func:`_order_key`) differ."""


def agreed_group(source: DataSource, batches: Iterator[Any]) -> Group | None:
    """The next group of which some rank has a batch, None if there is none; a collective.

    The ranks exchange what each has fetched: how many batches it has, what they weigh, and whether it failed or was
    stopped. So no rank enters a step that a peer will not join. A rank that has fewer batches than its peers repeats
    its last one, which weighs nothing; one that has none takes a peer's.

    Args:
        batches: of this rank, with errors in the place of those that cannot be read.

    Raises:
        Exception: what this rank's data raised.
        PeerFailed: what a peer's raised, at the same place.
        StopRequested: a rank was stopped while it waited for data, on every rank.
    """
    group = Group()
    while True:
        own, weights, rows = _exchanged(source, batches, group)
        longest, places = (int(max(row[column] for row in rows)) for column in (0, 3))
        group.places += places
        if longest or not places:
            break
    if not longest:
        if source.read_errors is not None:
            source.read_errors.count(group)  # no part of the pass is read again
        return None
    group.extend(own)
    if not all(row[0] for row in rows):
        holder = next(rank for rank, row in enumerate(rows) if row[0])
        repeated = batch_of(holder, own[0] if own else None)
    group.padding = longest - len(own)
    group.extend([own[-1] if own else repeated] * group.padding)
    of_data = mesh.by_data_rank(rows)
    group.total = int(sum(row[0] for row in of_data))
    if source.weigh is not None:
        group.weights = weights + [0.0] * group.padding
        group.total_weight = sum(row[2] for row in of_data)
    return group


def _exchanged(
    source: DataSource, batches: Iterator[Any], group: Group
) -> tuple[list[Any], list[float], list[list[float]]]:
    """This rank's batches and their weights; of each rank how many it has, what is wrong, their weight, how many were
    due."""
    places, own, unread, weights = list[Any](), list[Any](), list[Exception](), list[float]()
    flags, error = 0, None
    try:
        places = source.read(batches, source.steps)
        own = [item for item in places if not isinstance(item, Exception)]
        unread = [item for item in places if isinstance(item, Exception)]
        if source.weigh is not None:
            weights = [check_weight(source.weigh(batch)) for batch in own]
    except StopRequested:
        flags = _STOP
    except Exception as raised:
        error, flags = raised, _ERROR
    rows = agreement.gather_floats([len(own), flags, sum(weights), len(places)])
    if any(row[1] == _ERROR for row in rows):
        _raise(error)
    if any(row[1] for row in rows):
        raise StopRequested
    if source.read_errors is not None and any(row[3] > row[0] for row in rows):
        source.read_errors.leave_out(unread, group)
    return own, weights, rows


def _raise(error: Exception | None) -> None:
    """Raise a data error of one rank on all ranks."""
    lines = agreement.gather_objects(None if error is None else one_line(error))
    if error is not None:
        raise error
    rank, line = next((rank, line) for rank, line in enumerate(lines) if line is not None)
    raise PeerFailed(f"Rank {rank} failed, reading its data: {line}")


def batch_of(holder: int, batch: Any) -> Any:
    """The batch of rank ``holder``, on every rank; a collective.

    Raises:
        Exception: it cannot be pickled, on every rank.
    """
    mine = agreement.rank() == holder
    return pickle.loads(agreement.agreed(lambda: pickle.dumps(batch) if mine else b"")[holder])


def lengths(source: DataSource, own: int | None) -> tuple[list[int], bool]:
    """The batches of a pass by data rank, -1 where it is unknown, and whether each rank reads by index; a collective.

    Args:
        own: of this rank.

    Raises:
        ValueError: ranks would take shares of other orders or datasets, so that samples came twice or never.
    """
    length = -1.0 if own is None else float(own)
    rows = agreement.gather_floats([length, *_order_key(source), float(source.reader.draws)])
    for column, sentence in enumerate(_DIFFER, 1):
        keys = [row[column] for row in rows]
        first = next((key for key in keys if key), 0.0)
        other = next((rank for rank, key in enumerate(keys) if key not in (0.0, first)), None)
        if other is not None:
            raise ValueError(sentence.format(other, keys.index(first)))
    return [int(row[0]) for row in mesh.by_data_rank(rows)], not any(row[3] for row in rows)


def _order_key(source: DataSource) -> list[float]:
    """Two numbers that are the same on ranks that share out one order of one dataset; 0: each has an order of its own.

    The first is of the order, the second of what the dataset holds.
    """
    sampler = source.sampler
    if sampler is None or sampler.world_size == 1:
        return [0.0, 0.0]
    sampler.pass_number = source.pass_number
    words = f"{sampler.seed if sampler.shuffle else None} {sampler.drawn_order} {sampler.length}"
    return [float(int(hashlib.sha256(text.encode()).hexdigest()[:12], 16)) for text in (words, f"{source.fingerprint}")]


def deal(reader: Replayed, micro_batches: int) -> Dealing | None:
    """Make ``reader`` read this rank's share only.

    Raises:
        ValueError: there are fewer micro-batches than ranks, or data of the ranks' own cannot be dealt out.
    """
    first, end = share(micro_batches, mesh.data_rank(), mesh.data_size())
    if isinstance(reader, Indexed):
        reader.dealing = Dealing(reader.data.batch_size, micro_batches, first, end)
        return reader.dealing
    if mesh.data_size() > 1 and reader.data != ():  # which is an empty window
        raise ValueError(
            f"global_micro_batches deals one order of samples out to the ranks, which needs loader() or a plain "
            f"DataLoader, got a {type(reader.data).__name__} on {mesh.data_size()} ranks: use one of them, or "
            "accumulation_steps."
        )
    return None


def refuse_lengths(lengths: list[int]) -> None:
    """Refuse data that cannot be shared out.

    Raises:
        ValueError: always; the data has no batch, or not as many, in another order or of other data on some rank.
    """
    raise ValueError(
        "global_micro_batches needs the same data on every rank, with at least one batch, got "
        f"{', '.join(map(str, lengths))} batches by rank."
    )


def dealt_group(source: DataSource, dealing: Dealing, batches: Iterator[Any]) -> Group | None:
    """This rank's share of the next iteration; None at the end of the pass."""
    assert source.batches is not None and source.sampler is not None
    size = min(dealing.cycle, source.batches - source.batch)
    if size <= 0:
        next(batches, None)  # the loader ends its workers when it is exhausted
        return None
    group = Group(source.read(batches, dealing.own(size)))
    if not group and not source.may_be_empty:
        # in a resumed run the same: the first samples of the pass
        first = source.sampler.first(dealing.batch_size)
        group.append(source.data.dataset.__getitems__([(source.pass_number, index) for index in first]))
        group.padding = 1
    group.total = group.places = size
    return group
