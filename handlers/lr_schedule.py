"""Learning-rate schedules as pure functions of the step, and the handler that moves any schedule with the optimizer.

The convention, for every schedule here: the update number k, counted from 0, is made with ``base * factor(k)``. So with
``warmup=4`` the first four updates use 1/4, 2/4, 3/4 and 4/4 of the base LR, and none is wasted on an LR of 0. What
follows the warm-up starts from the full LR at update ``warmup`` and would reach its end at update ``total``, which is
the first one after the run; from there on the factor stays what it is at ``total``.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from ignite.engine import Engine, Events
from ignite.handlers.param_scheduler import LRScheduler as IgniteTorchScheduler
from ignite.handlers.param_scheduler import ParamGroupScheduler, ParamScheduler, ReduceLROnPlateauScheduler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from ignite_engine.events import Phase, TrainingEvents

DECAY_SHAPES = ("linear", "cosine", "1-sqrt", "exponential")


class Schedule:
    """LRs of an optimizer as a pure function of the number of updates made.

    Args:
        optimizer: the ``lr`` that each parameter group has now is its base; a group added later is scheduled from the
            ``lr`` it is added with.
        factor: maps the 0-based number of an update to what its base LRs are multiplied by; must be pure.
        description: how ``repr`` names it.

    Making one touches nothing; :meth:`apply` and :meth:`step` set ``group["lr"]``, in place where it is a tensor.
    """

    def __init__(self, optimizer: Optimizer, factor: Callable[[int], float], description: str = "Schedule") -> None:
        self.optimizer = optimizer
        self.factor_at = factor
        self.description = description
        self.base_lrs = [float(group["lr"]) for group in optimizer.param_groups]
        self.steps = 0

    def lrs_at(self, step: int) -> list[float]:
        """LR of each parameter group for the 0-based update ``step``; changes nothing."""
        factor = self.factor_at(step)
        return [base * factor for base in self.base_lrs]

    def apply(self) -> None:
        """Set the LRs of the update that comes next."""
        groups, bases = self.optimizer.param_groups, self.base_lrs
        if len(groups) != len(bases):
            bases.extend(float(group["lr"]) for group in groups[len(bases) :])
        factor = self.factor_at(self.steps)
        for group, base in zip(groups, bases):
            _set_lr(group, base * factor)

    def step(self) -> None:
        """Count one update as made and set the LRs of the next."""
        self.steps += 1
        self.apply()

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps, "base_lrs": list(self.base_lrs)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up count and base LRs and set the LRs; ``warmup``, ``total`` and the shape stay as they were given."""
        self.steps = int(state["steps"])
        self.base_lrs = [float(base) for base in state["base_lrs"]]
        self.apply()

    def __repr__(self) -> str:
        return self.description


def constant(optimizer: Optimizer) -> Schedule:
    """The base LR throughout."""
    return Schedule(optimizer, lambda step: 1.0, "constant()")


def warmup_constant(optimizer: Optimizer, warmup: int | float = 0, *, total: int | None = None) -> Schedule:
    """Linear warm-up, then the base LR. A ``warmup`` given as a fraction needs ``total``; see :func:`warmup_cosine`."""
    steps = _duration("warmup", warmup, None if total is None else _total(total))
    return Schedule(optimizer, _after_warmup(steps, lambda step: 1.0), f"warmup_constant({warmup=}, {total=})")


def warmup_linear(optimizer: Optimizer, warmup: int | float = 0, *, total: int, min_ratio: float = 0.0) -> Schedule:
    """Linear warm-up, then a straight line to ``min_ratio`` of the base LR; see :func:`warmup_cosine`."""
    factor = _decaying(warmup, total, min_ratio, lambda progress: 1.0 - progress)
    return Schedule(optimizer, factor, f"warmup_linear({warmup=}, {total=}, {min_ratio=})")


def warmup_cosine(optimizer: Optimizer, warmup: int | float = 0, *, total: int, min_ratio: float = 0.0) -> Schedule:
    """Linear warm-up, then half a cosine down to ``min_ratio`` of the base LR.

    Args:
        optimizer: whose parameter groups are scheduled, each from its own base LR.
        warmup: updates (int), or the fraction of ``total`` (float in [0, 1]).
        total: updates of the whole run, warm-up included.
        min_ratio: the end, as a ratio of the base LR, in [0, 1].

    Raises:
        ValueError: a value is out of its range.

    Source: Loshchilov and Hutter 2017, arXiv 1608.03983, equation 5, one period.
    """
    factor = _decaying(warmup, total, min_ratio, lambda progress: 0.5 * (1.0 + math.cos(math.pi * progress)))
    return Schedule(optimizer, factor, f"warmup_cosine({warmup=}, {total=}, {min_ratio=})")


