"""Schedules are pure functions of the number of the update, with exact values from the first to the last."""

import math

import pytest
import torch
from torch import nn
from torch.optim import SGD
from torch.optim import lr_scheduler as torch_schedulers

from ignite_engine.schedules import (
    constant,
    warmup_constant,
    warmup_cosine,
    warmup_inverse_sqrt,
    warmup_linear,
    warmup_polynomial,
    warmup_wsd,
)

BASE = 0.5


def sgd(lr=BASE, groups=1):
    return SGD([{"params": [nn.Parameter(torch.ones(2))]} for _ in range(groups)], lr=lr, foreach=False)


def factors(schedule, steps):
    return [schedule.factor_at(step) for step in range(steps)]


def test_warmup_rises_by_equal_steps_from_the_first_update_and_reaches_the_base_with_its_last():
    assert factors(warmup_constant(sgd(), 4), 7) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0, 1.0]
    assert factors(constant(sgd()), 3) == [1.0, 1.0, 1.0]
    assert factors(warmup_constant(sgd(), 0), 2) == [1.0, 1.0]


def test_linear_has_exact_values_and_stays_at_its_end():
    assert factors(warmup_linear(sgd(), 2, total=6), 9) == [0.5, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0, 0.0, 0.0]
    assert factors(warmup_linear(sgd(), 0, total=4, min_ratio=0.5), 6) == [1.0, 0.875, 0.75, 0.625, 0.5, 0.5]


@pytest.mark.row("E1")
def test_cosine_has_exact_values_and_stays_at_its_end():
    expected = [
        0.5,
        1.0,
        1.0,
        0.1 + 0.9 * (0.5 + math.sqrt(0.125)),
        0.55,
        0.1 + 0.9 * (0.5 - math.sqrt(0.125)),
        0.1,
        0.1,
    ]
    assert factors(warmup_cosine(sgd(), 2, total=6, min_ratio=0.1), 8) == pytest.approx(expected, rel=1e-14)
    assert factors(warmup_cosine(sgd(), 2, total=6), 1_000_000)[-1] == 0.0


def test_polynomial_has_exact_values_and_stays_at_its_end():
    assert factors(warmup_polynomial(sgd(), 1, total=5), 7) == [1.0, 1.0, 0.5625, 0.25, 0.0625, 0.0, 0.0]
    straight, line = warmup_polynomial(sgd(), 2, total=9, power=1.0), warmup_linear(sgd(), 2, total=9)
    assert factors(straight, 12) == factors(line, 12)


def test_inverse_sqrt_falls_with_the_root_of_the_updates_and_is_held_at_total():
    assert factors(warmup_inverse_sqrt(sgd(), 4), 16) == pytest.approx(
        [0.25, 0.5, 0.75, 1.0] + [math.sqrt(4 / updates) for updates in range(5, 17)], rel=1e-15
    )
    assert factors(warmup_inverse_sqrt(sgd(), 4, total=15), 40)[15:] == [0.5] * 25
    assert warmup_inverse_sqrt(sgd()).factor_at(3) == 0.5
    assert warmup_inverse_sqrt(sgd(), 4, min_ratio=0.75).factor_at(10_000) == 0.75


@pytest.mark.row("E1")
@pytest.mark.parametrize(
    ("shape", "min_ratio", "decayed"),
    [
        ("linear", 0.0, [1.0, 0.75, 0.5, 0.25, 0.0]),
        ("linear", 0.2, [1.0, 0.8, 0.6, 0.4, 0.2]),
        ("cosine", 0.0, [1.0, 0.5 + math.sqrt(0.125), 0.5, 0.5 - math.sqrt(0.125), 0.0]),
        ("1-sqrt", 0.0, [1.0, 0.5, 1 - math.sqrt(0.5), 1 - math.sqrt(0.75), 0.0]),
        ("exponential", 0.0625, [1.0, 0.5, 0.25, 0.125, 0.0625]),
    ],
)
def test_wsd_is_stable_until_its_decay_of_the_given_shape(shape, min_ratio, decayed):
    schedule = warmup_wsd(sgd(), 2, total=10, decay=4, decay_shape=shape, min_ratio=min_ratio)
    expected = [0.5, 1.0, 1.0, 1.0, 1.0, 1.0, *decayed, decayed[-1]]
    assert factors(schedule, 12) == pytest.approx(expected, rel=1e-14)


@pytest.mark.parametrize("total", [7, 100, 1000])
def test_a_fraction_of_total_is_the_same_as_its_number_of_updates(total):
    warmup, decay = round(0.1 * total), round(0.3 * total)
    for make in (warmup_linear, warmup_cosine, warmup_polynomial, warmup_inverse_sqrt, warmup_constant):
        assert factors(make(sgd(), 0.1, total=total), 99) == factors(make(sgd(), warmup, total=total), 99)
    by_fraction, by_updates = (warmup_wsd(sgd(), w, total=total, decay=d) for w, d in ((0.1, 0.3), (warmup, decay)))
    assert factors(by_fraction, total + 3) == factors(by_updates, total + 3)


@pytest.mark.parametrize("make", [warmup_linear, warmup_cosine, warmup_polynomial, warmup_inverse_sqrt, warmup_wsd])
def test_no_schedule_leaves_the_range_of_its_ratios_or_moves_past_its_end(make):
    values = factors(make(sgd(), 3, total=20, min_ratio=0.1), 60)
    assert all(0.1 <= value <= 1.0 for value in values[3:])
    assert values[20:] == [values[20]] * 40


def test_the_curve_can_be_asked_for_without_touching_the_optimizer():
    optimizer = SGD([{"params": [nn.Parameter(torch.ones(1))], "lr": lr} for lr in (0.5, 2.0)], lr=1.0)
    schedule = warmup_linear(optimizer, 2, total=6)
    assert [schedule.lrs_at(step) for step in (0, 1, 4, 99)] == [[0.25, 1.0], [0.5, 2.0], [0.25, 1.0], [0.0, 0.0]]
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 2.0]
    assert repr(schedule) == "warmup_linear(warmup=2, total=6, min_ratio=0.0)"


def test_a_group_added_later_is_scheduled_from_the_lr_it_came_with():
    optimizer = sgd()
    schedule = warmup_linear(optimizer, 2, total=6)
    schedule.step()
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))], "lr": 4.0})
    schedule.step()
    schedule.step()
    assert [group["lr"] for group in optimizer.param_groups] == schedule.lrs_at(3) == [0.375, 3.0]


def test_last_lrs_are_those_that_are_set_as_with_torchs_schedulers():
    optimizer, other = sgd(groups=2), sgd(groups=2)
    schedule = warmup_linear(optimizer, 2, total=6)
    schedule.apply()
    theirs = torch_schedulers.LambdaLR(other, schedule.factor_at)
    for _ in range(8):
        assert schedule.get_last_lr() == theirs.get_last_lr() == [group["lr"] for group in optimizer.param_groups]
        schedule.step()
        other.step()
        theirs.step()


def test_total_that_a_run_has_set_is_saved_and_one_that_is_given_stays():
    first = warmup_linear(sgd(), 2)
    first.set_total(6)
    resumed, longer = warmup_linear(sgd(), 2), warmup_linear(sgd(), 2, total=10)
    for schedule in (resumed, longer):
        schedule.load_state_dict(first.state_dict())

    assert factors(resumed, 9) == factors(first, 9) and resumed.is_known
    assert factors(longer, 12) == factors(warmup_linear(sgd(), 2, total=10), 12)
