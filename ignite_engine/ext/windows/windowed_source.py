"""Takes windows from a stream on all ranks together, and iterates over them as passes over data of their own."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from itertools import islice
from typing import TYPE_CHECKING, Any

from ignite_engine import rng
from ignite_engine.data.source import DataSource, Run, Source
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
    """

    def __init__(self, windows: Windows, stops: Callable[[], bool]) -> None:
        self.windows, self._stops, self._stream = windows, stops, windows.stream_at_its_beginning()
        self._before = self._stream.state_dict()
        """The state of the stream before the window that was taken last."""
        self.name: Any = None
        """Of the window that was taken last, or the window itself, until it is done."""

    @property
    def inexact(self) -> str | None:
        """Why a resumed run would not get the same windows; None if it would."""
        replays = isinstance(self._stream, CountedWindows) and not self._stream.is_sequence
        return "the stream of windows keeps no state: it is read again" if replays else None

    def take(self) -> bool:
        """Take the next window, or the one that was taken and not trained on; waits for it. A collective.

        Returns:
            False: no rank has one. Otherwise a rank that has none takes part without: its ``name`` is None.

        Raises:
            StopRequested: a rank was asked to stop while it waited.
            Exception: of the stream, on every rank.
        """
        shared, until, ended = self.windows.shared, time.monotonic() + self.windows.wait_s, False
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
        return any(has for has, _, _, _ in rows)

    def _look(self) -> bool:
        """Take the next window; whether the stream has ended."""
        self.name, self._before = None, self._stream.state_dict()
        try:
            self.name = self._stream.next_window()
        except StopIteration:
            return True
        return False

    def done(self) -> None:
        """Mark the last window as done."""
        self.name = None

    def rewind(self) -> bool:
        """Begin a sequence again that is at its end on every rank; whether it was. A collective."""
        ends = agreement.gather_objects(isinstance(self._stream, CountedWindows) and self._stream.is_at_end)
        at_end = ends[0] if self.windows.shared else all(ends)
        if at_end:
            self._stream.begin()
        return bool(at_end)

    def state_dict(self) -> dict[str, Any]:
        """Before the window that was taken and is not done, or after the last one."""
        stream = self._stream.state_dict() if self.name is None else self._before
        return {"stream": stream, "name": text_of(self.name)}

    def load_state_dict(self, state: dict[str, Any], *, begun: bool = True) -> None:
        """Continue there; a window that was taken and not done is taken again. A collective.

        Args:
            begun: it has had its WINDOW_STARTED. Otherwise another one may be in its place, or none.

        Raises:
            StateMismatch: it is another one now; of a shared stream on every rank.
        """

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


