"""Takes windows from a stream in their order, on all ranks together, and knows which one was taken."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ignite_engine.data.readers import length_of
from ignite_engine.errors import StateMismatch, StopRequested, leave_out
from ignite_engine.ext.windows.streams import CountedWindows, text_of
from ignite_engine.ranks import agreement

if TYPE_CHECKING:
    from ignite_engine.ext.windows.windows import Windows


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
