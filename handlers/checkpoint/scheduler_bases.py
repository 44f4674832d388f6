"""What the schedulers of an optimizer hold of its options: their bases, which an override scales."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from ignite.handlers.param_scheduler import CyclicalScheduler, ParamGroupScheduler, ParamScheduler, PiecewiseLinear
from ignite.handlers.param_scheduler import LRScheduler as IgniteTorchScheduler
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import (
    CyclicLR,
    LRScheduler,
    OneCycleLR,
    ReduceLROnPlateau,
)

from ignite_engine import Trainer
from ignite_engine.handlers.built_schedule import closed_form_lrs
from ignite_engine.schedules import Schedule


class Setting(NamedTuple):
    """One option of one parameter group."""

    part: str
    """The name under which the optimizer is registered."""
    group: int
    option: str


class Change(NamedTuple):
    key: str
    """As the user wrote it."""
    setting: Setting
    value: Any
    before: Any
    """The option in the parameter group, which a schedule may have scaled."""


def named_schedulers_of(trainer: Trainer, optimizer: Optimizer) -> Iterator[tuple[Any, str]]:
    for name, obj in trainer.registry.objects.items():
        scheduler = obj.scheduler if trainer.registry.kinds[name] == "schedule" and hasattr(obj, "scheduler") else obj
        is_one = scheduler is not obj or isinstance(scheduler, LRScheduler | ParamScheduler | ParamGroupScheduler)
        theirs = getattr(scheduler, "optimizer", None) if is_one or isinstance(scheduler, Schedule) else None
        if any(candidate is optimizer for candidate in (theirs if isinstance(theirs, list) else [theirs])):
            yield scheduler, name


def schedulers_of(trainer: Trainer, optimizer: Optimizer) -> list[Any]:
    return [scheduler for scheduler, _ in named_schedulers_of(trainer, optimizer)]


def atoms_of(scheduler: Any) -> Iterator[Any]:
    """The schedulers that one is made of."""
    if isinstance(scheduler, IgniteTorchScheduler):
        inner = scheduler.lr_scheduler
        scheduler = getattr(inner, "_lr_scheduler", inner)
    parts: Iterable[Any] | None = getattr(scheduler, "_schedulers", None)
    if isinstance(scheduler, ParamScheduler | ParamGroupScheduler):
        parts = getattr(scheduler, "schedulers", None)
    if parts is None:
        yield scheduler
        return
    for part in parts:
        yield from atoms_of(part)


def cannot_rebase(atom: Any, option: str) -> str | None:
    if isinstance(atom, ParamScheduler):
        known = isinstance(atom, CyclicalScheduler | PiecewiseLinear)
        return None if known or atom.param_name != option else "sets it, and what it holds of it is not known."
    cycled = isinstance(atom, CyclicLR | OneCycleLR) and atom.cycle_momentum
    if cycled and option in ("momentum", "betas"):
        return "sets it: build the schedule with other momenta."
    if option != "lr" or isinstance(atom, ReduceLROnPlateau | Schedule) or hasattr(atom, "base_lrs"):
        return None
    return (
        "sets it, and has no base_lrs, the list of the groups' base LRs, which is replaced: give it one, or begin it "
        "again with ignore=['schedule']."
    )


def places_of(atom: Any, setting: Setting, optimizer: Optimizer) -> list[tuple[Any, Any]]:
    """Where a scheduler keeps the numbers that make up an option of a group: object and key."""
    index, group = setting.group, optimizer.param_groups[setting.group]
    if isinstance(atom, ParamScheduler):
        if atom.param_name != setting.option or atom.optimizer is not optimizer:
            return []
        if atom.param_group_index not in (None, index):
            return []
        if isinstance(atom, PiecewiseLinear):
            return [(atom.values, place) for place in range(len(atom.values))]
        return [(vars(atom), "start_value"), (vars(atom), "end_value")]
    if setting.option != "lr" or isinstance(atom, ReduceLROnPlateau) or atom.optimizer is not optimizer:
        return []
    bases = getattr(atom, "base_lrs", ())
    held: list[tuple[Any, Any]] = [(bases, index)] if index < len(bases) else []
    if isinstance(atom, CyclicLR):
        held.append((atom.max_lrs, index))
    if isinstance(atom, OneCycleLR):
        held += [(group, "max_lr"), (group, "min_lr")]
    if "swa_lr" in group and type(atom).__name__ == "SWALR":
        held.append((group, "swa_lr"))
    return held


def base_of(scheduler: Any, setting: Setting, optimizer: Optimizer) -> float | None:
    """The base of an option; None: the scheduler does not set it."""
    values = [float(owner[key]) for atom in atoms_of(scheduler) for owner, key in places_of(atom, setting, optimizer)]
    return max(values, default=None)


def scale(scheduler: Any, change: Change, base: float, optimizer: Optimizer, scaled: set[tuple[int, Any]]) -> None:
    """Scale what a scheduler holds, so that ``base`` becomes the new value."""
    group = optimizer.param_groups[change.setting.group]
    held = [place for atom in atoms_of(scheduler) for place in places_of(atom, change.setting, optimizer)]
    if held and "initial_lr" in group and change.setting.option == "lr":
        held.append((group, "initial_lr"))
    for owner, key in held:
        if (id(owner), key) in scaled:  # by another group that the scheduler sets, too
            continue
        scaled.add((id(owner), key))
        value = float(owner[key])
        put(owner, key, change.value if value == base else value * (change.value / base))


def expected_lr(scheduler: Any, setting: Setting) -> float | None:
    """The LR that a scheduler's closed form has for the next update; None: it has none."""
    if isinstance(scheduler, Schedule):
        return scheduler.lrs_at(scheduler.steps)[setting.group] if scheduler.is_known else None
    lrs = closed_form_lrs(scheduler) if setting.option == "lr" else None
    return None if lrs is None else lrs[setting.group]


def remember_lr(schedulers: Iterable[Any], index: int, lr: Any) -> None:
    """Let torch's schedulers say the LR that is set now."""
    for scheduler in schedulers:
        for torchs in (scheduler, *atoms_of(scheduler)):
            last = getattr(torchs, "_last_lr", None)
            if isinstance(last, list) and index < len(last):
                last[index] = lr.clone() if isinstance(lr, Tensor) else lr


def put(owner: Any, key: Any, value: Any) -> None:
    """In place where it is a tensor."""
    if isinstance(owner[key], Tensor):
        owner[key].fill_(value)
    else:
        owner[key] = value


def is_near(first: float, second: float) -> bool:
    return abs(first - second) <= 1e-6 * max(abs(first), abs(second))
