"""A source on several ranks: all of them take the same number of groups."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from ignite_engine import rng
from ignite_engine.data.lookahead import LookAhead, Waiting
from ignite_engine.data.place import Held
from ignite_engine.data.read_errors import ReadErrors
from ignite_engine.data.readers import length_of
from ignite_engine.data.source import DataSource
from ignite_engine.ranks import agreement, mesh
from ignite_engine.step.micro_batches import WeightFn


class AgreedSource(DataSource):
    """A :class:`DataSource` whose ranks agree on its groups.

    Args:
        weigh: weight of a batch, which the ranks then exchange ahead; None: none.
        waiting: its ``waiting_for_data`` is set where a signal may end a wait that the ranks agree on.

    Sized loaders exchange their lengths when a pass starts; nothing more is needed where they are equal. Otherwise, and
    where groups are weighed or batches may be left out, the ranks agree on each group one ahead (:class:`LookAhead`): a
    rank that is exhausted before its peers repeats its last batch until all are.
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
        self._weigh, self._waiting = weigh, waiting
        self._ahead: LookAhead | None = None
        self.pads = False
        """A rank may have to repeat a batch, or groups are weighed ahead."""

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
        told_ahead = self._weigh is not None or self.read_errors is not None
        self.pads = told_ahead or self.batches is None or len(set(lengths)) > 1

    def __iter__(self) -> Iterator[Any]:
        if not self.pads or self.place.ended:
            return super().__iter__()
        if self.read_errors is not None:
            self.read_errors.clear()
        held, left = self.place.held, None if self.batches is None else self.batches - self.place.batch
        self.place = self.place._replace(held=replace(held, rng=None))
        self._opened_at = self.place.held if held.loader is not None or held.exhausted else None
        repeated = self._last_consumed()
        self._ahead = LookAhead(
            iter(()) if held.exhausted or repeated is not None else self._open(),
            repeated=repeated,
            steps=self.steps,
            position=None
            if self.sampler is not None
            else lambda: replace(self._loader_before_the_fetch(), rng=rng.capture()),
            weigh=self._weigh,
            waiting=self._waiting,
            read_errors=self.read_errors,
            left=left,
        )
        if held.rng is not None:  # what the fetch drew was drawn before the generators were saved
            with rng.isolated():
                rng.restore(held.rng)
                self._ahead.fetch(drawn=True)
        return self._ahead

    def _last_consumed(self) -> Iterator[Any] | None:
        """The last batch of this rank, opened, where it has none left; None: it has, or it cannot be read again."""
        place, own = self.place, length_of(self.data)
        if self.read_errors is not None or not (self.reader.begins_anywhere and own and place.batch >= own):
            return None
        self.place = place._replace(batch=own - 1)
        batches = self._open()
        self.place = self.place._replace(batch=place.batch)
        return batches

    def consumed(self, batches: int) -> None:
        super().consumed(batches)
        if self._ahead is not None:
            self._ahead.consumed()

    def next_pass(self) -> None:
        super().next_pass()
        self._ahead = None

    def close(self) -> None:
        if self._ahead is not None:
            self.freeze()
        super().close()

    def _held(self) -> Held:
        before = None if self._ahead is None else self._ahead.before
        return super()._held() if before is None else before

    def freeze(self) -> None:
        if self._ahead is not None:
            if isinstance(self.data, Iterator):
                self.reader.fetched = self._ahead.fetched
            self.place, self._ahead = self.place._replace(held=self._held()), None
        else:
            super().freeze()

    def _has_ended(self) -> bool:
        if not self.pads:
            return super()._has_ended()
        return self.place.ended or (self.batches is not None and self.place.batch >= self.batches)


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
