"""How the batches of a loader are read from a place on: by index, or by reading again what was consumed."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, islice
from typing import Any

from torch.utils.data import BatchSampler, DistributedSampler, IterableDataset, SequentialSampler

from ignite_engine import rng
from ignite_engine.data.place import Held, Place
from ignite_engine.data.sampler import ResumableSampler

logger = logging.getLogger(__name__)

Begin = Callable[[], Iterator[Any]]
"""Makes the loader's iterator of a pass."""


def length_of(data: Any) -> int | None:
    """Batches in one pass over ``data``, None where it does not say."""
    try:
        return len(data)
    except (TypeError, NotImplementedError):
        return None


class Replayed:
    """Data without a state: what was consumed of a pass is read again and dropped."""

    keeps_state = False
    """The data has a ``state_dict`` of its own, which holds the place in a pass."""
    exhausted = False
    """The loader has ended its pass, perhaps while the last group was gathered; only known of one with a state."""
    generators: Sequence[Any] = ()
    """Those whose states are saved with the place."""
    draws = True
    """Random numbers may be drawn, or a state moved on, where a batch is read."""

    def __init__(self, data: Any) -> None:
        self.data = data
        self.fetched: Sequence[Any] | None = None
        """What was put back, of an iterator that can be read only once and goes on."""
        self._measured: int | None = None
        """The pass that was measured and is not open yet."""

    @property
    def inexact(self) -> str | None:
        """Why a resumed run would not see the same bits, None if it would."""
        order = getattr(self.data, "sampler", None)
        if isinstance(getattr(self.data, "dataset", None), IterableDataset):
            order = self.data.dataset
        elif getattr(self.data, "batch_size", 0) is None:
            order = getattr(self.data, "batch_sampler", None) or order
        by = "" if order is None or type(order) is SequentialSampler else f" with {type(order).__name__}"
        return f"{type(self.data).__name__}{by} keeps no state: its batches are replayed"

    def measure(self, place: Place) -> int | None:
        """Batches of the pass, counted as ``place.batch`` is; None: unknown."""
        if length_of(self.data) is None:
            return None
        self._set_epoch(place.pass_number)  # a sampler may have another length in each
        self._measured = place.pass_number
        return length_of(self.data)

    def set_pass(self, place: Place) -> None:
        """Tell the data which pass is read, unless it was told where that was measured."""
        if self._measured != place.pass_number:
            self._set_epoch(place.pass_number)
        self._measured = None

    def _set_epoch(self, pass_number: int) -> None:
        """Tell the data and its samplers; a stream too, as those of Hugging Face shuffle by it."""
        stream = getattr(self.data, "dataset", None)
        for order in [*orders_of(self.data), *([stream] if isinstance(stream, IterableDataset) else [])]:
            if hasattr(order, "set_epoch"):
                order.set_epoch(pass_number)

    def open(self, place: Place, begin: Begin) -> Iterator[Any]:
        """The batches from ``place`` on."""
        iterator, fetched, self.fetched = begin(), self.fetched, None
        if fetched is not None:
            return chain(fetched, iterator)
        if place.batch:
            logger.warning(
                "%s keeps no state: the %d batches that were consumed are loaded again and skipped%s.",
                type(self.data).__name__,
                place.batch,
                f", in an order that {drawn} draws anew" if (drawn := self._drawn_by()) else "",
            )
        return _from(iterator, place.batch)

    def _drawn_by(self) -> str | None:
        """The sampler whose order is another one each time; None: none is known to be."""
        if isinstance(getattr(self.data, "dataset", None), IterableDataset):
            return None  # torch's placeholder orders nothing
        samplers = [
            order
            for order in orders_of(self.data)[1:]
            if not isinstance(order, SequentialSampler | DistributedSampler | BatchSampler)
        ]
        return next((type(order).__name__ for order in samplers if not hasattr(order, "set_epoch")), None)

    def held(self) -> Held:
        """What a place holds of the loader as it is now."""
        return Held()

    def saved(self, place: Place) -> dict[str, Any]:
        """What a checkpoint holds of the loader beside the numbers of ``place``."""
        return {}

    def close(self) -> None:
        """The run is over."""


class Listed(Replayed):
    """Batches in a list or a tuple: the same in every pass."""

    inexact = None
    draws = False

    def open(self, place: Place, begin: Begin) -> Iterator[Any]:
        return _from(begin(), place.batch)


class ByIndex(Replayed):
    """A ``loader()``: its sampler begins at any sample, nothing that was consumed is loaded."""

    draws = False

    def __init__(self, data: Any) -> None:
        super().__init__(data)
        self.sampler: ResumableSampler = data.sampler

    @property
    def inexact(self) -> str | None:
        return self.sampler.inexact

    def measure(self, place: Place) -> int | None:
        self.sampler.length, self.sampler.skipped = self.sampler.data_length(place.pass_number), place.skipped
        return length_of(self.data)

    def set_pass(self, place: Place) -> None:
        self.sampler.pass_number = place.pass_number

    def open(self, place: Place, begin: Begin) -> Iterator[Any]:
        self.sampler.start = min(place.batch * self.data.batch_size, len(self.sampler))
        return begin()

    def order(self, samples: int) -> dict[str, Any]:
        """What must be the same where a place is loaded."""
        seed, shuffle = self.sampler.seed, self.sampler.shuffle
        return {"seed": seed, "shuffle": shuffle, "samples": samples, "batch_size": self.data.batch_size}

    def saved(self, place: Place) -> dict[str, Any]:
        # a pass that is yet to start has what is there by then
        begun = place.batch or place.skipped
        order = self.order(self.sampler.length if begun else self.sampler.data_length(place.pass_number))
        drawn = self.sampler.drawn_order if begun else None
        return {**order, "skipped": place.skipped, **({} if drawn is None else {"drawn_order": drawn})}

    def close(self) -> None:
        self.sampler.start, self.sampler.skipped = None, 0


def _from(iterator: Iterator[Any], batch: int) -> Iterator[Any]:
    """The iterator without what comes before ``batch``, which the first ``next`` reads: a stop may end that."""
    return chain(_skipped(iterator, batch, rng.capture()), iterator) if batch else iterator


def _skipped(iterator: Iterator[Any], batch: int, began_with: Any) -> Iterator[Any]:
    """None of the batches that are read.

    Args:
        began_with: the random numbers with which the pass was opened here.
    """
    with rng.isolated():  # what they draw was drawn then
        rng.restore(began_with)
        for _ in islice(iterator, batch):
            pass
    yield from ()


def orders_of(data: Any) -> list[Any]:
    """``data``, its samplers and theirs, without repetition; at most 8, as some objects answer every attribute."""
    orders = [data]
    for order in orders:
        for inner in (getattr(order, name, None) for name in ("batch_sampler", "sampler")):
            if inner is not None and len(orders) < 8 and not any(inner is known for known in orders):
                orders.append(inner)
    return orders
