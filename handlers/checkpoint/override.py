"""Settings of optimizers that a resume changes, with the numbers that their schedules hold of them."""

from __future__ import annotations

import inspect
import logging
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from ignite.handlers.param_scheduler import CyclicalScheduler, ParamGroupScheduler, ParamScheduler, PiecewiseLinear
from ignite.handlers.param_scheduler import LRScheduler as IgniteTorchScheduler
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import (
    CosineAnnealingWarmRestarts,
    CyclicLR,
    LRScheduler,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
)

from ignite_engine import Trainer
from ignite_engine.errors import StateMismatch, check_type, did_you_mean, dotted_part, is_number
from ignite_engine.ranks import agreement
from ignite_engine.schedules import Schedule
from ignite_engine.states.model_and_optimizer import OptimizerState

logger = logging.getLogger(__name__)

_KERNELS = ("params", "foreach", "fused", "capturable", "differentiable")


class Setting(NamedTuple):
    """One option of one parameter group."""

    part: str
    """The name under which the optimizer is registered."""
    group: int
    option: str


class _Change(NamedTuple):
    key: str
    """As the user wrote it."""
    setting: Setting
    value: Any
    before: Any
    """The option in the parameter group, which a schedule may have scaled."""


class Override:
    """Replaces settings of optimizers in a resumed run, once; moments and the schedules' progress stay.

    What a schedule sets is replaced in the schedule: its base becomes the new value, and all that it holds is scaled
    with it, so that the run goes on as if it had begun with that base. The base of one that holds several numbers is
    the largest. Without a schedule, and with ReduceLROnPlateau, the option itself is replaced.

    The values given are part of the handler's state: a start that gives the same ones as the start before changes
    nothing, whatever the run has made of them since.

    Args:
        values: by the optimizer and the option (``optimizer.lr``), where there are several optimizers with its name
            (``optimizers.dense.lr``), for one parameter group with its name or number (``optimizer.head.lr``).

    Raises:
        TypeError: it is not a mapping of such names.
    """

    def __init__(self, values: Mapping[str, Any] | None) -> None:
        expected = "a mapping such as {'optimizer.lr': 0.001}, or None"
        is_right = isinstance(values, Mapping) and all(isinstance(key, str) for key in values)
        check_type("override", values, values is None or is_right, expected)
        self.values = {key: _plain(value) for key, value in (values or {}).items()}
        self.given_before: dict[str, Any] = {}
        """What the start gave that saved the checkpoint, by part, group and option, and as the user wrote it."""
        self._has_begun = False
        self._begun_again: set[str] = set()
        """The parts of optimizers that were not resumed, so that nothing of what was given before is in them."""
        self._given_in_vain: dict[str, Any] | None = None
        self._changes: list[_Change] = []
        self._made: list[Any] = []
        """What each change has made of its option."""
        self._rebased: list[Any] = []
        self._unsaid = ""
        """The changes in words, until a run trains with them."""

    def announce(self, trainer: Trainer) -> None:
        """Before a resume: refuse unknown names; the optimizers are not to warn of what is replaced.

        Raises:
            StateMismatch: an optimizer or an option is not known, or the ranks were given other values.
        """
        if difference := agreement.first_difference(
            {f"override {key!r}": str(self.values[key]) for key in self.values}
        ):
            raise StateMismatch(f"{difference}: every rank must change the same.")
        optimizers = _optimizers_of(trainer)
        for obj in trainer.registry.objects.values():
            if isinstance(obj, OptimizerState):
                obj.overridden.clear()
        for key in self.values:
            part, group, option = _parsed(key, optimizers)
            obj = trainer.registry.objects[part]
            if isinstance(obj, OptimizerState):
                obj.overridden.add((group, option))

    def apply(self, trainer: Trainer) -> None:
        """After a resume: change what the start before did not change already.

        Raises:
            StateMismatch: a value does not fit; nothing was changed.
        """
        self._has_begun, self._given_in_vain = True, None
        self._changes, self._rebased, self._unsaid = [], [], ""
        if not self.values:
            self.given_before = {}
            return
        optimizers = _optimizers_of(trainer)
        self._begun_again = set(optimizers) - trainer.resume_state.loaded
        settings = self._settings(trainer, optimizers)
        given = self._given(settings)
        for setting, (key, value) in settings.items():
            if self._is_new(setting, key, value):
                group = optimizers[setting.part].param_groups[setting.group]
                before = group[setting.option]
                before = before.clone() if isinstance(before, Tensor) else before
                change = _Change(key, setting, _fitting(key, value, before), before)
                self._check(trainer, change, optimizers[setting.part])
                self._changes.append(change)
        self._check_shared(trainer, optimizers)
        self.given_before = given
        words: dict[str, str] = {}
        bases = [self._base_of(trainer, change.setting, optimizers[change.setting.part]) for change in self._changes]
        for part in optimizers:
            self._rebase(trainer, part, _schedulers_of(trainer, optimizers[part]), self._changes)
        self._made = [
            float(optimizers[part].param_groups[group][option]) if is_number(value) else value
            for _, (part, group, option), value, _ in self._changes
        ]
        for change, base in zip(self._changes, bases, strict=True):
            words.setdefault(change.key, self._words(trainer, change, base, optimizers[change.setting.part]))
        self._unsaid = ", ".join(words[key] for key in self.values if key in words)

    def start(self, trainer: Trainer) -> None:
        """A run starts: schedules that were attached after the resume follow."""
        if not self._has_begun:
            self.begin_fresh(trainer)
        end = trainer.last_iteration
        if self._unsaid and (end is None or trainer.state.iteration < end) and agreement.rank() == 0:
            logger.warning("Changed from iteration %d on: %s.", trainer.state.iteration + 1, self._unsaid)
        self._unsaid = ""
        if self._given_in_vain is not None:  # what was loaded from another run may have brought its own
            self.given_before, self._given_in_vain = self._given_in_vain, None
        for part, optimizer in _optimizers_of(trainer).items() if self._changes else ():
            late = [
                scheduler
                for scheduler in _schedulers_of(trainer, optimizer)
                if not any(scheduler is rebased for rebased in self._rebased)
            ]
            if not late:
                continue
            changes = []
            for change, made in zip(self._changes, self._made, strict=True):
                if any(_held(scheduler, change.setting, optimizer) is not None for scheduler in late):
                    changes.append(change)
                elif change.setting.part == part:  # what was loaded into a schedule of another option has undone it
                    _put(optimizer.param_groups[change.setting.group], change.setting.option, made)
            self._rebase(trainer, part, late, changes)
        self._changes = []

    def begin_fresh(self, trainer: Trainer) -> None:
        """There was nothing to resume: neither this start nor the same command after it changes anything."""
        self._has_begun, self._given_in_vain, self.given_before = True, {}, {}
        if not self.values:
            return
        self.given_before = self._given_in_vain = self._given(self._settings(trainer, _optimizers_of(trainer)))
        if agreement.rank() == 0:
            logger.warning(
                "%s: override has no effect on a run that starts fresh, nor where the same command resumes it: build "
                "the optimizer with the value.",
                ", ".join(self.values),
            )

    def _given(self, settings: Mapping[Setting, tuple[str, Any]]) -> dict[str, Any]:
        groups = {
            _label(setting): value
            for setting, (key, value) in settings.items()
            if _label(setting) in self.given_before or self._is_new(setting, key, value)
        }
        return {**self.values, **groups}

    def _is_new(self, setting: Setting, key: str, value: Any) -> bool:
        """Whether the start before did not give it. A group that the run has added since is given nothing by it."""
        label = _label(setting)
        before = self.given_before.get(label if label in self.given_before else key, _NOTHING)
        return bool(before != value) or setting.part in self._begun_again

    def _settings(self, trainer: Trainer, optimizers: Mapping[str, Optimizer]) -> dict[Setting, tuple[str, Any]]:
        """What is given, by group; a group's own name counts before that of all groups."""
        settings: dict[Setting, tuple[str, Any]] = {}
        parsed = [(key, value, *_parsed(key, optimizers)) for key, value in self.values.items()]
        for key, value, part, name, option in sorted(parsed, key=lambda entry: not entry[3]):
            groups = optimizers[part].param_groups
            chosen = [
                index for index, group in enumerate(groups) if not name or name in (str(index), group.get("name"))
            ]
            if not chosen:
                known = [str(group.get("name", index)) for index, group in enumerate(groups)]
                raise _refusal(key, f"the optimizer has no group {name!r}{did_you_mean(name, known)}")
            new = [Setting(part, index, option) for index in chosen if Setting(part, index, option) not in settings]
            changed = [setting for setting in new if self._is_new(setting, key, value)]
            bases = [self._base_of(trainer, setting, optimizers[part]) for setting in changed]
            if any(base != bases[0] for base in bases):
                each = [
                    f"{base} ({groups[setting.group].get('name', setting.group)})"
                    for setting, base in zip(changed, bases, strict=True)
                ]
                raise _refusal(
                    key,
                    f"its groups have {' and '.join(each)}: name each that is to change, such as "
                    f"{key.removesuffix(option)}{groups[chosen[0]].get('name', chosen[0])}.{option}.",
                )
            settings |= {setting: (key, value) for setting in new}
        return settings

    def _check(self, trainer: Trainer, change: _Change, optimizer: Optimizer) -> None:
        _, group, option = change.setting
        for scheduler, part in _named_schedulers_of(trainer, optimizer):
            for atom in _atoms(scheduler):
                if reason := _cannot_rebase(atom, option):
                    raise _refusal(change.key, f"{type(atom).__name__} {reason}")
            if part not in trainer.resume_state.loaded and _held(scheduler, change.setting, optimizer):
                raise _refusal(
                    change.key,
                    f"{part} is not resumed, so it begins with what the program builds: give the value there.",
                )
        if (base := self._base_of(trainer, change.setting, optimizer)) == 0 and change.before != 0:
            raise _refusal(change.key, f"the base of its schedule is {base}, which cannot be scaled.")
        _try(change.key, optimizer, optimizer.param_groups[group], option, change.value)

    def _check_shared(self, trainer: Trainer, optimizers: Mapping[str, Optimizer]) -> None:
        """Refuse to change one group where a scheduler sets several to one value."""
        new = {change.setting: change.value for change in self._changes}
        for change in self._changes:
            optimizer = optimizers[change.setting.part]
            for atom in (atom for scheduler in _schedulers_of(trainer, optimizer) for atom in _atoms(scheduler)):
                if not isinstance(atom, ParamScheduler) or not _held_by(atom, change.setting, optimizer):
                    continue
                for index in range(len(optimizer.param_groups)):
                    other = change.setting._replace(group=index)
                    if _held_by(atom, other, optimizer) and new.get(other) != change.value:
                        kind = type(atom).__name__
                        raise _refusal(change.key, f"{kind} sets all groups to one value: give all of them the same.")

    def _base_of(self, trainer: Trainer, setting: Setting, optimizer: Optimizer) -> Any:
        held = [
            base
            for scheduler in _schedulers_of(trainer, optimizer)
            if (base := _held(scheduler, setting, optimizer)) is not None
        ]
        value = optimizer.param_groups[setting.group][setting.option]
        return held[0] if held else float(value) if isinstance(value, Tensor) else value

    def _rebase(self, trainer: Trainer, part: str, schedulers: Sequence[Any], changes: Iterable[_Change]) -> None:
        """Replace the values of one optimizer, and in these of its schedulers."""
        obj, optimizer = trainer.registry.objects[part], _optimizers_of(trainer)[part]
        scaled: set[tuple[int, Any]] = set()
        changes = [change for change in changes if change.setting.part == part]
        for change in changes:
            _put(optimizer.param_groups[change.setting.group], change.setting.option, change.before)
        bases_of = {
            change: [_held(scheduler, change.setting, optimizer) for scheduler in schedulers] for change in changes
        }
        was_set = {change: [_expected(scheduler, change.setting) for scheduler in schedulers] for change in changes}
        for change in changes:
            group, option = optimizer.param_groups[change.setting.group], change.setting.option
            bases = bases_of[change]
            base = next((base for base in bases if base is not None), None)
            if base is None:
                _put(group, option, change.value)
            else:
                ratio = change.value / base if base else 0.0
                for scheduler in schedulers:
                    _scale(scheduler, change, base, optimizer, scaled)
                now = float(group[option]) * ratio
                for scheduler, expected in zip(schedulers, was_set[change], strict=True):
                    # one with a floor, such as CosineAnnealingLR, is not a multiple of its base
                    is_alone = sum(base is not None for base in bases) == 1
                    if expected is not None and is_alone and _is_near(expected, float(change.before)):
                        now = _expected(scheduler, change.setting) or now
                _put(group, option, now)
                _remember(schedulers, change.setting.group, group[option])
            if isinstance(obj, OptimizerState):
                obj.note_override(change.setting.group, option, change.value)
        self._rebased += schedulers

    def _words(self, trainer: Trainer, change: _Change, base: Any, optimizer: Optimizer) -> str:
        said = f"{change.key} {base} -> {change.value}"
        now = optimizer.param_groups[change.setting.group][change.setting.option]
        if any(
            _held(scheduler, change.setting, optimizer) is not None for scheduler in _schedulers_of(trainer, optimizer)
        ):
            said += f" (the schedule's base; of the next update {float(change.before):g} -> {float(now):g})"
        return said


