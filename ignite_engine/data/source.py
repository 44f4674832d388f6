"""What a Trainer iterates over: it groups micro-batches and knows its place in the data."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from itertools import islice
from typing import Any, Protocol

from torch.utils.data import DataLoader

from ignite_engine import rng
from ignite_engine.data import groups
from ignite_engine.data.fingerprint import fingerprint
from ignite_engine.data.read_errors import ReadErrors
from ignite_engine.data.readers import Indexed, Place, reader_of
from ignite_engine.data.sampler import ResumableSampler
from ignite_engine.errors import StateMismatch, StopRequested, leave_out
from ignite_engine.ranks import agreement, mesh
from ignite_engine.update.micro_batches import Group, WeightFn

logger = logging.getLogger(__name__)


class Waiting(Protocol):
    """Who is told that a signal may raise :class:`StopRequested` now."""

    waiting_for_data: bool

    def stops_waiting(self) -> bool:
        """Whether this rank is to stop."""


class EndsEpochs(Protocol):
    """A source whose epochs are several passes, and that says which is the last; ``run`` is the ``loop/feed.py``."""

    def run_begins(self) -> None:
        """The position at which a run begins is set."""

    def group_fetched(self, run: Any) -> None:
        """GET_BATCH_COMPLETED has come."""

    def first_of_next_pass(self, run: Any) -> Group | None:
        """The next group where a pass has no more, None at the end of the epoch."""

    def epoch_ended(self) -> None:
        """The epoch is over."""


class LoadersInTurn(Protocol):
    """Gives an evaluation another loader each time, and keeps its position."""

    def reset(self) -> None:
        """Start at the beginning."""

    def next_loader(self) -> Any:
        """The loader of this evaluation, None if there is none now; a collective."""

    def done(self) -> None:
        """Its loader was evaluated."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class OwnSource(ABC):
    """Data that is more than one pass and says itself how long an epoch is: it makes a source of its own."""

    @abstractmethod
    def __iter__(self) -> Iterator[Any]: ...

    @abstractmethod
    def make_source(self, state: Any, **how: Any) -> DataSource:
        """The source over it.

        Args:
            state: of the run.
            how: arguments of a :class:`DataSource`.

        Raises:
            ValueError: it cannot be read so.
        """

    @abstractmethod
    def opened_by(self, make: Callable[[Any], Any]) -> OwnSource:
        """The same data, of whose map-style datasets ``make`` makes loaders."""

    @abstractmethod
    def loaders_in_turn(self, name: str) -> LoadersInTurn:
        """What the evaluation ``name`` takes a loader of, each time."""

    @property
    @abstractmethod
    def settings(self) -> Mapping[str, Any]:
        """What is the same on every rank."""


