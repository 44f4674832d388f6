"""Positions built by hand, and what comes next: no run is needed."""

import random
from dataclasses import replace

import pytest

from ignite_engine.engine.position import (
    EpochIs,
    Next,
    Plan,
    Position,
    is_done,
    is_full,
    last_iteration,
    next_of,
    regrouped,
)

PASSES = Plan(max_epochs=3, epoch_length=4, epoch_is=EpochIs.A_PASS)
MEASURED = replace(PASSES, epoch_is=EpochIs.MEASURED)


@pytest.mark.parametrize(
    ("position", "plan", "expected"),
    [
        (Position(), PASSES, Next.EPOCH),
        (Position(5, epochs=1, epoch_iteration=1), PASSES, Next.GROUP),
        (Position(8, epochs=1, epoch_iteration=4), PASSES, Next.EPOCH_END),
        (Position(12, epochs=2, epoch_iteration=4), PASSES, Next.EPOCH_END),
        (Position(12, epochs=3), PASSES, Next.END),
        # cut short by terminate_epoch(): iterations do not say how many epochs there were
        (Position(5, epochs=3), PASSES, Next.END),
        (Position(11, epochs=2), PASSES, Next.EPOCH),
        # a limit of iterations ends an epoch under way, but not one that has all its iterations
        (Position(6, epochs=1, epoch_iteration=2), replace(PASSES, max_epochs=None, max_iters=6), Next.END),
        (Position(8, epochs=1, epoch_iteration=4), replace(PASSES, max_epochs=None, max_iters=8), Next.EPOCH_END),
        # only the data tells where a measured epoch ends, whatever the pass before had
        (Position(9, epochs=1, epoch_iteration=5), MEASURED, Next.GROUP),
        (Position(9, epochs=1), MEASURED, Next.EPOCH),
    ],
)
def test_what_comes_next(position, plan, expected):
    assert next_of(position, plan) is expected


def test_every_drawn_position_leads_to_the_end_at_the_last_iteration():
    """A run that follows ``next_of`` takes as many iterations as ``last_iteration`` says, from wherever it begins."""
    draw = random.Random(7)
    for _ in range(500):
        length, epochs = draw.randint(1, 6), draw.randint(1, 5)
        plan = Plan(max_epochs=epochs, epoch_length=length, epoch_is=draw.choice([EpochIs.A_PASS, EpochIs.A_LENGTH]))
        if draw.random() < 0.3:
            plan = replace(plan, max_epochs=draw.choice([None, epochs]), max_iters=draw.randint(1, 20))
        position = Position(
            draw.randint(0, 20), epochs=draw.randint(0, epochs), epoch_iteration=draw.randint(0, length)
        )
        last, steps = last_iteration(position, plan), 0
        while (following := next_of(position, plan)) is not Next.END:
            if following is Next.EPOCH_END:
                position = replace(position, epochs=position.epochs + 1, epoch_iteration=0)
                continue
            grown = position.iteration + 1, position.epoch_iteration + 1
            position = replace(position, iteration=grown[0], epoch_iteration=grown[1])
            steps += 1
            assert steps < 200
        assert is_done(position, plan) and last is not None
        assert position.iteration == last or (position.iteration > last and steps == 0)


@pytest.mark.parametrize(("steps", "epoch_iteration"), [(2, 2), (4, 1), (1, 4)])
def test_iterations_of_another_size_leave_what_the_data_has_left(steps, epoch_iteration):
    plan = Plan(max_epochs=1, epoch_length=-(-8 // steps), epoch_is=EpochIs.A_PASS)
    before = Position(2, epoch_iteration=2)

    assert regrouped(before, plan, 8, 4, steps).epoch_iteration == epoch_iteration
    assert regrouped(before, replace(plan, epoch_is=EpochIs.A_LENGTH), 8, 4, steps) == before


def test_end_of_a_pass_that_was_reported_is_the_start_of_an_epoch():
    plan = Plan(max_epochs=2, epoch_length=2, epoch_is=EpochIs.A_PASS)

    assert regrouped(Position(4, epochs=1), plan, 8, 8, 4).epoch_iteration == 0
    assert regrouped(Position(4, epochs=0, epoch_iteration=4), plan, 8, 8, 4).epoch_iteration == 2
    assert is_full(2, plan) and not is_full(2, replace(plan, epoch_is=EpochIs.MEASURED))
