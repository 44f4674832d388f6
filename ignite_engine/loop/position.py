"""The position and the plan of a run as values, and functions of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any


class EpochIs(Enum):
    """What defines an epoch of a run."""

    A_LENGTH = "a number of iterations"
    """``epoch_length`` was given; passes over the data begin and end within epochs."""
    A_PASS = "a pass"
    """One pass over data whose length is known when the pass starts."""
    MEASURED = "a pass of unknown length"
    """One pass over data that does not say how long it is, or the windows of an epoch: measured each time anew."""


@dataclass(frozen=True)
class Grouping:
    """The batches in an iteration: a number on each rank, or over all ranks; neither: one batch."""

    accumulation_steps: int | None = None
    global_micro_batches: int | None = None

    def __str__(self) -> str:
        return ", ".join(f"{name}={size}" for name, size in vars(self).items() if size) or "no grouping"


@dataclass(frozen=True)
class Plan:
    """The limits of a run and its epochs; None: no limit, or unknown."""

    max_epochs: int | None = None
    max_iters: int | None = None
    epoch_length: int | None = None
    """Iterations of an epoch; if epochs are measured, those of the previous pass."""
    epoch_is: EpochIs = EpochIs.A_LENGTH


@dataclass(frozen=True)
class Position:
    """A step boundary of a run; with the states of the objects it is all that is needed to continue there.

    Epochs are counted, never derived from ``iteration``: passes over data of unknown length differ, and an epoch may
    have been cut short.
    """

    iteration: int = 0
    """The number of updates."""
    epochs: int = 0
    """The number of completed epochs."""
    epoch_iteration: int = 0
    """The number of iterations in the current epoch."""
    epoch_ends: bool | str = False
    """``terminate_epoch()`` was called, and a stop came before the epoch's end; the string is Ignite's option of it."""
    data: Mapping[str, Any] | None = field(default_factory=dict)
    """The place in the data, as its source saves it; empty without data. None: the next pass begins."""

    @property
    def epoch(self) -> int:
        """The number of the current epoch, or of the completed one."""
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
