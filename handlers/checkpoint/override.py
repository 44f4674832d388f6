"""Settings of optimizers that a resume changes, with the numbers that their schedules hold of them."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from ignite.handlers.param_scheduler import ParamScheduler
from torch import Tensor
from torch.optim import Optimizer

from ignite_engine import Trainer
from ignite_engine.errors import StateMismatch, check_type, did_you_mean, dotted_part, is_number
from ignite_engine.handlers.checkpoint.scheduler_bases import (
    Change,
    Setting,
    atoms_of,
    base_of,
    cannot_rebase,
    expected_lr,
    is_near,
    named_schedulers_of,
    places_of,
    put,
    remember_lr,
    scale,
    schedulers_of,
)
from ignite_engine.ranks import agreement
from ignite_engine.states.model_and_optimizer import OptimizerState

logger = logging.getLogger(__name__)

_KERNELS = ("params", "foreach", "fused", "capturable", "differentiable")


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
        self.values = {key: _with_plain_floats(value) for key, value in (values or {}).items()}
        self.given_before: dict[str, Any] = {}
        """What the start gave that saved the checkpoint, by part, group and option, and as the user wrote it."""
        self._has_begun = False
        self._begun_again: set[str] = set()
        """The parts of optimizers that were not resumed, so that nothing of what was given before is in them."""
        self._given_in_vain: dict[str, Any] | None = None
        self._changes: list[Change] = []
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
                change = Change(key, setting, _fitting(key, value, before), before)
                self._check(trainer, change, optimizers[setting.part])
                self._changes.append(change)
        self._check_shared(trainer, optimizers)
        self.given_before = given
        words: dict[str, str] = {}
        bases = [self._base_of(trainer, change.setting, optimizers[change.setting.part]) for change in self._changes]
        for part in optimizers:
            self._rebase(trainer, part, schedulers_of(trainer, optimizers[part]), self._changes)
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
                for scheduler in schedulers_of(trainer, optimizer)
                if not any(scheduler is rebased for rebased in self._rebased)
            ]
            if not late:
                continue
            changes = []
            for change, made in zip(self._changes, self._made, strict=True):
                if any(base_of(scheduler, change.setting, optimizer) is not None for scheduler in late):
                    changes.append(change)
                elif change.setting.part == part:  # what was loaded into a schedule of another option has undone it
                    put(optimizer.param_groups[change.setting.group], change.setting.option, made)
            self._rebase(trainer, part, late, changes)
        self._changes = []

    def begin_fresh(self, trainer: Trainer) -> None:
        """There was nothing to resume: neither this start nor the same command after it changes anything."""
        self._has_begun, self._given_in_vain, self.given_before = True, {}, {}
        if not self.values:
            return
        optimizers = _optimizers_of(trainer)
        settings = self._settings(trainer, optimizers)
        for (part, index, option), (key, value) in settings.items():
            group = optimizers[part].param_groups[index]
            _try(key, optimizers[part], group, option, _fitting(key, value, group[option]))
        self.given_before = self._given_in_vain = self._given(settings)
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
                described = [
                    f"{base} ({groups[setting.group].get('name', setting.group)})"
                    for setting, base in zip(changed, bases, strict=True)
                ]
                raise _refusal(
                    key,
                    f"its groups have {' and '.join(described)}: name each that is to change, such as "
                    f"{key.removesuffix(option)}{groups[chosen[0]].get('name', chosen[0])}.{option}.",
                )
            settings |= {setting: (key, value) for setting in new}
        return settings

    def _check(self, trainer: Trainer, change: Change, optimizer: Optimizer) -> None:
        _, group, option = change.setting
        for scheduler, part in named_schedulers_of(trainer, optimizer):
            for atom in atoms_of(scheduler):
                if reason := cannot_rebase(atom, option):
                    raise _refusal(change.key, f"{type(atom).__name__} {reason}")
            if part not in trainer.resume_state.loaded and base_of(scheduler, change.setting, optimizer):
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
            for atom in (atom for scheduler in schedulers_of(trainer, optimizer) for atom in atoms_of(scheduler)):
                if not isinstance(atom, ParamScheduler) or not places_of(atom, change.setting, optimizer):
                    continue
                for index in range(len(optimizer.param_groups)):
                    other = change.setting._replace(group=index)
                    if places_of(atom, other, optimizer) and new.get(other) != change.value:
                        kind = type(atom).__name__
                        raise _refusal(change.key, f"{kind} sets all groups to one value: give all of them the same.")

    def _base_of(self, trainer: Trainer, setting: Setting, optimizer: Optimizer) -> Any:
        held = [
            base
            for scheduler in schedulers_of(trainer, optimizer)
            if (base := base_of(scheduler, setting, optimizer)) is not None
        ]
        value = optimizer.param_groups[setting.group][setting.option]
        return held[0] if held else float(value) if isinstance(value, Tensor) else value

    def _rebase(self, trainer: Trainer, part: str, schedulers: Sequence[Any], changes: Iterable[Change]) -> None:
        """Replace the values of one optimizer, and in these of its schedulers."""
        obj, optimizer = trainer.registry.objects[part], _optimizers_of(trainer)[part]
        scaled: set[tuple[int, Any]] = set()
        changes = [change for change in changes if change.setting.part == part]
        for change in changes:
            put(optimizer.param_groups[change.setting.group], change.setting.option, change.before)
        bases_of = {
            change: [base_of(scheduler, change.setting, optimizer) for scheduler in schedulers] for change in changes
        }
        was_set = {change: [expected_lr(scheduler, change.setting) for scheduler in schedulers] for change in changes}
        for change in changes:
            group, option = optimizer.param_groups[change.setting.group], change.setting.option
            bases = bases_of[change]
            base = next((base for base in bases if base is not None), None)
            if base is None:
                put(group, option, change.value)
            else:
                ratio = change.value / base if base else 0.0
                for scheduler in schedulers:
                    scale(scheduler, change, base, optimizer, scaled)
                now = float(group[option]) * ratio
                for scheduler, expected in zip(schedulers, was_set[change], strict=True):
                    # one with a floor, such as CosineAnnealingLR, is not a multiple of its base
                    is_alone = sum(base is not None for base in bases) == 1
                    if expected is not None and is_alone and is_near(expected, float(change.before)):
                        now = expected_lr(scheduler, change.setting) or now
                put(group, option, now)
                remember_lr(schedulers, change.setting.group, group[option])
            if isinstance(obj, OptimizerState):
                obj.note_override(change.setting.group, option, change.value)
        self._rebased += schedulers

    def _words(self, trainer: Trainer, change: Change, base: Any, optimizer: Optimizer) -> str:
        said = f"{change.key} {base} -> {change.value}"
        now = optimizer.param_groups[change.setting.group][change.setting.option]
        if any(
            base_of(scheduler, change.setting, optimizer) is not None for scheduler in schedulers_of(trainer, optimizer)
        ):
            said += f" (the schedule's base; of the next update {float(change.before):g} -> {float(now):g})"
        return said


_NOTHING = object()


def _refusal(key: str, reason: str) -> StateMismatch:
    return StateMismatch(f"override {key!r}: {reason}")


def _with_plain_floats(value: Any) -> Any:
    """Without NumPy's float64, a float that a checkpoint cannot hold."""
    if isinstance(value, list | tuple):
        return tuple(map(_with_plain_floats, value))
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
