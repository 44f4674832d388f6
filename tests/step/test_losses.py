"""What a loss function may return, the error where it returns something else, and the averages of a group."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from ignite.engine import Events
from torch import Tensor, nn

from ignite_engine import Trainer, Update
from ignite_engine.step.losses import scalar, weighted, weighted_by_name
from tests.kit.tiny import Numbers, linear, mse, one


def trained(loss_fn, steps=2, **options):
    model, data = linear(), Numbers(8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = [(data.inputs[start : start + 2], data.targets[start : start + 2]) for start in range(0, 8, 2)]
    state = Trainer(Update(model, optimizer, loss_fn, **options), steps).run(batches)
    return one(model), state.output


def beside(**values):
    return lambda model, batch: (mse(model, batch), values)


def test_errors_of_the_users_own_stay_as_they_are():
    def failing(model, batch):
        raise KeyError("mine")

    def failing_in_backward(model, batch):
        loss = mse(model, batch)
        loss.register_hook(failing)  # one argument is missing
        return loss

    with pytest.raises(KeyError, match="mine"):
        trained(failing)
    with pytest.raises(TypeError, match="missing 1 required positional argument"):
        trained(failing_in_backward)


@pytest.mark.parametrize("shape", [(1,), (1, 1)])
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_loss_of_one_element_is_a_loss(shape, precision):
    weights, output = trained(lambda model, batch: mse(model, batch).reshape(shape), precision=precision)
    expected, same = trained(mse, precision=precision)

    assert torch.equal(weights, expected)
    assert output["loss"].shape == () and torch.equal(output["loss"], same["loss"])


@pytest.mark.parametrize("steps", [None, 2])
def test_reported_views_do_not_keep_the_whole_tensor(steps):
    def loss_fn(model, batch):
        large = torch.zeros(1000) + mse(model, batch)
        return large[0], {"first": large.detach()[1], "last": large[-1:]}

    output = trained(loss_fn, steps)[1]

    assert {name: value.untyped_storage().nbytes() for name, value in output.items()} == dict.fromkeys(output, 4)
    assert torch.equal(output["first"], output["loss"]) and output["last"].shape == ()


def test_counts_are_averaged_too():
    output = trained(lambda model, batch: (mse(model, batch), {"right": (batch[1] > -9).sum()}), 4)[1]

    assert output["right"].item() == 2.0


def test_what_is_a_scalar_of_its_own_is_not_copied():
    value = torch.ones((), requires_grad=True) * 2

    assert scalar(value).data_ptr() == value.data_ptr() and not scalar(value).requires_grad
    assert scalar(torch.ones(2)[1]).item() == 1.0


class Tempered(nn.Module):
    """CLIP's logit scale, and a buffer of one element that each forward writes to."""

    def __init__(self):
        super().__init__()
        self.logit_scale = nn.Parameter(torch.ones(()))
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, batch):
        self.seen += 1
        return self.logit_scale * batch.mean()


REPORTED = {
    "detached parameter": lambda model: {"value": model.logit_scale.detach()},
    "data of a parameter": lambda model: {"value": model.logit_scale.data},
    "parameter": lambda model: {"value": model.logit_scale},
    "view of a parameter": lambda model: {"value": model.logit_scale.view(1)},
    "buffer": lambda model: {"value": model.seen},
    "view of a buffer": lambda model: {"value": model.seen[0]},
    "alias in numpy": lambda model: {"value": torch.from_numpy(model.seen.numpy())},
}


@pytest.mark.parametrize("steps", [None, 2])
@pytest.mark.parametrize("name", REPORTED)
def test_a_reported_value_keeps_its_number_when_the_model_changes(name, steps):
    model, outputs, at_once = Tempered(), list[Tensor](), list[float]()

    def loss_fn(model, batch):
        loss, values = model(batch), REPORTED[name](model)
        at_once.append(values["value"].item())
        return loss, values

    trainer = Trainer(Update(model, torch.optim.SGD(model.parameters(), lr=0.5), loss_fn), steps)
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: outputs.append(trainer.state.output["value"]))
    trainer.run([torch.ones(2)] * 6, max_epochs=1)

    groups = [at_once[start : start + (steps or 1)] for start in range(0, 6, steps or 1)]
    assert [output.item() for output in outputs] == [sum(group) / len(group) for group in groups]
    assert len({output.item() for output in outputs}) == len(outputs)


def test_a_loss_that_is_a_parameter_keeps_its_number():
    model, outputs = Tempered(), list[Any]()

    def loss_fn(model, batch):
        return {"scale": model.logit_scale}

    trainer = Trainer(Update(model, torch.optim.SGD(model.parameters(), lr=0.5), loss_fn))
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: outputs.append(trainer.state.output))
    trainer.run([torch.ones(2)] * 3, max_epochs=1)

    assert [(each["loss"].item(), each["loss/scale"].item()) for each in outputs] == [(1, 1), (0.5, 0.5), (0, 0)]


def test_weighted_sums_leave_out_what_weighs_nothing():
    values = [torch.tensor(1.0), torch.tensor(float("nan")), torch.tensor(4.0)]

    assert weighted(values, [0.25, 0.0, 0.75]).item() == 3.25
    assert weighted(values[:1], [0.0]).item() == 0.0
    assert weighted([values[0], values[2]], [0.5, 0.5]).item() == 2.5
    assert weighted([values[0], values[2]], [2.0, 2.0]).item() == 10.0
    assert weighted_by_name([{"a": values[0]}, {"a": values[2]}], [0.25, 0.75])["a"].item() == 3.25


class Parts(NamedTuple):
    fit: Tensor
    size: Tensor


def in_parts(model, batch):
    return {"fit": mse(model, batch), "size": 0.1 * one_of(model).square().sum().reshape(1)}


def one_of(model):
    return next(iter(model.parameters()))


@pytest.mark.row("A8")
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("steps", [None, 2])
@pytest.mark.parametrize("form", ["dict", "named tuple", "with others"])
def test_losses_by_name_are_summed_and_each_is_reported(form, steps, precision):
    def summed(model, batch):
        fit, size = in_parts(model, batch).values()
        return fit + size.reshape(())

    def loss_fn(model, batch):
        losses = in_parts(model, batch)
        if form == "named tuple":
            return Parts(**losses)
        return losses if form == "dict" else (losses, {"count": torch.tensor(2.0)})

    weights, output = trained(loss_fn, steps, precision=precision)
    expected, whole = trained(summed, steps, precision=precision)

    assert torch.equal(weights, expected) and torch.equal(output["loss"], whole["loss"])
    assert list(output) == ["loss", "loss/fit", "loss/size", *(["count"] if form == "with others" else [])]
    assert not any(value.requires_grad or value.dim() for value in output.values())
    assert torch.allclose(output["loss/fit"] + output["loss/size"], output["loss"])


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_error_of_the_model_is_noted_with_the_shapes_of_its_batch(precision):
    def wrong(model, batch):
        return model(batch["x"].T).mean()

    model = linear()
    update = Update(model, torch.optim.SGD(model.parameters(), lr=0.1), wrong, precision=precision)
    batch = {"x": torch.ones(5, 3), "y": [torch.ones(5, dtype=torch.int64), "a text"]}
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied") as raised:
        Trainer(update).run([batch], max_epochs=1)
    assert "The micro-batch: {'x': Tensor [5, 3] float32, 'y': [Tensor [5] int64, str]}." in raised.value.__notes__
