"""Every schedule in one table: the rate of each update by a closed formula, in a trainer that also skips steps.

That they resume is in tests/handlers/test_stateful.py.
"""

import math
import warnings

import pytest
import torch
from ignite import handlers as of_ignite
from torch import nn
from torch.optim import SGD
from torch.optim import lr_scheduler as of_torch

from ignite_engine import Trainer, Update
from ignite_engine.handlers import LRSchedule
from ignite_engine.schedules import (
    constant,
    warmup_constant,
    warmup_cosine,
    warmup_inverse_sqrt,
    warmup_linear,
    warmup_polynomial,
    warmup_wsd,
)

BASES = (0.5, 2.0)


def sgd(*bases):
    return SGD([{"params": [nn.Parameter(torch.ones(2))], "lr": lr} for lr in bases or BASES], lr=1.0)


def warming(updates, after):
    """Equal steps from the first update, and the base with the last of the warm-up; then ``after``."""
    return lambda k: (k + 1) / updates if k < updates else after(k)


def falling(start, end, shape):
    """1 until update ``start``, ``shape`` of the progress from there to ``end``, and its last value ever after."""
    return lambda k: shape(min(max((k - start) / (end - start), 0.0), 1.0))


def cosine(progress):
    return (1 + math.cos(math.pi * progress)) / 2


OURS = {
    "constant": (constant, lambda k: 1.0),
    "warmup_constant": (lambda o: warmup_constant(o, 0.25, total=8), warming(2, lambda k: 1.0)),
    "warmup_linear": (
        lambda o: warmup_linear(o, 2, total=6, min_ratio=0.5),
        warming(2, falling(2, 6, lambda p: 0.5 + 0.5 * (1 - p))),
    ),
    "warmup_cosine": (lambda o: warmup_cosine(o, 2, total=7), warming(2, falling(2, 7, cosine))),
    "warmup_cosine to a tenth": (
        lambda o: warmup_cosine(o, 0.25, total=8, min_ratio=0.1),
        warming(2, falling(2, 8, lambda p: 0.1 + 0.9 * cosine(p))),
    ),
    "warmup_polynomial": (lambda o: warmup_polynomial(o, total=5), falling(0, 5, lambda p: (1 - p) ** 2)),
    "warmup_polynomial, cubic": (
        lambda o: warmup_polynomial(o, 1, total=8, power=3.0, min_ratio=0.2),
        warming(1, falling(1, 8, lambda p: 0.2 + 0.8 * (1 - p) ** 3)),
    ),
    "warmup_inverse_sqrt": (lambda o: warmup_inverse_sqrt(o, 2), warming(2, lambda k: math.sqrt(2 / (k + 1)))),
    "warmup_inverse_sqrt above a ratio": (
        lambda o: warmup_inverse_sqrt(o, min_ratio=0.4),
        lambda k: max(0.4, math.sqrt(1 / (k + 1))),
    ),
    "warmup_inverse_sqrt, held at total": (
        lambda o: warmup_inverse_sqrt(o, 2, total=7),
        warming(2, lambda k: math.sqrt(2 / (min(k, 7) + 1))),
    ),
    **{
        f"warmup_wsd, {shape}": (
            lambda o, shape=shape, ratio=ratio: warmup_wsd(o, 2, total=8, decay=4, decay_shape=shape, min_ratio=ratio),
            warming(2, falling(4, 8, formula)),
        )
        for shape, ratio, formula in (
            ("linear", 0.2, lambda p: 0.2 + 0.8 * (1 - p)),
            ("cosine", 0.0, cosine),
            ("1-sqrt", 0.0, lambda p: 1 - math.sqrt(p)),
            ("exponential", 0.0625, lambda p: 0.0625**p),
        )
    },
    "warmup_wsd, fractions": (
        lambda o: warmup_wsd(o, 0.25, total=8, decay=0.5),
        warming(2, falling(4, 8, lambda p: 1 - p)),
    ),
}
"""By name: makes the schedule; the factor of update k, counted from 0."""


def cyclical(optimizer):
    return of_ignite.LinearCyclicalScheduler(optimizer, "lr", 1.0, 0.0, 6, cycle_mult=2.0)


def warmed_up(optimizer):
    down = of_ignite.CosineAnnealingScheduler(optimizer, "lr", 0.5, 0.0, 18)
    return of_ignite.create_lr_scheduler_with_warmup(down, warmup_start_value=0.0, warmup_duration=4)


def of_both_groups(optimizer):
    ends = enumerate((0.0, 2.0))
    return of_ignite.ParamGroupScheduler(
        [of_ignite.LinearCyclicalScheduler(optimizer, "lr", 1.0, end, 4, param_group_index=at) for at, end in ends]
    )


class OwnSchedule:
    """As those of other libraries, which are none of torch's."""

    def __init__(self, optimizer):
        self.optimizer, self.count = optimizer, 0
        self.set()

    def set(self):
        for group, base in zip(self.optimizer.param_groups, BASES, strict=False):
            group["lr"] = base / (1 + self.count)

    def step(self):
        self.count += 1
        self.set()

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"]


