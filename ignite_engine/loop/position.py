"""Where a run is, how far it goes, and what comes next: values, and functions of values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
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
class Grouping:
    """What an iteration is made of: so many batches of each rank, or of all ranks; neither: one batch."""

    accumulation_steps: int | None = None
    global_micro_batches: int | None = None

    def __str__(self) -> str:
        return ", ".join(f"{name}={size}" for name, size in vars(self).items() if size) or "no grouping"


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
