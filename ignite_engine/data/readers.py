"""How the batches of a loader are read from a place on: by index, or by reading again what was consumed."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, islice
from typing import Any

from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from ignite_engine import rng
from ignite_engine.data.place import Place
from ignite_engine.data.read_errors import each
from ignite_engine.data.sampler import Dealing, ResumableSampler
from ignite_engine.data.workers import begin_pass, end_workers

logger = logging.getLogger(__name__)


def length_of(data: Any) -> int | None:
    """Batches in one pass over ``data``, None where it does not say."""
    try:
        return len(data)
    except (TypeError, NotImplementedError):
        return None


class Replayed:
    """Data without a state: what was consumed of a pass is read again and dropped.

    Args:
        marks: in the place of a batch that cannot be read stands its error.
    """

    def __init__(self, data: Any, *, marks: bool = False) -> None:
        self.data, self._marks = data, marks
        self.draws = type(data) not in (list, tuple, range)
        """Random numbers may be drawn, or a state moved on, where a batch is read."""
        self.fetched: Sequence[Any] | None = None
        """What was put back, of an iterator that can be read only once and goes on."""
        self.iterator: Any = None
        """The loader's, of the present pass."""
        self._began_with: Mapping[str, Any] | None = None
        """The state in which its samplers were where the present pass began, from which it is read again."""
        self.dealing: Dealing | None = None
        """Whole batches are dealt out to the ranks; those of a place are counted over all of them."""
        self._told: int | None = None
        """The pass of which the data was told last."""

    @property
    def inexact(self) -> str | None:
        """Why a resumed run would not see the same bits, None if it would."""
        if not self.draws or _draws_at_once(self.data):
            return None
        order = getattr(self.data, "sampler", None)
        if isinstance(getattr(self.data, "dataset", None), IterableDataset):
            order = self.data.dataset
        elif getattr(self.data, "batch_size", 0) is None:
            order = getattr(self.data, "batch_sampler", None) or order
        by = "" if order is None or type(order) is SequentialSampler else f" with {type(order).__name__}"
        return f"{type(self.data).__name__}{by} keeps no state: its batches are replayed"

    def measure(self, place: Place) -> int | None:
        """Batches of the pass, counted as ``place.batch`` is; None: unknown."""
        if length_of(self.data) is not None:
            self.set_pass(place)  # a sampler may have another length in each
        return length_of(self.data)

    def set_pass(self, place: Place) -> None:
        """Tell the data and its samplers, once, which pass is read; a stream too, as Hugging Face's shuffle by it."""
        if self._told == place.pass_number:
            return
        self._told, stream = place.pass_number, getattr(self.data, "dataset", None)
        for order in [*orders_of(self.data), *([stream] if isinstance(stream, IterableDataset) else [])]:
            if hasattr(order, "set_epoch"):
                order.set_epoch(place.pass_number)
        if hasattr(stream, "set_epoch") and getattr(self.data, "persistent_workers", False):
            end_workers(self.data._iterator, self.data)  # they have copies, and new ones are told

    def begin(self) -> Iterator[Any]:
        """The loader's batches, from where it is."""
        self.iterator = begin_pass(self.data) if self.fetched is None else self.data
        if type(self.data) is DataLoader and not self._marks:
            batches: Iterator[Any] = self.iterator
            return batches
        return each(self.iterator, self.data, marks=self._marks)

    def open(self, place: Place) -> Iterator[Any]:
        """The batches from ``place`` on."""
        self._load_samplers(place)
        drawn_with = place.held.get("drawn_with")
        self._began_with = self.state()
        if self.draws:
            self._began_with = {**self._began_with, "drawn_with": drawn_with or rng.capture()}
        if drawn_with is not None:
            rng.restore(drawn_with)
        iterator, fetched, self.fetched = self.begin(), self.fetched, None
        if fetched is not None:
            return chain(fetched, iterator)
        if not place.batch:
            return iterator
        if self.draws:
            what = self.inexact or type(self.data).__name__
            logger.warning("%s: the %d batches that were consumed are loaded again and skipped.", what, place.batch)
        return _from(iterator, place.batch, rng.capture())

    def put_back(self, group: Sequence[Any]) -> None:
        """The group that was read last comes again."""
        if isinstance(self.data, Iterator):
            self.fetched = group

    def state(self) -> Mapping[str, Any]:
        """What a place holds of the loader as it is now (``Place.held``)."""
        if self._began_with is not None:
            return self._began_with
        states = [sampler.state_dict() for sampler in self._samplers()]
        return {"samplers": states} if states else {}

    def _samplers(self) -> list[Any]:
        return [order for order in orders_of(self.data)[1:] if hasattr(order, "state_dict")]

    def _load_samplers(self, place: Place) -> bool:
        states = place.held.get("samplers", ())
        for sampler, state in zip(self._samplers(), states, strict=False):
            sampler.load_state_dict(state)
        return bool(states)

    def end_pass(self, place: Place) -> None:
        """The present pass is over; through one that was not opened here the samplers go now."""
        self._began_with = None
        if self._load_samplers(place):
            with rng.isolated():  # what they draw was drawn then
                deque(getattr(self.data, "batch_sampler", None) or self.data.sampler, maxlen=0)

    def order(self, place: Place) -> dict[str, Any]:
        """What a checkpoint holds of the order at ``place``."""
        return {}

    def end(self, *, keep_persistent: bool = False) -> None:
        """End the workers of the present pass."""
        if not (keep_persistent and getattr(self.data, "persistent_workers", False)):
            end_workers(self.iterator, self.data)
        self.iterator = None