def warmup_polynomial(
    optimizer: Optimizer, warmup: int | float = 0, *, total: int, power: float = 2.0, min_ratio: float = 0.0
) -> Schedule:
    """Linear warm-up, then ``(1 - progress) ** power`` down to ``min_ratio``; see :func:`warmup_cosine`."""
    if not 0 < power < math.inf:
        raise ValueError(f"power must be a positive number, got {power}; 1.0 is a straight line.")
    factor = _decaying(warmup, total, min_ratio, lambda progress: (1.0 - progress) ** power)
    return Schedule(optimizer, factor, f"warmup_polynomial({warmup=}, {total=}, {power=}, {min_ratio=})")


def warmup_inverse_sqrt(
    optimizer: Optimizer, warmup: int | float = 0, *, total: int | None = None, min_ratio: float = 0.0
) -> Schedule:
    """Linear warm-up, then ``sqrt(warmup / updates)``, never below ``min_ratio``; held at ``total`` if that is given.

    Without a warm-up it is ``1 / sqrt(updates)``, updates counted from 1.

    Source: Vaswani et al. 2017, arXiv 1706.03762, equation 3, scaled to 1 at its peak.
    """
    end = math.inf if total is None else _total(total)
    steps = _duration("warmup", warmup, None if total is None else total)
    _check_ratio(min_ratio)
    scale = max(steps, 1)
    factor = _after_warmup(steps, lambda step: max(min_ratio, math.sqrt(scale / (min(step, end) + 1))))
    return Schedule(optimizer, factor, f"warmup_inverse_sqrt({warmup=}, {total=}, {min_ratio=})")


def warmup_wsd(
    optimizer: Optimizer,
    warmup: int | float = 0,
    *,
    total: int,
    decay: int | float = 0.1,
    decay_shape: str = "linear",
    min_ratio: float = 0.0,
) -> Schedule:
    """Warm-up, stable, decay: the base LR is held until the last ``decay`` updates.

    Args:
        decay: updates (int), or the fraction of ``total`` (float in [0, 1]).
        decay_shape: ``linear``, ``cosine``, ``1-sqrt``, or ``exponential`` (``min_ratio ** progress``: needs a positive
            ``min_ratio``).

    The others and the errors are as for :func:`warmup_cosine`.

    Source: Hu et al. 2024, arXiv 2404.06395 (WSD); Haegele et al. 2024, arXiv 2405.18392 (1-sqrt).
    """
    total, warmup_steps, decay_steps = (
        _total(total),
        _duration("warmup", warmup, total),
        _duration("decay", decay, total),
    )
    if decay_steps == 0:
        raise ValueError(f"decay must be at least 1 update, got {decay!r}; warmup_constant has no decay.")
    if warmup_steps + decay_steps > total:
        raise ValueError(
            f"warmup ({warmup_steps} updates) and decay ({decay_steps}) must fit in total={total}; shorten one of them."
        )
    if decay_shape not in DECAY_SHAPES:
        raise ValueError(f"decay_shape must be one of {', '.join(DECAY_SHAPES)}, got {decay_shape!r}.")
    _check_ratio(min_ratio)
    if decay_shape == "exponential":
        if min_ratio == 0:
            raise ValueError("decay_shape='exponential' never reaches 0: give a min_ratio above 0, for instance 0.01.")
        after = _progressing(total - decay_steps, decay_steps, lambda progress: float(min_ratio**progress))
    else:
        shapes: dict[str, Callable[[float], float]] = {
            "linear": lambda progress: 1.0 - progress,
            "cosine": lambda progress: 0.5 * (1.0 + math.cos(math.pi * progress)),
            "1-sqrt": lambda progress: 1.0 - math.sqrt(progress),
        }
        after = _progressing(total - decay_steps, decay_steps, _above(min_ratio, shapes[decay_shape]))
    description = f"warmup_wsd({warmup=}, {total=}, {decay=}, {decay_shape=}, {min_ratio=})"
    return Schedule(optimizer, _after_warmup(warmup_steps, after), description)


