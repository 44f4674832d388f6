"""Streams of windows, which come one after the other: files, a list, an iterable, or a custom stream."""

from __future__ import annotations

import fnmatch
import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from itertools import chain, islice
from numbers import Integral
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from torch.utils.data import IterableDataset

from ignite_engine.errors import StateMismatch, check_type

logger = logging.getLogger(__name__)


@runtime_checkable
class WindowStream(Protocol):
    """Where windows come from, one after the other."""

    def next_window(self) -> Any:
        """What names or holds the next window, None where it has not come yet.

        Raises:
            StopIteration: no more will come.
        """

    def state_dict(self) -> dict[str, Any]:
        """After which window it is."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue after that window."""


class Files:
    """A stream of the files of a directory, in the order of their names; new ones may come while it is read.

    A writer should rename a file into place when it is complete. A file whose name sorts before one that was taken
    already is left out, with a warning.

    Args:
        directory: may be made later.
        pattern: of the names, as in a shell: ``clicks_*.npz``.
        end: name of a file that says, by being there, that no more will come; None: nothing says so.
    """

    def __init__(self, directory: str | os.PathLike[str], pattern: str = "*", *, end: str | None = None) -> None:
        check_type("pattern", pattern, isinstance(pattern, str), "a pattern of names, such as 'clicks_*.npz'")
        check_type("end", end, end is None or isinstance(end, str), "the name of a file or None")
        self.directory, self.pattern, self.end = Path(directory), pattern, end
        self._last = ""
        self._seen: set[str] | None = None

    def next_window(self) -> Path | None:
        # the end first: what is there by then is all
        ends = self.end is not None and (self.directory / self.end).exists()
        names = self._names()
        self._name_late_ones(names)
        following = min((name for name in names if name > self._last), default=None)
        if following is None:
            if ends:
                raise StopIteration
            return None
        self._last = following
        return self.directory / following

    def again(self, name: str) -> Path | None:
        """The file that was taken where the state that was loaded was saved; another one if it is gone."""
        names = self._names()
        if name not in names:
            return self.next_window()
        self._last = name
        self._name_late_ones(names)
        return self.directory / name

    def _names(self) -> set[str]:
        try:
            names = {name for name in os.listdir(self.directory) if fnmatch.fnmatchcase(name, self.pattern)}
        except FileNotFoundError:
            if self._last:  # it was there: this is no end of the stream
                raise
            return set()
        return names - {self.end}

    def _name_late_ones(self, names: set[str]) -> None:
        late = {name for name in names if name < self._last} - (names if self._seen is None else self._seen)
        if late:
            logger.warning(
                "%s came after %s was taken, so it is left out: name files in the order in which they come.",
                ", ".join(sorted(late)),
                self._last,
            )
        self._seen = names

    def state_dict(self) -> dict[str, Any]:
        """The file that was taken last, and those that were there before it."""
        seen = None if self._seen is None else sorted(name for name in self._seen if name <= self._last)
        return {"last": self._last, "seen": seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        seen = state.get("seen")  # it was not always saved
        self._last, self._seen = state["last"], None if seen is None else set(seen)

    def __repr__(self) -> str:
        return f"Files({str(self.directory)!r}, {self.pattern!r})"


class ListedWindows:
    """A sequence of windows; an epoch after its end begins it again."""

    def __init__(self, names: Sequence[Any]) -> None:
        self.names, self.taken = names, 0

    def next_window(self) -> Any:
        if self.taken >= len(self.names):
            raise StopIteration
        self.taken += 1
        if (name := self.names[self.taken - 1]) is None:
            raise ValueError(f"Window {self.taken - 1} of the sequence is None: leave it out of the sequence.")
        return name

    def state_dict(self) -> dict[str, Any]:
        return {"taken": self.taken}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.taken = state["taken"]


class ReplayedStream:
    """An iterable without a state: a resumed run takes the windows that were consumed again, and drops them."""

    def __init__(self, given: Iterable[Any]) -> None:
        self._names, self._taken = iter(given), 0
        self._last: Any = None

    def next_window(self) -> Any:
        self._last = next(self._names)
        self._taken += 1
        return self._last

    def state_dict(self) -> dict[str, Any]:
        return {"taken": self._taken}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        ahead = state["taken"] - self._taken
        if ahead == -1:
            self._names = chain([self._last], self._names)
        elif ahead < 0:
            raise StateMismatch(
                f"The stream of windows is {-ahead} windows further than the checkpoint and cannot go back: give "
                "Windows a sequence, or a stream with a state_dict."
            )
        elif ahead:
            logger.warning("The stream of windows keeps no state: %d windows are taken again.", ahead)
            self._names = islice(self._names, ahead, None)
        self._taken = state["taken"]


class SingleStream:
    """A stream that is not begun a second time: at any time it has one consumer."""

    def __init__(self, stream: WindowStream) -> None:
        self._stream, self._initial = stream, stream.state_dict()
        self.consumer: object = None

    def begun_by(self, consumer: object) -> WindowStream:
        """The stream, at its beginning where it can go back; from now on it is this consumer's."""
        self.consumer = consumer
        if not isinstance(self._stream, ReplayedStream):
            self._stream.load_state_dict(self._initial)
        return self._stream


def single(given: Any) -> SingleStream | None:
    """What the user has given, where it cannot be begun a second time beside the first."""
    if isinstance(given, WindowStream):
        return None if isinstance(given, Files) else SingleStream(given)
    return None if is_sequence(given) or iter(given) is not given else SingleStream(ReplayedStream(given))


def begun(given: Any) -> WindowStream:
    """A new stream, at its beginning, over what the user has given."""
    if isinstance(given, Files):
        files = copy(given)
        files.load_state_dict({"last": ""})
        return files
    return ListedWindows(given) if is_sequence(given) else ReplayedStream(given)


def is_sequence(stream: Any) -> bool:
    """Whether it has a length and is read by index, as lists, arrays, tensors and datasets are."""
    by_index = hasattr(stream, "__getitem__") and hasattr(stream, "__len__")
    return by_index and not isinstance(stream, Mapping | IterableDataset)


def text_of(name: Any) -> str | None:
    """How a checkpoint names a window; empty where its text may differ in another process."""
    if isinstance(name, os.PathLike):  # wherever the directory is
        return Path(name).name
    return None if name is None else str(name) if isinstance(name, str | Integral | tuple) else ""
