"""What a scheduler is built as: its kind, and the settings that torch's keep among their progress.

Where they are others than those saved, a copy of the scheduler as it is built now is stepped to the saved step: its
state is then one of the new schedule, and never a mixture of both.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from types import FunctionType
from typing import Any

import torch
from ignite.handlers.param_scheduler import ParamGroupScheduler, ParamScheduler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CosineAnnealingWarmRestarts, LRScheduler, SequentialLR

from ignite_engine.errors import StateMismatch, leave_out, one_line
from ignite_engine.schedules import Schedule, set_lr

# the base rates are the optimizer's
_NOT_SETTINGS = frozenset(("base_lrs", "last_epoch", "_step_count", "_last_lr", "T_cur", "T_i"))
# OneCycleLR, CyclicLR and SWALR keep these in the parameter groups
_OF_GROUPS = ("max_lr", "min_lr", "max_momentum", "base_momentum", "swa_lr")
# what an override scales
_RATES = ("initial_lr", "max_lr", "min_lr", "swa_lr", "max_lrs")
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
        name: of its part of a checkpoint.
    """

    def __init__(self, scheduler: Any, name: str) -> None:
        self._scheduler, self._name = scheduler, name
        self._built = _values(scheduler)
        self._groups: list[dict[str, Any]] = []
        if isinstance(scheduler, LRScheduler):
            self._groups = [_options(group) for group in scheduler.optimizer.param_groups]
        self._first_step = _step_of(scheduler)
        self._fresh: Any = None

    def saved(self) -> dict[str, Any]:
        return deepcopy(self._built)

    def load(self, state: Mapping[str, Any], before: Mapping[str, Any], *, is_alone: bool) -> list[str] | None:
        """Load a scheduler's state; if settings were others ``before``, be the schedule that is built now at its step.

        Args:
            is_alone: no other schedule sets the rates of the optimizer.

        Returns:
            A text of each setting that is another than the saved one; None: the state is the saved one. So it is too
            where the run itself has changed the settings that are others now.

        Raises:
            StateMismatch: the state that the schedule has at this step is not known.
        """
        others = {name for name in before.keys() & self._built.keys() if before[name] != self._built[name]}
        try:
            if others and self._fresh is None:
                self._fresh = self._copied()
            self._scheduler.load_state_dict(state)
            loaded = _values(self._scheduler)
            rebuilt = {name for name in others if loaded.get(name) == before[name]}
            if not rebuilt:
                return None
            if not is_alone:
                raise ValueError("another schedule sets the rates of its optimizer, too.")
            if len(self._scheduler.optimizer.param_groups) != len(self._groups):
                raise ValueError("the run has added parameter groups.")
            stepped = self._stepped(rebuilt, loaded)
            self._scheduler.load_state_dict(stepped.state_dict())
            self._set_options(stepped.optimizer.param_groups)
        except Exception as error:
            if not others:
                raise
            raise StateMismatch(
                f"LRSchedule {self._name!r} was saved with other settings ({', '.join(sorted(others))}), and its LR "
                f"with those of now is not known: {one_line(error).rstrip('.')}. Build it with the saved ones, or "
                f"begin it again with {leave_out(self._name)}."
            ) from error
        now = _values(self._scheduler)
        return [f"{name} {_change(was, now[name])}" for name, was in loaded.items() if was != now.get(name, was)]

    def _copied(self) -> Any:
        """The scheduler as it was built, with an optimizer of its own."""
        if self._first_step is None or _step_of(self._scheduler) != self._first_step:
            raise ValueError("it was stepped in this process, or has no last_epoch.")
        theirs = self._scheduler.optimizer
        optimizer = Optimizer([torch.zeros(0)], theirs.defaults)
        optimizer.param_groups = deepcopy(self._groups)
        return deepcopy(self._scheduler, {id(theirs): optimizer})

    def _stepped(self, rebuilt: set[str], loaded: Mapping[str, Any]) -> Any:
        """The scheduler as it is built now, stepped as often as the loaded one, from the base rates of that."""
        stepped = deepcopy(self._fresh)
        (was, *_), (now, *_) = (_all_base_lrs(scheduler) for scheduler in (self._scheduler, stepped))
        groups = stepped.optimizer.param_groups
        kept = [index for index in range(len(groups)) if _of_group("initial_lr", index) not in rebuilt]
        for index in kept:
            if was[index] != now[index]:  # the first rate is in proportion to its base
                for key in ("lr", "initial_lr"):
                    groups[index][key] = groups[index][key] * (was[index] / now[index])
        for bases, saved in zip(_all_base_lrs(stepped), _all_base_lrs(self._scheduler)):
            for index in kept:
                bases[index] = saved[index]
        for name, values, key in _places(stepped):
            if key in _RATES and name not in rebuilt and name in loaded:
                values[key] = deepcopy(loaded[name])
        with warnings.catch_warnings():  # no step of an optimizer goes before
            warnings.simplefilter("ignore")
            for _ in range(_step_of(self._scheduler) - self._first_step):
                stepped.step()
        if _step_of(stepped) != _step_of(self._scheduler):
            raise ValueError("its last_epoch is not the number of its steps.")
        return stepped

    def begin_again(self) -> None:
        """Set what the scheduler set in the parameter groups when it was made."""
        self._set_options(self._groups)

    def _set_options(self, options: Sequence[Mapping[str, Any]]) -> None:
        """Set in the parameter groups what the scheduler sets, as it is in ``options``."""
        for built, new, group in zip(self._groups, options, getattr(self._scheduler.optimizer, "param_groups", ())):
            set_lr(group, float(new["lr"]))
            held = {*_settings_of(new), *(("momentum", "betas") if "max_momentum" in new else ())}
            changed = {key for key, value in new.items() if value != built.get(key)} - {"lr", "initial_lr"}
            for key in new.keys() & (held | changed):
                group[key] = (new[key][0], *group[key][1:]) if key == "betas" else new[key]


