"""The settings that a run trains with, where a resume has restored or replaced others than it was given."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from ignite_engine.schedules import Schedule
from ignite_engine.states.model_and_optimizer import OptimizerState
from ignite_engine.step.precision import LossScaler
from ignite_engine.trainer import Trainer


def put_in_force(config: dict[str, Any], trainer: Trainer, schedules: Mapping[str, Schedule]) -> None:
    """After the resume: write into a run's config, in place, what its optimizers and its loss scaler have.

    Args:
        config: the resolved config, which the run's folder, its checkpoints and its trackers show.
        schedules: by the name of their optimizer.
    """
    # not of one that only tells the rate with which a plateau begins
    stepped = [getattr(obj, "scheduler", None) for obj in trainer.registry.objects.values()]
    for name, optimizer in trainer.update.optimizers.items():  # type: ignore[attr-defined]  # build_run gave it an Update
        section = config["optimizers"].get(name) if config["optimizers"] else config["optimizer"]
        for obj in trainer.registry.objects.values():
            if section is not None and isinstance(obj, OptimizerState) and obj.optimizer is optimizer:
                schedule = schedules.get(name)
                is_stepped = any(scheduler is schedule for scheduler in stepped)
                bases = schedule.base_lrs if schedule is not None and is_stepped else ()
                usual = inspect.signature(type(optimizer)).parameters
                names_all = set(optimizer.defaults) <= set(section)
                for option, value in obj.in_force(section, bases).items():
                    if names_all or option == "lr" or option not in usual or value != _as_list(usual[option].default):
                        section[option] = value
                    else:
                        section.pop(option, None)
    scaler = trainer.update.scaler  # type: ignore[attr-defined]
    if isinstance(scaler, LossScaler):
        given = config["update"]["grad_scaler"] or {}
        defaults = LossScaler("cpu").growth
        growth = {key: value for key, value in scaler.growth.items() if value != given.get(key, defaults[key])}
        if growth:
            config["update"]["grad_scaler"] = {**given, **growth}


def _as_list(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
