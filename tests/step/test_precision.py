"""What a precision's name means, and one verdict of the loss scaler over several optimizers."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch
from ignite.engine import Events
from torch import nn

from ignite_engine import Trainer, TrainingEvents, Update, create_evaluator, loader
from ignite_engine.handlers import Checkpoint
from ignite_engine.step.precision import LossScaler, autocast, check_precision, loss_scaler
from tests.kit.tiny import Numbers, mse, one


@pytest.mark.parametrize(
    ("name", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)]
)
def test_a_precision_is_the_dtype_of_matrix_products(name, dtype):
    with autocast(name, "cpu"):
        assert nn.Linear(2, 2)(torch.ones(1, 2)).dtype == dtype


def test_unknown_precisions_and_options_without_effect_are_refused():
    with pytest.raises(ValueError, match="precision must be one of fp32, bf16, fp16, got 'half'"):
        check_precision("half")
    with pytest.raises(ValueError, match="have no effect with precision 'fp32'"):
        loss_scaler("fp32", "cpu", {"init_scale": 2.0})
    assert loss_scaler("bf16", "cpu", None) is None and loss_scaler("fp32", "cpu", {}) is None


def optimizer(gradient, scale=1.0):
    parameter = nn.Parameter(torch.ones(2))
    parameter.grad = None if gradient is None else torch.full((2,), gradient * scale)
    return torch.optim.SGD([parameter], lr=1.0)


def scaler(**options):
    made = LossScaler("cpu", init_scale=8.0, growth_interval=1, **options)
    made.scale(torch.ones(()))  # torch makes its tensors here
    return made


def gradient(of):
    return of.param_groups[0]["params"][0].grad.tolist()


def test_finite_gradients_are_unscaled_and_the_scale_grows():
    made, optimizers = scaler(), [optimizer(3.0, 8.0), optimizer(5.0, 8.0), optimizer(None)]

    assert made.unscale_all(optimizers)
    assert [gradient(each) for each in optimizers[:2]] == [[3.0, 3.0], [5.0, 5.0]]
    assert optimizers[0].param_groups[0]["params"][0].tolist() == [1.0, 1.0]  # no optimizer was stepped
    made.adjust()
    assert made.get_scale() == 16.0


@pytest.mark.parametrize("place", [0, 1])
def test_an_overflow_anywhere_is_one_for_all_and_the_scale_falls(place):
    made, optimizers = scaler(), [optimizer(3.0), optimizer(5.0)]
    optimizers[place] = optimizer(float("inf"))

    assert not made.unscale_all(optimizers)
    made.adjust()
    assert made.get_scale() == 4.0
    assert made.unscale_all([optimizer(3.0)])  # the next update begins with none


def test_without_a_gradient_nothing_is_judged():
    made = scaler()

    assert made.unscale_all([optimizer(None)])
    made.adjust()
    assert made.get_scale() == 8.0


def test_a_parameter_of_two_optimizers_is_unscaled_once():
    made, first = scaler(), optimizer(3.0, 8.0)
    second = torch.optim.SGD(first.param_groups[0]["params"], lr=1.0)

    assert made.unscale_all([first, second]) and gradient(first) == [3.0, 3.0]


def test_a_scaler_that_is_switched_off_lets_everything_step():
    made = loss_scaler("fp16", "cpu", {"enabled": False})

    assert made is not None and made.unscale_all([optimizer(float("inf"))])
    made.adjust()


class Recipe:
    """Stands in for an FP8 library: a context around each forward pass, in which its layers round to eight bits.

    As with delayed scaling, a layer's scale is of the largest values seen before, and moves when the context is left.
    """

    def __init__(self):
        self.entered, self.is_open = 0, False
        self.layers = []

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

    largest: torch.Tensor

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


@pytest.mark.row("B10")
def test_an_fp8_library_plugs_in_by_its_layers_and_a_context_around_each_forward_pass(tmp_path):
    by_hand, hand_optimizer, hand_recipe = in_eight_bits()
    data = Numbers(24)
    for first in range(0, 24, 8):
        for micro_batch in (slice(first, first + 4), slice(first + 4, first + 8)):
            with hand_recipe():
                loss = mse(by_hand, (data.inputs[micro_batch], data.targets[micro_batch]))
            (loss * 0.5).backward()
        hand_optimizer.step()
        hand_optimizer.zero_grad()

    def train(until):
        model, optimizer, recipe = in_eight_bits()
        trainer = Trainer(Update(model, optimizer, mse, precision=recipe), accumulation_steps=2)
        for event in (TrainingEvents.BACKWARD_COMPLETED, TrainingEvents.OPTIMIZER_STEP_STARTED):
            trainer.add_event_handler(event, lambda: closed.append(not recipe.is_open))
        checkpoint = Checkpoint(tmp_path)
        checkpoint.attach(trainer, Events.ITERATION_COMPLETED)
        checkpoint.resume()
        trainer.run(loader(data, 4), max_iters=until)
        return model, recipe

    closed = []
    train(1)
    model, recipe = train(3)  # in another process: the scales are in the checkpoint
    assert recipe.entered == 4 and closed and all(closed)
    for name, value in by_hand.state_dict().items():
        assert torch.equal(model.state_dict()[name], value), name
    plain, optimizer, _ = in_eight_bits()
    Trainer(Update(plain, optimizer, mse), accumulation_steps=2).run(loader(data, 4), max_iters=3)
    assert not torch.equal(one(plain), one(model))  # it really rounds

    counted = recipe.entered
    evaluator = create_evaluator(model, lambda model, batch: (model(batch[0]), batch[1]), precision=recipe)
    evaluator.run(loader(data, 4))
    assert recipe.entered == counted + 6
