"""Gradient accumulation: the arithmetic of groups for the Trainer, and the façade for hand-written loops."""

from ignite_engine.accumulation.groups import (
    Group,
    WeightFn,
    accumulation_steps_for,
    check_accumulates,
    gradient_sync,
    micro_batch_scales,
)

__all__ = [
    "Group",
    "WeightFn",
    "accumulation_steps_for",
    "check_accumulates",
    "gradient_sync",
    "micro_batch_scales",
]
