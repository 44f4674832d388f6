"""What a scheduler is built as: its kind, and the settings that torch's and Ignite's keep among their progress.

Where those of torch's are others than the saved ones, a copy of the scheduler as it is built now is stepped to the
saved step: its state is then one of the new schedule, and never a mixture of both. Ignite's are refused.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from typing import Any

import torch
from ignite.handlers.param_scheduler import CyclicalScheduler, ParamGroupScheduler, ParamScheduler, PiecewiseLinear
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CosineAnnealingWarmRestarts, LRScheduler, SequentialLR

from ignite_engine.errors import StateMismatch, leave_out, one_line
from ignite_engine.handlers.comparable import FUNCTIONS, OTHER, fingerprint, is_plain, plain
from ignite_engine.schedules import Schedule, set_lr

# the base rates are the optimizer's
_NOT_SETTINGS = frozenset(
    ("base_lrs", "last_epoch", "_step_count", "_last_lr", "T_cur", "T_i", "_save_history", "_state_attrs")
)
_FIRST_STEP = "last_epoch"
# OneCycleLR, CyclicLR and SWALR keep these in the parameter groups
_OF_GROUPS = ("max_lr", "min_lr", "max_momentum", "base_momentum", "swa_lr")
# what an override scales
_RATES = ("initial_lr", "max_lr", "min_lr", "swa_lr", "max_lrs")
_OF_IGNITE = ("start_value", "end_value", "values")
_LONGEST_SHOWN = 60


def kind_of(scheduler: Any) -> str:
    """Its class, with those inside of it, and what one of Ignite sets beside the LR; the engine's are one kind."""
    if isinstance(scheduler, Schedule):
        return "Schedule"
    # no module: a class of the script that is run is in __main__ at one start and elsewhere at another
    name, parts = type(scheduler).__name__, [part for _, part in _parts_of(scheduler)]
    if isinstance(scheduler, ParamScheduler) and scheduler.param_name != "lr":
        name = f"{name} of {scheduler.param_name}"
    return f"{name}({', '.join(map(kind_of, parts))})" if parts else name


def _parts_of(scheduler: Any) -> list[tuple[str, Any]]:
    """The schedulers that one of torch or Ignite steps."""
    if not isinstance(scheduler, LRScheduler | ParamScheduler | ParamGroupScheduler):
        return []
    inner = getattr(scheduler, "_schedulers", getattr(scheduler, "schedulers", ()))
    kept = [(f"{key}.", value) for key, value in vars(scheduler).items() if isinstance(value, LRScheduler)]
    return [*((f"{number}.", part) for number, part in enumerate(inner)), *kept]


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
    """The settings of a scheduler of torch or Ignite as it was built, by name; none of other schedulers.

    Args:
        scheduler: not stepped yet.
        name: of its part of a checkpoint.
    """

    def __init__(self, scheduler: Any, name: str) -> None:
        self._scheduler, self._name = scheduler, name
        self._first_step = _step_of(scheduler)
        self._built = _values(scheduler)
        self._groups: list[dict[str, Any]] = []
        if isinstance(scheduler, LRScheduler):
            self._built[_FIRST_STEP] = self._first_step
            self._groups = [_options(group) for group in scheduler.optimizer.param_groups]
        self._fresh: Any = None

    def saved(self) -> dict[str, Any]:
        return deepcopy(self._built)

    def load(
        self, state: Mapping[str, Any], before: Mapping[str, Any], lrs: Sequence[float], *, is_alone: bool
    ) -> list[str] | None:
        """Load a scheduler's state; if settings were others ``before``, be the schedule that is built now at its step.

        Args:
            lrs: of each group, as they were saved.
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
            # the saved one; or the one of now, which the state does not bring, such as of a function
            rebuilt = {
                name for name in others if name not in loaded or loaded[name] in (before[name], self._built[name])
            }
            if not rebuilt:
                return None
            self._check_that_it_can_be_rebuilt(others, lrs, is_alone=is_alone)
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
        now, was = _values(self._scheduler), loaded | {name: before[name] for name in rebuilt}
        return [f"{name} {_change(was[name], now[name])}" for name in was if was[name] != now.get(name, was[name])]

    def _check_that_it_can_be_rebuilt(self, others: set[str], lrs: Sequence[float], *, is_alone: bool) -> None:
        if not is_alone:
            raise ValueError("another schedule sets the rates of its optimizer, too.")
        if len(self._scheduler.optimizer.param_groups) != len(self._groups):
            raise ValueError("the run has added parameter groups.")
        if _FIRST_STEP in others:
            raise ValueError("it began at another step.")
        schedulers = [owner for _, owner in owners(self._scheduler) if isinstance(owner, LRScheduler)]
        are_torchs = all(type(scheduler).__module__ == LRScheduler.__module__ for scheduler in schedulers)
        of_the_saved = (are_torchs and closed_form_lrs(self._scheduler)) or lrs
        if not all(math.isclose(lr, other, rel_tol=1e-4, abs_tol=1e-12) for lr, other in zip(lrs, of_the_saved)):
            raise ValueError("the run has changed its rates.")

    def _copied(self) -> Any:
        """The scheduler as it was built, with an optimizer of its own."""
        if not isinstance(self._scheduler, LRScheduler):
            raise ValueError("one of Ignite's is not built again.")
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
            if key in _RATES and name not in rebuilt and name in loaded and is_plain(values[key]):
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
            # those of a cycle that the new one has not
            gone = [key for key in group if key in _OF_GROUPS and key not in new]
            for key in gone:
                del group[key]
            cycled = "max_momentum" in new or "max_momentum" in gone
            held = {*_settings_of(new), *(("momentum", "betas") if cycled else ())}
            changed = {key for key, value in new.items() if value != built.get(key)} - {"lr", "initial_lr"}
            for key in new.keys() & (held | changed):
                group[key] = (new[key][0], *group[key][1:]) if key == "betas" else new[key]


def _step_of(scheduler: Any) -> Any:
    first = next(iter(getattr(scheduler, "_schedulers", None) or ()), None)
    return getattr(scheduler, "last_epoch", None if first is None else _step_of(first))


def _values(scheduler: Any) -> dict[str, Any]:
    """Each setting, and what stands for each function that gives rates; rates of Ignite's as parts of the highest."""
    values = {name: deepcopy(plain(values[key])) for name, values, key in _places(scheduler)}
    for prefix, owner in owners(scheduler):
        if highest := highest_rate(owner):
            of_ignite = {key: vars(owner)[key] for key in _OF_IGNITE if key in vars(owner)}
            values |= {prefix + key: _as_parts(rates, highest) for key, rates in of_ignite.items()}
        for number, function in enumerate(_functions_of(owner)):
            if isinstance(function, FUNCTIONS):
                values[f"{prefix}function {number}"] = fingerprint(function)
    return values


