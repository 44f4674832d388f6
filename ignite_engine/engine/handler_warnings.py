"""What is said when a run starts of handlers that will not do what their author expects."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from ignite.engine import Engine, Events

from ignite_engine.engine import bus
from ignite_engine.events import Phase, TrainingEvents

logger = logging.getLogger(__name__)


def warn_of_handlers(engine: Engine, update: Callable[[Engine, Any], Any], *, has_windows: bool) -> None:
    """One line for each: handlers of windows where there are none, and random batches of a rank-invariant update."""
    for event in (TrainingEvents.WINDOW_STARTED, TrainingEvents.WINDOW_COMPLETED):
        if not has_windows and (handlers := bus.handlers_of(engine, event)):
            logger.warning(
                "%s of %s will not be called, as the data has no windows: give run() Windows, or attach to another "
                "event.",
                *(", ".join(bus.name_of(handler) for handler, _, _ in handlers), bus.event_name(event)),
            )
    handlers_of_batches = [handler for handler, _, _ in bus.handlers_of(engine, Events.GET_BATCH_COMPLETED)]
    users = [bus.name_of(handler) for handler in handlers_of_batches if bus.phase_of(handler) == Phase.OTHER]
    if users and getattr(update, "rank_invariant", False) is True:
        logger.warning(
            "%s on GET_BATCH_COMPLETED has the micro-batches of its rank only: random numbers that it puts into them "
            "are others on another number of ranks, whatever rank_invariant does. Draw them in the dataset or in "
            "loss_fn, where they belong to the sample or the micro-batch.",
            ", ".join(users),
        )
