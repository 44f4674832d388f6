"""What comes next in the data: a group, another pass or window, or the end of the epoch."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from ignite.engine import Engine, Events

from ignite_engine.errors import StopRequested
from ignite_engine.loop.boundary import RunEnds, StepBoundary
from ignite_engine.loop.position import EpochIs, Grouping, limit_reached
from ignite_engine.loop.progress import Progress
from ignite_engine.ranks import agreement
from ignite_engine.state import TrainingState
from ignite_engine.update.micro_batches import Group

logger = logging.getLogger(__name__)


class Feed:
    """The groups of a run, one by one, with the events of fetching them: ``GET_BATCH_*``, those of windows, and
    ``DATALOADER_STOP_ITERATION``."""

    def __init__(self, engine: Engine, state: TrainingState, progress: Progress, boundary: StepBoundary) -> None:
        self._engine, self._state, self._progress = engine, state, progress
        self._boundary = boundary
        self._fire: Callable[..., bool] = engine._fire_event  # type: ignore[assignment]  # the Trainer's, which may be wrapped
        self._began_at, self._is_warned = state.iteration, False
        self._is_grouped = progress.grouping != Grouping()

    def open(self) -> None:
        """Open the pass at its position, unless it is open."""
        if self._engine._dataloader_iter is None:
            self._engine._dataloader_iter = self._progress.open_pass()

    def next(self) -> Group | None:
        """The next group of the epoch, which becomes ``state.batch``; None: it has no more."""
        state, progress = self._state, self._progress
        state.group = state.batch = None
        if state.dataloader is not None and self._fire(Events.GET_BATCH_STARTED):
            self._boundary.check()
        group = self._fetch()
        if group is None and (progress.epoch_is_full() or (group := self._first_of_next_pass()) is None):
            return None
        # reset here, not at the epoch's end: handlers of EPOCH_COMPLETED read the last output
        progress.group = group
        state.output = None
        state.group = None if progress.source is None else group
        state.batch = group if self._is_grouped else group[0]  # type: ignore[assignment]  # Ignite says: a number
        if state.dataloader is not None and self._fire(Events.GET_BATCH_COMPLETED):
            self._boundary.check()
        if progress.ends_epochs is not None:
            progress.ends_epochs.group_fetched(self)
        return group

    def give_up_pass(self) -> None:
        """The epoch was ended before its time: the next one begins with a new pass."""
        self._progress.group, self._progress.updating = None, False  # one that was fetched is given up, too
        self._progress.end_pass()
        self._engine._dataloader_iter = self._progress.open_pass()

    def _fetch(self) -> Group | None:
        """The next group of the pass; where a signal breaks the wait for it, the run ends."""
        progress = self._progress
        iterator: Iterator[Group] = self._engine._dataloader_iter  # type: ignore[assignment]  # it is open
        try:
            return next(iterator, None)
        except StopRequested:  # on several ranks all of them are here
            progress.put_back()
            if progress.source is not None:
                progress.source.abandon()
            self._engine._dataloader_iter = None
            self._boundary.at(last=True)
            raise RunEnds from None

    def _first_of_next_pass(self) -> Group | None:
        """The first group of the next pass over the data, None at the end of the epoch."""
        state, progress, engine = self._state, self._progress, self._engine
        if progress.ends_epochs is not None:
            return progress.ends_epochs.first_of_next_pass(self)
        is_measured = progress.epoch_is is EpochIs.MEASURED and progress.epoch_iteration > 0
        if is_measured:
            self._measured(progress.epoch_iteration)
        if state.dataloader is not None:
            self._fire(Events.DATALOADER_STOP_ITERATION)
            self._boundary.check()
        progress.end_pass()
        if is_measured:
            # opened when it is needed: what this draws comes after the position is saved, as in a resumed run
            engine._dataloader_iter = None
            return None
        group = self.fetch()
        if group is None:
            self._data_is_exhausted()
        return group

    # -- for a source that ends epochs --------------------------------------------------------------------------------

    @property
    def epoch_iteration(self) -> int:
        return self._progress.epoch_iteration

    def fire(self, event: Any) -> None:
        if self._fire(event):
            self._boundary.check()

    def boundary(self, *, last: bool = False) -> None:
        self._boundary.at(last=last or bool(self._engine.should_terminate), within_epoch=True)
        self._boundary.check_or_pause()

    def fetch(self) -> Group | None:
        self._engine._dataloader_iter = self._progress.open_pass()
        return self._fetch()

    def end_run(self) -> None:
        self._state.epoch -= 1  # or what is logged from here on is of an epoch without an iteration
        self._state.reason, self._engine.should_terminate = "end of data", True
        raise RunEnds

    def _measured(self, iterations: int) -> None:
        said = None if self._progress.source is None else self._progress.source.iterations
        if said not in (None, iterations) and not self._is_warned and agreement.rank() == 0:
            self._is_warned = True
            logger.warning(
                "The length of the data says %d iterations of an epoch, and it gave %d: the epoch ends where the data "
                "end, and a schedule over the run may be off.",
                *(said, iterations),
            )
        self._state.epoch_length = iterations

    def _data_is_exhausted(self) -> None:
        state = self._state
        if limit_reached(replace(self._progress.counted, epochs=state.epoch), self._progress.plan):
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
