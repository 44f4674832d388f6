"""What a scheduler is built as: its kind, and the settings that torch's keep among their progress."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from copy import deepcopy
from types import FunctionType
from typing import Any

from ignite.handlers.param_scheduler import ParamGroupScheduler, ParamScheduler
from torch.optim.lr_scheduler import CosineAnnealingWarmRestarts, LRScheduler, SequentialLR

from ignite_engine.schedules import Schedule

# the rates are the optimizer's, and an override scales them
_NOT_SETTINGS = frozenset(("base_lrs", "last_epoch", "_step_count", "_last_lr"))
_PLAIN = (bool, int, float, str, type(None))
_LONGEST_SHOWN = 60


def kind_of(scheduler: Any) -> str:
    """Its class, with those inside of a torch scheduler; the ones of the engine and of Ignite are one kind each."""
    if isinstance(scheduler, Schedule):
        return "Schedule"
    if isinstance(scheduler, ParamScheduler | ParamGroupScheduler):
        return "scheduler of Ignite"
    # no module: a class of the script that is run is in __main__ at one start and elsewhere at another
    name, parts = type(scheduler).__name__, getattr(scheduler, "_schedulers", ())
    return f"{name}({', '.join(map(kind_of, parts))})" if parts and isinstance(scheduler, LRScheduler) else name


def closed_form_lrs(scheduler: Any) -> list[float] | None:
    """The LR of each group for the next update by a torch scheduler's closed form; None: it has none."""
    while isinstance(scheduler, SequentialLR):
        passed = sum(scheduler.last_epoch >= milestone for milestone in scheduler._milestones)
        scheduler = scheduler._schedulers[passed]
    closed_form = getattr(scheduler, "_get_closed_form_lr", None)
    if isinstance(scheduler, CosineAnnealingWarmRestarts):
        closed_form = scheduler.get_lr
    if closed_form is None or _owner_of("get_lr", scheduler) is not _owner_of(closed_form.__name__, scheduler):
        return None  # a subclass with a curve of its own
    with warnings.catch_warnings():  # of a call outside of step()
        warnings.simplefilter("ignore")
        return [float(lr) for lr in closed_form()]


def _owner_of(method: str, scheduler: Any) -> type | None:
    """The class that defines a method."""
    return next((kind for kind in type(scheduler).__mro__ if method in vars(kind)), None)


class Settings:
    """The plain values of a torch scheduler as it was built, by name; none of other schedulers.

    Args:
        scheduler: not stepped yet.
    """

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler
        self._built = {name: deepcopy(vars(owner)[key]) for name, owner, key in _places(scheduler)}

    def saved(self) -> dict[str, Any]:
        return deepcopy(self._built)

    def put_back(self, before: Mapping[str, Any]) -> list[str]:
        """Set those that were built otherwise ``before`` and that the run has not changed since.

        Returns:
            A text of each.
        """
        changes = []
        for name, owner, key in _places(self._scheduler):
            if name not in before or name not in self._built:
                continue
            was, now = before[name], self._built[name]
            if was != now and vars(owner)[key] == was:
                vars(owner)[key] = deepcopy(now)
                change = f"{was!r} -> {now!r}"
                changes.append(f"{name} {change if len(change) <= _LONGEST_SHOWN else 'is another'}")
        return changes


def _places(scheduler: Any) -> Iterator[tuple[str, Any, str]]:
    """Each setting: its name, the object that has it, and the attribute."""
    for prefix, owner in _owners(scheduler, "") if isinstance(scheduler, LRScheduler) else ():
        for key, value in [*vars(owner).items()]:
            if key not in _NOT_SETTINGS and _is_plain(value):
                yield prefix + key.lstrip("_"), owner, key


def _owners(scheduler: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    """The scheduler, those inside, and the callable objects whose attributes torch saves with it."""
    yield prefix, scheduler
    for number, part in enumerate(getattr(scheduler, "_schedulers", ())):
        yield from _owners(part, f"{prefix}{number}.")
    functions = [*getattr(scheduler, "lr_lambdas", ()), getattr(scheduler, "_scale_fn_custom", None)]
    for number, function in enumerate(functions):
        if hasattr(function, "__dict__") and not isinstance(function, FunctionType):
            yield f"{prefix}{number}.", function


def _is_plain(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(_is_plain(part) for item in value.items() for part in item)
    return all(map(_is_plain, value)) if isinstance(value, list | tuple) else isinstance(value, _PLAIN)