_NOTHING = object()


def _refusal(key: str, reason: str) -> StateMismatch:
    return StateMismatch(f"override {key!r}: {reason}")


def _plain(value: Any) -> Any:
    """Without NumPy's float64, a float that a checkpoint cannot hold."""
    if isinstance(value, list | tuple):
        return tuple(map(_plain, value))
    return float(value) if isinstance(value, float) else value


def _label(setting: Setting) -> str:
    return "/".join(map(str, setting))


def _optimizers_of(trainer: Trainer) -> dict[str, Optimizer]:
    found = {}
    for name, obj in trainer.registry.objects.items():
        optimizer = obj.optimizer if isinstance(obj, OptimizerState) else obj
        if isinstance(optimizer, Optimizer):
            found[name] = optimizer
    return found


def _parsed(key: str, optimizers: Mapping[str, Optimizer]) -> tuple[str, str, str]:
    """The part, the name of the group (empty: all groups), and the option."""
    for part, optimizer in optimizers.items():
        for prefix in (dotted_part(part), part.replace("/", ".")):
            if key.startswith(f"{prefix}."):
                name, _, option = key.removeprefix(f"{prefix}.").rpartition(".")
                known = [option for option in optimizer.defaults if option in optimizer.param_groups[0]]
                if option not in known:
                    raise _refusal(key, f"the optimizer has no option {option!r}{did_you_mean(option, known)}")
                return part, name, option
    known = [f"{dotted_part(part)}.lr" for part in optimizers]
    near = f", such as {', '.join(known)}" if known else ", and no optimizer is registered"
    raise _refusal(key, f"expected the optimizer's name and an option{near}.")


