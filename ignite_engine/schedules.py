"""Learning-rate schedules as pure functions of the step.

The convention, for every schedule here: the update number k, counted from 0, is made with ``base * factor(k)``. So with
``warmup=4`` the first four updates use 1/4, 2/4, 3/4 and 4/4 of the base LR, and none has an LR of 0. What follows the
warm-up starts from the full LR at update ``warmup`` and reaches its end at update ``total``, the first one after the
run; from there on the factor stays constant. A ``total`` of None is the length of the run, which is known when the run
starts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.optim import Optimizer

Shape = Callable[[int], Callable[[int], float]]
"""The factor of each update, as a function of the number of updates in all."""

DECAY_SHAPES = ("linear", "cosine", "1-sqrt", "exponential")


class Schedule:
    """LRs of an optimizer as a pure function of the number of updates made.

    Args:
        optimizer: the current ``lr`` of each parameter group is its base LR; a group added later is scheduled from
            the ``lr`` it is added with.
        factor: maps the 0-based number of an update to the factor of its base LRs; must be pure.
        description: what ``repr`` returns.
        shape: instead of ``factor``, of a schedule whose length is not known yet: until :meth:`set_total` it has no LR.

    The constructor changes nothing; :meth:`apply` and :meth:`step` set ``group["lr"]``, in place where it is a tensor.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        factor: Callable[[int], float] | None = None,
        description: str = "Schedule",
        *,
        shape: Shape | None = None,
    ) -> None:
        self.optimizer = optimizer
        self.factor_at = factor or self._unknown
        self.shape = shape
        self.total: int | None = None
        """What :meth:`set_total` was told; None: it was not, or the schedule has a length of its own."""
        self.description = description
        self.base_lrs = [float(group["lr"]) for group in optimizer.param_groups]
        self.steps = 0

    def set_total(self, total: int) -> None:
        """Be a schedule over ``total`` updates; for one that was made without.

        Raises:
            ValueError: its warm-up or decay does not fit.
        """
        assert self.shape is not None
        self.factor_at, self.total = self.shape(_total(total)), total

    @property
    def is_known(self) -> bool:
        """Whether it has LRs: its length was given, or :meth:`set_total` was called."""
        return self.shape is None or self.total is not None

    def _unknown(self, step: int) -> float:
        raise ValueError(
            f"{self.description} has the length of its run, which is known when the run starts: attach it by "
            "LRSchedule(...).attach(trainer), or give total, the number of updates."
        )

    def lrs_at(self, step: int) -> list[float]:
        """LR of each parameter group for the 0-based update ``step``; changes nothing."""
        factor = self.factor_at(step)
        return [base * factor for base in self.base_lrs]

    def apply(self) -> None:
        """Set the LRs of the next update."""
        groups, bases = self.optimizer.param_groups, self.base_lrs
        if len(groups) != len(bases):
            bases.extend(float(group["lr"]) for group in groups[len(bases) :])
        factor = self.factor_at(self.steps)
        for group, base in zip(groups, bases):
            set_lr(group, base * factor)

    def step(self) -> None:
        """Count one update and set the LRs of the next."""
        self.steps += 1
        self.apply()

    def get_last_lr(self) -> list[float]:
        """The LRs that the last ``apply()`` or ``step()`` set, of each parameter group; as torch's schedulers."""
        return self.lrs_at(self.steps)

    def state_dict(self) -> dict[str, Any]:
        state = {"steps": self.steps, "base_lrs": list(self.base_lrs)}
        return state if self.shape is None else {**state, "total": self.total}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore count and base LRs and set the LRs; ``warmup``, the shape and a given ``total`` stay as given."""
        self.steps = int(state["steps"])
        self.base_lrs = [float(base) for base in state["base_lrs"]]
        if self.shape is not None and state.get("total") is not None:
            self.set_total(state["total"])
        if self.is_known:
            self.apply()

    def __repr__(self) -> str:
        return self.description


def constant(optimizer: Optimizer) -> Schedule:
    """The base LR throughout."""
    return Schedule(optimizer, lambda step: 1.0, "constant()")


def warmup_constant(optimizer: Optimizer, warmup: int | float = 0, *, total: int | None = None) -> Schedule:
    """Linear warm-up, then the base LR; ``total`` is for a fractional ``warmup`` only, see :func:`warmup_cosine`."""
    description = f"warmup_constant({warmup=}, {total=})"
    if not isinstance(warmup, float):
        return Schedule(optimizer, _warm_constant(warmup, None if total is None else _total(total)), description)
    return _schedule(optimizer, lambda total: _warm_constant(warmup, total), total, description)


def warmup_linear(
    optimizer: Optimizer, warmup: int | float = 0, *, total: int | None = None, min_ratio: float = 0.0
) -> Schedule:
    """Linear warm-up, then a straight line to ``min_ratio`` of the base LR; see :func:`warmup_cosine`."""
    shape = _decaying(warmup, min_ratio, lambda progress: 1.0 - progress)
    return _schedule(optimizer, shape, total, f"warmup_linear({warmup=}, {total=}, {min_ratio=})")


def warmup_cosine(
    optimizer: Optimizer, warmup: int | float = 0, *, total: int | None = None, min_ratio: float = 0.0
) -> Schedule:
    """Linear warm-up, then half a cosine down to ``min_ratio`` of the base LR.

    Args:
        optimizer: whose parameter groups are scheduled, each from its own base LR.
        warmup: updates (int), or the fraction of ``total`` (float in [0, 1]).
        total: updates of the whole run, warm-up included. None: as many as the run has that it is attached to.
        min_ratio: the final LR as a ratio of the base LR, in [0, 1].

    Raises:
        ValueError: a value is out of its range.

    Source: Loshchilov and Hutter 2017, arXiv 1608.03983, equation 5, one period.
    """
    shape = _decaying(warmup, min_ratio, lambda progress: 0.5 * (1.0 + math.cos(math.pi * progress)))
    return _schedule(optimizer, shape, total, f"warmup_cosine({warmup=}, {total=}, {min_ratio=})")


def warmup_polynomial(
    optimizer: Optimizer,
    warmup: int | float = 0,
    *,
    total: int | None = None,
    power: float = 2.0,
    min_ratio: float = 0.0,
) -> Schedule:
    """Linear warm-up, then ``(1 - progress) ** power`` down to ``min_ratio``; see :func:`warmup_cosine`."""
    if not 0 < power < math.inf:
        raise ValueError(f"power must be a positive number, got {power}; 1.0 is a straight line.")
    shape = _decaying(warmup, min_ratio, lambda progress: (1.0 - progress) ** power)
    return _schedule(optimizer, shape, total, f"warmup_polynomial({warmup=}, {total=}, {power=}, {min_ratio=})")


def warmup_inverse_sqrt(
    optimizer: Optimizer, warmup: int | float = 0, *, total: int | None = None, min_ratio: float = 0.0
) -> Schedule:
    """Linear warm-up, then ``sqrt(warmup / updates)``, never below ``min_ratio``; held at ``total`` if that is given.

    Without a warm-up it is ``1 / sqrt(updates)``, updates counted from 1. A ``total`` of None is the length of the run
    for a fractional ``warmup``.

    Source: Vaswani et al. 2017, arXiv 1706.03762, equation 3, scaled to 1 at its peak.
    """
    description = f"warmup_inverse_sqrt({warmup=}, {total=}, {min_ratio=})"
    _check_ratio(min_ratio)
    end = math.inf if total is None else _total(total)

    def shape(total: int | None) -> Callable[[int], float]:
        steps = _duration("warmup", warmup, total)
        scale = max(steps, 1)
        return _after_warmup(steps, lambda step: max(min_ratio, math.sqrt(scale / (min(step, end) + 1))))

    if not isinstance(warmup, float):
        return Schedule(optimizer, shape(total), description)
    return _schedule(optimizer, shape, total, description)


def warmup_wsd(
    optimizer: Optimizer,
    warmup: int | float = 0,
    *,
    total: int | None = None,
    decay: int | float = 0.1,
    decay_shape: str = "linear",
    min_ratio: float = 0.0,
) -> Schedule:
    """Warm-up, stable, decay: the base LR is held until the last ``decay`` updates.

    Args:
        decay: updates (int), or the fraction of ``total`` (float in [0, 1]).
        decay_shape: ``linear``, ``cosine``, ``1-sqrt``, or ``exponential`` (``min_ratio ** progress``: needs a positive
            ``min_ratio``).

    Other arguments and errors: as for :func:`warmup_cosine`.

    Source: Hu et al. 2024, arXiv 2404.06395 (WSD); Haegele et al. 2024, arXiv 2405.18392 (1-sqrt).
    """
    if decay_shape not in DECAY_SHAPES:
        raise ValueError(f"decay_shape must be one of {', '.join(DECAY_SHAPES)}, got {decay_shape!r}.")
    _check_ratio(min_ratio)
    if decay_shape == "exponential" and min_ratio == 0:
        raise ValueError("decay_shape='exponential' never reaches 0: give a min_ratio above 0, for instance 0.01.")
    shapes: dict[str, Callable[[float], float]] = {
        "linear": lambda progress: 1.0 - progress,
        "cosine": lambda progress: 0.5 * (1.0 + math.cos(math.pi * progress)),
        "1-sqrt": lambda progress: 1.0 - math.sqrt(progress),
    }
    falling = (
        (lambda progress: float(min_ratio**progress))
        if decay_shape == "exponential"
        else _above(min_ratio, shapes[decay_shape])
    )

    def shape(total: int) -> Callable[[int], float]:
        warmup_steps, decay_steps = _duration("warmup", warmup, total), _duration("decay", decay, total)
        if decay_steps == 0:
            raise ValueError(f"decay must be at least 1 update, got {decay!r}; warmup_constant has no decay.")
        if warmup_steps + decay_steps > total:
            raise ValueError(
                f"warmup ({warmup_steps} updates) and decay ({decay_steps}) must fit in total={total}; "
                "shorten one of them."
            )
        return _after_warmup(warmup_steps, _progressing(total - decay_steps, decay_steps, falling))

    description = f"warmup_wsd({warmup=}, {total=}, {decay=}, {decay_shape=}, {min_ratio=})"
    return _schedule(optimizer, shape, total, description)


def set_lr(group: dict[str, Any], lr: float) -> None:
    """Set the LR of a parameter group, in place where it is a tensor."""
    if isinstance(group["lr"], torch.Tensor):
        group["lr"].fill_(lr)
    else:
        group["lr"] = lr


_LONG = 2**40
"""A length with which only what is wrong for every length is wrong."""


def _schedule(optimizer: Optimizer, shape: Shape, total: int | None, description: str) -> Schedule:
    """The schedule over ``total`` updates, or of a run whose length is not known yet."""
    if total is not None:
        return Schedule(optimizer, shape(_total(total)), description)
    shape(_LONG)
    return Schedule(optimizer, None, description, shape=shape)


def _warm_constant(warmup: int | float, total: int | None) -> Callable[[int], float]:
    return _after_warmup(_duration("warmup", warmup, total), lambda step: 1.0)


def _after_warmup(warmup: int, after: Callable[[int], float]) -> Callable[[int], float]:
    return lambda step: (step + 1) / warmup if step < warmup else after(step)


def _progressing(start: int, length: int, shape: Callable[[float], float]) -> Callable[[int], float]:
    """``shape`` over progress from 0 at update ``start`` to 1 at ``start + length`` and ever after; 1 before."""
    end = start + length
    return lambda step: shape(1.0) if step >= end else 1.0 if step <= start else shape((step - start) / length)


def _above(floor: float, shape: Callable[[float], float]) -> Callable[[float], float]:
    return lambda progress: floor + (1.0 - floor) * shape(progress)


def _decaying(warmup: int | float, min_ratio: float, shape: Callable[[float], float]) -> Shape:
    _check_ratio(min_ratio)

    def over(total: int) -> Callable[[int], float]:
        steps = _duration("warmup", warmup, total)
        return _after_warmup(steps, _progressing(steps, total - steps, _above(min_ratio, shape)))

    return over


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
        assert total is not None, "a fraction waits for the length of the run"
        return round(value * total)
    if value < 0 or (total is not None and value > total):
        limit = "" if total is None else f" and at most total={total}"
        raise ValueError(f"{name} must be at least 0{limit} updates, got {value}.")
    return value