OTHERS = {
    "LambdaLR": lambda o: of_torch.LambdaLR(o, lambda step: 1 / (1 + step)),
    "CosineAnnealingWarmRestarts": lambda o: of_torch.CosineAnnealingWarmRestarts(o, 3, 2),
    "SequentialLR": lambda o: of_torch.SequentialLR(
        o, [of_torch.LinearLR(o, 0.1, 1.0, 4), of_torch.CosineAnnealingLR(o, 8)], milestones=[4]
    ),
    "one of another library": OwnSchedule,
    "LinearCyclicalScheduler": cyclical,
    "ConcatScheduler": warmed_up,
    "ParamGroupScheduler": of_both_groups,
    "torch's in Ignite's LRScheduler": lambda o: of_ignite.LRScheduler(of_torch.CosineAnnealingWarmRestarts(o, 3, 2)),
}
"""Schedulers of torch, which step after each update, and those of Ignite, which are called before."""


def bare_loop(make, updates):
    """The rates that a loop of one's own would have."""
    optimizer, rates = sgd(), []
    scheduler = make(optimizer)
    if isinstance(scheduler, of_ignite.LRScheduler):  # alone it gives wrong ones, of which we take what is inside
        scheduler = OTHERS["CosineAnnealingWarmRestarts"](optimizer := sgd())
    is_called = callable(scheduler)
    for _ in range(updates):
        if is_called:
            scheduler(None)
        rates.append([group["lr"] for group in optimizer.param_groups])
        optimizer.step()
        if not is_called:
            scheduler.step()
    return rates


def in_a_trainer(make, weights=(1,), optimizer=None):
    """The rates of its updates, and the trainer; a batch of weight 0 makes none."""
    optimizer, rates = optimizer or sgd(), []

    def loss_fn(model, batch):
        rates.append([float(group["lr"]) for group in optimizer.param_groups])
        return sum((group["params"][0] ** 2).sum() for group in optimizer.param_groups)

    model = nn.ParameterList([group["params"][0] for group in optimizer.param_groups])
    trainer = Trainer(Update(model, optimizer, loss_fn, weight_fn=lambda batch: batch))
    LRSchedule(make(optimizer)).attach(trainer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch warns where a schedule moves before its optimizer
        trainer.run(weights, max_epochs=1)
    return rates, trainer


SOME_SKIPPED = (0, 1, 1, 0, 0, *[1] * 10)


@pytest.mark.row("E1")
@pytest.mark.parametrize("name", OURS)
def test_rate_of_each_update_is_that_of_the_formula(name):
    make, factor = OURS[name]
    schedule = make(sgd())
    expected = [[base * factor(k) for base in BASES] for k in [*range(12), 10**6]]

    assert [schedule.lrs_at(k) for k in [*range(12), 10**6]] == [pytest.approx(each, rel=1e-14) for each in expected]
    rates, trainer = in_a_trainer(make, SOME_SKIPPED)
    assert rates == [schedule.lrs_at(k) for k in range(12)] and trainer.state.skipped_steps == 3


@pytest.mark.row("B7", "E2")
@pytest.mark.parametrize("name", OTHERS)
def test_other_schedulers_have_the_rates_of_a_loop_of_ones_own(name):
    rates, _ = in_a_trainer(OTHERS[name], SOME_SKIPPED)

    assert rates == bare_loop(OTHERS[name], 12) and len({tuple(each) for each in rates}) > 2


def test_a_rate_that_is_a_tensor_is_filled_in_place():
    optimizer = sgd(torch.tensor(0.5, dtype=torch.float64))
    held = optimizer.param_groups[0]["lr"]
    rates, _ = in_a_trainer(lambda o: warmup_linear(o, 2, total=6), [1] * 7, optimizer)

    assert rates == [[0.25], [0.5], [0.5], [0.375], [0.25], [0.125], [0.0]]
    assert optimizer.param_groups[0]["lr"] is held


def test_a_group_added_later_is_scheduled_from_the_rate_it_came_with():
    optimizer = sgd(0.5)
    schedule = warmup_linear(optimizer, 2, total=6)
    schedule.step()
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))], "lr": 4.0})
    schedule.step(), schedule.step()

    assert [group["lr"] for group in optimizer.param_groups] == schedule.lrs_at(3) == [0.375, 3.0]


def test_total_that_is_given_stays_and_one_that_a_run_has_set_is_saved():
    first = warmup_linear(sgd(), 2)
    in_a_trainer(lambda optimizer: first, [1] * 6, first.optimizer)
    resumed, longer = warmup_linear(sgd(), 2), warmup_linear(sgd(), 2, total=10)
    for schedule in (resumed, longer):
        schedule.load_state_dict(first.state_dict())

    assert [resumed.lrs_at(k) for k in range(9)] == [warmup_linear(sgd(), 2, total=6).lrs_at(k) for k in range(9)]
    assert [longer.lrs_at(k) for k in range(12)] == [warmup_linear(sgd(), 2, total=10).lrs_at(k) for k in range(12)]
