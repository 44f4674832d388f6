"""What a precision's name means, one verdict of the loss scaler over several optimizers, and FP8."""

from contextlib import contextmanager

import pytest
import torch
from torch import nn

from ignite_engine import Trainer, TrainingEvents, Update, create_evaluator, loader
from tests.kit.refusals import refusals
from tests.kit.resume import Program, assert_resumes
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
    """Stands in for an FP8 library: a context around each forward pass, in which its layers round to eight bits.

    As with delayed scaling, a layer's scale is of the largest values seen before, and moves when the context is left.
    """

    def __init__(self):
        self.entered, self.is_open, self.layers = 0, False, []

    @contextmanager
    def __call__(self):
        self.entered, self.is_open = self.entered + 1, True
        yield
        self.is_open = False
        for layer in self.layers:
            if layer.training:
                layer.largest.copy_(torch.maximum(layer.seen, 0.5 * layer.largest))


class Rounded(nn.Linear):
    """A layer as an FP8 library puts it in the place of ``nn.Linear``."""

    def __init__(self, features, outputs, recipe):
        super().__init__(features, outputs)
        self.register_buffer("largest", torch.ones(()))
        self.recipe, self.seen = recipe, torch.ones(())
        recipe.layers.append(self)

    def forward(self, inputs):
        if not self.recipe.is_open:
            return super().forward(inputs)
        self.seen = inputs.detach().abs().amax()
        scale = 448.0 / self.largest
        eight_bits = (inputs.detach() * scale).clamp(-448.0, 448.0).to(torch.float8_e4m3fn)
        rounded = eight_bits.to(inputs.dtype) / scale
        return super().forward(inputs + (rounded - inputs.detach()))  # the gradient passes it


def in_eight_bits():
    torch.manual_seed(3)
    recipe = Recipe()
    model = nn.Sequential(Rounded(3, 4, recipe), nn.Tanh(), Rounded(4, 1, recipe))
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), recipe


def trainer_in_eight_bits(use=True):
    model, optimizer, recipe = in_eight_bits()
    return Trainer(Update(model, optimizer, mse, precision=recipe if use else "fp32"), accumulation_steps=2)


@pytest.mark.row("B10")
def test_an_fp8_library_plugs_in_by_its_layers_and_a_context_around_each_forward_pass():
    by_hand, hand_optimizer, hand_recipe = in_eight_bits()
    data, closed = Numbers(24), []
    for first in range(0, 24, 8):
        for micro_batch in (slice(first, first + 4), slice(first + 4, first + 8)):
            with hand_recipe():
                loss = mse(by_hand, (data.inputs[micro_batch], data.targets[micro_batch]))
            (loss * 0.5).backward()
        hand_optimizer.step()
        hand_optimizer.zero_grad()
    trainer, plain = trainer_in_eight_bits(), trainer_in_eight_bits(use=False)
    recipe = trainer.update.precision
    for event in (TrainingEvents.BACKWARD_COMPLETED, TrainingEvents.OPTIMIZER_STEP_STARTED):
        trainer.add_event_handler(event, lambda: closed.append(not recipe.is_open))
    for each in (trainer, plain):
        each.run(loader(data, 4), max_epochs=1)

    model = trainer.update.model
    assert recipe.entered == 6 and closed and all(closed)
    assert all(torch.equal(model.state_dict()[name], value) for name, value in by_hand.state_dict().items())
    assert not torch.equal(one(plain.update.model), one(model))  # it really rounds

    evaluator = create_evaluator(model, lambda model, batch: (model(batch[0]), batch[1]), precision=recipe)
    evaluator.run(loader(data, 4))
    assert recipe.entered == 12


def test_scales_of_an_fp8_library_are_resumed(tmp_path):
    assert_resumes(Program(trainer_in_eight_bits, lambda: loader(Numbers(24), 4)), tmp_path, at=(2,), how=("stop",))


def no_context():
    model = linear()
    update = Update(model, torch.optim.SGD(model.parameters(), 0.1), mse, precision=lambda: 3)
    Trainer(update).run(loader(Numbers(4), 2))


test_refusals = refusals([("a recipe that makes no context", no_context, TypeError, "precision context manager 3")])
