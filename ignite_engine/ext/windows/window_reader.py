"""Takes windows from a stream in their order, on all ranks together, and knows which one was taken."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ignite_engine.data.readers import length_of
from ignite_engine.errors import StateMismatch, StopRequested, leave_out
from ignite_engine.ext.windows.streams import Files, ListedWindows, ReplayedStream, text_of
from ignite_engine.ext.windows.windows import Windows
from ignite_engine.ranks import agreement


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
        self._stream = self.windows.begun_by(self)
        self._before = self._stream.state_dict()
        self.name: Any = None
        self.fingerprint: str | None = None
        """The fingerprint of the file of that name, if this rank takes it."""
        self.over = False
        """The stream had no more when it was asked last."""

    @property
    def inexact(self) -> str | None:
        """Why a resumed run would not see the same windows."""
        return (
            "the stream of windows keeps no state: it is read again" if type(self._stream) is ReplayedStream else None
        )

    def take(self) -> bool:
        """Take the next window, or the one that was taken and not trained on; waits for it. A collective.

        Returns:
            False: no rank has one. Otherwise a rank that has none takes part without: its ``name`` is None.

        Raises:
            StopRequested: a rank was asked to stop while it waited.
            ValueError: another reader has begun the stream since.
            Exception: of the stream, on every rank.
        """
        self.windows.check_belongs_to(self)
        if self.name is None:
            self._before = self._stream.state_dict()
        until, ended = time.monotonic() + self._wait_s, not self._looks_here

        def own() -> tuple[bool, bool, bool, Any]:
            """Whether this rank has a window, waits for one, is to stop; and the window, of a shared stream."""
            nonlocal ended
            if self.name is None and not ended:
                name = self._look()
                ended, self.name = name is _END, None if name is _END else name
                self.fingerprint = _fingerprint(self.name)
            has = self.name is not None and self._looks_here
            waits = not has and not ended and time.monotonic() < until
            return has, waits, self._stops(), self.name if self.windows.shared and has else None

        while True:
            rows = agreement.agreed(own)
            if not any(waits for _, waits, _, _ in rows):
                break
            if any(stops for _, _, stops, _ in rows):
                raise StopRequested
            time.sleep(self.windows.poll_s)
        if self.windows.shared:
            self.name = rows[0][3]
        self.over = not any(has for has, _, _, _ in rows)
        return not self.over

    @property
    def _looks_here(self) -> bool:
        return not self.windows.shared or agreement.rank() == 0

    def _look(self, again: str | None = None) -> Any:
        """The next window; ``again``: the file that was taken already."""
        try:
            if again and isinstance(self._stream, Files):
                return self._stream.taken_again(again)
            return self._stream.next_window()
        except StopIteration:
            return _END

    def done(self) -> None:
        """The window that was taken last is trained on."""
        self.name = None

    def next_loader(self) -> Any:
        """The loader of the next window that has a batch on some rank, None if there is none; a collective."""
        begun_again = False
        while True:
            if not self.take():
                if begun_again or not self.begin_again():
                    return None
                begun_again = True
                continue
            data = self.windows.loader_of(self.name)
            if any(agreement.gather_objects(length_of(data) != 0)):
                return data
            self.done()

    def begin_again(self) -> bool:
        """Begin a sequence again that is at its end; whether one did so on some rank. A collective."""
        begins = self.over and isinstance(self._stream, ListedWindows)
        if isinstance(self._stream, ListedWindows) and begins:
            self._stream.taken = 0
        begins = self.over and any(agreement.gather_objects(begins))
        self.over = self.over and not begins
        return begins

    def state_dict(self) -> dict[str, Any]:
        """Before the window that was taken and is not done, or after the last one."""
        before = self._before if self.name is not None else self._stream.state_dict()
        return {"stream": before, "name": text_of(self.name), "over": self.over}

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
            self._before = self._stream.state_dict()
            name = self._look(state["name"])
            missing = name is _END or name is None
            self.fingerprint = None if missing else _fingerprint(name)
            found = "there is none" if missing else f"the next one is {text_of(name)}"
            if missing or state["name"] not in ("", text_of(name)):
                problem = f"The checkpoint was made in the window {state['name']}, now {found}: bring it back"
            elif self.fingerprint != state.get("fingerprint", self.fingerprint):
                where = "than where the checkpoint was made: bring them back"
                problem = f"The window {state['name']} has other bytes {where}"
            else:
                return name
            if begun:
                raise StateMismatch(f"{problem}, or leave the position out with {leave_out('data')}.")
            self._stream.load_state_dict(self._before)
            return None

        self.name = agreement.on_rank_0(load) if self.windows.shared else agreement.together(load)


def _fingerprint(name: Any) -> str | None:
    """A hash of the size and the ends of a file, or of each file in a folder; None: it is neither.

    The ends of ``.npz`` and Parquet files have checksums or statistics of what is between them.
    """
    if not isinstance(name, str | os.PathLike) or not os.path.exists(name):
        return None
    path, found = Path(name), hashlib.sha256()
    try:
        for file_path in filter(Path.is_file, sorted(path.iterdir()) if path.is_dir() else [path]):
            with file_path.open("rb") as file:
                size = file.seek(0, os.SEEK_END)
                found.update(f"{file_path.name} {size} ".encode())
                for place in (0, max(0, size - _END_BYTES)):
                    file.seek(place)
                    found.update(file.read(_END_BYTES))
    except OSError:  # it is no end of a run if ``open`` can make something of it
        return None
    return found.hexdigest()


_END = object()
_END_BYTES = 1 << 16