class Indexed(Replayed):
    """A ``loader()``: its sampler begins at any sample, nothing that was consumed is loaded."""

    def __init__(self, data: Any, *, marks: bool = False) -> None:
        super().__init__(data, marks=marks)
        self.sampler: ResumableSampler = data.sampler
        self.draws = False

    @property
    def inexact(self) -> str | None:
        return self.sampler.inexact

    def measure(self, place: Place) -> int | None:
        sampler = self.sampler
        sampler.length, sampler.skipped = sampler.data_length(place.pass_number), place.skipped
        sampler.dealing = self.dealing
        if self.dealing is None:
            return length_of(self.data)
        left, size = max(0, sampler.length - place.skipped), self.dealing.batch_size
        return left // size if self.data.drop_last else -(-left // size)

    def set_pass(self, place: Place) -> None:
        self.sampler.pass_number = place.pass_number

    def open(self, place: Place) -> Iterator[Any]:
        self.sampler.start = place.batch * self.data.batch_size
        return self.begin()

    def fixed(self, samples: int) -> dict[str, Any]:
        """What must be the same where a place is loaded."""
        seed, shuffle = self.sampler.seed, self.sampler.shuffle
        return {"seed": seed, "shuffle": shuffle, "samples": samples, "batch_size": self.data.batch_size}

    def order(self, place: Place) -> dict[str, Any]:
        # a pass that is yet to start has what is there by then
        begun = place.is_within
        samples = self.sampler.length if begun else self.sampler.data_length(place.pass_number)
        order = self.fixed(samples) | {"skipped": place.skipped}
        if self.dealing is not None:  # in samples it means the same on any number of ranks
            order |= {"batch": 0, "skipped": min(place.skipped + place.batch * self.data.batch_size, samples)}
        drawn = self.sampler.drawn_order if begun else None
        return order if drawn is None else order | {"drawn_order": drawn}

    def end(self, *, keep_persistent: bool = False) -> None:
        super().end(keep_persistent=keep_persistent)
        self.sampler.start, self.sampler.skipped, self.sampler.dealing = None, 0, None


def _from(iterator: Iterator[Any], batch: int, began_with: Any) -> Iterator[Any]:
    """The iterator without what comes before ``batch``, which the first ``next`` reads: a stop may end that.

    Args:
        began_with: the random numbers with which the pass was opened here.
    """
    with rng.isolated():  # what they draw was drawn then
        rng.restore(began_with)
        for _ in islice(iterator, batch):
            pass
    yield from iterator


def _draws_at_once(data: Any) -> bool:
    """Whether a loader draws all that its batches depend on where a pass begins: its order, the seed of its workers."""
    samplers = (SequentialSampler, RandomSampler, SubsetRandomSampler, WeightedRandomSampler, DistributedSampler)
    return (
        type(data) is DataLoader
        and not isinstance(data.dataset, IterableDataset)
        and type(data.sampler) in samplers
        and type(data.batch_sampler) in (BatchSampler, type(None))
        and (data.generator or getattr(data.sampler, "generator", None)) is None
        and not data.persistent_workers
    )


def orders_of(data: Any) -> list[Any]:
    """``data``, its samplers and theirs, also through torchdata's nodes; at most 16: some answer every attribute."""
    orders = [data]
    for order in orders:
        for inner in (getattr(order, name, None) for name in ("batch_sampler", "sampler", "root", "source")):
            if inner is not None and len(orders) < 16 and not any(inner is known for known in orders):
                orders.append(inner)
    return orders
