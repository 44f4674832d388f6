"""What comes next in the data: a group, another pass or window, or the end of the epoch."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from enum import Enum
from typing import Any

from ignite.engine import Engine, Events

from ignite_engine.engine.boundary import RunEnds, StepBoundary
from ignite_engine.engine.position import EpochIs, is_done
from ignite_engine.engine.progress import Progress
from ignite_engine.engine.requests import Requests
from ignite_engine.errors import StopRequested
from ignite_engine.events import TrainingEvents
from ignite_engine.ext.windows.windowed_source import WindowedSource
from ignite_engine.ranks import agreement
from ignite_engine.state import TrainingState

logger = logging.getLogger(__name__)


class End(Enum):
    """Instead of a group: the epoch has no more."""

    OF_EPOCH = "end of epoch"


class Feed:
    """The groups of a run, one by one, with the events of fetching them: ``GET_BATCH_*``, those of windows, and
    ``DATALOADER_STOP_ITERATION``."""

    def __init__(
        self, engine: Engine, state: TrainingState, progress: Progress, requests: Requests, boundary: StepBoundary
    ) -> None:
        self._engine, self._state, self._progress = engine, state, progress
        self._requests, self._boundary = requests, boundary
        self._fire: Callable[..., bool] = engine._fire_event  # type: ignore[assignment]  # the Trainer's, which may be wrapped
        self._began_at = state.iteration

    def open(self) -> None:
        """Open the pass at its position, unless it is open."""
        if self._engine._dataloader_iter is None:
            self._engine._dataloader_iter = self._progress.open_pass()

    def next(self) -> Any:
        """The next group of the epoch, which becomes ``state.batch``, or :attr:`End.OF_EPOCH`."""
        state, progress = self._state, self._progress
        state.batch = None
        if state.dataloader is not None and self._fire(Events.GET_BATCH_STARTED):
            self._boundary.check()
        group = self._fetch()
        if group is End.OF_EPOCH:
            group = self._first_of_next_pass()
            if group is End.OF_EPOCH:
                return group
        # reset here, not at the epoch's end: handlers of EPOCH_COMPLETED read the last output
        state.batch, state.output = group, None
        if state.dataloader is not None and self._fire(Events.GET_BATCH_COMPLETED):
            self._boundary.check()
        if progress.windows is not None and not progress.windows.announced:
            progress.begin_window()
            if self._fire(TrainingEvents.WINDOW_STARTED):
                self._boundary.check()
        return group

    def give_up_pass(self) -> None:
        """The epoch was ended before its time: the next one begins with a new pass."""
        self._progress.give_up_epoch()
        self._engine._dataloader_iter = self._progress.open_pass()

    def _fetch(self) -> Any:
        """The next group of the pass; where a signal breaks the wait for it, the run ends."""
        requests = self._requests
        iterator: Iterator[Any] = self._engine._dataloader_iter  # type: ignore[assignment]  # it is open
        try:
            requests.waiting_for_data = requests.single_process  # several say it where they can agree on it
            try:
                return next(iterator, End.OF_EPOCH)
            finally:
                requests.waiting_for_data = False
        except StopRequested:
            # the group was not consumed; on several ranks all of them are here
            if self._progress.source is not None:
                self._progress.source.abandon()
            self._engine._dataloader_iter = None
            self._boundary.at(last=True)
            raise RunEnds from None

    def _first_of_next_pass(self) -> Any:
        """The first group of the next pass over the data, or the end of the epoch."""
        state, progress, engine = self._state, self._progress, self._engine
        if progress.windows is not None:
            return self._first_of_next_window(progress.windows)
        if progress.consume_unreadable_tail():
            return End.OF_EPOCH
        emptied, measured = False, progress.epoch_is is EpochIs.MEASURED
        while True:
            if measured and progress.epoch_iteration:
                state.epoch_length = progress.epoch_iteration
            if emptied:
                self._data_is_exhausted()
                return End.OF_EPOCH
            if state.dataloader is not None:
                self._fire(Events.DATALOADER_STOP_ITERATION)
                self._boundary.check()
            progress.end_pass()
            if measured and progress.epoch_iteration:
                # opened when it is needed: what this draws comes after the position is saved, as in a resumed run
                engine._dataloader_iter = None
                return End.OF_EPOCH
            engine._dataloader_iter = progress.open_pass()
            emptied = True
            if (group := self._fetch()) is not End.OF_EPOCH:
                return group

    def _first_of_next_window(self, windows: WindowedSource) -> Any:
        """The first group of the next window that has one, or the end of the epoch."""
        engine, progress, begun_again = self._engine, self._progress, False
        while True:
            progress.consume_unreadable_tail()
            if (announced := windows.announced) and not windows.completed:
                windows.complete()
                self._fire(TrainingEvents.WINDOW_COMPLETED)
                if windows.is_evaluated_again:
                    self._boundary.at(last=True, within_epoch=True)
                    self._boundary.check()
            progress.end_pass()
            engine._dataloader_iter = None
            if windows.epoch_is_over and not progress.epoch_iteration and not begun_again:
                begun_again = windows.reader.begin_again()  # the epoch before has ended with the sequence
            if windows.epoch_is_over:
                if windows.reader.over and self._fire(Events.DATALOADER_STOP_ITERATION):
                    self._boundary.check()
                if not progress.epoch_iteration:
                    self._stream_is_exhausted(windows)
                return End.OF_EPOCH
            if announced:
                self._boundary.at(last=bool(engine.should_terminate), within_epoch=True)
                self._boundary.check_or_pause()
            engine._dataloader_iter = progress.open_pass()
            if (group := self._fetch()) is not End.OF_EPOCH:
                return group

    def _stream_is_exhausted(self, windows: WindowedSource) -> None:
        """No window came in this epoch: the run is over, and the epoch is none."""
        if not self._state.windows and agreement.rank() == 0:
            logger.warning("No window with a batch came from %r: the run ends without an update.", windows.data.stream)
        self._state.epoch -= 1  # or what is logged from here on is of an epoch without an iteration
        self._state.reason, self._engine.should_terminate = "end of data", True
        raise RunEnds

    def _data_is_exhausted(self) -> None:
        state = self._state
        if is_done(replace(self._progress.counted, epochs=state.epoch), self._progress.plan):
            return
        if state.iteration == self._began_at:
            raise ValueError(
                f"The data gave no batch, and the run is not at its end (iteration {state.iteration}): "
                "give data that is not empty and can be iterated again."
            )
        warnings.warn(
            "Data iterator can not provide data anymore, but the run is not at its end "
            f"(iteration {state.iteration}): give data that can be iterated again.",
            stacklevel=2,
        )
        if state.max_epochs is None:  # else epochs without an iteration would follow for ever
            state.reason, self._engine.should_terminate = "end of data", True
