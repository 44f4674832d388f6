"""What a Trainer iterates over windows: one window after the other, each by a source of its own."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING, Any

from ignite.engine import Events

from ignite_engine import rng
from ignite_engine.data.place import Place
from ignite_engine.data.source import BetweenPasses, DataSource
from ignite_engine.errors import StateMismatch, StopRequested, leave_out
from ignite_engine.events import TrainingEvents
from ignite_engine.ext.windows.window_reader import WindowReader
from ignite_engine.ranks import agreement, mesh
from ignite_engine.step.micro_batches import Group

if TYPE_CHECKING:
    from ignite_engine.ext.windows.windows import Windows

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class WindowPlace:
    """Where a source is in the windows of its stream."""

    number: int = 0
    """Windows before the open one, or the one that comes next: its pass."""
    of_epoch: int = 0
    """Windows begun in this epoch."""
    updates: int = 0
    """Updates in the open window."""
    begun: bool = False
    """The open window has had its WINDOW_STARTED."""


class WindowedSource:
    """What a Trainer iterates over windows: one window per ``iter()``, each by a source of its own.

    Args:
        source_of: makes the source over a window's loader.
        state: of the run; its windows are counted here.
        stops: of a :class:`WindowReader`.
    """

    iterations = None
    """They are not known for a pass."""

    def __init__(
        self, windows: Windows, source_of: Callable[[Any], DataSource], state: Any, stops: Callable[[], bool]
    ) -> None:
        self.data, self._state = windows, state
        self.reader = WindowReader(windows, stops)
        self._source_of = source_of
        self.present: DataSource | None = None
        """Over the window that is open."""
        self.at = WindowPlace()
        self._opened_with: Any = None
        """The random numbers before the open window was opened."""
        self.order_seed: int | None = None
        """Of the random order of the plain DataLoaders of the open window; None: they have none."""
        self._changed: str | None = None
        self._inexact: str | None = None

    @property
    def name(self) -> Any:
        """Of the open window; None where none is, and where this rank has none."""
        return None if self.present is None else self.reader.name

    @property
    def ends_epochs(self) -> WindowedSource:
        return self

    @property
    def changed(self) -> str | None:
        """What is other than where the place was saved, as a sentence."""
        return self._changed or (None if self.present is None else self.present.changed)

    @property
    def place(self) -> Place:
        """In the open window; ``pass_number`` counts windows."""
        return Place(pass_number=self.at.number) if self.present is None else self.present.place

    @property
    def epoch_is_over(self) -> bool:
        """The epoch has its windows, or the stream has no more."""
        return self.reader.over or (self.data.per_epoch is not None and self.at.of_epoch >= self.data.per_epoch)

    @property
    def inexact(self) -> str | None:
        """Why a resumed run would not see the same bits, None if it would; of its windows once one was opened."""
        return self.reader.inexact or self._inexact

    def begin_after(self, place: Place) -> None:
        """Begin with the pass after ``place``, which is one in other data."""
        self.at = WindowPlace(place.pass_number + int(place.batch > 0))

    # -- a window -----------------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Group]:
        """The rest of the open window, or the next one, which is taken by the first ``next``: a stop may end that."""
        if self.present is None:
            return self._next_window()
        limit = self.data.max_updates
        return islice(self.present, None if limit is None else max(limit - self.at.updates, 0))

    def _next_window(self) -> Iterator[Group]:
        if self.reader.take():
            try:
                yield from islice(self._open(rng.capture()), self.data.max_updates)
            except StopRequested:
                self.put_back()
                raise

    def _open(self, generators: Any) -> DataSource:
        """Open the window that the reader has taken. A collective.

        Args:
            generators: the random numbers before it.
        """
        self._opened_with = generators
        loader, self.order_seed = self.data.loader_and_seed(self.reader.name)
        self.present = self._source_of(loader)
        self.present.place = Place(pass_number=self.at.number)
        self._inexact = self._inexact or self.present.inexact
        self.present.agree_lengths()
        return self.present

    def run_begins(self) -> None:
        """Of the windows that have begun all are completed but the one that is open."""
        open_now = self.at.begun
        self._state.windows_completed = self._state.windows - int(open_now)
        self._state.window = self.name if open_now else None

    def group_fetched(self, run: BetweenPasses) -> None:
        """The first one of a window: it counts, and WINDOW_STARTED comes."""
        if not self.at.begun:
            self.at = replace(self.at, begun=True, of_epoch=self.at.of_epoch + 1)
            self._state.windows += 1
            self._state.window = self.name
            run.fire(TrainingEvents.WINDOW_STARTED)

    def first_of_next_pass(self, run: BetweenPasses) -> Group | None:
        """The first group of the next window that has one, None at the end of the epoch."""
        begun_again = False
        while True:
            if begun := self.at.begun:
                run.fire(TrainingEvents.WINDOW_COMPLETED)
            self.next_pass()
            if self.epoch_is_over and not run.epoch_iteration and not begun_again:
                begun_again = self.reader.begin_again()  # the epoch before has ended with the sequence
            if self.epoch_is_over:
                if self.reader.over:
                    run.fire(Events.DATALOADER_STOP_ITERATION)
                if not run.epoch_iteration:
                    if not self._state.windows and agreement.rank() == 0:
                        logger.warning(
                            "No window with a batch came from %r: the run ends without an update.", self.data.stream
                        )
                    run.end_run()
                return None
            if begun:
                run.boundary()
            if (group := run.fetch()) is not None:
                return group

    def consumed(self, group: Group) -> None:
        """A group of the open window is trained on, or given up."""
        assert self.present is not None, "it was fetched from it"
        self.present.consumed(group)
        self.at = replace(self.at, updates=self.at.updates + int(not group.is_lost))

    def put_back(self) -> None:
        """Undo the fetch of the group in hand; the window of which it is the first is taken again with it."""
        if self.present is not None and self.present.place.is_within:
            self.present.put_back()
            return
        if self._opened_with is not None:
            rng.restore(self._opened_with)
        if self.at.begun:
            self.at = replace(self.at, begun=False, of_epoch=self.at.of_epoch - 1)
            self._state.windows -= 1
        self._leave_window()

    def _leave_window(self) -> None:
        self.close()
        self.present = self._opened_with = None
        self._state.window, self._state.windows_completed = None, self._state.windows

    def next_pass(self) -> None:
        """The open window is trained on, or was empty."""
        self._changed = self.changed  # a resumed run of later windows is as little that of the checkpoint
        self.at = WindowPlace(self.at.number + int(self.present is not None), self.at.of_epoch)
        self._leave_window()
        self.reader.done()

    def epoch_ended(self) -> None:
        """The epoch is over: in the next one the stream is asked again, and a sequence at its end begins again."""
        self.at = replace(self.at, of_epoch=0)
        self.reader.over = False

    def abandon(self) -> None:
        """End the workers of the open window at once."""
        if self.present is not None:
            self.present.abandon()

    def freeze(self) -> None:
        """Keep the place in the open window, whatever becomes of its loader."""
        if self.present is not None:
            self.present.freeze()

    def close(self) -> None:
        """The run is over: end the workers of the open window."""
        if self.present is not None:
            self.present.close()

    # -- in checkpoints -----------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The place in the stream, and that in the open window."""
        own = self.reader.state_dict() | asdict(self.at)
        if self.present is None:
            return {"windows": own, "window": None, "ranks": mesh.data_size()}
        window = self.present.state_dict() | {"opened_with": self._opened_with}
        return {"windows": own, "window": window, "ranks": mesh.data_size()}

    def load(self, state: dict[str, Any]) -> None:
        """Continue at a saved place; opens the window that was open. A collective.

        Raises:
            StateMismatch: it is one in other data.
        """
        if "windows" not in state:
            raise StateMismatch(
                "The checkpoint was made with data that is not a Windows object: give run() the same, or leave the "
                f"position out with {leave_out('data')}."
            )
        own, ranks = state["windows"], mesh.data_size()
        if state["ranks"] != ranks and not self.data.shared:
            self._changed = (
                f"The data position was saved on {state['ranks']} ranks, resumed on {ranks}: each continues with its "
                "own windows, some may come twice or never."
            )
        self.reader.load_state_dict(own, begun=own["begun"])
        self.at = WindowPlace(**{name: own[name] for name in asdict(self.at)})
        if (saved := state["window"]) is not None:
            with rng.isolated():  # what it draws was drawn then
                rng.restore(saved["opened_with"])
                window = self._open(saved["opened_with"])
            window.load(saved | ({} if self.data.shared else {"ranks": ranks}))
            if window.place.skipped:
                window.agree_lengths()
