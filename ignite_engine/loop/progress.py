"""The progress of a run: its position, its plan, and the source of its data."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import repeat
from typing import Any

from ignite_engine import rng
from ignite_engine.data.loader import resumable
from ignite_engine.data.read_errors import ReadErrors
from ignite_engine.data.source import DataSource, OwnSource, Run, Source, Waiting
from ignite_engine.loop.position import EpochIs, Grouping, Plan, Position, limit_reached
from ignite_engine.ranks import mesh
from ignite_engine.state import TrainingState
from ignite_engine.update.base import BaseUpdate
from ignite_engine.update.micro_batches import Group

logger = logging.getLogger(__name__)


class Progress:
    """The progress of a run; ``loop/saved_progress.py`` makes the parts of a checkpoint from it.

    Args:
        grouping: as the Trainer was built.
        may_be_empty, weigh, waiting: of the source (``data/groups.py``).
    """

    def __init__(
        self,
        state: TrainingState,
        grouping: Grouping,
        *,
        may_be_empty: bool = False,
        weigh: Callable[[Any], float] | None = None,
        waiting: Waiting | None = None,
        max_read_errors: int = 0,
    ) -> None:
        self.state = state
        self._may_be_empty, self._weigh, self._waiting = may_be_empty, weigh, waiting
        self.rebuilds_loaders = True
        """A plain ``DataLoader`` is rebuilt into one of ours; False: data are read as they are."""
        self.max_read_errors = max_read_errors
        self.grouping = grouping
        self.source: Source | None = None
        self.user_data: Any = None
        """The user's own object behind :attr:`source`."""
        self.epoch_is = EpochIs.A_LENGTH
        self.epochs_completed = 0
        self.epoch_iteration = 0
        self.epoch_ends: bool | str = False
        """As :attr:`Position.epoch_ends`."""
        self.group: Group | None = None
        """The group that is fetched and not consumed."""
        self.updating = False
        """Whether an update with the group has begun."""
        self.before_epoch: Any = None
        """The random numbers before EPOCH_STARTED."""
        self.steps_before = 0
        """Optimizer steps before it."""
        self.left: Position | None = None
        """The position at which the previous run in this process ended; None: there was none, or it failed."""
        self.failed = False
        """Whether the previous run failed, perhaps within an update; the next one then starts over."""

    # -- the position -------------------------------------------------------------------------------------------------

    @property
    def position(self) -> Position:
        """The current position; asks the loader for its state."""
        return replace(self.counted, data={} if self.source is None else self.source.state_dict())

    @property
    def counted(self) -> Position:
        """The current position without the place in the data."""
        return Position(
            iteration=self.state.iteration,
            epochs=self.epochs_completed,
            epoch_iteration=self.epoch_iteration,
            epoch_ends=self.epoch_ends,
        )

    @property
    def plan(self) -> Plan:
        """How far the run goes; its limits are Ignite's, which a handler may change."""
        state = self.state
        return Plan(state.max_epochs, state.max_iters, state.epoch_length, self.epoch_is)

    def begin(self, source: Source | None, data: Any, plan: Plan, position: Position) -> None:
        """Begin a run at ``position``; assigns only, so it cannot fail."""
        state = self.state
        self.source, self.user_data, self.failed = source, data, False
        self.epoch_is = plan.epoch_is
        self.epochs_completed, self.epoch_iteration = position.epochs, position.epoch_iteration
        self.before_epoch = None
        self.epoch_ends = position.epoch_ends
        state.max_epochs, state.max_iters = plan.max_epochs, plan.max_iters
        state.epoch_length, state.dataloader = plan.epoch_length, data
        state.iteration = position.iteration
        self.forget_group()

    # -- data ---------------------------------------------------------------------------------------------------------

    def new_source(self, data: Any) -> Source:
        """A source over the user's data, not yet at a position. A collective."""
        if isinstance(data, OwnSource):
            assert self._waiting is not None
            return data.make_source(self.state, self._waiting, self._source_of)
        return self._source_of(data)

    def _source_of(self, data: Any) -> DataSource:
        if self.rebuilds_loaders:  # a sampler of torch's would be drawn alike on each rank
            data = resumable(data, any_sampler=mesh.data_size() > 1)
        return DataSource(
            data,
            self.grouping.accumulation_steps,
            global_micro_batches=self.grouping.global_micro_batches,
            may_be_empty=self._may_be_empty,
            weigh=self._weigh,
            waiting=self._waiting,
            read_errors=ReadErrors(self.max_read_errors, self.state) if self.max_read_errors else None,
        )

    def iterations_of(self, data: Any) -> int | None:
        """Iterations of a pass over ``data``, None if unknown; reads nothing. A collective."""
        if isinstance(data, OwnSource):
            return None
        if self.source is not None and data is self.user_data:  # it may be under way
            return self.source.iterations
        source = self.new_source(data)
        source.begin(0)
        source.close()
        return source.iterations

    def open_pass(self, run: Run) -> Iterator[Any]:
        """The groups of the current pass from the position on; without data, None for each iteration."""
        data = self.state.dataloader
        if data is not None and data is not self.user_data:  # a handler's, such as a new iterator where one ends
            self._replace_data(data)
        if data is None or self.source is None:
            assert self.state.epoch_length is not None
            return repeat(Group([None]), self.state.epoch_length)
        self.forget_group()
        groups = self.source.open(run)
        if self.epoch_is is not EpochIs.A_LENGTH and self.source.iterations and not self.epoch_iteration:
            self.state.epoch_length = self.source.iterations
        return groups

    def _replace_data(self, data: Any) -> None:
        before, source = self.source, self.new_source(data)
        source.begin(0 if before is None else before.pass_number + int(before.batch > 0))
        self.source, self.user_data = source, data

    def forget_group(self) -> None:
        self.state.group = self.group = None
        self.updating = False

    def put_back(self) -> None:
        """Undo the fetch of a group that no update has begun with: it comes again where the run goes on.

        So does EPOCH_STARTED of an epoch without an iteration, with the random numbers that its handlers have drawn.
        """
        if self.source is not None and self.group is not None:
            self.source.put_back()
        if not self.epoch_iteration and self.before_epoch is not None:
            rng.restore_snapshot(self.before_epoch)
        self.forget_group()

    def leave(self, *, goes_on: bool) -> None:
        """The run has ended at a step boundary: loader workers end with it, and others may iterate the loader.

        Args:
            goes_on: the next run does here; else with the next pass, as Ignite's after ``terminate()``.
        """
        if goes_on and self.source is not None:
            self.source.freeze()
        self.left = self.position if goes_on else Position(self.state.iteration, self.state.epoch, data=None)
        self.close()

    def fail(self) -> None:
        """Record that the run has failed."""
        self.left, self.failed = None, True
        self.close()

    def close(self) -> None:
        """End the workers of the loader."""
        if self.source is not None:
            self.source.close()

    # -- counting -----------------------------------------------------------------------------------------------------

    def epoch_is_full(self) -> bool:
        """Whether the epoch has all its iterations; a measured one ends with its data."""
        length = self.state.epoch_length
        return length is not None and self.epoch_iteration >= length and self.epoch_is is not EpochIs.MEASURED

    def is_within_epoch(self) -> bool:
        """Whether an epoch is under way, which a run that begins here completes first."""
        return self.epoch_iteration > 0 and (self.epoch_is_full() or not self.is_done())

    def is_done(self) -> bool:
        """Whether the run has reached a limit."""
        return limit_reached(self.counted, self.plan) is not None

    def samples_of_group(self) -> list[int] | None:
        """Dataset indices of this rank's group in hand, or of the next one; None if not of a ``loader()``'s data."""
        return None if self.source is None else self.source.samples(self.group)

    def group_consumed(self) -> None:
        """The group in hand does not come again: its update is done, or its error was swallowed."""
        group, self.group, self.updating = self.group, None, False
        if group is not None and self.source is not None:
            self.source.consumed(group)

    def end_pass(self) -> bool:
        """End the current pass; returns whether there is another one."""
        return self.source is None or self.source.next_pass()

    def end_epoch(self) -> None:
        """End the epoch."""
        self.epochs_completed = self.state.epoch
        self.epoch_iteration = 0

    @contextmanager
    def before_the_failure(self, update: BaseUpdate) -> Iterator[bool]:
        """Let the counters say what was done before an iteration failed; yields whether the weights agree with it.

        They do not if an optimizer had begun to step, nor after an update function that does not say so.
        """
        state = self.state
        stepped = update.stepping or (self.updating and state.optimizer_steps != self.steps_before)
        undone = int(self.updating and state.iteration > 0)
        state.iteration -= undone
        try:
            yield not self.updating or not stepped
        finally:
            state.iteration += undone
