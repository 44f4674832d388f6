"""Where a run is, how far it goes, and what comes next: values, and functions of values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any


class EpochIs(Enum):
    """What an epoch of a run is."""

    A_LENGTH = "a number of iterations"
    """``epoch_length`` was given; passes over the data begin and end within epochs."""
    A_PASS = "a pass"
    """One pass over data whose length is known when the pass starts."""
    MEASURED = "a pass of unknown length"
    """One pass over data that does not say how long it is, or the windows of an epoch: measured each time anew."""


@dataclass(frozen=True)
class Plan:
    """How far a run goes, and in which epochs; None: no limit, or not known."""

    max_epochs: int | None = None
    max_iters: int | None = None
    epoch_length: int | None = None
    """Iterations of an epoch; of a measured one that of the pass before."""
    epoch_is: EpochIs = EpochIs.A_LENGTH


@dataclass(frozen=True)
class Position:
    """A step boundary of a run: all that is needed, beside the state of objects, to continue there.

    Epochs are counted, never derived from ``iteration``: passes over data of unknown length differ, and an epoch may
    have been cut short.
    """

    iteration: int = 0
    """Updates so far."""
    epochs: int = 0
    """Epochs completed."""
    epoch_iteration: int = 0
    """Iterations of the epoch under way."""
    epoch_ends: bool | str = False
    """``terminate_epoch()`` was called, and a stop came before the epoch's end; the string is Ignite's option of it."""
    data: Mapping[str, Any] | None = field(default_factory=dict)
    """The place in the data, as its source saves it; empty without data. None: the next pass begins."""

    @property
    def epoch(self) -> int:
        """The number of the epoch under way, or of the one that is completed."""
        return self.epochs + int(self.epoch_iteration > 0)


def is_within_epoch(position: Position, plan: Plan) -> bool:
    """Whether a run that begins there completes an epoch first, if only by its EPOCH_COMPLETED."""
    begun = position.epoch_iteration
    return begun > 0 and (is_full(begun, plan) or not is_done(position, plan))


def is_full(epoch_iteration: int, plan: Plan) -> bool:
    """Whether an epoch has all its iterations; a measured one ends with its data."""
    length = None if plan.epoch_is is EpochIs.MEASURED else plan.epoch_length
    return length is not None and epoch_iteration >= length


def is_done(position: Position, plan: Plan) -> bool:
    """Whether a limit is reached."""
    return limit_reached(position, plan) is not None


def limit_reached(position: Position, plan: Plan) -> str | None:
    """The limit that ends the run, None if none does; not by iterations per epoch, as passes differ in length."""
    if plan.max_iters is not None and position.iteration >= plan.max_iters:
        return "max_iters"
    if plan.max_epochs is not None and position.epochs >= plan.max_epochs:
        return "max_epochs"
    return None


def last_iteration(position: Position, plan: Plan) -> int | None:
    """The iteration at which the run ends by ``max_iters`` or ``max_epochs``, at the latest; None: not known."""
    if plan.max_epochs is None or plan.epoch_length is None:
        return plan.max_iters
    left = (plan.max_epochs - position.epochs) * plan.epoch_length - position.epoch_iteration
    by_epochs = position.iteration + max(left, 0)
    return by_epochs if plan.max_iters is None else min(by_epochs, plan.max_iters)


def regrouped(position: Position, plan: Plan, batches: int, batch: int, steps: int) -> Position:
    """``position``, where iterations have another size than the one it was saved with: the data says what is left.

    Args:
        batches: of the pass.
        batch: the next one of it; ``batches`` at the end of the pass.
        steps: batches of an iteration.
    """
    if plan.epoch_is is not EpochIs.A_PASS or plan.epoch_length is None:
        return position
    left = -(-(batches - batch) // steps)
    if left == 0 and position.epoch_iteration == 0:  # the end of an epoch that has been reported
        return position
    return replace(position, epoch_iteration=plan.epoch_length - left)
