"""Data that arrives in windows: files of a day or an hour, a list of shards, a stream without an end."""

from __future__ import annotations

import fnmatch
import hashlib
import logging
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from itertools import chain, islice
from numbers import Integral
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from torch.utils.data import DataLoader, IterableDataset

from ignite_engine import rng
from ignite_engine.data.loader import resumable
from ignite_engine.data.sampler import ResumableSampler
from ignite_engine.data.source import DataSource, Position, length_of
from ignite_engine.errors import EmptyData, StateMismatch, StopRequested, check_type, is_number, is_whole, leave_out
from ignite_engine.ranks import agreement, mesh

logger = logging.getLogger(__name__)


@runtime_checkable
class WindowStream(Protocol):
    """Where windows come from, one after the other."""

    def next_window(self) -> Any:
        """What names or holds the next window, None where it has not come yet.

        Raises:
            StopIteration: no more will come.
        """
        ...

    def state_dict(self) -> dict[str, Any]:
        """After which window it is."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue after that window."""
        ...


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

    def taken_again(self, name: str) -> Path | None:
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


class _Listed:
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


class _Replayed:
    """An iterable without a state: a resumed run takes the windows that were consumed again, and drops them."""

    def __init__(self, stream: Iterable[Any]) -> None:
        self.stream, self.names = stream, iter(stream)
        self.taken = 0
        self._last: Any = None
        self._again = False
        """The one that was taken last comes again."""

    def next_window(self) -> Any:
        if not self._again:
            self._last = next(self.names)
        self._again = False
        self.taken += 1
        return self._last

    def state_dict(self) -> dict[str, Any]:
        return {"taken": self.taken}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        back = self.taken - state["taken"]
        if back == 1:
            self.taken, self._again = state["taken"], True
        elif back > 1:
            if (names := iter(self.stream)) is self.names:
                raise StateMismatch(
                    f"The stream of windows is {back} windows further than the checkpoint and cannot go back: give "
                    "Windows a sequence, or a stream with a state_dict."
                )
            self.names, self.taken, self._again = names, 0, False
        if self.taken < state["taken"]:
            logger.warning("The stream of windows keeps no state: %d windows are taken again.", state["taken"])
        while self.taken < state["taken"]:
            self.next_window()


class _OnePosition:
    """A stream that cannot be made anew: who takes a window of it takes it from all others."""

    def __init__(self, stream: WindowStream) -> None:
        self.stream, self._initial = stream, stream.state_dict()
        self.reader: WindowReader | None = None

    def begun_by(self, reader: WindowReader) -> WindowStream:
        """The stream, at its beginning where it can go back; from now on it is ``reader``'s."""
        self.reader = reader
        if not isinstance(self.stream, _Replayed):
            self.stream.load_state_dict(self._initial)
        return self.stream


