"""The arithmetic of groups, and which backward reduces."""

from contextlib import contextmanager

import pytest
import torch
from ignite.engine import Events
from torch import nn

from ignite_engine import Trainer, Update, accumulation_steps_for, every, gradient_sync
from ignite_engine.step.micro_batches import micro_batch_scales, micro_batches_of
from tests.kit.tiny import Numbers, linear, mse


@pytest.mark.row("B9")
@pytest.mark.parametrize(("arguments", "steps"), [((64, 8, 2), 4), ((8, 8), 1), ((96, 4, 3), 8)])
def test_steps_make_up_the_global_batch(arguments, steps):
    assert accumulation_steps_for(*arguments) == steps


@pytest.mark.row("B9")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((60, 8, 2), "must be a multiple of local_batch x world_size = 16: take 48"),
        ((8, 16), "take 16 or change local_batch"),
        ((0, 8), "must be at least 1, got 0, 8, 1"),
    ],
)
def test_global_batch_that_does_not_divide_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        accumulation_steps_for(*arguments)


def test_scales_of_equal_and_weighted_micro_batches():
    batches = ["a", "bbb", "", "cccc"]

    assert micro_batch_scales(batches) == [0.25] * 4
    assert micro_batch_scales(batches, weight_fn=len) == [1 / 8, 3 / 8, 0.0, 4 / 8]
    assert micro_batch_scales(batches, padding=2) == [0.5, 0.5, 0.0, 0.0]
    assert micro_batch_scales(batches, padding=1, weight_fn=len) == [0.25, 0.75, 0.0, 0.0]
    assert micro_batch_scales(["", ""], weight_fn=len) is None


def test_weights_beyond_the_largest_number_are_refused():
    with pytest.raises(ValueError, match=r"sum up to infinity, got \[1e\+308, 1e\+308\] here: return smaller ones"):
        micro_batch_scales(["a", "b"], weight_fn=lambda batch: 1e308)


class Wrapped(nn.Module):
    """Reduces like DDP, or like FSDP2, and writes down whether it would."""

    def __init__(self, kind):
        super().__init__()
        self.reduces = True
        if kind == "no_sync":
            self.no_sync = self._no_sync
        else:
            self.set_requires_gradient_sync = self._set

    def _set(self, reduces):
        self.reduces = reduces

    @contextmanager
    def _no_sync(self):
        self.reduces = False
        try:
            yield
        finally:
            self.reduces = True


@pytest.mark.parametrize("kind", ["no_sync", "set_requires_gradient_sync"])
def test_only_the_last_backward_reduces(kind):
    model, seen = Wrapped(kind), list[bool]()
    for last in (False, False, True):
        with gradient_sync(model, last=last):
            seen.append(model.reduces)
    with pytest.raises(KeyError), gradient_sync(model, last=False):
        raise KeyError

    assert seen == [False, False, True] and model.reduces


@pytest.mark.parametrize("steps", [None, 2])
@pytest.mark.parametrize("kind", [list, tuple])
def test_a_batch_that_a_handler_assigns_is_counted_by_what_the_trainer_groups(kind, steps):
    """Mixup and cropping assign a plain list of micro-batches; without grouping a list is one batch."""
    model, counted = linear(), list[int]()
    trainer = Trainer(Update(model, torch.optim.SGD(model.parameters(), lr=0.1), mse), steps)

    def augment():
        trainer.state.batch = kind(trainer.state.batch)

    trainer.add_event_handler(Events.GET_BATCH_COMPLETED, augment)
    trainer.add_event_handler(
        Events.ITERATION_COMPLETED, lambda: counted.append(sum(len(batch[0]) for batch in micro_batches_of(trainer)))
    )
    trainer.add_event_handler(every(samples=8), lambda: None)
    data = Numbers(16)
    state = trainer.run([(data.inputs[at : at + 4], data.targets[at : at + 4]) for at in range(0, 16, 4)])

    assert counted == [4 * (steps or 1)] * (4 // (steps or 1)) and state.samples == 16
