"""Streams of windows: files, a list, an iterable, or a custom stream."""

from __future__ import annotations

import fnmatch
import logging
import os
from collections.abc import Mapping
from itertools import chain, islice
from numbers import Integral
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from torch.utils.data import IterableDataset

from ignite_engine.errors import StateMismatch, check_type

logger = logging.getLogger(__name__)


@runtime_checkable
class WindowStream(Protocol):
    """A stream of windows."""

    def next_window(self) -> Any:
        """The name or content of the next window; None if it has not arrived yet.

        Raises:
            StopIteration: no more will come.
        """

    def state_dict(self) -> dict[str, Any]:
        """The position in the stream."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at a saved position."""


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
        self._seen: set[str] = set()

    def next_window(self) -> Path | None:
        # the end first: what is there by then is all
        ends = self.end is not None and (self.directory / self.end).exists()
        names = self._names()
        if late := {name for name in names if name < self._last} - self._seen:
            logger.warning(
                "%s came after %s was taken, so it is left out: name files in the order in which they come.",
                ", ".join(sorted(late)),
                self._last,
            )
        self._seen = names
        following = min((name for name in names if name > self._last), default=None)
        if following is not None:
            self._last = following
            return self.directory / following
        if ends:
            raise StopIteration
        return None

    def _names(self) -> set[str]:
        try:
            names = {name for name in os.listdir(self.directory) if fnmatch.fnmatchcase(name, self.pattern)}
        except FileNotFoundError:
            if self._last:  # it was there: this is no end of the stream
                raise
            return set()
        return names - {self.end}

    def state_dict(self) -> dict[str, Any]:
        """The file that was taken last, and those that were there before it."""
        return {"last": self._last, "seen": sorted(name for name in self._seen if name <= self._last)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._last, self._seen = state["last"], set(state["seen"])

    def __repr__(self) -> str:
        return f"Files({str(self.directory)!r}, {self.pattern!r})"


class CountedWindows:
    """A sequence or an iterable, of which is saved how many were taken.

    A sequence is read on from any place, and an epoch after its end begins it again. Of an iterable a resumed run takes
    the windows that were consumed again, and drops them.
    """

    def __init__(self, given: Any) -> None:
        self.is_sequence = is_sequence(given)
        self._given, self._taken, self._last = given, 0, None
        self._iterator = None if self.is_sequence else iter(given)
        self._goes_on = self._iterator is given

    def next_window(self) -> Any:
        if self._iterator is not None:
            self._last = next(self._iterator)
        elif self.is_at_end:
            raise StopIteration
        elif (name := self._given[self._taken]) is None:
            raise ValueError(f"Window {self._taken} of the sequence is None: leave it out of the sequence.")
        else:
            self._last = name
        self._taken += 1
        return self._last

    @property
    def is_at_end(self) -> bool:
        """Whether it is a sequence of which all windows were taken."""
        return self.is_sequence and self._taken >= len(self._given)

    def begin(self) -> None:
        """Begin again, unless it is an iterator, which goes on."""
        if not self._goes_on:
            self.__init__(self._given)  # type: ignore[misc]  # as it was

    def state_dict(self) -> dict[str, Any]:
        return {"taken": self._taken}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self._iterator is not None:
            ahead = state["taken"] - self._taken
            if ahead < -1:
                raise StateMismatch(
                    f"The stream of windows is {-ahead} windows further than the checkpoint and cannot go back: give "
                    "Windows a sequence, or a stream with a state_dict."
                )
            if ahead == -1:
                self._iterator = chain([self._last], self._iterator)
            elif ahead:
                logger.warning("The stream of windows keeps no state: %d windows are taken again.", ahead)
                self._iterator = islice(self._iterator, ahead, None)
        self._taken = state["taken"]


def is_sequence(stream: Any) -> bool:
    """Whether it has a length and is read by index, as lists, arrays, tensors and datasets are."""
    by_index = hasattr(stream, "__getitem__") and hasattr(stream, "__len__")
    return by_index and not isinstance(stream, Mapping | IterableDataset)


def text_of(name: Any) -> str | None:
    """The name of a window in a checkpoint; empty if its text may differ in another process."""
    if isinstance(name, os.PathLike):  # wherever the directory is
        path = Path(name)
        return f"{path.name} ({path.stat().st_size} bytes)" if path.is_file() else path.name
    return None if name is None else str(name) if isinstance(name, str | Integral | tuple) else ""
