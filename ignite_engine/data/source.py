"""What a Trainer iterates over: it groups micro-batches and knows its position."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator
from copy import copy
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, SequentialSampler

from ignite_engine import rng
from ignite_engine.data.lookahead import Before, LookAhead, Waiting, batch_to_repeat
from ignite_engine.data.read_errors import ReadErrors, marked
from ignite_engine.data.sampler import ResumableSampler
from ignite_engine.data.workers import begin_pass, end_workers
from ignite_engine.errors import StateMismatch, leave_out
from ignite_engine.ranks import agreement, mesh
from ignite_engine.step.micro_batches import Group, GroupWeights, WeightFn

logger = logging.getLogger(__name__)

_FINISHED = "_iterator_finished"  # in the state of torchdata's StatefulDataLoader


def length_of(data: Any) -> int | None:
    """Batches in one pass over ``data``, None where it does not say."""
    try:
        return len(data)
    except (TypeError, NotImplementedError):
        return None


@dataclass
class Position:
    """Batch ``batch`` of pass ``pass_number`` is the next that is not yet consumed."""

    pass_number: int = 0
    batch: int = 0
    ended: bool = False
    """The pass was at its end when the position was saved: ``batch`` is 0, and the pass yields nothing more."""
    between_passes: bool = False
    """The pass before has ended, and this one is not open yet."""
    skipped: int = 0
    """Samples at the start of the pass that another number of ranks consumed; batches are counted after them."""
    loader: Any = None
    """A state for the loader itself, with which the pass is opened; None: there is none, or the pass is open."""
    generators: Any = None
    """The states of the loader's own random number generators (:func:`generators_of`) that belong to it."""
    rng: Any = None
    """The global generators with which the next batch was fetched, ahead of the point where they were saved."""
    exhausted: bool = False
    """This rank has consumed the pass, a peer has not: there is no batch left to fetch."""