class Windows:
    """Data in windows, for ``Trainer.run()``, or of which an ``Evaluation`` takes the next one each time.

    Args:
        stream: names the windows: a sequence, :class:`Files`, a :class:`WindowStream` of your own, or any iterable,
            which a resumed run reads again from its beginning. A sequence begins again in the next epoch; the others
            go on.
        open: makes the loader of a window: ``open(name)`` returns a ``loader()``, another loader, or any iterable of
            batches, on several ranks of this rank's share. Nothing, or no batch, is an empty window, which is skipped.
        per_epoch: windows of an epoch; None: it lasts until the stream has no more.
        limit: windows of the whole run; None: no limit.
        wait_s: how long to wait for a window that has not come yet, in seconds; then the stream is at its end.
            ``math.inf`` waits for ever. A stop request ends the wait.
        poll_s: seconds between two looks.
        shared: rank 0 takes the windows of all ranks, which share out the samples of each. False: each rank has a
            stream of its own, of which it reads every sample; an epoch ends when all are at their end, and a rank
            without a window takes part in the steps of its peers.

    Raises:
        TypeError, ValueError: an argument is not what it should be.
    """

    def __init__(
        self,
        stream: Iterable[Any] | WindowStream,
        open: Callable[[Any], Iterable[Any] | None],
        *,
        per_epoch: int | None = None,
        limit: int | None = None,
        wait_s: float = 0.0,
        poll_s: float = 1.0,
        shared: bool = True,
    ) -> None:
        is_stream = isinstance(stream, (WindowStream, Iterable)) and not isinstance(stream, str | Windows)
        check_type("stream", stream, is_stream, "a sequence of windows, Files or another stream")
        check_type("open", open, callable(open), "a function that makes the loader of a window")
        for name, value in (("per_epoch", per_epoch), ("limit", limit)):
            check_type(name, value, value is None or is_whole(value), "a whole number of windows or None")
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1 window, or None, got {value}.")
        for name, seconds in (("wait_s", wait_s), ("poll_s", poll_s)):
            check_type(name, seconds, is_number(seconds), "a number of seconds")
        check_type("shared", shared, isinstance(shared, bool), "True or False")
        if not wait_s >= 0 or not 0 < poll_s < math.inf:
            raise ValueError(f"wait_s must be 0 or more and poll_s above 0 seconds, got {wait_s} and {poll_s}.")
        self.stream, self.open, self.shared = stream, open, shared
        self._one: _OnePosition | None = None
        if isinstance(stream, WindowStream):
            self._one = None if isinstance(stream, Files) else _OnePosition(stream)
        elif not _is_sequence(stream) and iter(stream) is stream:
            self._one = _OnePosition(_Replayed(stream))
        self.per_epoch, self.limit = per_epoch, limit
        self.wait_s, self.poll_s = wait_s, poll_s
        self.present: Any = None
        """The name of the window that is trained on now; None between windows, and where this rank has none."""
        self.is_open = False
        """One is trained on now, if only by other ranks."""

    def begun_by(self, reader: WindowReader) -> WindowStream:
        """The stream at its beginning: a new one, if that can be; otherwise ``reader`` takes it from others."""
        if self._one is not None:
            return self._one.begun_by(reader)
        if isinstance(self.stream, Files):
            files = copy(self.stream)
            files.load_state_dict({"last": ""})
            return files
        return _Listed(self.stream) if _is_sequence(self.stream) else _Replayed(self.stream)  # type: ignore[arg-type]

    def check_belongs_to(self, reader: WindowReader) -> None:
        """Refuse that two take windows from one stream.

        Raises:
            ValueError: another one has begun it since ``reader`` did.
        """
        if self._one is not None and self._one.reader is not reader:
            raise ValueError(
                f"Two read the windows of {self.stream!r}, and each would miss those of the other: give training and "
                "evaluation streams of their own, or evaluate Windows.again at WINDOW_STARTED."
            )

    @property
    def settings(self) -> dict[str, Any]:
        """What is the same on every rank."""
        return {f"Windows({name})": getattr(self, name) for name in ("per_epoch", "limit", "shared")}

    def opened_by(self, make: Callable[[Any], Any], *, limit: int | None = None) -> Windows:
        """The same windows, of whose datasets ``make`` makes loaders.

        Args:
            make: called with what ``open`` returns, if that is map-style data.
            limit: another one; None: the same.
        """

        def open_and_make(name: Any) -> Any:
            data = self.open(name)
            is_dataset = hasattr(data, "__getitem__") and hasattr(data, "__len__") and not isinstance(data, DataLoader)
            return make(data) if is_dataset else data

        own = {name: getattr(self, name) for name in ("per_epoch", "wait_s", "poll_s", "shared")}
        made = Windows(self.stream, open_and_make, limit=limit or self.limit, **own)
        made._one = self._one
        return made

    def again(self) -> Any:
        """A new loader over the window that is trained on now: ``Evaluation(evaluator, windows.again)`` at
        ``WINDOW_STARTED`` evaluates each window before it is trained on.

        Raises:
            RuntimeError: none is trained on now.
        """
        if not self.is_open:
            raise RuntimeError(
                "No window is open: use Windows.again from TrainingEvents.WINDOW_STARTED to WINDOW_COMPLETED."
            )
        return self.loader_of(self.present)

    def loader_of(self, name: Any) -> Any:
        """The loader of a window; where it has no sample, or there is no window (None), an empty tuple."""
        if name is None:
            return ()
        try:
            data = self.open(name)
        except EmptyData:
            return ()
        except Exception as error:
            error.add_note(f"Raised where the window {_text(name) or type(name).__name__} was opened.")
            raise
        if data is None:
            return ()
        is_data = isinstance(data, Iterable) and not isinstance(data, str | os.PathLike)
        check_type("the window's data", data, is_data, "an iterable of batches, or None")
        data = resumable(data, seed=0)
        if not self.shared and isinstance(sampler := getattr(data, "sampler", None), ResumableSampler):
            sampler.rank, sampler.world_size = 0, 1  # the window is this rank's alone: none of it is for its peers
        return data

    def __iter__(self) -> Iterator[Any]:
        raise TypeError("Windows are iterated by Trainer.run() and Evaluation, which keep their position.")


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
        """Of the file of that name, where this rank takes it."""
        self.over = False
        """The stream had no more when it was asked last."""

    @property
    def inexact(self) -> str | None:
        """Why a resumed run would not see the same windows."""
        return "the stream of windows keeps no state: it is read again" if type(self._stream) is _Replayed else None

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
        """That of the next window that has a batch on some rank, None if there is none; a collective."""
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
        begins = self.over and isinstance(self._stream, _Listed)
        if isinstance(self._stream, _Listed) and begins:
            self._stream.taken = 0
        begins = self.over and any(agreement.gather_objects(begins))
        self.over = self.over and not begins
        return begins

    def state_dict(self) -> dict[str, Any]:
        """Before the window that was taken and is not done, or after the last one."""
        before = self._before if self.name is not None else self._stream.state_dict()
        return {"stream": before, "name": _text(self.name), "over": self.over}

    def load_state_dict(self, state: dict[str, Any], *, begun: bool = True) -> None:
        """Continue there; a window that was taken and not done is taken again. A collective.

        Args:
            begun: some of it was trained on. Otherwise another one may be in its place, or none.

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
            found = "there is none" if missing else f"the next one is {_text(name)}"
            if missing or state["name"] not in ("", _text(name)):
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

        self.name = agreement.on_rank_0(load) if self.windows.shared else load()


class WindowedSource:
    """What a Trainer iterates over windows: one window per ``iter()``, each by a source of its own.

    Args:
        source_of: makes the source over a window's loader.
        stops: of a :class:`WindowReader`.
    """

    batches = iterations = None
    """Of a pass: not known."""

    def __init__(self, windows: Windows, source_of: Callable[[Any], DataSource], stops: Callable[[], bool]) -> None:
        self.data = windows
        self.reader = WindowReader(windows, stops)
        self._source_of = source_of
        self.window: DataSource | None = None
        """Over the window that is open."""
        self.begun = False
        """The window that is open has had its WINDOW_STARTED."""
        self._opened_with: Any = None
        """The random numbers with which it was opened, until its first group is consumed."""
        self._between = Position(between_passes=True)
        self._of_epoch = 0
        self._changed: str | None = None
        windows.present, windows.is_open = None, False

    def agree_lengths(self) -> None:
        """That of a window is read when it is opened."""

    @property
    def changed(self) -> str | None:
        """What is other than where the position was saved, as a sentence."""
        return self._changed or (None if self.window is None else self.window.changed)

    @property
    def position(self) -> Position:
        """In the open window; ``pass_number`` counts windows."""
        return self._between if self.window is None else self.window.position

    @property
    def was_begun(self) -> bool:
        """A window was open when the position was saved."""
        return self.window is not None or self.is_untouched

    @property
    def is_untouched(self) -> bool:
        """The first group of the open window was fetched, and not trained on."""
        return self._opened_with is not None

    @property
    def epoch_is_over(self) -> bool:
        """The epoch has its windows, or the stream has no more."""
        return self.reader.over or (self.data.per_epoch is not None and self._of_epoch >= self.data.per_epoch)

    @property
    def inexact(self) -> str | None:
        """Why a resumed run would not see the same bits, None if it would."""
        return self.reader.inexact or (None if self.window is None else self.window.inexact)

    def __iter__(self) -> Iterator[Any]:
        """The rest of the open window, or the next one, which is taken by the first ``next``."""
        if self.window is not None:
            return iter(self.window)
        return self._next_window() if self._opened_with is None else self._window_again()

    def _next_window(self) -> Iterator[Any]:
        if self.reader.take():
            self._opened_with = rng.capture()
            yield from self._open()

    def _window_again(self) -> Iterator[Any]:
        """The window whose first group was fetched, but not trained on, when the position was saved."""
        with rng.isolated():  # what was drawn for it was drawn then
            rng.restore(self._opened_with)
            iterator = iter(self._open())
            first = list(islice(iterator, 1))
        return chain(first, iterator)

    def _open(self) -> DataSource:
        name = self.reader.name
        self.data.present, self.data.is_open = name, True
        self.window = self._source_of(self.data.loader_of(name))
        self.window.position.pass_number = self._between.pass_number
        self.window.agree_lengths()
        return self.window

    def consumed(self, batches: int) -> None:
        """So many of the open window are trained on."""
        assert self.window is not None, "a group was fetched from it"
        self.window.consumed(batches)
        self._opened_with = None

    def abandon(self) -> None:
        """End the workers of the open window at once."""
        if self.window is not None:
            self.window.abandon()

    def close(self) -> None:
        """The run is over: end the workers of the open window."""
        if self.window is not None:
            self.window.close()

    def begin(self) -> None:
        """The open window has a batch: it counts."""
        self.begun = True
        self._of_epoch += 1

    def next_pass(self) -> None:
        """The open window is trained on, or was empty."""
        if self.window is not None:
            self.window.close()
            self._between = Position(self.window.position.pass_number + 1, between_passes=True)
        self.window, self.begun = None, False
        self.data.present, self.data.is_open = None, False
        self._opened_with = None
        self.reader.done()

    def end_epoch(self) -> None:
        self._of_epoch = 0
        self.reader.begin_again()
        self.reader.over = False

    def state_dict(self) -> dict[str, Any]:
        """The place in the stream, and that in the open window; of one that was not trained on how it was opened."""
        window = None if self.window is None or self._opened_with is not None else self.window.state_dict()
        own: dict[str, Any] = {"begun": self.begun, "of_epoch": self._of_epoch, "number": self.position.pass_number}
        own |= {"opened_with": self._opened_with} if self._opened_with is not None else {}
        own |= {"fingerprint": self.reader.fingerprint} if window is not None and self.reader.fingerprint else {}
        return {"windows": self.reader.state_dict() | own, "window": window, "ranks": mesh.data_size()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at a saved position.

        Raises:
            StateMismatch: it is one in other data.
        """
        if "windows" not in state:
            raise StateMismatch(
                f"The checkpoint was made with data that is no Windows: give run() the same, or leave the position "
                f"out with {leave_out('data')}."
            )
        own, ranks = state["windows"], mesh.data_size()
        if state["ranks"] != ranks and not self.data.shared:
            self._changed = (
                f"The data position was saved on {state['ranks']} ranks, resumed on {ranks}: each continues with its "
                "own windows, some may come twice or never."
            )
        self.reader.load_state_dict(own, begun=own["begun"])
        self._between.pass_number, self._of_epoch = own["number"], own["of_epoch"]
        self.begun, self._opened_with = own["begun"], own.get("opened_with")
        if any(agreement.gather_objects(own["name"] is not None and self.reader.name is None)):
            self._opened_with = None  # of this rank or a peer: all take the next one together
        if self._opened_with is not None:
            self.data.present, self.data.is_open = self.reader.name, True
        if state["window"] is not None:
            window = self._open()
            window.load_state_dict(state["window"] | ({} if self.data.shared else {"ranks": ranks}))
            if window.position.skipped:
                window.agree_lengths()