class LRSchedule:
    """Steps a schedule once after each applied optimizer step, never after a skipped one, and publishes the LRs.

    Args:
        scheduler: a :class:`Schedule`, any scheduler of ``torch.optim.lr_scheduler`` but ReduceLROnPlateau, or a native
            one of Ignite (they are called once here for the first update, then once per applied step). Ignite's
            ``LRScheduler`` is opened and the torch scheduler within is stepped.
        name: the stable name of its state in checkpoints; a second one in the same trainer needs its own.

    Writes on METRICS_READY, so nothing on quiet iterations: ``lr``, the LR that the last applied update used (before
    the first: the one it will use), of the first parameter group; with several groups also ``lr/<name of the group>``,
    where ``group["name"]`` is missing its index. With a ``name`` of your own ``lr`` becomes ``lr/<name>``.

    Raises:
        ValueError: the scheduler needs a metric, or (in ``attach``) is not over one of the trainer's optimizers.
        TypeError: not a scheduler.
    """

    def __init__(self, scheduler: Any, *, name: str = "lr_schedule") -> None:
        if isinstance(scheduler, (ReduceLROnPlateau, ReduceLROnPlateauScheduler)):
            raise ValueError(
                f"{type(scheduler).__name__} follows a metric, and LRSchedule steps with the optimizer; "
                "step it in a handler of your own on TrainingEvents.EVALUATION_COMPLETED."
            )
        if isinstance(scheduler, IgniteTorchScheduler):
            # Ignite asks chainable torch schedulers for an LR without setting it first, and many go wrong
            inner = scheduler.lr_scheduler
            scheduler = getattr(inner, "_lr_scheduler", inner)
        if not isinstance(scheduler, (Schedule, LRScheduler, ParamScheduler, ParamGroupScheduler)):
            raise TypeError(
                f"scheduler must be a Schedule, a torch or an Ignite scheduler, got {type(scheduler).__name__}; "
                "make one with warmup_cosine(optimizer, warmup=100, total=10_000), for instance."
            )
        self.scheduler: Any = scheduler
        self.name = name
        self._called = isinstance(scheduler, (ParamScheduler, ParamGroupScheduler))
        self._primed = not self._called
        self._moved = False
        self._used: list[Any] = []  # not for a Schedule, which can be asked

    def attach(self, trainer: Engine) -> None:
        """Subscribe, register the state under :attr:`name`, and set the LR of the first update."""
        known = getattr(getattr(trainer, "update", None), "optimizers", None)
        if isinstance(known, Mapping) and not any(self._optimizer is optimizer for optimizer in known.values()):
            raise ValueError(
                f"The scheduler of LRSchedule {self.name!r} is not over one of the trainer's optimizers "
                f"({', '.join(known)}); make it from the optimizer that was given to Update."
            )
        self._prepare(trainer)
        if hasattr(trainer, "register"):
            trainer.register(self.name, self, shared=True)  # before subscribing, which would register it as unshared
        trainer.add_event_handler(Events.STARTED, self._prepare)
        trainer.add_event_handler(TrainingEvents.OPTIMIZER_STEP_COMPLETED, self)
        trainer.add_event_handler(TrainingEvents.METRICS_READY, self._publish)
        trainer.add_event_handler(Events.EPOCH_COMPLETED(once=1) | Events.COMPLETED, self._warn_if_unmoved)

    def __call__(self, trainer: Engine) -> None:
        self._moved = True
        if not isinstance(self.scheduler, Schedule):
            # a clone of a tensor, not a float: no host sync per step
            lrs = [group["lr"] for group in self._optimizer.param_groups]
            self._used = [lr.clone() if isinstance(lr, torch.Tensor) else lr for lr in lrs]
        if self._called:
            self.scheduler(trainer)
        else:
            self.scheduler.step()

    def state_dict(self) -> dict[str, Any]:
        """The scheduler's own state; the LRs set now and the LRs of the last update, per group, as floats."""
        lrs = [float(group["lr"]) for group in self._optimizer.param_groups]
        used = [float(lr) for lr in self._used]
        return {"scheduler": self.scheduler.state_dict(), "lrs": lrs, "used": used}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        groups = self._optimizer.param_groups
        if len(state["lrs"]) != len(groups):
            raise ValueError(
                f"The saved state of LRSchedule {self.name!r} has {len(state['lrs'])} parameter groups and "
                f"the optimizer has {len(groups)}; build the same groups, or resume(ignore=[{self.name!r}])."
            )
        self.scheduler.load_state_dict(state["scheduler"])
        self._primed, self._used = True, list(state["used"])
        for group, lr in zip(groups, state["lrs"]):
            _set_lr(group, lr)

    @property
    def _optimizer(self) -> Optimizer:
        optimizer = self.scheduler.optimizer  # a ParamGroupScheduler has a list, one for each of its schedulers
        return optimizer[0] if isinstance(optimizer, list) else optimizer  # type: ignore[no-any-return]  # theirs is untyped

    def _prepare(self, trainer: Engine) -> None:
        # Also on STARTED: an optimizer whose state was loaded without this schedule's carries an LR of its own.
        if isinstance(self.scheduler, Schedule):
            self.scheduler.apply()
        elif not self._primed:
            self.scheduler(trainer)
            self._primed = True

    def _publish(self, trainer: Engine) -> None:
        groups = self._optimizer.param_groups
        if isinstance(self.scheduler, Schedule):
            lrs = self.scheduler.lrs_at(max(self.scheduler.steps - 1, 0))
        else:
            lrs = [float(lr) for lr in self._used or [group["lr"] for group in groups]]
        key = "lr" if self.name == "lr_schedule" else f"lr/{self.name}"
        trainer.state.metrics[key] = lrs[0]
        if len(lrs) > 1:
            for index, (group, lr) in enumerate(zip(groups, lrs)):
                trainer.state.metrics[f"{key}/{group.get('name', index)}"] = lr

    def _warn_if_unmoved(self, trainer: Engine) -> None:
        if not self._moved and trainer.state.iteration and not getattr(trainer.state, "skipped_steps", 0):
            warnings.warn(
                f"LRSchedule {self.name!r} did not move in {trainer.state.iteration} iterations: the update fired no "
                "OPTIMIZER_STEP_COMPLETED; fire it after optimizer.step(), as Update does.",
                stacklevel=2,
            )

    _publish.phase = Phase.MEASURE  # type: ignore[attr-defined]  # read by the Trainer


