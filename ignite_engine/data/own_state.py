"""Loaders with a ``state_dict`` of their own, such as torchdata's, which know their place in a pass themselves."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from itertools import chain
from typing import Any

import torch
from torch.utils.data import DistributedSampler, IterableDataset, SequentialSampler

from ignite_engine import rng
from ignite_engine.data.place import Place
from ignite_engine.data.readers import Replayed, orders_of

_NOTHING = object()
_RESTARTS = "restart_on_stop_iteration"  # of torchdata.nodes' Loader: a state of a pass's end would begin the next pass
_FINISHED = "_iterator_finished"  # in the state of torchdata's StatefulDataLoader


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
