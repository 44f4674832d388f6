"""Sets new learning rates at a resume."""

from __future__ import annotations

from collections.abc import Mapping

from torch.optim import Optimizer

from ignite_engine.checkpoint.states.model_and_optimizer import OptimizerState
from ignite_engine.checkpoint.states.registry import Registry
from ignite_engine.errors import StateMismatch, did_you_mean, leave_out
from ignite_engine.schedules import Schedule, set_lr

Rates = float | Mapping[str, float]


def set_rates(registry: Registry, rates: Rates) -> None:
    """Replace the base of each schedule, which continues from its position; without a schedule, the optimizer's rate.

    Args:
        rates: one for all parameter groups, or by name of an optimizer or a group.

    Raises:
        StateMismatch: a name is unknown, or a schedule is not a :class:`Schedule`.
    """
    known = list[str]()
    for part, obj in registry.objects.items():
        optimizer = obj.optimizer if isinstance(obj, OptimizerState) else obj
        if not isinstance(optimizer, Optimizer):
            continue
        schedules = {
            name: scheduled.scheduler  # type: ignore[attr-defined]  # an LRSchedule
            for name, scheduled in registry.objects.items()
            if registry.kinds[name] == "schedule"
        }
        name, schedule = next(
            ((name, found) for name, found in schedules.items() if found.optimizer is optimizer), ("", None)
        )
        for index, group in enumerate(optimizer.param_groups):
            names = [part.removeprefix("optimizer/"), str(group.get("name", index))]
            known += names
            if isinstance(rates, Mapping):
                rate = next((rates[key] for key in reversed(names) if key in rates), None)
            else:
                rate = rates
            if rate is None:
                continue
            if isinstance(schedule, Schedule):
                schedule.base_lrs[index] = rate
            elif schedule is None:
                set_lr(group, rate)
            else:
                raise StateMismatch(
                    f"The rate of a resume is the base of a schedule of this package, and a {type(schedule).__name__} "
                    f"keeps its own: build it with the new rate, and begin it again with {leave_out(name)}."
                )
        if isinstance(schedule, Schedule) and schedule.total is not None:
            schedule.apply()
    for key in rates if isinstance(rates, Mapping) else ():
        if key not in known:
            raise StateMismatch(f"No optimizer or parameter group is called {key!r}{did_you_mean(key, known)}")
