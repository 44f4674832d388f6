"""A source on several ranks: all of them take the same number of groups."""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Iterator, Sequence
from typing import Any

from ignite_engine.data.read_errors import ReadErrors, split
from ignite_engine.data.source import DataSource, Waiting
from ignite_engine.errors import PeerFailed, StopRequested, one_line
from ignite_engine.ranks import agreement, mesh
from ignite_engine.step.micro_batches import Group, WeightFn, check_weight

_ERROR, _STOP = 1, 2


class AgreedSource(DataSource):
    """A :class:`DataSource` whose ranks agree on its groups.

    Args:
        weigh: weight of a batch, which the ranks exchange; None: none.

    Sized loaders exchange their lengths when a pass starts; nothing more is needed where they are equal. Otherwise, and
    where groups are weighed or batches may be left out, the ranks exchange when each has fetched a group: how many
    batches it has, what they weigh, and whether it failed or was stopped. So no rank enters a step that a peer will not
    join. A rank that has fewer batches than its peers repeats its last one, which weighs nothing; one that has none
    takes a peer's.

    Raises (where a group is fetched):
        Exception: what this rank's data raised.
        PeerFailed: what a peer's raised, at the same place.
        StopRequested: a rank was stopped while it waited for data, on every rank.
    """

    def __init__(
        self,
        data: Any,
        accumulation_steps: int | None,
        *,
        weigh: WeightFn | None = None,
        waiting: Waiting | None = None,
        read_errors: ReadErrors | None = None,
    ) -> None:
        super().__init__(data, accumulation_steps, read_errors=read_errors)
        self._weigh, self._agreed_wait = weigh, waiting
        self.pads = False
        """A rank may have to repeat a batch, or groups are weighed."""

    def agree_lengths(self) -> None:
        """Read the length of the pass that starts; the ranks exchange theirs. A collective.

        Raises:
            ValueError: the ranks share out one order, and one of them has another order or other data.
        """
        own = self.reader.measure(self.place)
        rows = agreement.gather_floats([-1.0 if own is None else float(own), *order_key(self)])
        check_orders_agree([row[1:] for row in rows])
        lengths = [int(row[0]) for row in mesh.by_data_rank(rows)]
        self.batches = max(lengths) if min(lengths) >= 0 else None
        exchanges = self._weigh is not None or self.read_errors is not None
        self.pads = exchanges or self.batches is None or len(set(lengths)) > 1
        self._waiting = self._agreed_wait if self.pads else None  # else the ranks could not agree on a stop in it

    def _next(self, batches: Iterator[Any]) -> Group | None:
        if not self.pads:
            return super()._next(batches)
        group = Group()
        while True:
            own, weights, rows = self._exchanged(batches, group)
            longest, places = (int(max(row[column] for row in rows)) for column in (0, 3))
            group.places += places
            if longest or not places:
                break
        if not longest:
            return group if group.places else None
        group.extend(own)
        holder = next(rank for rank, row in enumerate(rows) if row[0])
        if not all(row[0] for row in rows):
            repeated = batch_of(holder, own[0] if own else None)
        group.padding = longest - len(own)
        group.extend([own[-1] if own else repeated] * group.padding)
        of_data = mesh.by_data_rank(rows)
        group.total = int(sum(row[0] for row in of_data))
        if self._weigh is not None:
            group.weights = weights + [0.0] * group.padding
            group.total_weight = sum(row[2] for row in of_data)
        return group

    def _exchanged(self, batches: Iterator[Any], group: Group) -> tuple[list[Any], list[float], list[list[float]]]:
        """This rank's batches and their weights; of each rank how many it has, what is wrong, their weight, how many
        were due."""
        places, own, unread, weights = list[Any](), list[Any](), list[Exception](), list[float]()
        flags, error = 0, None
        try:
            places = self._read(batches)
            own, unread = split(places)
            if self._weigh is not None:
                weights = [check_weight(self._weigh(batch)) for batch in own]
        except StopRequested:
            flags = _STOP
        except Exception as raised:
            error, flags = raised, _ERROR
        rows = agreement.gather_floats([len(own), flags, sum(weights), len(places)])
        if any(row[1] == _ERROR for row in rows):
            _raise(error)
        if any(row[1] for row in rows):
            raise StopRequested
        if self.read_errors is not None:
            found = int(sum(row[3] - row[0] for row in rows))
            empty = any(row[3] for row in rows) and not any(row[0] for row in rows)
            self.read_errors.leave_out(group, unread, found=found, empty=empty)
        return own, weights, rows

    def _has_ended(self) -> bool:
        if not self.pads:
            return super()._has_ended()
        return self.place.ended or (self.batches is not None and self.place.batch >= self.batches)


def _raise(error: Exception | None) -> None:
    """Of the data of one rank, on all."""
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


def order_key(source: DataSource) -> list[float]:
    """Two numbers that are the same on ranks that share out one order of one dataset; 0: each has an order of its own.

    The first is of the order, the second of what the dataset holds.
    """
    sampler = source.sampler
    if sampler is None or sampler.world_size == 1:
        return [0.0, 0.0]
    sampler.pass_number = source.place.pass_number
    words = f"{sampler.seed if sampler.shuffle else None} {sampler.drawn_order} {sampler.length}"
    return [float(int(hashlib.sha256(text.encode()).hexdigest()[:12], 16)) for text in (words, f"{source.fingerprint}")]


def check_orders_agree(keys: Sequence[Sequence[float]]) -> None:
    """Refuse ranks that would take shares of other orders or datasets, so that samples came twice or never.

    Args:
        keys: of :func:`order_key`, by rank.
    """
    if (ranks := _that_differ([order for order, _ in keys])) is not None:
        raise ValueError(
            f"The order of the data on rank {ranks[1]} is not that of rank {ranks[0]}, and each rank takes its "
            "share of one order: give loader() as many samples and the same seed on every rank, and a sampler whose "
            "order does not depend on the rank."
        )
    if (ranks := _that_differ([data for _, data in keys])) is not None:
        raise ValueError(
            f"The dataset on rank {ranks[1]} is not that of rank {ranks[0]}, and each rank takes its share of one "
            "dataset, so samples would be lost: give every rank the whole dataset; or, where each rank has a shard of "
            "its own, a DataLoader with a sampler of your own, such as sampler=range(len(shard))."
        )


def _that_differ(keys: Sequence[float]) -> tuple[int, int] | None:
    """The first rank that has a key, and the first with another one."""
    first = next((key for key in keys if key), 0.0)
    other = next((rank for rank, key in enumerate(keys) if key not in (0.0, first)), None)
    return None if other is None else (keys.index(first), other)