class WindowedSource(Source):
    """A source of the windows of each epoch: a pass, of unknown length, is the windows that an epoch has.

    Args:
        state: of the run; its windows are counted here.
        make: makes the source of a window's loader.
    """

    kind = "Windows"

    def __init__(
        self, windows: Windows, state: Any, stops: Callable[[], bool], make: Callable[[Any], DataSource]
    ) -> None:
        self.windows, self.stream = windows, WindowReader(windows, stops)
        self._state, self._make = state, make
        self.window: DataSource | None = None
        """The source of the open window."""
        self._before_window: Any = None
        """The random states before the window was opened."""
        self._begun, self._of_epoch, self._updates = False, 0, 0
        """Whether the open window is counted, windows of this epoch that are, updates in the open one."""
        self._inexact: str | None = None
        state.windows_completed, state.window = state.windows, None

    @property
    def name(self) -> Any:
        """Of the open window; None where none is, and where this rank has none."""
        return None if self.window is None else self.stream.name

    @property
    def inexact(self) -> str | None:  # type: ignore[override]
        """Of its windows once one was opened."""
        return self.stream.inexact or self._inexact

    def begin(self, pass_number: int) -> None:
        self.pass_number = pass_number

    # -- a window -----------------------------------------------------------------------------------------------------

    def open(self, run: Run | None = None) -> Iterator[Group]:
        """The groups of the epoch's windows; the first ``next`` takes one: a stop may end that."""
        assert run is not None
        limit, per_epoch = self.windows.max_updates, self.windows.per_epoch
        while True:
            if self.window is None:
                if (per_epoch is not None and self._of_epoch >= per_epoch) or not self.stream.take():
                    return
                self._open_window(rng.capture())
                assert self.window is not None
            groups = self.window.open()
            try:
                for group in islice(groups, None if limit is None else max(limit - self._updates, 0)):
                    if not self._begun:
                        self._count_window()
                        group.begins = TrainingEvents.WINDOW_STARTED
                    yield group
            except StopRequested:
                self.put_back()
                raise
            if begun := self._begun:
                run.fire(TrainingEvents.WINDOW_COMPLETED)
            self._leave_window(done=True)
            if begun:
                run.boundary()

    def _open_window(self, generators: Any) -> None:
        """Open the window that the reader has taken. A collective.

        Args:
            generators: the random numbers before it.
        """
        self._before_window = generators
        self.window = self._make(self.windows.loader_of(self.stream.name))
        if self.window.dealing is not None and not self.windows.shared and mesh.data_size() > 1:
            raise ValueError(
                "global_micro_batches deals one order of samples out to the ranks, and Windows(shared=False) gives "
                "each rank samples of its own: use shared windows, or accumulation_steps."
            )
        self.window.begin(self.pass_number)
        self._inexact = self._inexact or self.window.inexact

    def _count_window(self) -> None:
        self._begun, self._of_epoch = True, self._of_epoch + 1
        self._state.windows += 1
        self._state.window = self.name

    def _leave_window(self, *, done: bool) -> None:
        """The open window is trained on, or was empty; or it is to be taken again."""
        self.close()
        if done:
            self.pass_number += 1
            self.stream.done()
        elif self._begun:
            self._of_epoch -= 1
            self._state.windows -= 1
        self.window, self._begun, self._updates = None, False, 0
        self._state.window, self._state.windows_completed = None, self._state.windows

    def consumed(self, group: Group) -> None:
        assert self.window is not None
        self.window.consumed(group)
        self._updates += 1

    def put_back(self) -> None:
        """Undo the fetch of the group in hand; the window of which it is the first is taken again with it."""
        if self.window is None:
            return
        if self._updates:
            self.window.put_back()
        else:
            self._leave_window(done=False)
            rng.restore(self._before_window)

    def next_pass(self) -> bool:
        """The epoch is over; a sequence at its end begins again, another stream may have had more by then."""
        if self.window is not None:
            self._leave_window(done=True)
        self._of_epoch = 0
        return self.stream.rewind()

    def freeze(self) -> None:
        if self.window is not None:
            self.window.freeze()

    def close(self, *, at_once: bool = False) -> None:
        if self.window is not None:
            self.window.close(at_once=at_once)

    def samples(self, group: Group | None) -> list[int] | None:
        return None if self.window is None else self.window.samples(group)

    # -- in checkpoints -----------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The position in the stream, and that in the open window."""
        window = None if self.window is None else self.window.state_dict() | {"before": self._before_window}
        counts = {"begun": self._begun, "of_epoch": self._of_epoch, "updates": self._updates}
        own = {"kind": self.kind, "pass": self.pass_number, "ranks": mesh.data_size()}
        return own | counts | {"stream": self.stream.state_dict(), "window": window}

    def load(self, state: dict[str, Any]) -> None:
        """Continue at a saved position; opens the window that was open. A collective.

        Raises:
            StateMismatch: it is one in other data.
        """
        self.check_kind(state)
        ranks, window = mesh.data_size(), state["window"]
        if state["ranks"] != ranks and not self.windows.shared:
            self.note_changed(
                f"The data position was saved on {state['ranks']} ranks, resumed on {ranks}: each continues with its "
                "own windows, some may come twice or never."
            )
            window = window and {**window, "ranks": ranks}
        self.stream.load_state_dict(state["stream"], begun=state["begun"])
        self.pass_number = state["pass"]
        self._begun, self._of_epoch, self._updates = state["begun"], state["of_epoch"], state["updates"]
        if window is not None:
            with rng.isolated():  # what it draws was drawn then
                rng.restore(window["before"])
                self._open_window(window["before"])
            assert self.window is not None
            self.window.load(window)
            self.changed = self.changed or self.window.changed
        if self._begun:
            self._state.windows_completed, self._state.window = self._state.windows - 1, self.name