def _fitting(key: str, value: Any, before: Any) -> Any:
    """The value in the type of the one that it replaces."""
    number = is_number(before) or (isinstance(before, Tensor) and before.numel() == 1)
    numbers = isinstance(before, tuple | list) and all(is_number(element) for element in before)
    before = float(before) if isinstance(before, Tensor) and number else before
    got = f"got {list(value) if isinstance(value, tuple) else value!r} in the place of {before}, "
    if number and not is_number(value):
        raise _refusal(key, f"{got}expected a number.")
    if numbers and not (
        isinstance(value, tuple) and len(value) == len(before) and all(is_number(element) for element in value)
    ):
        raise _refusal(key, f"{got}expected {len(before)} numbers.")
    if isinstance(before, bool) and not isinstance(value, bool):
        raise _refusal(key, f"{got}expected true or false.")
    if not (number or numbers or isinstance(before, bool)):
        raise _refusal(key, f"{got}which stays as it is.")
    return type(before)(value) if numbers else value


def _try(key: str, optimizer: Optimizer, group: Mapping[str, Any], option: str, value: Any) -> None:
    """Refuse what the optimizer itself refuses, or what needs a state that the checkpoint cannot have."""
    kind = type(optimizer)
    names = [name for name in inspect.signature(kind).parameters if name in group and name not in _KERNELS]
    options: dict[str, Any] = {
        name: float(group[name]) if isinstance(group[name], Tensor) else group[name] for name in names
    }
    parameter = torch.zeros(1, 1, requires_grad=True)
    parameter.grad = torch.zeros(1, 1)
    try:
        on_trial = kind([parameter], **options)
        on_trial.step()
    except Exception:  # not made or stepped in this way: nothing can be tried
        return
    try:
        kind([parameter], **{**options, option: value})
    except Exception as error:
        raise _refusal(key, f"{kind.__name__} says: {' '.join(str(error).split()).rstrip('.')}.") from None
    try:
        on_trial.param_groups[0][option] = value
        on_trial.step()
    except Exception as error:
        said = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise _refusal(key, f"{kind.__name__} cannot go on with it: {said.rstrip('.')}.") from None


