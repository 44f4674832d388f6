"""Takes windows from a stream on all ranks together, and iterates over them: each is a pass over data of its own."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from itertools import islice
from typing import TYPE_CHECKING, Any

from ignite.engine import Events

from ignite_engine import rng
from ignite_engine.data.loader import resumable
from ignite_engine.data.readers import Place, length_of
from ignite_engine.data.source import DataSource
from ignite_engine.errors import StateMismatch, StopRequested, leave_out
from ignite_engine.events import TrainingEvents
from ignite_engine.ext.windows.streams import CountedWindows, text_of
from ignite_engine.ranks import agreement, mesh
from ignite_engine.update.micro_batches import Group

if TYPE_CHECKING:
    from ignite_engine.ext.windows.windows import Windows

logger = logging.getLogger(__name__)


class WindowReader:
    """Takes the windows in their order: of a shared stream the same on every rank.

    Args:
        stops: whether this rank is to stop, which ends a wait on all of them.
        waits: for windows that have not come yet, as ``windows`` says.
    """

    def __init__(self, windows: Windows, stops: Callable[[], bool] = lambda: False, *, waits: bool = True) -> None:
        self.windows, self._stops = windows, stops
        self._wait_s = windows.wait_s if waits else 0.0
        self.reset()

    def reset(self) -> None:
        """Start at the beginning of the stream."""
        self._stream = self.windows.beginnings.begun_by(self)
        self._before = self._stream.state_dict()
        """Before the window that was taken last."""
        self.name: Any = None
        """Of the window that was taken last, or the window itself, until it is done."""
        self.over = False
        """The stream had no more when it was asked last."""

    @property
    def inexact(self) -> str | None:
        """Why a resumed run would not see the same windows."""
        replays = isinstance(self._stream, CountedWindows) and not self._stream.is_sequence
        return "the stream of windows keeps no state: it is read again" if replays else None

    def take(self) -> bool:
        """Take the next window, or the one that was taken and not trained on; waits for it. A collective.

        Returns:
            False: no rank has one. Otherwise a rank that has none takes part without: its ``name`` is None.

        Raises:
            StopRequested: a rank was asked to stop while it waited.
            ValueError: another reader has begun the stream since.
            Exception: of the stream, on every rank.
        """
        self.windows.beginnings.check_belongs_to(self)
        shared, until, ended = self.windows.shared, time.monotonic() + self._wait_s, False
        looks = not shared or agreement.rank() == 0

        def own() -> tuple[bool, bool, bool, Any]:
            """Whether this rank has a window, waits for one, is to stop; and the window, of a shared stream."""
            nonlocal ended
            if looks and self.name is None and not ended:
                ended = self._look()
            has = looks and self.name is not None
            waits = looks and not has and not ended and time.monotonic() < until
            return has, waits, self._stops(), self.name if shared and has else None

        rows = agreement.agreed(own)
        while any(waits for _, waits, _, _ in rows):
            if any(stops for _, _, stops, _ in rows):
                raise StopRequested
            time.sleep(self.windows.poll_s)
            rows = agreement.agreed(own)
        if shared:
            self.name = rows[0][3]
        self.over = not any(has for has, _, _, _ in rows)
        return not self.over

    def _look(self) -> bool:
        """Take the next window; whether the stream has ended."""
        self.name, self._before = None, self._stream.state_dict()
        try:
            self.name = self._stream.next_window()
        except StopIteration:
            return True
        return False

    def done(self) -> None:
        """The window that was taken last is trained on."""
        self.name = None

    def next_loader(self) -> Any:
        """The loader of the next window that has a batch on some rank, None if there is none; a collective."""
        begun_again = False
        while True:
            if self.take():
                data = self.windows.loader_of(self.name)
                if any(agreement.gather_objects(length_of(data) != 0)):
                    return data
                self.done()
            elif begun_again or not self.begin_again():
                return None
            else:
                begun_again = True

    def begin_again(self) -> bool:
        """Begin a sequence again that is at its end; whether one did so on some rank. A collective."""
        if not self.over:
            return False
        if begins := isinstance(self._stream, CountedWindows) and self._stream.is_sequence:
            self._stream.load_state_dict({"taken": 0})
        self.over = not any(agreement.gather_objects(begins))
        return not self.over

    def state_dict(self) -> dict[str, Any]:
        """Before the window that was taken and is not done, or after the last one."""
        stream = self._stream.state_dict() if self.name is None else self._before
        return {"stream": stream, "name": text_of(self.name), "over": self.over}

    def load_state_dict(self, state: dict[str, Any], *, begun: bool = True) -> None:
        """Continue there; a window that was taken and not done is taken again. A collective.

        Args:
            begun: it has had its WINDOW_STARTED. Otherwise another one may be in its place, or none.

        Raises:
            StateMismatch: it is another one now; of a shared stream on every rank.
        """
        self.over = state["over"]

        def load() -> Any:
            self._stream.load_state_dict(state["stream"])
            if state["name"] is None:
                return None
            self._look()
            name, now = state["name"], text_of(self.name)
            if begun and (now is None or name not in ("", now)):
                found = "there is none" if now is None else f"the next one is {now}"
                raise StateMismatch(
                    f"The checkpoint was made in the window {name}, now {found}: bring it back, or leave the position "
                    f"out with {leave_out('data')}."
                )
            return self.name

        self.name = agreement.on_rank_0(load) if self.windows.shared else agreement.together(load)


class WindowedSource(DataSource):
    """What a Trainer iterates over windows: ``place.pass_number`` counts those that were open.

    Args:
        state: of the run; its windows are counted here.
        how: of a :class:`DataSource`.
    """

    kind = "Windows"

    def __init__(self, windows: Windows, state: Any, **how: Any) -> None:
        super().__init__((), **how)
        self._state = state
        self.stream = WindowReader(windows, how["waiting"].stops_waiting)
        self._before_window: Any = None
        """The random numbers before the open window was opened; None: none is open."""
        self._begun, self._of_epoch, self._updates = False, 0, 0
        """Whether the open window has had its WINDOW_STARTED, windows begun in this epoch, updates in the open one."""
        self._inexact: str | None = None

    @property
    def is_open(self) -> bool:  # type: ignore[override]  # of a pass it always is
        """A window is."""
        return self._before_window is not None

    @property
    def ends_epochs(self) -> WindowedSource:  # type: ignore[override]
        return self

    @property
    def name(self) -> Any:
        """Of the open window; None where none is, and where this rank has none."""
        return self.stream.name if self.is_open else None

    @property
    def iterations(self) -> None:
        """They are not known for a pass."""

    @property
    def inexact(self) -> str | None:
        """Why a resumed run would not see the same bits, None if it would; of its windows once one was opened."""
        return self.stream.inexact or self._inexact

    # -- a window -----------------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Group]:
        """The rest of the open window, or the next one, which is taken by the first ``next``: a stop may end that."""
        return self._limited() if self.is_open else self._next_window()

    def _limited(self) -> Iterator[Group]:
        limit = self.stream.windows.max_updates
        return islice(super().__iter__(), None if limit is None else max(limit - self._updates, 0))

    def _next_window(self) -> Iterator[Group]:
        if self.stream.take():
            try:
                self._open_window(rng.capture())
                yield from self._limited()
            except StopRequested:
                self.put_back()
                raise

    def _open_window(self, generators: Any) -> None:
        """Open the window that the reader has taken. A collective.

        Args:
            generators: the random numbers before it.
        """
        self._before_window = generators
        self.set_data(resumable(self.stream.windows.loader_of(self.stream.name), any_sampler=mesh.data_size() > 1))
        self._inexact = self._inexact or super().inexact
        self.agree_lengths()

    def agree_lengths(self) -> None:
        if self.is_open:
            super().agree_lengths()

    def run_begins(self) -> None:
        """Of the windows that have begun all are completed but the one that is open."""
        self._state.windows_completed = self._state.windows - int(self._begun)
        self._state.window = self.name if self._begun else None

    def group_fetched(self, run: Any) -> None:
        """The first one of a window: it counts, and WINDOW_STARTED comes."""
        if not self._begun:
            self._begun, self._of_epoch = True, self._of_epoch + 1
            self._state.windows += 1
            self._state.window = self.name
            run.fire(TrainingEvents.WINDOW_STARTED)

    def first_of_next_pass(self, run: Any) -> Group | None:
        """The first group of the next window that has one, None at the end of the epoch."""
        stream, state, begun_again = self.stream, self._state, False
        while True:
            if begun := self._begun:
                run.fire(TrainingEvents.WINDOW_COMPLETED)
            self.next_pass()
            per_epoch = stream.windows.per_epoch
            is_full = per_epoch is not None and self._of_epoch >= per_epoch
            if not run.epoch_iteration and not begun_again:
                begun_again = stream.begin_again()  # the epoch before has ended with the sequence
            if stream.over or is_full:
                if stream.over:
                    run.fire(Events.DATALOADER_STOP_ITERATION)
                if not run.epoch_iteration:
                    if not state.windows and agreement.rank() == 0:
                        logger.warning(
                            "No window with a batch came from %r: the run ends without an update.",
                            stream.windows.stream,
                        )
                    run.end_run()
                return None
            if begun:
                run.boundary()
            if (group := run.fetch()) is not None:
                return group  # type: ignore[no-any-return]

    def consumed(self, group: Group) -> None:
        super().consumed(group)
        self._updates += 1

    def put_back(self) -> None:
        """Undo the fetch of the group in hand; the window of which it is the first is taken again with it."""
        if self.is_open and self.place.is_within:
            super().put_back()
            return
        if self.is_open:
            rng.restore(self._before_window)
        if self._begun:
            self._of_epoch -= 1
            self._state.windows -= 1
        self._leave_window(self.place.pass_number)

    def next_pass(self) -> None:
        """The open window is trained on, or was empty."""
        self._leave_window(self.place.pass_number + int(self.is_open))
        self.stream.done()

    def _leave_window(self, number: int) -> None:
        self.close()
        self.set_data(())
        self.place, self._before_window, self._begun, self._updates = Place(number), None, False, 0
        self._state.window, self._state.windows_completed = None, self._state.windows

    def epoch_ended(self) -> None:
        """The epoch is over: in the next one the stream is asked again, and a sequence at its end begins again."""
        self._of_epoch, self.stream.over = 0, False

    # -- in checkpoints -----------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The place in the open window, and that in the stream."""
        own = {"before": self._before_window, "begun": self._begun, "of_epoch": self._of_epoch}
        return super().state_dict() | {"windows": self.stream.state_dict() | own | {"updates": self._updates}}

    def load(self, state: dict[str, Any]) -> None:
        """Continue at a saved place; opens the window that was open. A collective.

        Raises:
            StateMismatch: it is one in other data.
        """
        self.check_kind(state)
        own, ranks = state["windows"], mesh.data_size()
        if state["ranks"] != ranks and not self.stream.windows.shared:
            self.changed = (
                f"The data position was saved on {state['ranks']} ranks, resumed on {ranks}: each continues with its "
                "own windows, some may come twice or never."
            )
            state = {**state, "ranks": ranks}
        self.stream.load_state_dict(own, begun=own["begun"])
        self._begun, self._of_epoch, self._updates = own["begun"], own["of_epoch"], own["updates"]
        if own["before"] is not None:
            self.place = Place(state["pass"] - int(state["ended"]))
            with rng.isolated():  # what it draws was drawn then
                rng.restore(own["before"])
                self._open_window(own["before"])
        super().load(state)
