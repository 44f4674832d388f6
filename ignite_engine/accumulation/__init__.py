"""Gradient accumulation: the arithmetic of groups for the Trainer, and the façade for hand-written loops."""

from ignite_engine.accumulation.optimizer import GradientAccumulationOptimizer
from ignite_engine.accumulation.scheduler import GradientAccumulationLRScheduler, initialize
from ignite_engine.step.micro_batches import (
    Group,
    WeightFn,
    accumulation_steps_for,
    check_accumulates,
    gradient_sync,
    micro_batch_scales,
)

__all__ = [
    "GradientAccumulationLRScheduler",
    "GradientAccumulationOptimizer",
    "Group",
    "WeightFn",
    "accumulation_steps_for",
    "check_accumulates",
    "gradient_sync",
    "initialize",
    "micro_batch_scales",
]