def _step_of(scheduler: Any) -> Any:
    first = next(iter(getattr(scheduler, "_schedulers", None) or ()), None)
    return getattr(scheduler, "last_epoch", None if first is None else _step_of(first))


def _values(scheduler: Any) -> dict[str, Any]:
    return {name: deepcopy(values[key]) for name, values, key in _places(scheduler)}


def _all_base_lrs(scheduler: Any) -> list[list[Any]]:
    return [owner.base_lrs for _, owner in _owners(scheduler, "") if hasattr(owner, "base_lrs")]


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    """Copies of a parameter group's numbers and other plain values."""
    return {
        key: deepcopy(value)
        for key, value in group.items()
        if _is_plain(value) or (isinstance(value, torch.Tensor) and value.numel() == 1)
    }


def _settings_of(group: Mapping[str, Any]) -> tuple[str, ...]:
    """What a scheduler of torch keeps in a parameter group; OneCycleLR the base rate, too."""
    keys = (*_OF_GROUPS, "initial_lr") if {"max_lr", "min_lr"} <= group.keys() else _OF_GROUPS
    return tuple(key for key in keys if key in group)


def _change(was: Any, now: Any) -> str:
    change = f"{was!r} -> {now!r}"
    return change if len(change) <= _LONGEST_SHOWN else "is another"


def _of_group(option: str, index: int) -> str:
    return f"{option} of group {index}"


def _places(scheduler: Any) -> Iterator[tuple[str, dict[str, Any], str]]:
    """Each setting: its name, the dictionary that has it, and the key."""
    if not isinstance(scheduler, LRScheduler):
        return
    for prefix, owner in _owners(scheduler, ""):
        for key, value in [*vars(owner).items()]:
            if key not in _NOT_SETTINGS and _is_plain(value):
                yield prefix + key.lstrip("_"), vars(owner), key
    for index, group in enumerate(scheduler.optimizer.param_groups):
        for key in _settings_of(group):
            if _is_plain(group[key]):
                yield _of_group(key, index), group, key


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