class DataSource:
    """What a Trainer iterates: one pass over ``data`` per ``iter()``, in groups, counted by what was consumed.

    Args:
        data: a loader or any iterable of batches.
        accumulation_steps: batches in a group; None yields the batches themselves.
        weigh: weight of a batch, which the ranks then exchange ahead; None: none.
        waiting: its ``waiting_for_data`` is set where a signal may end a wait that the ranks agree on.
        read_errors: batches that cannot be read are left out; None: they raise.

    On several ranks one that is exhausted before its peers repeats its last batch until all are; :meth:`padded` counts
    what of a group weighs nothing. Of sized loaders the lengths are exchanged when a pass starts. Where they do not
    tell, groups are weighed, or batches may be left out, the ranks agree on each group one ahead (:class:`LookAhead`).
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
        self.weigh, self.waiting, self.read_errors = weigh, waiting, read_errors
        self.data, self.steps = data, accumulation_steps or 1
        self.grouped = accumulation_steps is not None
        self.sampler: ResumableSampler | None = getattr(data, "sampler", None) if type(data) is DataLoader else None
        if not isinstance(self.sampler, ResumableSampler):
            self.sampler = None
        self.position = Position()
        self.lengths: list[int] | None = None
        self.changed: str | None = None
        """What is other than where the position was saved, as a sentence."""
        self.uneven = False
        self._exhausted = False
        """The loader has ended its pass, perhaps while the last group was gathered."""
        self._iterator: Any = None
        self._is_replayed = _is_replayed(data)
        self._looks_ahead = False
        self._ahead: LookAhead | None = None
        self._loaded: Before | None = None
        """The saved place at which the present pass was opened, until the first fetch of it."""

    def agree_lengths(self) -> None:
        """Read the length of the pass that starts; of sized loaders the ranks exchange theirs. A collective."""
        if self.sampler is not None:
            self.sampler.length, self.sampler.skipped = self.sampler.data_length(), self.position.skipped
        own = length_of(self.data)
        rows = agreement.gather_floats([-1.0 if own is None else float(own)])
        lengths = [int(row[0]) for row in mesh.by_data_rank(rows)]
        self.lengths = lengths if min(lengths) >= 0 else None
        tells = self.weigh is not None or self.read_errors is not None
        self._looks_ahead = len(rows) > 1 and (self.lengths is None or tells)
        self.uneven = len(set(lengths)) > 1 and not self._looks_ahead

    @property
    def batches(self) -> int | None:
        """Batches in one pass on the longest rank, None if unknown."""
        return max(self.lengths) if self.lengths else None

    @property
    def iterations(self) -> int | None:
        """Groups in one pass, None if unknown."""
        return None if self.batches is None else -(-self.batches // self.steps)

    @property
    def inexact(self) -> str | None:
        """Why a resumed run would not see the same bits, None if it would."""
        kind = type(self.data).__name__
        if self.sampler is not None:
            return None
        if self.keeps_state:
            workers = getattr(self.data, "num_workers", 0)
            if (sampler := _stateless_order(self.data)) is not None:
                return f"{kind} does not save the order of its {type(sampler).__name__}: it is drawn again"
            dataset = getattr(self.data, "dataset", None)
            if workers and isinstance(dataset, IterableDataset) and not _iterator_keeps_state(dataset):
                return (
                    f"{kind} asks workers again whose stream has ended: where {type(dataset).__name__} then begins "
                    "anew, its batches come twice (not if its iterator keeps the state)"
                )
            if not workers or hasattr(dataset, "state_dict"):
                return None
            return f"{kind} does not save the random numbers of its {workers} workers: samples that draw any differ"
        order = getattr(self.data, "sampler", None)
        if isinstance(getattr(self.data, "dataset", None), IterableDataset):
            order = self.data.dataset
        elif getattr(self.data, "batch_size", 0) is None:
            order = getattr(self.data, "batch_sampler", None) or order
        by = "" if order is None or type(order) is SequentialSampler else f" with {type(order).__name__}"
        return f"{kind}{by} keeps no state: its batches are replayed"

    @property
    def keeps_state(self) -> bool:
        """The data has a ``state_dict`` of its own, which holds the position in a pass."""
        return self.sampler is None and hasattr(self.data, "state_dict") and not self._is_replayed

    def __iter__(self) -> Iterator[Any]:
        """The rest of the current pass, from the position on."""
        if self.read_errors is not None:
            self.read_errors.clear()
        if self.position.ended:
            return iter(())
        if self._looks_ahead:
            return self._agreed_ahead()
        batches = self._from_position()
        if self.uneven and self.batches is not None:
            batches = self._repeat_last(batches, self.batches - self.position.batch)
        if self.read_errors is not None:
            groups = self.read_errors.readable(batches, self.steps)
            return groups if self.grouped else (group[0] for group in groups)
        return self._groups(batches) if self.grouped else batches

    def _agreed_ahead(self) -> Iterator[Any]:
        at, batches = self.position, self.batches
        fetched_with, at.rng = at.rng, None
        if at.loader is not None or at.exhausted:
            self._loaded = Before(at.loader, at.generators, None, at.exhausted, at.between_passes)
        self._ahead = LookAhead(
            self._from_position(),
            steps=self.steps if self.grouped else None,
            position=None if self.sampler is not None else self._present,
            weigh=self.weigh,
            waiting=self.waiting,
            read_errors=self.read_errors,
            left=None if batches is None else batches - at.batch,
        )
        if fetched_with is not None:  # what the fetch drew was drawn before the generators were saved
            with rng.isolated():
                rng.restore(fetched_with)
                self._ahead.fetch()
        return self._ahead

    def _present(self) -> Before:
        """Where the data is before the next fetch."""
        if (loaded := self._loaded) is not None:
            if not loaded.exhausted:  # else the loader is not used in this pass
                self._loaded = None
            return replace(loaded, rng=rng.capture())
        own = self.data.state_dict() if self.keeps_state else None
        return Before(own, self._generator_states(), rng.capture())

    def _place(self) -> Before:
        """Where the data is without what was fetched ahead, as a checkpoint holds it."""
        at = self.position
        if self._ahead is not None and (before := self._ahead.before) is not None:
            return before
        if at.loader is not None or at.exhausted or at.rng is not None:  # the pass is not open
            return Before(at.loader, at.generators, at.rng, at.exhausted, at.between_passes)
        own = self.data.state_dict() if self.keeps_state else None
        return Before(own, self._generator_states(), None, between_passes=at.between_passes)

    def _stay(self) -> None:
        """Let the position be where it is now, whatever becomes of the loader."""
        at, place = self.position, self._place()
        at.loader, at.generators, at.rng = place.loader, place.generators, place.rng
        at.exhausted, at.between_passes = place.exhausted, place.between_passes
        self._ahead = None

    def _groups(self, batches: Iterator[Any]) -> Iterator[Group]:
        while group := Group(islice(batches, self.steps)):
            yield group

    def _from_position(self) -> Iterator[Any]:
        at = self.position
        between_passes, at.between_passes = at.between_passes, False
        self._set_epoch()
        if self.sampler is not None:
            assert self.data.batch_size is not None
            self.sampler.start = min(at.batch * self.data.batch_size, len(self.sampler))
            return self._open()
        if at.exhausted:
            return iter(())
        if at.loader is not None:
            self.data.load_state_dict(at.loader)
            at.loader = None
            if between_passes:
                return self._after_a_pass(at.generators)
            iterator = self._open()
            self._restore_generators(at.generators)
            return self._until_exhausted(iterator)
        iterator = self._open()
        if self.keeps_state:
            return self._until_exhausted(iterator)
        if at.batch:
            logger.warning(
                "%s keeps no state: the %d batches that were consumed are loaded again and skipped.",
                type(self.data).__name__,
                at.batch,
            )
            for _ in islice(iterator, at.batch):
                pass
        return iterator

    def _set_epoch(self) -> None:
        """Tell the data which pass is read."""
        if self.sampler is not None:
            self.sampler.pass_number = self.position.pass_number
            return
        for order in _orders(self.data):
            if hasattr(order, "set_epoch"):
                order.set_epoch(self.position.pass_number)

    def _open(self) -> Iterator[Any]:
        self._iterator = begin_pass(self.data)
        return self._iterator if self.read_errors is None else marked(self._iterator, self.data)

    def _after_a_pass(self, generators: Any) -> Iterator[Any]:
        """The next pass of data whose state is that of a pass's end: some yield nothing then, some start the next."""
        of_the_process = rng.capture()
        for batch in (iterator := self._until_exhausted(self._open())):
            yield batch
            yield from iterator
            return
        self._exhausted = False
        rng.restore(of_the_process)  # what the end of the pass drew was drawn before the state was saved
        self._restore_generators(generators)
        yield from self._until_exhausted(self._open())

    def _until_exhausted(self, iterator: Iterator[Any]) -> Iterator[Any]:
        yield from iterator
        self._exhausted = True

    def _restore_generators(self, states: Any) -> None:
        for generator, state in zip(generators_of(self.data), states or (), strict=False):
            generator.set_state(state)

    def _repeat_last(self, batches: Iterator[Any], count: int) -> Iterator[Any]:
        assert self.lengths is not None
        batch, given = None, 0
        if min(self.lengths) <= self.position.batch:  # some rank has no batch left
            first = list(islice(batches, 1))
            batch, given = batch_to_repeat(first[0] if first else None, has_own=bool(first)), len(first)
            yield from first
        for batch in islice(batches, count - given):
            given += 1
            yield batch
        for _ in range(count - given):
            yield batch

    def size_of(self, group: Any) -> int:
        """How far ``group`` moves the position, with what could not be read before it and within it."""
        if self.read_errors is not None:
            return self.read_errors.batches
        return len(group) if type(group) is Group else 1

    def padded(self, count: int) -> tuple[int, int]:
        """Of the next ``count`` batches: how many repeat the last, and how many do not, over all data ranks."""
        if self._ahead is not None:
            return self._ahead.padding, self._ahead.total
        assert self.lengths is not None
        real = [max(0, min(count, length - self.position.batch)) for length in self.lengths]
        return count - real[mesh.data_rank()], sum(real)

    @property
    def pads(self) -> bool:
        """A rank may have to repeat a batch, or groups are weighed ahead."""
        return self.uneven or self._looks_ahead

    @property
    def weights(self) -> GroupWeights | None:
        """Of the group that was taken last, where the ranks have agreed on them."""
        return None if self._ahead is None else self._ahead.weights

    def consumed(self, batches: int) -> None:
        """So many are trained on."""
        self.position.batch += batches
        if self._ahead is not None:
            self._ahead.consumed()
        if self.read_errors is not None:
            self.read_errors.clear()

    def abandon(self) -> None:
        """End the workers of the present pass at once: they may be busy for long with what is no longer wanted."""
        if self.keeps_state or self._ahead is not None:
            self._stay()
        end_workers(self._iterator, self.data)
        self._iterator = None

    def close(self) -> None:
        """The run is over: end the workers of the present pass, unless they are persistent."""
        if self._ahead is not None:
            self._stay()
        if not getattr(self.data, "persistent_workers", False):
            end_workers(self._iterator, self.data)
        self._iterator = None
        if self.sampler is not None:
            self.sampler.start, self.sampler.skipped = None, 0

    def next_pass(self) -> None:
        """Move to the first batch of the next pass."""
        at = self.position  # a loaded state that was not needed is that of the end of the pass
        self.position = replace(
            at,
            pass_number=at.pass_number + 1,
            batch=0,
            skipped=0,
            ended=False,
            between_passes=True,
            rng=None,
            exhausted=False,
        )
        self._exhausted, self._ahead, self._loaded = False, None, None

    @property
    def was_begun(self) -> bool:
        """The present pass was begun before the position was saved: what making its iterator draws was drawn then."""
        at = self.position
        return at.batch > 0 or at.skipped > 0 or (at.loader is not None and not at.between_passes)

    def state_dict(self) -> dict[str, Any]:
        """The position, and what must be the same for it to mean the same."""
        at, exhausted = self.position, self._exhausted and not (self.uneven or self._looks_ahead)
        ended = at.ended or exhausted or (self.batches is not None and at.batch >= self.batches)
        # batch 0 of the next pass; but the end of the one before has not been reported yet
        number, batch = (at.pass_number + 1, 0) if ended else (at.pass_number, at.batch)
        state: dict[str, Any] = {"pass": number, "batch": batch, "ended": ended, "ranks": mesh.data_size()}
        if self.sampler is not None:
            skipped = 0 if ended else at.skipped
            # a pass that is yet to start has what is there by then
            begun = state["batch"] or skipped
            order = self._order(self.sampler.length if begun else self.sampler.data_length())
            return state | order | {"skipped": skipped, "steps": self.steps}
        place = self._place()
        if self.keeps_state:
            state |= {"loader": _unfinished(place.loader), "between_passes": place.between_passes}
            state |= {"generators": place.generators} if place.generators else {}
        return state | ({"rng": place.rng, "exhausted": place.exhausted} if place.rng is not None else {})

    def _generator_states(self) -> list[torch.Tensor]:
        return [generator.get_state() for generator in generators_of(self.data)]

    def _order(self, samples: int) -> dict[str, Any]:
        assert self.sampler is not None
        seed, shuffle = self.sampler.seed, self.sampler.shuffle
        return {"seed": seed, "shuffle": shuffle, "samples": samples, "batch_size": self.data.batch_size}

    def _keeps_global_batch(self, state: dict[str, Any]) -> bool:
        """On another number of ranks an update has as many samples as where ``state`` was saved."""
        before, now = state.get("ranks", 1) * state["batch_size"], mesh.data_size() * self.data.batch_size
        steps = state.get("steps", self.steps)
        return state.get("ranks") != mesh.data_size() and (before == now or before * steps == now * self.steps)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at a saved position.

        Raises:
            StateMismatch: the dataset, its order or the batch size is another one. The latter may be, where an update
                has as many samples on another number of ranks.
        """
        if "windows" in state:
            raise StateMismatch(
                f"The checkpoint was made with Windows as data: give run() the same, or leave the position out with "
                f"{leave_out('data')}."
            )
        if self.sampler is not None and "seed" in state:
            if self.sampler.adopts_seed:
                self.sampler.seed = self.data.dataset.seed = state["seed"]
            for name, value in self._order(self.sampler.length).items():
                # shuffle was not always saved
                if state.get(name, value) != value and not (name == "batch_size" and self._keeps_global_batch(state)):
                    raise StateMismatch(
                        f"The checkpoint was made with {name} {state[name]} in its data, now it is {value}: make them "
                        f"equal, or leave the position out with {leave_out('data')}."
                    )
        batch, skipped, ranks = state["batch"], state.get("skipped", 0), mesh.data_size()
        before = state.get("ranks", ranks)
        if same := before == ranks:
            outcome = None
        elif self.sampler is None or "seed" not in state:
            outcome = f"each continues at batch {batch} of its own, samples of this pass may come twice or never"
        else:
            if batch:
                skipped, batch = min(skipped + batch * state["batch_size"] * before, state["samples"]), 0
            outcome = f"{skipped} of {state['samples']} samples of this pass are consumed, the ranks share the rest"
            if state["batch_size"] != self.data.batch_size:
                outcome += f", {self.data.batch_size} in a batch where it was {state['batch_size']}"
        if outcome is not None and (
            batch or skipped or state.get("batch_size") != getattr(self.data, "batch_size", None)
        ):
            self.changed = f"The data position was saved on {before} ranks, resumed on {ranks}: {outcome}."
            if agreement.rank() == 0:
                logger.warning("%s", self.changed)
        self.position = Position(
            state["pass"] - int(state["ended"]),
            batch,
            skipped=skipped,
            ended=state["ended"],
            between_passes=bool(state.get("between_passes")),
            loader=None if self._is_replayed else state.get("loader"),
            generators=state.get("generators"),
            rng=state.get("rng") if same else None,
            exhausted=bool(state.get("exhausted")) and same,
        )
        # an evaluation may read the data before the pass is opened
        self._set_epoch()
        self._restore_generators(self.position.generators)


def _is_replayed(data: Any) -> bool:
    """A loader with a state over a stream without one: torchdata counts twice what it replays, and loses as much."""
    dataset = getattr(data, "dataset", None)
    if not hasattr(data, "state_dict") or not isinstance(dataset, IterableDataset) or hasattr(dataset, "state_dict"):
        return False
    return not _iterator_keeps_state(dataset)


def _iterator_keeps_state(dataset: Any) -> bool:
    if inspect.isgeneratorfunction(type(dataset).__iter__):
        return False
    try:
        with rng.isolated():
            return hasattr(iter(copy(dataset)), "state_dict")
    except Exception:  # it may be iterated in a worker alone; without torchdata's state it is right, if slower
        return False


def _orders(data: Any) -> list[Any]:
    """``data``, its samplers and theirs, without repetition."""
    found = [data]
    for each in found:
        inner = (getattr(each, name, None) for name in ("batch_sampler", "sampler"))
        found += [one for one in inner if one is not None and not any(one is known for known in found)]
    return found


def generators_of(data: Any) -> list[torch.Generator]:
    """The random number generators of a loader's own: its own and those of its samplers, without repetition."""
    own = (getattr(order, "generator", None) for order in _orders(data))
    return list(dict.fromkeys(each for each in own if isinstance(each, torch.Generator)))


def _stateless_order(data: Any) -> Any:
    """The sampler whose order a loader with a state cannot resume; None: there is none, or its order is fixed."""
    order = getattr(data, "batch_sampler", None)
    if order is None:
        order = getattr(data, "sampler", None)
    if order is None or isinstance(getattr(data, "dataset", None), IterableDataset):
        return None
    stateful = True
    while (inner := getattr(order, "sampler", None)) is not None:  # of a batch sampler
        stateful = stateful and _has_state(order)
        order = inner
    fixed = type(order) is SequentialSampler or isinstance(order, DistributedSampler)
    return None if fixed or (stateful and _has_state(order)) else order


def _has_state(sampler: Any) -> bool:
    """Torchdata's have one in their iterators."""
    return hasattr(sampler, "state_dict") or type(sampler).__module__.startswith("torchdata.")


def _unfinished(state: Any) -> Any:
    """The state of a loader that need not have reported yet that its pass is over.

    One of torchdata that has, as it does while the last group is gathered, would start the next pass at once when its
    state is loaded: the end of this one would be lost, and more would be drawn than was drawn here.
    """
    return state | {_FINISHED: False} if isinstance(state, dict) and state.get(_FINISHED) else state
