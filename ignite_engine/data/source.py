"""What a Trainer iterates over: it groups micro-batches and knows its place in the data."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import islice
from typing import Any, NamedTuple, Protocol

from torch.utils.data import DataLoader

from ignite_engine import rng
from ignite_engine.data.fingerprint import fingerprint
from ignite_engine.data.own_state import WithState, keeps_state
from ignite_engine.data.place import Held, Place
from ignite_engine.data.read_errors import ReadErrors, marked, split
from ignite_engine.data.readers import ByIndex, Listed, Replayed, length_of
from ignite_engine.data.sampler import ResumableSampler
from ignite_engine.data.workers import Begun, begin_pass, end_workers
from ignite_engine.errors import StateMismatch, StopRequested, leave_out
from ignite_engine.ranks import agreement, mesh
from ignite_engine.step.micro_batches import Group

logger = logging.getLogger(__name__)

__all__ = ["DataSource", "length_of", "reader_of"]


def reader_of(data: Any) -> Replayed:
    """How ``data`` is read from a place on."""
    if type(data) is DataLoader and isinstance(data.sampler, ResumableSampler):
        return ByIndex(data)
    if type(data) in (list, tuple):
        return Listed(data)
    return WithState(data) if keeps_state(data) else Replayed(data)


class Waiting(Protocol):
    """Who is told that a signal may raise :class:`StopRequested` now."""

    waiting_for_data: bool

    def stops_waiting(self) -> bool:
        """Whether this rank is to stop."""
        ...


class _InHand(NamedTuple):
    """What comes back where the group that was fetched last is put back."""

    group: Group | None
    held: Held
    generators: Any
    """Of :func:`rng.snapshot`."""


class BetweenPasses(Protocol):
    """What a source that ends epochs asks of the run between two of its passes; each call may end or pause the run."""

    @property
    def epoch_iteration(self) -> int:
        """Iterations of the epoch under way."""
        ...

    def fire(self, event: Any) -> None:
        """Run the handlers of an event."""
        ...

    def boundary(self, *, last: bool = False) -> None:
        """A step boundary."""
        ...

    def fetch(self) -> Group | None:
        """The first group of the pass that begins, None if it has none."""
        ...

    def end_run(self) -> None:
        """There is no epoch any more, and the one that was begun is none."""
        ...


class EndsEpochs(Protocol):
    """A source whose epochs are several passes, and that says which is the last."""

    def run_begins(self) -> None:
        """The position at which a run begins is set."""
        ...

    def group_fetched(self, run: BetweenPasses) -> None:
        """GET_BATCH_COMPLETED has come."""
        ...

    def first_of_next_pass(self, run: BetweenPasses) -> Group | None:
        """The next group where a pass has no more, None at the end of the epoch."""
        ...

    def epoch_ended(self) -> None:
        """The epoch is over."""
        ...


class Source(Protocol):
    """What a Trainer iterates: a :class:`DataSource`, or what an :class:`OwnSource` makes."""

    data: Any

    @property
    def place(self) -> Place: ...
    @property
    def present(self) -> DataSource | None:
        """Over what is iterated now."""
        ...

    @property
    def ends_epochs(self) -> EndsEpochs | None:
        """Itself, if it does; else the run counts them."""
        ...

    @property
    def iterations(self) -> int | None: ...
    @property
    def inexact(self) -> str | None: ...
    @property
    def changed(self) -> str | None: ...
    @property
    def was_open_when_saved(self) -> bool: ...
    @property
    def between_passes(self) -> bool: ...
    def __iter__(self) -> Iterator[Group]: ...
    def agree_lengths(self) -> None: ...
    def begin_after(self, place: Place) -> None: ...
    def continue_at(self, place: Place) -> None: ...
    def consumed(self, group: Group) -> None: ...
    def put_back(self) -> None: ...
    def next_pass(self) -> None: ...
    def abandon(self) -> None: ...
    def freeze(self) -> None: ...
    def close(self) -> None: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load(self, state: dict[str, Any]) -> None:
        """Continue at a saved place; what one rank refuses is raised on all. A collective."""
        ...


class OwnSource(ABC):
    """Data that is more than one pass: it makes a source of its own, and cannot be iterated without."""

    @abstractmethod
    def __iter__(self) -> Iterator[Any]: ...

    @abstractmethod
    def make_source(
        self, source_of: Callable[[Any], DataSource], state: Any, stops: Callable[[], bool], *, shares: bool
    ) -> Source:
        """Args:
            source_of: makes the source over a loader.
            state: of the run.
            stops: whether this rank is to stop while it waits for data.
            shares: the ranks share out the micro-batches of an iteration.

        Raises:
            ValueError: it cannot be shared out.
        """

    @abstractmethod
    def check_epoch_length(self, epoch_length: int | None) -> None:
        """Refuse a length of epochs that contradicts it.

        Raises:
            ValueError: it does.
        """

    @property
    @abstractmethod
    def settings(self) -> Mapping[str, Any]:
        """What is the same on every rank."""


class DataSource:
    """What a Trainer iterates: one pass over ``data`` per ``iter()``, in groups, counted by what was consumed.

    Args:
        data: a loader or any iterable of batches.
        accumulation_steps: batches in a group; None: one.
        waiting: its ``waiting_for_data`` is set where a signal may end a wait; None: a signal ends none.
        read_errors: batches that cannot be read are left out; None: they raise.

    At most one group is in hand, fetched and not consumed; :meth:`put_back` undoes the fetch. It reads what this rank
    has; on several ranks :class:`~ignite_engine.data.agreed.AgreedSource` makes the groups of all equally many.
    """

    ends_epochs = None

    def __init__(
        self,
        data: Any,
        accumulation_steps: int | None,
        *,
        waiting: Waiting | None = None,
        read_errors: ReadErrors | None = None,
    ) -> None:
        self.data, self.reader, self.read_errors = data, reader_of(data), read_errors
        self.steps = accumulation_steps or 1
        self.place = Place()
        self.batches: int | None = None
        """Batches in one pass on the longest rank, None if unknown."""
        self.changed: str | None = None
        """What is other than where the place was saved, as a sentence."""
        self._waiting = waiting
        self._iterator: Any = None
        self._opened_at: Held | None = None
        """What was loaded and the present pass was opened with, until its first fetch."""
        self._in_hand: _InHand | None = None
        # as it is before it is read, as in a process that resumes
        self.fingerprint = fingerprint(data.dataset) if isinstance(data, DataLoader) else None
        """Of the dataset; None: it is not known what it holds."""

    @property
    def present(self) -> DataSource:
        return self

    @property
    def sampler(self) -> ResumableSampler | None:
        """The sampler of a ``loader()``, whose order is a function of seed and pass; None for other data."""
        return self.reader.sampler if isinstance(self.reader, ByIndex) else None

    @property
    def inexact(self) -> str | None:
        """Why a resumed run would not see the same bits, None if it would."""
        return self.reader.inexact

    def agree_lengths(self) -> None:
        """Read the length of the pass that starts. A collective."""
        self.batches = self.reader.measure(self.place)

    @property
    def was_open_when_saved(self) -> bool:
        """The pass was begun before the place was saved: what opening it draws was drawn then."""
        return self.place.was_open_when_saved

    @property
    def between_passes(self) -> bool:
        """The pass before has ended, and this one is not open yet."""
        return self.place.held.between_passes

    def begin_after(self, place: Place) -> None:
        """Begin with the pass after ``place``, which is one in other data: the same order would be the same samples."""
        self.place = Place(pass_number=place.pass_number + int(place.batch > 0))

    def continue_at(self, place: Place) -> None:
        """Continue at ``place``, which is one in other data."""
        self.place = Place(pass_number=place.pass_number, batch=place.batch)

    @property
    def iterations(self) -> int | None:
        """Groups in one pass, None if unknown."""
        return None if self.batches is None else -(-self.batches // self.steps)

    # -- a pass -----------------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Group]:
        """The groups of the present pass from the place on."""
        if self.place.ended:
            return iter(())
        held = self.place.held
        self._opened_at = None if held.loader is None else held
        return self._groups(self._open())

    def _groups(self, batches: Iterator[Any]) -> Iterator[Group]:
        while (group := self._fetch(batches)) is not None:
            yield group

    def _fetch(self, batches: Iterator[Any]) -> Group | None:
        """The next group, None at the end of the pass; the place is before it until it is consumed."""
        if not self.reader.draws:
            self._in_hand = None
            return self._next(batches)
        before = _InHand(None, self._loader_before_the_fetch(), rng.snapshot())
        self._in_hand = before
        try:
            group = self._next(batches)
        except StopRequested:
            self.put_back()
            raise
        self._in_hand = None if group is None else before._replace(group=group)
        return group

    def _next(self, batches: Iterator[Any]) -> Group | None:
        """The next batches; where some of them cannot be read, as far as the next group that has one."""
        group = Group()
        while not group and (places := self._read(batches)):
            group.places += len(places)
            if self.read_errors is None:
                group.extend(places)
            else:
                own, errors = split(places)
                group.extend(own)
                self.read_errors.leave_out(group, errors, found=len(errors), empty=not own)
        return group if group.places else None

    def _read(self, batches: Iterator[Any]) -> list[Any]:
        """The batches of one iteration; a stop may end the wait for them."""
        if self._waiting is None:
            return list(islice(batches, self.steps))
        try:
            self._waiting.waiting_for_data = True
            return list(islice(batches, self.steps))
        finally:
            self._waiting.waiting_for_data = False

    def put_back(self) -> None:
        """Undo the fetch of the group in hand: it comes again, with what was drawn for it."""
        if (before := self._in_hand) is None:
            return
        rng.restore_snapshot(before.generators)
        self._in_hand = None
        if isinstance(self.data, Iterator):
            self.reader.fetched = before.group or ()
        elif self.reader.keeps_state:
            self.place = self.place._replace(held=before.held)

    def _loader_before_the_fetch(self) -> Held:
        if (opened_at := self._opened_at) is None:
            return self.reader.held()
        if not opened_at.exhausted:  # else the loader is not used in this pass
            self._opened_at = None
        return opened_at

    def _open(self) -> Iterator[Any]:
        """This rank's batches from the place on; from now on the loader itself is at its place."""
        if self.place.held.exhausted:  # the loader is not used in this pass
            return iter(())
        place, self.place = self.place, self.place._replace(held=Held())
        self.reader.set_pass(place)
        return self.reader.open(place, self._begin)

    def _begin(self) -> Iterator[Any]:
        goes_on = self.reader.fetched is not None and not self.reader.keeps_state
        # else an iterator of the user's may begin anew, where it was left in the middle
        self._iterator = Begun(self.data) if goes_on else begin_pass(self.data)
        return self._iterator if self.read_errors is None else marked(self._iterator, self.data)

    def own_batches(self, batches: int) -> int:
        """How many of the next ``batches`` are this rank's."""
        return batches

    def consumed(self, group: Group) -> None:
        """It is trained on, or given up."""
        self.place, self._in_hand = self.place._replace(batch=self.place.batch + group.places), None

    def next_pass(self) -> None:
        """Move to the first batch of the next pass."""
        self.place, self.reader.exhausted = self.place.next_pass(), False
        self._in_hand = self._opened_at = None

    def abandon(self) -> None:
        """End the workers of the present pass at once: they may be busy for long with what is no longer wanted."""
        self.freeze()
        end_workers(self._iterator, self.data)
        self._iterator = None

    def close(self) -> None:
        """The run is over: end the workers of the present pass, unless they are persistent."""
        if not getattr(self.data, "persistent_workers", False):
            end_workers(self._iterator, self.data)
        self._iterator = None
        self.reader.close()

    # -- in checkpoints ---------------------------------------------------------------------------------------------

    def _held(self) -> Held:
        """What belongs to the place beside its numbers, as a checkpoint holds it."""
        if self._in_hand is not None:
            return self._in_hand.held
        held = self.place.held
        if held.loader is not None or held.exhausted:  # the pass is not open
            return held
        return replace(self.reader.held(), between_passes=held.between_passes)

    def freeze(self) -> None:
        """Keep the place as it is now, whatever becomes of the loader: it is discarded, or others iterate it."""
        if self.reader.keeps_state and self._iterator is not None:
            self.place = self.place._replace(held=self._held())

    def _has_ended(self) -> bool:
        consumed = self.batches is not None and self.place.batch >= self.batches
        return self.place.ended or (self.reader.exhausted and self._in_hand is None) or consumed

    def state_dict(self) -> dict[str, Any]:
        """The place, and what must be the same for it to mean the same."""
        place = self.place._replace(held=self._held())
        if ended := self._has_ended():
            # batch 0 of the next pass; but the end of the one before has not been reported yet
            place = place._replace(pass_number=place.pass_number + 1, batch=0, skipped=0)
        state: dict[str, Any] = {
            "pass": place.pass_number,
            "batch": place.batch,
            "ended": ended,
            "ranks": mesh.data_size(),
        }
        if self.fingerprint is not None:
            state["fingerprint"] = self.fingerprint
        if self.sampler is not None:
            return {**state, **self.reader.saved(place), "steps": self.steps}
        exhausted = {"exhausted": True} if place.held.exhausted else {}
        return {**state, **self.reader.saved(place), **exhausted}

    def _keeps_global_batch(self, state: dict[str, Any]) -> bool:
        """On another number of ranks an update has as many samples as where ``state`` was saved."""
        before, now = state.get("ranks", 1) * state["batch_size"], mesh.data_size() * self.data.batch_size
        steps = state.get("steps", self.steps)
        return state.get("ranks") != mesh.data_size() and (before == now or before * steps == now * self.steps)

    def load(self, state: dict[str, Any]) -> None:
        agreement.together(lambda: self.load_state_dict(state))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at a saved place.

        Raises:
            StateMismatch: the dataset, its order or the batch size is another one. The latter may be, where an update
                has as many samples on another number of ranks.
        """
        if "windows" in state:
            raise StateMismatch(
                f"The checkpoint was made with Windows as data: give run() the same, or leave the position out with "
                f"{leave_out('data')}."
            )
        if isinstance(self.reader, ByIndex) and "seed" in state:
            self._check_order(self.reader, state)
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
            self._note_changed(f"The data position was saved on {before} ranks, resumed on {ranks}: {outcome}.")
        if None not in (self.fingerprint, saved := state.get("fingerprint")) and saved != self.fingerprint:
            self._note_changed("The data is not that of the checkpoint: the run continues at its place in other data.")
        held = Held(
            loader=state.get("loader") if self.reader.keeps_state else None,
            generators=state.get("generators"),
            exhausted=bool(state.get("exhausted")) and same,
            between_passes=bool(state.get("between_passes")),
        )
        pass_number = state["pass"] - int(state["ended"])
        self.place = Place(pass_number=pass_number, batch=batch, ended=state["ended"], skipped=skipped, held=held)
        self.reader.set_pass(self.place)
        drawn = state.get("drawn_order")
        if drawn is not None and (self.sampler is None or self.sampler.drawn_order != drawn):
            self._note_changed(
                "The sampler draws another order than in the checkpoint: samples of this pass may come twice or never."
            )

    def _note_changed(self, sentence: str) -> None:
        self.changed = sentence if self.changed is None else f"{self.changed} {sentence}"
        if agreement.rank() == 0:
            logger.warning("%s", sentence)

    def _check_order(self, reader: ByIndex, state: dict[str, Any]) -> None:
        if reader.sampler.adopts_seed:
            reader.sampler.seed = self.data.dataset.seed = state["seed"]
        for name, value in reader.order(reader.sampler.data_length(state["pass"])).items():
            if state[name] != value and not (name == "batch_size" and self._keeps_global_batch(state)):
                raise StateMismatch(
                    f"The checkpoint was made with {name} {state[name]} in its data, now it is {value}: make them "
                    f"equal, or leave the position out with {leave_out('data')}."
                )
