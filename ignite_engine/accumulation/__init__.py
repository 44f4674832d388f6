"""Gradient accumulation: the arithmetic of groups for the Trainer, and the façade for hand-written loops."""

from ignite_engine.accumulation.groups import (
    Group,
    WeightFn,
    accumulation_steps_for,
    check_accumulates,
    gradient_sync,
    micro_batch_scales,
)
from ignite_engine.accumulation.optimizer import GradientAccumulationOptimizer
from ignite_engine.accumulation.scheduler import GradientAccumulationLRScheduler, initialize

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