def _text(name: Any) -> str | None:
    """How a checkpoint names a window; empty where its text may differ in another process."""
    if isinstance(name, os.PathLike):  # wherever the directory is
        return Path(name).name
    return None if name is None else str(name) if isinstance(name, str | Integral | tuple) else ""


def _is_sequence(stream: Any) -> bool:
    """Arrays, tensors and datasets, too."""
    by_index = hasattr(stream, "__getitem__") and hasattr(stream, "__len__")
    return by_index and not isinstance(stream, Mapping | IterableDataset)


def _fingerprint(name: Any) -> str | None:
    """Of the size and the ends of a file, or of those of a folder; None: it is neither.

    The ends of ``.npz`` and Parquet files have checksums or statistics of what is between them.
    """
    if not isinstance(name, str | os.PathLike) or not os.path.exists(name):
        return None
    path, found = Path(name), hashlib.sha256()
    try:
        for each in filter(Path.is_file, sorted(path.iterdir()) if path.is_dir() else [path]):
            with each.open("rb") as file:
                size = file.seek(0, os.SEEK_END)
                found.update(f"{each.name} {size} ".encode())
                for place in (0, max(0, size - _END_BYTES)):
                    file.seek(place)
                    found.update(file.read(_END_BYTES))
    except OSError:  # it is no end of a run if ``open`` can make something of it
        return None
    return found.hexdigest()


_END = object()
_END_BYTES = 1 << 16
