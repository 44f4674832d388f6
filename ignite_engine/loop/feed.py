"""Gets the next group of a run from its data: from the same pass, another pass or window, or none."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

from ignite.engine import Engine, Events

from ignite_engine.errors import StopRequested
from ignite_engine.loop.boundary import RunEnds, StepBoundary
from ignite_engine.loop.position import EpochIs, Grouping
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
        self._is_warned = False
        self._is_grouped = progress.grouping != Grouping()

    def open(self) -> None:
        """Open the pass at its position, unless it is open."""
        if self._engine._dataloader_iter is None:
            self._engine._dataloader_iter = self._progress.open_pass(self)

    def next(self) -> Group | None:
        """Fetch the next group of the epoch into ``state.batch``; None if there is no more."""
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
        if group.begins is not None:
            self.fire(group.begins)
        return group

    def give_up_pass(self) -> None:
        """End the pass early, as the epoch was ended; the next epoch begins a new pass."""
        self._progress.forget_group()  # one that was fetched is given up, too
        self._progress.end_pass()
        self._engine._dataloader_iter = None

    def _fetch(self) -> Group | None:
        """The next group of the pass; a signal during the wait ends the run."""
        progress = self._progress
        iterator: Iterator[Group] = self._engine._dataloader_iter  # type: ignore[assignment]  # it is open
        try:
            return next(iterator, None)
        except StopRequested:  # on several ranks all of them are here
            progress.put_back()
            if progress.source is not None:
                progress.source.close(at_once=True)
            self._engine._dataloader_iter = None
            self._boundary.at(last=True)
            raise RunEnds from None

    def _first_of_next_pass(self) -> Group | None:
        """The first group of the next pass over the data; None at the end of the epoch."""
        state, progress = self._state, self._progress
        ends_epoch = progress.epoch_is is EpochIs.MEASURED and progress.epoch_iteration > 0
        if ends_epoch:
            self._measured(progress.epoch_iteration)
        if state.dataloader is not None:
            self.fire(Events.DATALOADER_STOP_ITERATION)
        has_next = progress.end_pass()
        # opened when it is needed: what this draws comes after the position is saved, as in a resumed run
        self._engine._dataloader_iter = None
        if ends_epoch:
            return None
        if has_next:
            self.open()
            if (group := self._fetch()) is not None:
                return group
        self._data_is_exhausted()
        return None

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
        """End the run, whose data has nothing more; an epoch without an iteration is none."""
        state = self._state
        if state.iteration == 0:
            raise ValueError(
                "The data gave no batch, and the run is not at its end: give data that is not empty and can be "
                "iterated again."
            )
        if agreement.rank() == 0:
            logger.warning("The data has no more batches, and the run ends at iteration %d.", state.iteration)
        if not self._progress.epoch_iteration:
            state.epoch -= 1  # or what is logged from here on is of an epoch without an iteration
        state.reason, self._engine.should_terminate = "end of data", True
        raise RunEnds

    # -- for a source that fires events -------------------------------------------------------------------------------

    def fire(self, event: Any) -> None:
        if self._fire(event):
            self._boundary.check()

    def boundary(self) -> None:
        self._boundary.at(last=bool(self._engine.should_terminate), within_epoch=True)
        self._boundary.check_or_pause()