# -- schedules ---------------------------------------------------------------------------------------------------------


def _named_schedulers_of(trainer: Trainer, optimizer: Optimizer) -> Iterator[tuple[Any, str]]:
    for name, obj in trainer.registry.objects.items():
        scheduler = obj.scheduler if trainer.registry.kinds[name] == "schedule" and hasattr(obj, "scheduler") else obj
        is_one = scheduler is not obj or isinstance(scheduler, LRScheduler | ParamScheduler | ParamGroupScheduler)
        theirs = getattr(scheduler, "optimizer", None) if is_one or isinstance(scheduler, Schedule) else None
        if any(each is optimizer for each in (theirs if isinstance(theirs, list) else [theirs])):
            yield scheduler, name


def _schedulers_of(trainer: Trainer, optimizer: Optimizer) -> list[Any]:
    return [scheduler for scheduler, _ in _named_schedulers_of(trainer, optimizer)]


def _atoms(scheduler: Any) -> Iterator[Any]:
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
        yield from _atoms(part)


def _cannot_rebase(atom: Any, option: str) -> str | None:
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


def _held_by(atom: Any, setting: Setting, optimizer: Optimizer) -> list[tuple[Any, Any]]:
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


def _held(scheduler: Any, setting: Setting, optimizer: Optimizer) -> float | None:
    """The base of an option; None: the scheduler does not set it."""
    values = [float(owner[key]) for atom in _atoms(scheduler) for owner, key in _held_by(atom, setting, optimizer)]
    return max(values, default=None)