def _set_lr(group: dict[str, Any], lr: float) -> None:
    held = group["lr"]
    if isinstance(held, torch.Tensor):
        held.fill_(lr)
    else:
        group["lr"] = lr


def _after_warmup(warmup: int, after: Callable[[int], float]) -> Callable[[int], float]:
    return lambda step: (step + 1) / warmup if step < warmup else after(step)


def _progressing(start: int, length: int, shape: Callable[[float], float]) -> Callable[[int], float]:
    """``shape`` over progress from 0 at update ``start`` to 1 at ``start + length`` and ever after; 1 before."""
    end = start + length
    return lambda step: shape(1.0) if step >= end else 1.0 if step <= start else shape((step - start) / length)


def _above(floor: float, shape: Callable[[float], float]) -> Callable[[float], float]:
    return lambda progress: floor + (1.0 - floor) * shape(progress)


def _decaying(
    warmup: int | float, total: int, min_ratio: float, shape: Callable[[float], float]
) -> Callable[[int], float]:
    steps = _duration("warmup", warmup, _total(total))
    _check_ratio(min_ratio)
    return _after_warmup(steps, _progressing(steps, total - steps, _above(min_ratio, shape)))


def _total(total: int) -> int:
    if isinstance(total, bool) or not isinstance(total, int) or total < 1:
        raise ValueError(
            f"total must be the number of updates of the run, a whole number of at least 1, got {total!r}."
        )
    return total


def _check_ratio(min_ratio: float) -> None:
    if not 0 <= min_ratio <= 1:
        raise ValueError(f"min_ratio must be a ratio of the base LR in [0, 1], got {min_ratio}.")


def _duration(name: str, value: int | float, total: int | None) -> int:
    """A number of updates, from a number of updates (int) or from a fraction of ``total`` (float)."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"{name} must be a number of updates or a fraction of total, got {value!r}.")
    if isinstance(value, float):
        if not 0 <= value <= 1:
            raise ValueError(f"{name} must be updates (int) or a fraction in [0, 1] (float), got {value}.")
        if total is None:
            raise ValueError(f"{name}={value} is a fraction of total: give total too, or {name} as an int.")
        return round(value * total)
    if value < 0 or (total is not None and value > total):
        limit = "" if total is None else f" and at most total={total}"
        raise ValueError(f"{name} must be at least 0{limit} updates, got {value}.")
    return value
