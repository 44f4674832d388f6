"""What a Trainer iterates over: it groups micro-batches and knows its position in the data.

A source has three verbs: :meth:`Source.open` gives the groups of a pass, :meth:`Source.consumed` moves the position
past one, :meth:`Source.next_pass` moves it to the next pass. What has rules of its own about passes wraps a source.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from copy import copy
from itertools import islice
from typing import Any, Protocol

from torch.utils.data import DataLoader

from ignite_engine import rng
from ignite_engine.data import groups
from ignite_engine.data.fingerprint import fingerprint
from ignite_engine.data.read_errors import ReadErrors
from ignite_engine.data.readers import Indexed, Stateful, reader_of
from ignite_engine.data.sampler import ResumableSampler
from ignite_engine.errors import StateMismatch, StopRequested, leave_out
from ignite_engine.ranks import agreement, mesh
from ignite_engine.update.micro_batches import Group, WeightFn

logger = logging.getLogger(__name__)


class Waiting(Protocol):
    """Records when a signal may raise :class:`StopRequested`."""

    waiting_for_data: bool

    def stops_waiting(self) -> bool:
        """Whether this rank should stop."""


class Run(Protocol):
    """What a source that fires events needs from the run."""

    def fire(self, event: Any) -> None:
        """Run the handlers of an event, and fulfil their requests."""

    def boundary(self) -> None:
        """A step boundary."""


class Source(ABC):
    """Data with a position. At most one group is in hand, fetched and not consumed."""

    kind: str
    iterations: int | None = None
    """Groups in one pass; of data that is not read by index as it says, which may be wrong. None: unknown."""
    iterations_left: int | None = None
    """Groups from the position to the end of the pass, where it is known for certain."""
    inexact: str | None
    """Why a resumed run would not see the same bits, None if it would."""
    changed: str | None = None
    """How the data differs from that of the saved position, as a sentence; None if it does not."""
    pass_number = 0
    batch = 0
    """The number of consumed batches of the pass since it was opened here."""

    @abstractmethod
    def begin(self, pass_number: int) -> None:
        """Move to the first batch of a pass. A collective."""

    @abstractmethod
    def open(self, run: Run | None = None) -> Iterator[Group]:
        """The groups of the current pass from the position on."""

    @abstractmethod
    def consumed(self, group: Group) -> None:
        """Move past a group that was trained on or given up."""

    @abstractmethod
    def next_pass(self) -> bool:
        """Move to the next pass; returns False if there is none."""

    @abstractmethod
    def put_back(self) -> None:
        """Undo the fetch of the group in hand: it comes again, with what was drawn for it."""

    @abstractmethod
    def samples(self, group: Group | None) -> list[int] | None:
        """Dataset indices of this rank's group, or of the next one; None if not of a ``loader()``'s data."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """The position, and the facts that it depends on."""

    @abstractmethod
    def load(self, state: dict[str, Any]) -> None:
        """Continue at a saved position; what one rank refuses is raised on all. A collective.

        Raises:
            StateMismatch: it is one in other data.
        """

    def reads_on(self) -> None:  # noqa: B027  # of a source that cannot be an iterator nothing
        """The data is an iterator that is at the position itself."""

    @abstractmethod
    def freeze(self) -> None:
        """Keep the position as it is now, whatever becomes of the loader: it is discarded, or others iterate it."""

    @abstractmethod
    def close(self, *, at_once: bool = False) -> None:
        """The run is over: end the workers of the present pass, unless they are persistent; ``at_once`` these, too."""

    def check_kind(self, state: dict[str, Any]) -> None:
        """Refuse a position in data of another kind.

        Raises:
            StateMismatch: it is one.
        """
        if state["kind"] != self.kind:
            raise StateMismatch(
                f"The checkpoint was made with {state['kind']} as data: give run() the same, or leave the position out "
                f"with {leave_out('data')}."
            )

    def note_changed(self, sentence: str) -> None:
        self.changed = sentence if self.changed is None else f"{self.changed} {sentence}"
        if agreement.rank() == 0:
            logger.warning("%s", sentence)


class OwnSource(ABC):
    """Data that is more than one pass and says itself how long an epoch is: it makes a source of its own."""

    @abstractmethod
    def __iter__(self) -> Iterator[Any]: ...

    @abstractmethod
    def make_source(self, state: Any, waiting: Waiting, make: Callable[[Any], DataSource]) -> Source:
        """The source over it.

        Args:
            state: of the run.
            make: makes the source of a loader.
        """

    @abstractmethod
    def opened_by(self, make: Callable[[Any], Any]) -> OwnSource:
        """The same data, of whose map-style datasets ``make`` makes loaders."""

    @property
    @abstractmethod
    def settings(self) -> Mapping[str, Any]:
        """What is the same on every rank."""


class DataSource(Source):
    """Passes over ``data``, in groups, counted by what was consumed.

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

    Ranks exchange the lengths of sized loaders when a pass starts; nothing more is needed where they are equal.
    Otherwise, and where groups are weighed or batches may be left out, they agree on each group (``data/groups.py``).

    Raises:
        ValueError: ranks that share their data might read something else, or cannot share it out.
    """

    kind = "a loader"

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
        self.data, self.reader = data, reader_of(data, marks=read_errors is not None)
        self.may_be_empty, self._given_waiting = may_be_empty, waiting
        self.batches: int | None = None
        """Batches from where the pass was opened on the longest rank; None: unknown, not read by index, or some may be
        left out."""
        self._ended = False
        """The pass was at its end when the position was saved: it yields nothing more."""
        self._exchanges = False
        """The ranks agree on each group: they may have other numbers of batches, or groups are weighed."""
        self._waiting: Waiting | None = None
        self._opened = False
        self._held: Mapping[str, Any] = {}
        """What the reader needs to open the pass at the position, until it is open."""
        self._loaded = False
        """Whether the loader itself is at another place than the position."""
        self._before: tuple[Mapping[str, Any], Any] | None = None
        """What the fetch of the group in hand has changed: what was held, and :func:`rng.snapshot`."""
        # computed before the data is read, as in a process that resumes
        self.fingerprint = fingerprint(data.dataset) if isinstance(data, DataLoader) else None
        """Of the dataset; None: it is not known what it holds."""
        self.dealing = None if global_micro_batches is None else groups.deal(self.reader, global_micro_batches)
        """How the micro-batches of all ranks are shared out; None: each rank has data of its own."""

    @property
    def sampler(self) -> ResumableSampler | None:
        """The sampler of a ``loader()``, whose order is a function of seed and pass; None for other data."""
        return self.reader.sampler if isinstance(self.reader, Indexed) else None

    @property
    def inexact(self) -> str | None:  # type: ignore[override]
        return self.reader.inexact

    def begin(self, pass_number: int) -> None:
        self.pass_number, self.batch, self._ended, self._held = pass_number, 0, False, {}
        self.agree_lengths()

    def agree_lengths(self) -> None:
        """Read the length of the pass; the ranks exchange theirs. A collective.

        Raises:
            ValueError: the ranks share out one order, and one of them has another order or other data.
        """
        lengths, by_index = groups.lengths(self, self.reader.length(self.pass_number, self._held))
        known = max(lengths) if min(lengths) >= 0 else None
        self.batches = known if by_index and self.read_errors is None else None
        whole = self.reader.whole_length() if isinstance(self.reader, Indexed) else known
        self.iterations = None if whole is None else -(-whole // self.steps)
        differ = self.batches is None or len(set(lengths)) > 1
        alone = agreement.world_size() == 1
        self._exchanges = not alone and (differ or (self.weigh is not None and self.dealing is None))
        self._waiting = self._given_waiting if alone or self._exchanges else None  # else peers would not learn of it
        if self.dealing is not None and (self._exchanges or not (self.batches or self._held.get("consumed"))):
            groups.refuse_lengths(lengths)

    @property
    def iterations_left(self) -> int | None:  # type: ignore[override]
        if self.batches is None:
            return None
        return 0 if self._ended else -(-(self.batches - self.batch) // self.steps)

    # -- a pass -----------------------------------------------------------------------------------------------------

    def open(self, run: Run | None = None) -> Iterator[Group]:
        if self._ended:
            return iter(())
        if self._held.get("between"):
            self.agree_lengths()  # the data may have grown
        return self._groups()

    def _groups(self) -> Iterator[Group]:
        """The groups to the end of the pass; the position is before each until it is consumed."""
        batches: Iterator[Any] | None = None
        group: Group | None
        while True:
            if self.reader.draws:
                self._before = self._now(), rng.snapshot()
            try:
                if batches is None:
                    batches = self._open_reader()
                if self._exchanges or self.read_errors is not None:
                    group = groups.agreed_group(self, batches)
                elif self.dealing is not None:
                    group = groups.dealt_group(self, self.dealing, batches)
                else:
                    group = Group(self.read(batches, self.steps))
                    group.places = len(group)
            except StopRequested:
                self.put_back()
                raise
            if not group and (group is None or not group.places):
                self._before = None
                return
            yield group

    def _open_reader(self) -> Iterator[Any]:
        """This rank's batches from the position on; from now on the loader itself is there."""
        held = self._held if self._loaded else {}
        if held.get("exhausted") and not held.get("between"):  # peers may have more in this pass
            return iter(())
        with rng.isolated() if held.get("open") else nullcontext():  # its random numbers were drawn before the save
            goes_on = self.reader.goes_on
            batches = self.reader.open(self.pass_number, self.batch, held)
            if self.batch and self.reader.reads_again and not goes_on:
                if self.reader.draws:
                    what = self.reader.inexact or type(self.data).__name__
                    logger.warning(
                        "%s: the %d batches that were consumed are loaded again and skipped.", what, self.batch
                    )
                for _ in range(self.batch):
                    self.read(batches, 1)
        self._held, self._loaded, self._opened = {}, False, True
        return batches

    def read(self, batches: Iterator[Any], count: int) -> list[Any]:
        """The batches of one iteration; a stop may end the wait for them, where all ranks learn of it."""
        if self._waiting is None:
            return list(islice(batches, count))
        try:
            self._waiting.waiting_for_data = True
            return list(islice(batches, count))
        finally:
            self._waiting.waiting_for_data = False

    def put_back(self) -> None:
        if self._before is not None:
            self._held, generators = self._before
            self._before, self._loaded, self._opened = None, True, False
            rng.restore_snapshot(generators)

    def consumed(self, group: Group) -> None:
        self.batch += group.places
        self._before = None
        if self.read_errors is not None:
            self.read_errors.count(group)

    def next_pass(self) -> bool:
        is_open = False
        if self._opened:
            is_open = self.reader.end_pass()
            self._held = {} if is_open else {**self.reader.state(), "between": True}
        else:  # not opened since its position was loaded: what is held is still that, at the end of the pass
            of_pass = ("began_with", "consumed", "open")
            self._held = {name: value for name, value in self._held.items() if name not in of_pass} | {"between": True}
        self.pass_number, self.batch, self._ended, self._opened = self.pass_number + 1, 0, False, is_open
        self._before = None
        return True

    def reads_on(self) -> None:
        self.reader.goes_on = self.reader.reads_again

    def freeze(self) -> None:
        self._held, self._before, self._loaded, self._opened = self._now(), None, True, False

    def close(self, *, at_once: bool = False) -> None:
        if at_once:
            self.freeze()
        self.reader.end(keep_persistent=not at_once)

    def samples(self, group: Group | None) -> list[int] | None:
        if self.sampler is None:
            return None
        batches = self.steps if group is None else group.places
        size, order = self.data.batch_size, copy(self.sampler)
        order.start = self.batch * size
        own = batches if self.dealing is None else self.dealing.own(batches)
        return [index for _, index in islice(order, own * size)]

    # -- in checkpoints ---------------------------------------------------------------------------------------------

    def _now(self) -> Mapping[str, Any]:
        """The state that the reader needs to return to the position."""
        if self._before is not None:
            return self._before[0]
        if self._opened:
            return {**self.reader.state(), "open": True}
        return self._held

    def state_dict(self) -> dict[str, Any]:
        ended = self._ended or (self.batches is not None and self.batch >= self.batches)
        state: dict[str, Any] = {"kind": self.kind, "ranks": mesh.data_size(), "ended": ended}
        state |= {"pass": self.pass_number, "batch": self.batch, "held": self._now()}
        if self.fingerprint is not None:
            state["fingerprint"] = self.fingerprint
        if isinstance(self.reader, Indexed):
            state |= self.reader.saved(self.pass_number, self.batch, ended=ended)
        return state

    def load(self, state: dict[str, Any]) -> None:
        self.check_kind(state)
        agreement.together(lambda: self.load_state_dict(state))
        self.agree_lengths()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """As :meth:`load`, on this rank alone."""
        self.pass_number, self.batch, self._ended = state["pass"], state["batch"], state["ended"]
        self._held, self._loaded = state["held"], True
        if isinstance(self.reader, Stateful):
            self.reader.restore_generators(self._held)  # an evaluation may read the data before the pass is opened
        if None not in (self.fingerprint, saved := state.get("fingerprint")) and saved != self.fingerprint:
            self.note_changed("The data is not that of the checkpoint: the run continues at its place in other data.")
        ranks, before = mesh.data_size(), state["ranks"]
        moved = f"The data position was saved on {before} ranks, resumed on {ranks}"
        if isinstance(self.reader, Indexed) and "consumed" in state:
            self.reader.load(state)
            self.batch, self._held = 0, self.reader.state()
            if state.get("drawn_order", drawn := self.reader.sampler.drawn_order) != drawn:
                self.note_changed(
                    "The sampler draws another order than in the checkpoint: samples of this pass may come twice or "
                    "never."
                )
            size, size_before = self.data.batch_size, state["batch_size"]
            if (before, size_before) != (ranks, size) and self.dealing is None:
                outcome = f"{state['consumed']} of {state['samples']} samples of this pass are consumed"
                sizes = "" if size == size_before else f", {size} in a batch where it was {size_before}"
                self.note_changed(f"{moved}: {outcome}, the ranks share the rest{sizes}.")
        elif before != ranks:
            self._held = {**self._held, "exhausted": False}
            outcome = f"each continues at batch {self.batch} of its own, samples of this pass may come twice or never"
            self.note_changed(f"{moved}: {outcome}.")
