"""How the batches of data are read from a place on: by index, by a state of its own, or by reading again what was
consumed."""

from __future__ import annotations

import inspect
import logging
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from itertools import chain, islice
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
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
from ignite_engine.data.read_errors import each
from ignite_engine.data.sampler import Dealing, ResumableSampler
from ignite_engine.data.workers import begin_pass, end_workers

logger = logging.getLogger(__name__)
_NOTHING = object()
_RESTARTS = "restart_on_stop_iteration"  # of torchdata.nodes' Loader: a state of a pass's end would begin the next pass
_FINISHED = "_iterator_finished"  # in the state of torchdata's StatefulDataLoader


class Place(NamedTuple):
    """Batch ``batch`` of pass ``pass_number`` is the next that is not consumed."""

    pass_number: int = 0
    batch: int = 0
    ended: bool = False
    """The pass was at its end when the place was saved: it yields nothing more."""
    skipped: int = 0
    """Samples at the start of the pass that another number of ranks consumed; batches are counted after them."""
    held: Mapping[str, Any] = MappingProxyType({})
    """What belongs to it beside its numbers, of a loader that is not at its place itself:

    - ``loader``: its own state, with ``generators``, those of its own random number generators
    - ``samplers``: states of the samplers of data without one, where the pass began; ``drawn_with``: the random numbers
      with which it began
    - ``exhausted``: this rank has no batch left, a peer has
    - ``between_passes``: the pass before has ended, and this one is not open yet; ``loader`` is the state at that end
    """

    @property
    def is_within(self) -> bool:
        """Some of the pass is consumed."""
        return self.batch > 0 or self.skipped > 0


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


class Stateful(Replayed):
    """A loader whose state, saved with the place, brings it back there."""

    exhausted = False
    """It has ended its pass, perhaps while the last group was gathered."""

    @property
    def inexact(self) -> str | None:
        """Why a resumed run would not see the same bits, None if it would."""
        kind, workers = type(self.data).__name__, getattr(self.data, "num_workers", 0)
        if (sampler := _stateless_order(self.data)) is not None:
            return f"{kind} does not save the order of its {type(sampler).__name__}: it is drawn again"
        dataset = getattr(self.data, "dataset", None)
        if hasattr(dataset, "_ex_iterable"):  # Hugging Face's
            return f"{kind} saves no shuffle buffer that {type(dataset).__name__} may have: it is filled anew"
        if not workers:
            return None
        return f"{kind} saves of its {workers} workers neither random numbers nor which streams have ended"

    def set_pass(self, place: Place) -> None:
        super().set_pass(place)
        self._restore_generators(place)  # an evaluation may read the data before the pass is opened

    def open(self, place: Place) -> Iterator[Any]:
        self.fetched, self.exhausted = None, False
        if hasattr(self.data, _RESTARTS):
            setattr(self.data, _RESTARTS, False)
        if "loader" not in place.held:
            return self._until_exhausted(self.begin())
        self.data.load_state_dict(place.held["loader"])
        if place.held.get("between_passes"):
            return self._after_a_pass(place)
        iterator = self.begin()
        self._restore_generators(place)
        return self._until_exhausted(iterator)

    def _after_a_pass(self, place: Place) -> Iterator[Any]:
        """After the state of a pass's end was loaded some data yields nothing, other data the next pass at once.

        It begins now, as in a run that was not stopped, where ``terminate_epoch()`` opens it before a save.
        """
        of_the_process = rng.capture()
        is_over = next(self.begin(), _NOTHING) is _NOTHING
        rng.restore(of_the_process)  # what the end of the pass drew was drawn before the state was saved
        self._restore_generators(place)
        if is_over:
            return self._until_exhausted(self.begin())
        self.data.load_state_dict(place.held["loader"])
        return chain.from_iterable(self._until_exhausted(self.begin()) for _ in range(1))  # not before it is asked

    def _until_exhausted(self, iterator: Iterator[Any]) -> Iterator[Any]:
        yield from iterator
        self.exhausted = True

    def _restore_generators(self, place: Place) -> None:
        for generator, state in zip(generators_of(self.data), place.held.get("generators", ()), strict=False):
            generator.set_state(state)

    def put_back(self, group: Sequence[Any]) -> None:
        """Its state, which the place holds, is that before the group."""

    def state(self) -> Mapping[str, Any]:
        states = [generator.get_state() for generator in generators_of(self.data)]
        state = {"loader": _unfinished(self.data.state_dict()), "exhausted": self.exhausted}
        return state | ({"generators": states} if states else {})


def reader_of(data: Any, *, marks: bool = False) -> Replayed:
    """How ``data`` is read from a place on; with ``marks`` an error stands in the place of a batch."""
    if type(data) is DataLoader and isinstance(data.sampler, ResumableSampler):
        return Indexed(data, marks=marks)
    return (Stateful if keeps_state(data) else Replayed)(data, marks=marks)


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


def keeps_state(data: Any) -> bool:
    """Whether the state of ``data`` can be relied on.

    torchdata's loader over a stream without one counts twice what it replays, and loses as much.
    """
    dataset = getattr(data, "dataset", None)
    if not hasattr(data, "state_dict"):
        return False
    if not isinstance(dataset, IterableDataset) or hasattr(dataset, "state_dict"):
        return True
    return _iterator_keeps_state(dataset)


def generators_of(data: Any) -> list[torch.Generator]:
    """The random number generators of a loader's own: its own and those of its samplers, without repetition."""
    own = (getattr(order, "generator", None) for order in orders_of(data))
    return list(dict.fromkeys(generator for generator in own if isinstance(generator, torch.Generator)))


def _iterator_keeps_state(dataset: Any) -> bool:
    if inspect.isgeneratorfunction(type(dataset).__iter__):
        return False
    try:
        with rng.isolated():
            return hasattr(iter(copy(dataset)), "state_dict")
    except Exception:  # it may be iterated in a worker alone; without torchdata's state it is right, if slower
        return False


def _stateless_order(data: Any) -> Any:
    """The sampler whose order a loader with a state cannot resume; None: there is none, or its order is fixed."""
    outers = (getattr(data, name, None) for name in ("batch_sampler", "sampler", "root"))
    outer = next((outer for outer in outers if outer is not None), None)
    if outer is None or isinstance(getattr(data, "dataset", None), IterableDataset):
        return None
    orders = orders_of(outer)
    fixed = isinstance(orders[-1], SequentialSampler | DistributedSampler | list | tuple | range)
    return None if fixed or all(map(_has_state, orders)) else orders[-1]


def _has_state(sampler: Any) -> bool:
    """Torchdata's have one in their iterators."""
    return hasattr(sampler, "state_dict") or type(sampler).__module__.startswith("torchdata.")


def _unfinished(state: Any) -> Any:
    """The state of a loader that need not have reported yet that its pass is over.

    One of torchdata that has, as it does while the last group is gathered, would start the next pass at once when its
    state is loaded: the end of this one would be lost, and more would be drawn than was drawn here.
    """
    return state | {_FINISHED: False} if isinstance(state, dict) and state.get(_FINISHED) else state