def _scale(scheduler: Any, change: _Change, base: float, optimizer: Optimizer, scaled: set[tuple[int, Any]]) -> None:
    """Scale what a scheduler holds, so that ``base`` becomes the new value."""
    group = optimizer.param_groups[change.setting.group]
    held = [place for atom in _atoms(scheduler) for place in _held_by(atom, change.setting, optimizer)]
    if held and "initial_lr" in group and change.setting.option == "lr":
        held.append((group, "initial_lr"))
    for owner, key in held:
        if (id(owner), key) in scaled:  # by another group that the scheduler sets, too
            continue
        scaled.add((id(owner), key))
        value = float(owner[key])
        _put(owner, key, change.value if value == base else value * (change.value / base))


def _expected(scheduler: Any, setting: Setting) -> float | None:
    """The LR that a scheduler's closed form has for the next update; None: it has none."""
    while isinstance(scheduler, SequentialLR):
        passed = sum(scheduler.last_epoch >= milestone for milestone in scheduler._milestones)
        scheduler = scheduler._schedulers[passed]
    if isinstance(scheduler, Schedule):
        return scheduler.lrs_at(scheduler.steps)[setting.group] if scheduler.is_known else None
    if isinstance(scheduler, CosineAnnealingWarmRestarts) and setting.option == "lr":
        with warnings.catch_warnings():  # of a call outside of step()
            warnings.simplefilter("ignore")
            return float(scheduler.get_lr()[setting.group])
    closed_form = getattr(scheduler, "_get_closed_form_lr", None)
    return None if closed_form is None or setting.option != "lr" else float(closed_form()[setting.group])


def _remember(schedulers: Iterable[Any], index: int, lr: Any) -> None:
    """Let torch's schedulers say the LR that is set now."""
    for scheduler in schedulers:
        for torchs in (scheduler, *_atoms(scheduler)):
            last = getattr(torchs, "_last_lr", None)
            if isinstance(last, list) and index < len(last):
                last[index] = lr.clone() if isinstance(lr, Tensor) else lr


def _put(owner: Any, key: Any, value: Any) -> None:
    """In place where it is a tensor."""
    if isinstance(owner[key], Tensor):
        owner[key].fill_(value)
    else:
        owner[key] = value


def _is_near(first: float, second: float) -> bool:
    return abs(first - second) <= 1e-6 * max(abs(first), abs(second))
