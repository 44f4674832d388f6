"""Reads batches from a position on: by index, by the loader's own state, or by reading again what was
consumed."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from copy import copy
from typing import Any

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
from ignite_engine.errors import StateMismatch, leave_out

_NOTHING = object()


def length_of(data: Any) -> int | None:
    """The number of batches in one pass over ``data``; None if unknown."""
    try:
        return len(data)
    except (TypeError, NotImplementedError):
        return None


class Replayed:
    """Data without a state: a pass is opened with the random numbers with which it began, and replayed.

    Args:
        marks: in the place of a batch that cannot be read stands its error.
    """

    def __init__(self, data: Any, *, marks: bool = False) -> None:
        self.data, self._marks = data, marks
        self.draws = type(data) not in (list, tuple, range)
        """Whether reading a batch may draw random numbers or change a state."""
        self.reads_again = True
        """Whether an opened pass begins at its first batch, instead of at the position."""
        self.goes_on = False
        """Whether the data is an iterator that is already at the position."""
        self.iterator: Any = None
        """The loader's iterator of the current pass."""
        self._began_with: dict[str, Any] = {}

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

    def length(self, pass_number: int, held: Mapping[str, Any]) -> int | None:
        """Batches from the position on at which a pass is opened with ``held``; None: unknown."""
        if length_of(self.data) is not None:
            self._tell(pass_number)  # a sampler may have another length in each
        return length_of(self.data)

    def _tell(self, pass_number: int) -> None:
        """Tell the data and its samplers which pass is read; a stream too, as Hugging Face's shuffle by it."""
        stream = getattr(self.data, "dataset", None)
        for order in [*orders_of(self.data), *([stream] if isinstance(stream, IterableDataset) else [])]:
            if hasattr(order, "set_epoch"):
                order.set_epoch(pass_number)

    def _begin(self) -> Iterator[Any]:
        """The loader's batches from its current place on."""
        stream = getattr(self.data, "dataset", None)
        if hasattr(stream, "set_epoch") and getattr(self.data, "persistent_workers", False):
            end_workers(self.data._iterator, self.data)  # they have copies, and new ones are told
        self.iterator, self.goes_on = self.data if self.goes_on else begin_pass(self.data), False
        if type(self.data) is DataLoader and not self._marks:
            batches: Iterator[Any] = self.iterator
            return batches
        return each(self.iterator, self.data, marks=self._marks)

    def open(self, pass_number: int, batch: int, held: Mapping[str, Any]) -> Iterator[Any]:
        """Open a pass.

        Args:
            batch: at which it goes on, if it does not begin at the first.
            held: what :meth:`state` has returned there, empty at the beginning of a pass.
        """
        self._tell(pass_number)
        if self.draws:
            self._began_with = {"began_with": held.get("began_with") or rng.capture()}
            rng.restore(self._began_with["began_with"])
        return self._begin()

    def state(self) -> Mapping[str, Any]:
        """The state that belongs to the position, beside its numbers."""
        return self._began_with

    def end_pass(self) -> bool:
        """End the open pass; returns whether the next one is open already."""
        self._began_with = {}
        return False

    def end(self, *, keep_persistent: bool = False) -> None:
        """End the workers of the current pass."""
        if not (keep_persistent and getattr(self.data, "persistent_workers", False)):
            end_workers(self.iterator, self.data)
        self.iterator = None