def highest_rate(scheduler: Any) -> float | None:
    """Of a scheduler of Ignite's that has a curve of its own."""
    if isinstance(scheduler, CyclicalScheduler):
        return float(max(abs(scheduler.start_value), abs(scheduler.end_value)))
    return float(max(map(abs, scheduler.values))) if isinstance(scheduler, PiecewiseLinear) else None


def _as_parts(rates: Any, whole: float) -> list[float]:
    return [float(f"{rate / whole:.9g}") for rate in (rates if isinstance(rates, list | tuple) else [rates])]


def _all_base_lrs(scheduler: Any) -> list[list[Any]]:
    return [owner.base_lrs for _, owner in owners(scheduler) if hasattr(owner, "base_lrs")]


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    """Copies of a parameter group's numbers and other plain values."""
    return {
        key: deepcopy(value)
        for key, value in group.items()
        if is_plain(value) or (isinstance(value, torch.Tensor) and value.numel() == 1)
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
    if not isinstance(scheduler, LRScheduler | ParamScheduler | ParamGroupScheduler):
        return
    for prefix, owner in owners(scheduler):
        for key, value in [*vars(owner).items()]:
            if key not in _NOT_SETTINGS and plain(value) is not OTHER:
                yield prefix + key.lstrip("_"), vars(owner), key
    if isinstance(scheduler, LRScheduler):
        for index, group in enumerate(scheduler.optimizer.param_groups):
            for key in _settings_of(group):
                if is_plain(group[key]):
                    yield _of_group(key, index), group, key


def owners(scheduler: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The scheduler, those inside, and the callable objects whose attributes torch saves with it."""
    yield prefix, scheduler
    for name, part in _parts_of(scheduler):
        yield from owners(part, prefix + name)
    for number, function in enumerate(_functions_of(scheduler)):
        if hasattr(function, "__dict__") and not isinstance(function, FUNCTIONS):
            yield f"{prefix}{number}.", function


def _functions_of(scheduler: Any) -> list[Any]:
    return [*getattr(scheduler, "lr_lambdas", ()), getattr(scheduler, "_scale_fn_custom", None)]