class DataSource:
    """What a Trainer iterates: one pass over ``data`` per ``iter()``, in groups, counted by what was consumed.

    Args:
        data: a loader or any iterable of batches.
        accumulation_steps: batches in a group; None: one.
        global_micro_batches: batches in a group of all ranks, of one order, of which each rank reads a share
            (``data/groups.py``); then ``accumulation_steps`` is None.
        may_be_empty: yield an empty group where the tail of a pass has nothing for this rank. Otherwise it is a batch
            that weighs nothing: a wrapped model's peers wait for one.
        weigh: weight of a batch, which ranks exchange; None: none.
        waiting: its ``waiting_for_data`` is set where a signal may end a wait; None: a signal ends none.
        read_errors: batches that cannot be read are left out; None: they raise.

    At most one group is in hand, fetched and not consumed; :meth:`put_back` undoes the fetch.

    Ranks exchange the lengths of sized loaders when a pass starts; nothing more is needed where they are equal.
    Otherwise, and where groups are weighed or batches may be left out, they agree on each group (``data/groups.py``).

    Raises:
        ValueError: ranks that share their data might read something else, or cannot share it out.
    """

    ends_epochs: EndsEpochs | None = None
    """Itself, if it does; else the run counts them."""
    kind = "a loader"
    is_open = True
    """It is known what is read."""

    def __init__(
        self,
        data: Any,
        accumulation_steps: int | None = None,
        *,
        global_micro_batches: int | None = None,
        may_be_empty: bool = False,
        weigh: WeightFn | None = None,
        waiting: Waiting | None = None,
        read_errors: ReadErrors | None = None,
    ) -> None:
        self.steps, self.weigh, self.read_errors = accumulation_steps or global_micro_batches or 1, weigh, read_errors
        self.may_be_empty, self._micro_batches, self._given_waiting = may_be_empty, global_micro_batches, waiting
        self.place = Place()
        self.changed: str | None = None
        """What is other than where the place was saved, as a sentence."""
        self._read_last: list[Any] = []
        """The batches of this rank that were read last."""
        self.set_data(data)

    def set_data(self, data: Any) -> None:
        """Read ``data`` from now on."""
        self.data, self.reader = data, reader_of(data, marks=self.read_errors is not None)
        self.batches: int | None = None
        """Batches in one pass on the longest rank; None: unknown, not read by index, or some may be left out."""
        self._said: int | None = None
        self._exchanges = False
        """The ranks agree on each group: they may have other numbers of batches, or groups are weighed."""
        self._waiting: Waiting | None = None
        self._opened_with: Any = None
        """The random numbers before the pass was opened, until its first fetch."""
        # as it is before it is read, as in a process that resumes
        self._before: tuple[Mapping[str, Any], Any] | None = None
        """What the fetch of the group in hand has changed, as it was: of the place, and :func:`rng.snapshot`."""
        self.fingerprint = fingerprint(data.dataset) if isinstance(data, DataLoader) else None
        """Of the dataset; None: it is not known what it holds."""
        self.dealing = None if self._micro_batches is None else groups.deal(self.reader, self._micro_batches)
        """How the micro-batches of all ranks are shared out; None: each rank has data of its own."""

    @property
    def sampler(self) -> ResumableSampler | None:
        """The sampler of a ``loader()``, whose order is a function of seed and pass; None for other data."""
        return self.reader.sampler if isinstance(self.reader, Indexed) else None

    @property
    def inexact(self) -> str | None:
        """Why a resumed run would not see the same bits, None if it would."""
        return self.reader.inexact

    @property
    def iterations(self) -> int | None:
        """Groups in one pass; of data that is not read by index as it says, which may be wrong. None: unknown."""
        return None if self._said is None else -(-self._said // self.steps)

    def agree_lengths(self) -> None:
        """Read the length of the pass that starts; the ranks exchange theirs. A collective.

        Raises:
            ValueError: the ranks share out one order, and one of them has another order or other data.
        """
        lengths, by_index = groups.lengths(self, self.reader.measure(self.place))
        self._said = max(lengths) if min(lengths) >= 0 else None
        self.batches = self._said if by_index and self.read_errors is None else None
        differ = self.batches is None or len(set(lengths)) > 1
        alone = agreement.world_size() == 1
        self._exchanges = not alone and (differ or (self.weigh is not None and self.dealing is None))
        self._waiting = self._given_waiting if alone or self._exchanges else None  # else a peer would not learn of it
        if self.dealing is not None and (self._exchanges or not (self.batches or self.place.skipped)):
            groups.refuse_lengths(self)

    def begin_after(self, place: Place) -> None:
        """Begin with the pass after ``place``, which is one in other data: the same order would be the same samples."""
        self.place = Place(pass_number=place.pass_number + int(place.batch > 0))

    # -- a pass -----------------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Group]:
        """The groups of the present pass from the place on."""
        place = self.place
        if place.ended:
            return iter(())
        if begins := bool(place.held.get("between_passes")):
            self.agree_lengths()  # the data may have grown
        was_open = place.is_within or (not begins and bool({"loader", "drawn_with"} & place.held.keys()))
        self._opened_with = rng.snapshot() if self.reader.draws and not was_open else None
        with rng.isolated() if was_open else nullcontext():  # what it draws was drawn before the place was saved
            return self._groups(self._open())

    def _open(self) -> Iterator[Any]:
        """This rank's batches from the place on; from now on the loader itself is at its place."""
        if self.place.held.get("exhausted"):  # the loader is not used in this pass
            return iter(())
        place, self.place = self.place, self.place._replace(held={})
        self.reader.set_pass(place)
        return self.reader.open(place)

    def _groups(self, batches: Iterator[Any]) -> Iterator[Group]:
        """The groups to the end of the pass; the place is before each until it is consumed."""
        while True:
            if self.reader.draws:
                held, opened_with = self._held(), self._opened_with
                # a pass that is not begun is opened again, but by a loader that has it in its state
                begins = opened_with is not None and not {"loader", "drawn_with"} & held.keys()
                self._before = held, opened_with if begins else rng.snapshot()
            self._opened_with = None
            try:
                if self._exchanges or self.read_errors is not None:
                    group = groups.agreed_group(self, batches)
                elif self.dealing is not None:
                    group = groups.dealt_group(self, self.dealing, batches)
                else:
                    read = self.read(batches, self.steps)
                    group = Group(read) if read else None
                    if group is not None:
                        group.places = len(group)
            except StopRequested:
                self.put_back()
                raise
            if group is None:
                self._before = None
                return
            yield group

    def read(self, batches: Iterator[Any], count: int) -> list[Any]:
        """The batches of one iteration; a stop may end the wait for them, where all ranks learn of it."""
        self._read_last = read = list[Any]()
        if self._waiting is None:
            read += islice(batches, count)
            return read
        try:
            self._waiting.waiting_for_data = True
            read += islice(batches, count)  # keeps those before a stop
        finally:
            self._waiting.waiting_for_data = False
        return read

    def put_back(self) -> None:
        """Undo the fetch of the group in hand: it comes again, with what was drawn for it."""
        before, self._before = self._before, None
        if self.read_errors is not None:
            self.read_errors.found = 0
        if before is not None:
            held, generators = before
            rng.restore_snapshot(generators)
            self.reader.put_back(self._read_last)
            self.place = self.place._replace(held=held)

    def consumed(self, group: Group) -> None:
        """It is trained on, or given up."""
        self.place = self.place._replace(batch=self.place.batch + group.places)
        self._before = None
        if self.read_errors is not None:
            self.read_errors.count()

    def next_pass(self) -> None:
        """Move to the first batch of the next pass."""
        self.reader.end_pass(self.place)
        # if this pass was not opened since its place was loaded, the loader's state is still the loaded one, at its end
        held = {**self.place.held, "between_passes": True, "exhausted": False}
        for name in ("samplers", "drawn_with"):
            held.pop(name, None)
        self.place = Place(self.place.pass_number + 1, held=held)
        self._before = None

    def abandon(self) -> None:
        """End the workers of the present pass at once: they may be busy for long with what is no longer wanted."""
        self.freeze()
        self.reader.end()

    def freeze(self) -> None:
        """Keep the place as it is now, whatever becomes of the loader: it is discarded, or others iterate it."""
        if self.reader.iterator is not None:
            self.place = self.place._replace(held=self._held())

    def close(self) -> None:
        """The run is over: end the workers of the present pass, unless they are persistent."""
        self.reader.end(keep_persistent=True)

    # -- in checkpoints ---------------------------------------------------------------------------------------------

    def _held(self) -> Mapping[str, Any]:
        """What belongs to the place beside its numbers, as a checkpoint holds it."""
        if self._before is not None:
            return self._before[0]
        held = self.place.held
        return held if "loader" in held else {**self.reader.state(), **held}  # else the pass is not open

    def state_dict(self) -> dict[str, Any]:
        """The place, and what must be the same for it to mean the same."""
        place, held = self.place, self._held()
        exhausted = bool(held.get("exhausted")) and not self._exchanges
        ended = place.ended or exhausted or (self.batches is not None and place.batch >= self.batches)
        if ended:  # batch 0 of the next pass; but the end of the one before has not been reported yet
            place = place._replace(pass_number=place.pass_number + 1, batch=0, skipped=0)
        state: dict[str, Any] = {
            "pass": place.pass_number,
            "batch": place.batch,
            "ended": ended,
            "ranks": mesh.data_size(),
            "kind": self.kind,
        }
        if self.fingerprint is not None:
            state["fingerprint"] = self.fingerprint
        return {**state, **self.reader.order(place), "held": held, "steps": self.steps}

    def load(self, state: dict[str, Any]) -> None:
        """Continue at a saved place; what one rank refuses is raised on all. A collective."""
        self.check_kind(state)
        agreement.together(lambda: self.load_state_dict(state))
        if self.place.skipped:
            self.agree_lengths()  # of the rest of the pass

    def check_kind(self, state: dict[str, Any]) -> None:
        """Refuse a place in other data.

        Raises:
            StateMismatch: it is one in data of another kind.
        """
        if state["kind"] != self.kind:
            raise StateMismatch(
                f"The checkpoint was made with {state['kind']} as data: give run() the same, or leave the position out "
                f"with {leave_out('data')}."
            )

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at a saved place.

        Raises:
            StateMismatch: the dataset, its order or the batch size is another one. The latter may be, where an update
                has as many samples on another number of ranks.
        """
        place, held = self._place_of(state), state.get("held", {})
        if state.get("ranks", mesh.data_size()) != mesh.data_size():
            held = {**held, "exhausted": False}
        self.place = place._replace(held=held)
        if None not in (self.fingerprint, saved := state.get("fingerprint")) and saved != self.fingerprint:
            self._note_changed("The data is not that of the checkpoint: the run continues at its place in other data.")
        self.reader.set_pass(self.place)
        drawn = state.get("drawn_order")
        if drawn is not None and (self.sampler is None or self.sampler.drawn_order != drawn):
            self._note_changed(
                "The sampler draws another order than in the checkpoint: samples of this pass may come twice or never."
            )

    def _place_of(self, state: dict[str, Any]) -> Place:
        """The numbers of a saved place, perhaps of another number of ranks."""
        place = Place(state["pass"] - int(state["ended"]), state["batch"], state["ended"], state.get("skipped", 0))
        ranks, size = mesh.data_size(), getattr(self.data, "batch_size", None)
        before, size_before = state.get("ranks", ranks), state.get("batch_size")
        dealt, is_ordered = False, False
        if isinstance(self.reader, Indexed) and "seed" in state:
            self._check_order(self.reader, state)
            dealt, is_ordered = self.dealing is not None, True
        if before == ranks and not dealt:
            return place
        if is_ordered and place.batch:
            consumed = place.skipped + place.batch * state["batch_size"] * before
            place = place._replace(batch=0, skipped=min(consumed, state["samples"]))
        if before == ranks or dealt or not (place.is_within or size_before != size):
            return place
        outcome = f"each continues at batch {place.batch} of its own, samples of this pass may come twice or never"
        if is_ordered:
            outcome = (
                f"{place.skipped} of {state['samples']} samples of this pass are consumed, the ranks share the rest"
            )
            if size_before != size:
                outcome += f", {size} in a batch where it was {size_before}"
        self._note_changed(f"The data position was saved on {before} ranks, resumed on {ranks}: {outcome}.")
        return place

    def _note_changed(self, sentence: str) -> None:
        self.changed = sentence if self.changed is None else f"{self.changed} {sentence}"
        if agreement.rank() == 0:
            logger.warning("%s", sentence)

    def _check_order(self, reader: Indexed, state: dict[str, Any]) -> None:
        if reader.sampler.adopts_seed:
            reader.sampler.seed = self.data.dataset.seed = state["seed"]
        for name, value in reader.fixed(reader.sampler.data_length(state["pass"])).items():
            if state[name] != value and not (name == "batch_size" and self._keeps_global_batch(state)):
                raise StateMismatch(
                    f"The checkpoint was made with {name} {state[name]} in its data, now it is {value}: make them "
                    f"equal, or leave the position out with {leave_out('data')}."
                )

    def _keeps_global_batch(self, state: dict[str, Any]) -> bool:
        """On another number of ranks an update has as many samples as where ``state`` was saved."""
        before, now = state.get("ranks", 1) * state["batch_size"], mesh.data_size() * self.data.batch_size
        steps = state.get("steps", self.steps)
        return state.get("ranks") != mesh.data_size() and (before == now or before * steps == now * self.steps)