class Indexed(Replayed):
    """A ``loader()``: its sampler begins at any sample, and nothing that was consumed is loaded."""

    def __init__(self, data: Any, *, marks: bool = False) -> None:
        super().__init__(data, marks=marks)
        self.sampler: ResumableSampler = data.sampler
        self.draws = self.reads_again = False
        self.dealing: Dealing | None = None
        """Whole batches are dealt out to the ranks; those of a position are counted over all of them."""
        self._skipped = 0
        """Samples of the pass, over all ranks, that were consumed where it was opened."""

    @property
    def inexact(self) -> str | None:
        return self.sampler.inexact

    def length(self, pass_number: int, held: Mapping[str, Any]) -> int | None:
        sampler, self._skipped = self.sampler, held.get("consumed", 0)
        sampler.pass_number, sampler.length = pass_number, sampler.data_length(pass_number)
        sampler.skipped, sampler.dealing = self._skipped, self.dealing
        return length_of(self.data) if self.dealing is None else self._batches(sampler.length - self._skipped)

    def whole_length(self) -> int:
        """Batches of the whole pass, on the longest rank."""
        ranks = 1 if self.dealing is not None else self.sampler.world_size
        return self._batches(-(-self.sampler.length // ranks))

    def _batches(self, samples: int) -> int:
        size = self.data.batch_size
        batches: int = samples // size if self.data.drop_last else -(-samples // size)
        return max(0, batches)

    def open(self, pass_number: int, batch: int, held: Mapping[str, Any]) -> Iterator[Any]:
        self._skipped = held.get("consumed", 0)
        self.sampler.pass_number, self.sampler.skipped = pass_number, self._skipped
        self.sampler.start = batch * self.data.batch_size
        return self._begin()

    def state(self) -> Mapping[str, Any]:
        return {"consumed": self._skipped}

    def end_pass(self) -> bool:
        self._skipped = 0
        return False

    def saved(self, pass_number: int, batch: int, *, ended: bool) -> dict[str, Any]:
        """The part of a checkpoint about the order, and the number of samples that all ranks have consumed."""
        sampler, size = self.sampler, self.data.batch_size
        of_all = size * (1 if self.dealing is not None else sampler.world_size)
        consumed = self._skipped + batch * of_all
        begun = consumed > 0 and not ended
        # a pass that has not started uses the data as it is then
        samples = sampler.length if begun else sampler.data_length(pass_number + int(ended))
        state = {"seed": sampler.seed, "shuffle": sampler.shuffle, "samples": samples, "batch_size": size}
        consumed = samples if ended else min(consumed, samples)
        state |= {"consumed": consumed, "batch": consumed // of_all, "held": {}}
        if begun and (drawn := sampler.drawn_order) is not None:
            state["drawn_order"] = drawn
        return state

    def load(self, state: Mapping[str, Any]) -> None:
        """Continue after the samples that were consumed.

        Raises:
            StateMismatch: the order is another one.
        """
        if self.sampler.adopts_seed:
            self.sampler.seed = self.data.dataset.seed = state["seed"]
        samples = self.sampler.data_length(state["pass"] + int(state["ended"]))
        now = {"seed": self.sampler.seed, "shuffle": self.sampler.shuffle, "samples": samples}
        for name, value in now.items():
            if state[name] != value:
                raise StateMismatch(
                    f"The checkpoint was made with {name} {state[name]} in its data, now it is {value}: make them "
                    f"equal, or leave the position out with {leave_out('data')}."
                )
        self._skipped = 0 if state["ended"] else state["consumed"]
        self.sampler.pass_number, self.sampler.length = state["pass"], samples

    def end(self, *, keep_persistent: bool = False) -> None:
        super().end(keep_persistent=keep_persistent)
        self.sampler.start, self.sampler.skipped, self.sampler.dealing = None, 0, None


class Stateful(Replayed):
    """A loader whose state, saved with the position, brings it back there."""

    def __init__(self, data: Any, *, marks: bool = False) -> None:
        super().__init__(data, marks=marks)
        self.reads_again, self._exhausted = False, False
        self._next: Iterator[Any] | None = None
        """The batches of a pass that was opened where the one before was given up."""

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

    def open(self, pass_number: int, batch: int, held: Mapping[str, Any]) -> Iterator[Any]:
        if (batches := self._next) is not None:
            self._next = None
            return batches
        self._tell(pass_number)
        if hasattr(self.data, "restart_on_stop_iteration"):  # of torchdata.nodes: a state at an end would begin anew
            self.data.restart_on_stop_iteration = False
        if "loader" not in held:
            return self._batches()
        self.data.load_state_dict(held["loader"])
        if held.get("between"):  # it is the state of a pass's end: some yield nothing then, some the next pass at once
            with rng.isolated():
                is_over = next(self._begin(), _NOTHING) is _NOTHING
            if not is_over:
                self.data.load_state_dict(held["loader"])
            self.restore_generators(held)
            return self._batches()
        batches = self._batches()
        self.restore_generators(held)
        return batches

    def _batches(self) -> Iterator[Any]:
        self._exhausted = False
        return self._until_exhausted(self._begin())

    def _until_exhausted(self, batches: Iterator[Any]) -> Iterator[Any]:
        yield from batches
        self._exhausted = True

    def restore_generators(self, held: Mapping[str, Any]) -> None:
        for generator, state in zip(generators_of(self.data), held.get("generators", ()), strict=False):
            generator.set_state(state)

    def state(self) -> Mapping[str, Any]:
        """Its own, the generators that it has; and whether its pass has ended, perhaps while a group was gathered."""
        state = self.data.state_dict()
        if isinstance(state, dict) and state.get("_iterator_finished"):
            # torchdata's would start the next pass at once when it is loaded: the end of this one would be lost
            state = state | {"_iterator_finished": False}
        generators = [generator.get_state() for generator in generators_of(self.data)]
        return {"loader": state, "generators": generators, "exhausted": self._exhausted}

    def end_pass(self) -> bool:
        if self._exhausted:
            return False
        self._next = self._batches()  # its state is now that of a new pass
        return True


def reader_of(data: Any, *, marks: bool = False) -> Replayed:
    """How ``data`` is read from a position on; with ``marks`` an error stands in the place of a batch."""
    if type(data) is DataLoader and isinstance(data.sampler, ResumableSampler):
        return Indexed(data, marks=marks)
    return (Stateful if keeps_state(data) else Replayed)(data, marks=marks)


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
    if inspect.isgeneratorfunction(type(dataset).__iter__):
        return False
    try:
        with rng.isolated():
            return hasattr(iter(copy(dataset)), "state_dict")
    except Exception:  # it may be iterated in a worker alone; without torchdata's state it is right, if slower
        return False


def generators_of(data: Any) -> list[torch.Generator]:
    """The random number generators of a loader's own: its own and those of its samplers, without repetition."""
    own = (getattr(order, "generator", None) for order in orders_of(data))
    return list(dict.fromkeys(generator for generator in own if isinstance(generator, torch.Generator)))


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
