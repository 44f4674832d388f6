"""An update has the bits of the loop written by hand, whatever it trains."""

import shutil

import pytest
import torch

from ignite_engine import Update
from tests.kit.floors import needs
from tests.property.by_hand import by_engine, by_hand, capture_difference, difference
from tests.property.case import Case
from tests.property.judging import MINUTES, check, judged
from tests.property.strategies import captured, updates


def update(case):
    hand, engine = by_hand(case), by_engine(case)
    if hand.error is not None and engine.error is not None:  # the program itself is wrong, for torch's autograd say
        return None, {"refused by both"}
    return difference(hand, engine), hand.happened


def captured_update(case):
    return capture_difference(case), set()


PINNED = [Case()]


@pytest.mark.parametrize("case", PINNED, ids=repr)
def test_pinned_update_has_the_bits_of_the_loop_written_by_hand(case):
    check(update, case)


class KeepsGradients(Update):
    def accumulate(self, engine, micro_batches, scales):
        kept = {each: each.grad.clone() for each in self.model.parameters() if each.grad is not None}
        output = super().accumulate(engine, micro_batches, scales)
        [each.grad.add_(gradient) for each, gradient in kept.items()]
        return output


class WeighsAlike(Update):
    def accumulate(self, engine, micro_batches, scales):
        return super().accumulate(engine, micro_batches, [sum(scales) / len(scales)] * len(scales))


class ClipsBefore(Update):
    def accumulate(self, engine, micro_batches, scales):
        output = super().accumulate(engine, micro_batches, scales)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
        return output


@pytest.mark.parametrize(
    ("kind", "case"),
    [
        (KeepsGradients, Case()),
        (WeighsAlike, Case(steps=2, weights="samples", sizes=(2, 5))),
        (ClipsBefore, Case(clip=0.6)),
    ],
)
def test_update_that_is_wrong_is_found(kind, case):
    assert difference(by_hand(case), by_engine(case)) is None
    assert difference(by_hand(case), by_engine(case, kind=kind)) is not None


@pytest.mark.parametrize("seed", range(4))
def test_update_has_the_bits_of_the_loop_written_by_hand(seed):
    judged(update, updates, seed=seed, cases=37)


@pytest.mark.nightly
@pytest.mark.timeout(60 * MINUTES + 600)
def test_any_update_has_the_bits_of_the_loop_written_by_hand(random_seed):
    judged(update, updates, seed=random_seed, minutes=0.2 * MINUTES)


@needs("capture")
@pytest.mark.nightly
@pytest.mark.timeout(60 * MINUTES + 600)
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler, which torch.compile calls")
def test_captured_update_has_the_losses_of_the_loop_and_resumes_to_the_bit(random_seed):
    judged(captured_update, captured, seed=random_seed, minutes=0.1 * MINUTES)
