"""What a precision's name means, one verdict of the loss scaler over several optimizers, and FP8."""

from contextlib import contextmanager

import pytest
import torch
from torch import nn

from ignite_engine import Trainer, TrainingEvents, Update, create_evaluator, loader
from tests.kit.tiny import Numbers, linear, mse, one


@pytest.mark.parametrize(
    ("name", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)]
)
def test_a_precision_is_the_dtype_of_matrix_products(name, dtype):
    model, seen = nn.Linear(2, 2), []

    def loss_fn(model, batch):
        seen.append(model(batch).dtype)
        return model(batch).float().mean()

    Trainer(Update(model, torch.optim.SGD(model.parameters(), 0.1), loss_fn, precision=name)).run([torch.ones(1, 2)])
    create_evaluator(model, loss_fn, precision=name).run([torch.ones(1, 2)])
    assert seen == [dtype] * 2


class Two(nn.Module):
    """Two weights, whose gradients are those that the batch says."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))


def given(model, batch):
    loss = model.first.sum() * 0.0 if batch[0] is None else model.first.sum() * batch[0]
    return loss if batch[1] is None else loss + model.second.sum() * batch[1]


def scaled(batches, optimizers=lambda model: [[model.first], [model.second]], **options):
    """Weights, scale and gradients after each iteration of two optimizers under one scaler."""
    model, seen = Two(), []
    named = {str(n): torch.optim.SGD(part, lr=1.0) for n, part in enumerate(optimizers(model))}
    scaler = {"init_scale": 8.0, "growth_interval": 1, **options}
    trainer = Trainer(Update(model, named, given, precision="fp16", grad_scaler=scaler))

    def look(trainer):
        state = trainer.state
        at = trainer.update.scaler.get_scale() if scaler.get("enabled", True) else None
        seen.append((one(model).tolist(), at, state.optimizer_steps, state.skipped_steps))

    trainer.add_event_handler(TrainingEvents.OPTIMIZER_STEP_COMPLETED | TrainingEvents.OPTIMIZER_STEP_SKIPPED, look)
    trainer.run(batches, max_epochs=1)
    return seen


inf = float("inf")


@pytest.mark.parametrize("bad", [(inf, 5.0), (3.0, inf)])
def test_an_overflow_anywhere_is_one_for_all_and_the_next_update_begins_with_none(bad):
    assert scaled([(3.0, 5.0), bad, (1.0, 1.0)]) == [
        ([-3.0, -3.0, -5.0, -5.0], 16.0, 1, 0),
        ([-3.0, -3.0, -5.0, -5.0], 8.0, 1, 1),
        ([-4.0, -4.0, -6.0, -6.0], 16.0, 2, 1),
    ]


def test_an_optimizer_without_a_gradient_is_not_judged():
    assert scaled([(3.0, None)]) == [([-3.0, -3.0, 0.0, 0.0], 16.0, 1, 0)]


def test_a_parameter_of_two_optimizers_is_unscaled_once():
    both = scaled([(3.0, 5.0)], lambda model: [[model.first, model.second], [model.second]])
    assert both == [([-3.0, -3.0, -10.0, -10.0], 16.0, 1, 0)]


def test_a_scaler_that_is_switched_off_lets_everything_step():
    assert [(steps, skipped) for *_, steps, skipped in scaled([(inf, 5.0)], enabled=False)] == [(1, 0)]


class Recipe:
    """Stands in for an FP8 library: within its context a layer rounds its inputs to eight bits."""

    def __init__(self):
        self.entered, self.is_open = 0, False

    @contextmanager
    def __call__(self):
        self.entered, self.is_open = self.entered + 1, True
        yield
        self.is_open = False


class Rounded(nn.Module):
    def __init__(self, recipe):
        super().__init__()
        self.recipe = recipe

    def forward(self, inputs):
        eight_bits = inputs.detach().to(torch.float8_e4m3fn).to(inputs.dtype)
        return inputs + (eight_bits - inputs.detach()) if self.recipe.is_open else inputs


@pytest.mark.row("B10")
def test_an_fp8_library_plugs_in_by_a_context_around_each_forward_pass():
    ends, data, closed = [], Numbers(24), []
    for used in (True, False):
        recipe = Recipe()
        model = nn.Sequential(Rounded(recipe), linear())
        update = Update(model, torch.optim.SGD(model.parameters(), 0.1), mse, precision=recipe if used else "fp32")
        trainer = Trainer(update, 2)
        for event in (TrainingEvents.BACKWARD_COMPLETED, TrainingEvents.OPTIMIZER_STEP_STARTED):
            trainer.add_event_handler(event, lambda _, recipe: closed.append(not recipe.is_open), recipe)
        trainer.run(loader(data, 4), max_epochs=1)
        predict = create_evaluator(model, lambda m, b: (m(b[0]), b[1]), precision=recipe if used else "fp32")
        predict.run(loader(data, 4))
        assert recipe.entered == 12 * used and closed and all(closed)
        ends.append(one(model))
    rounded = linear()
    optimizer, inputs = torch.optim.SGD(rounded.parameters(), 0.1), data.inputs.to(torch.float8_e4m3fn).float()
    for first in range(0, 24, 8):
        for at in (slice(first, first + 4), slice(first + 4, first + 8)):
            (mse(rounded, (inputs[at], data.targets[at])) * 0.5).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert torch.equal(ends[0], one(rounded)) and not torch.equal(*ends)
