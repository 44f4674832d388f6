"""Data that arrives in windows: files of a day or an hour, a list of shards, a stream without an end."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Iterable, Iterator
from copy import copy
from typing import Any

from torch.utils.data import DataLoader, Dataset

from ignite_engine.data.loader import resumable
from ignite_engine.data.sampler import ResumableSampler
from ignite_engine.data.source import DataSource, OwnSource, Source, Waiting
from ignite_engine.errors import EmptyData, check_type, is_whole
from ignite_engine.ext.windows.streams import CountedWindows, Files, WindowStream, text_of
from ignite_engine.ext.windows.windowed_source import WindowedSource
from ignite_engine.ranks import agreement

__all__ = ["Files", "WindowStream", "Windows"]
logger = logging.getLogger(__name__)


class Windows(OwnSource):
    """Data in windows, for ``Trainer.run()``.

    Args:
        stream: names the windows: a sequence, :class:`Files`, a :class:`WindowStream` of your own, or any iterable,
            which a resumed run reads again from its beginning. A sequence begins again in the next epoch; the others
            go on.
        open: makes the loader of a window: ``open(name)`` returns a ``loader()``, another loader, or any iterable of
            batches, on several ranks of this rank's share; in ``fit`` and a config also a dataset. Nothing, or no
            batch, is an empty window, which is skipped.
        per_epoch: windows of an epoch; None: it lasts until the stream has no more.
        max_updates: of one window, the rest of which is left out; None: a window is trained on to its end.
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
        open: Callable[[Any], Iterable[Any] | Dataset[Any] | None],
        *,
        per_epoch: int | None = None,
        max_updates: int | None = None,
        wait_s: float = 0.0,
        poll_s: float = 1.0,
        shared: bool = True,
    ) -> None:
        is_stream = isinstance(stream, (WindowStream, Iterable)) and not isinstance(stream, str | Windows)
        check_type("stream", stream, is_stream, "a sequence of windows, Files or another stream")
        check_type("open", open, callable(open), "a function that makes the loader of a window")
        for name, value in (("per_epoch", per_epoch), ("max_updates", max_updates)):
            if value is not None and (not is_whole(value) or value < 1):
                raise ValueError(f"{name} must be a whole number of at least 1, or None, got {value!r}.")
        if not wait_s >= 0 or not 0 < poll_s < math.inf:
            raise ValueError(f"wait_s must be 0 or more and poll_s above 0 seconds, got {wait_s} and {poll_s}.")
        self.stream, self.open, self.shared = stream, open, shared
        self.per_epoch, self.max_updates = per_epoch, max_updates
        self.wait_s, self.poll_s = wait_s, poll_s
        self._stream: Any = stream if isinstance(stream, WindowStream) else CountedWindows(stream)
        self._initial = self._stream.state_dict()
        self._source: WindowedSource | None = None
        """The source of the current run."""

    def make_source(self, state: Any, waiting: Waiting, make: Callable[[Any], DataSource]) -> Source:
        self._source = WindowedSource(self, state, waiting.stops_waiting, make)
        return self._source

    def stream_at_its_beginning(self) -> Any:
        if isinstance(self._stream, CountedWindows):
            self._stream.begin()
        else:
            self._stream.load_state_dict(self._initial)
        return self._stream

    @property
    def settings(self) -> dict[str, Any]:
        """Settings that must be equal on every rank."""
        return {f"Windows({name})": getattr(self, name) for name in ("per_epoch", "max_updates", "shared")}

    def opened_by(self, make: Callable[[Any], Any]) -> Windows:
        """The same windows; ``make`` is called with what ``open`` returns, if that is map-style data."""

        def open_and_make(name: Any) -> Any:
            data = self.open(name)
            is_dataset = hasattr(data, "__getitem__") and hasattr(data, "__len__") and not isinstance(data, DataLoader)
            return make(data) if is_dataset else data

        made = copy(self)
        made.open, made._source = open_and_make, None
        return made

    @property
    def present(self) -> Any:
        """The name of the window that is trained on now; None between windows, and where this rank has none."""
        return None if self._source is None else self._source.name

    def again(self) -> Any:
        """A new loader over the window that is trained on now: ``Evaluation(evaluator, windows.again)`` at
        ``WINDOW_STARTED`` evaluates each window before it is trained on.

        Raises:
            RuntimeError: none is trained on now.
        """
        if self._source is None or self._source.window is None:
            raise RuntimeError(
                "No window is open: use Windows.again from TrainingEvents.WINDOW_STARTED to WINDOW_COMPLETED."
            )
        return self._opened(self.present)

    def loader_of(self, name: Any) -> Any:
        """The loader of a window; where it has no sample, or there is no window (None), an empty tuple; a collective.

        Raises:
            Exception: of ``open``, on every rank.
        """
        return agreement.together(lambda: self._opened(name))

    def _opened(self, name: Any) -> Any:
        if name is None:
            return ()
        try:
            data = self.open(name)
        except EmptyData:
            return ()
        except Exception as error:
            error.add_note(f"Raised where the window {text_of(name) or type(name).__name__} was opened.")
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
        raise TypeError("Trainer.run() iterates Windows, to keep their position: evaluate windows.again, or a loader.")
