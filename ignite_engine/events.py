"""The events of training that Ignite does not have, and the order of handlers within one event.

One iteration on the bus, in order (Ignite's own events in lower case)::

    get_batch_started, get_batch_completed, iteration_started
    for each micro-batch:  forward, with the loss        FORWARD_STARTED, FORWARD_COMPLETED
                           backward                      BACKWARD_COMPLETED
    gradients reduced and unscaled                       OPTIMIZER_STEP_STARTED
    clip, step                                           OPTIMIZER_STEP_COMPLETED | OPTIMIZER_STEP_SKIPPED
    iteration_completed, on an epoch's last iteration then epoch_completed
        within either: an evaluation that is due         EVALUATION_STARTED, EVALUATION_COMPLETED
    if state.metrics has new values                      METRICS_READY
    the step boundary                                    RESUME_POINT
        within it: a save that is due                    CHECKPOINT_SAVED | CHECKPOINT_FAILED
"""

from __future__ import annotations

from enum import IntEnum

from ignite.engine import EventEnum


class TrainingEvents(EventEnum):
    """Events that a :class:`ignite_engine.Trainer` fires beside Ignite's; they take the same filters."""

    FORWARD_STARTED = "forward_started"
    FORWARD_COMPLETED = "forward_completed"
    BACKWARD_COMPLETED = "backward_completed"
    OPTIMIZER_STEP_STARTED = "optimizer_step_started"
    OPTIMIZER_STEP_COMPLETED = "optimizer_step_completed"
    OPTIMIZER_STEP_SKIPPED = "optimizer_step_skipped"
    EVALUATION_STARTED = "evaluation_started"
    EVALUATION_COMPLETED = "evaluation_completed"
    METRICS_READY = "metrics_ready"
    RESUME_POINT = "resume_point"
    CHECKPOINT_SAVED = "checkpoint_saved"
    CHECKPOINT_FAILED = "checkpoint_failed"
    WINDOW_STARTED = "window_started"
    WINDOW_COMPLETED = "window_completed"


# what `every=`, `once=`, `before=`, `after=` count, event by event
EVENT_COUNTERS: dict[TrainingEvents, str] = {
    TrainingEvents.FORWARD_STARTED: "micro_batches",
    TrainingEvents.FORWARD_COMPLETED: "micro_batches",
    TrainingEvents.BACKWARD_COMPLETED: "micro_batches",
    TrainingEvents.OPTIMIZER_STEP_STARTED: "iteration",
    TrainingEvents.OPTIMIZER_STEP_COMPLETED: "optimizer_steps",
    TrainingEvents.OPTIMIZER_STEP_SKIPPED: "skipped_steps",
    TrainingEvents.EVALUATION_STARTED: "evaluations",
    TrainingEvents.EVALUATION_COMPLETED: "evaluations",
    TrainingEvents.METRICS_READY: "iteration",
    TrainingEvents.RESUME_POINT: "iteration",
    TrainingEvents.CHECKPOINT_SAVED: "checkpoints",
    TrainingEvents.CHECKPOINT_FAILED: "iteration",
    TrainingEvents.WINDOW_STARTED: "windows",
    TrainingEvents.WINDOW_COMPLETED: "windows",
}


class Phase(IntEnum):
    """Order of handlers within one event; a handler declares it with an attribute ``phase``.

    Handlers of one phase run in the order in which they were attached. ``FIRST`` and ``LAST`` are for handlers that
    measure the others.
    """

    FIRST = -1
    PREPARE = 0
    EVALUATE = 1
    MEASURE = 2
    LOG = 3
    OTHER = 4
    LAST = 5
