"""The backward pass without torch's checks: whoever needs torch's own gets it, and torch's private names may go."""

import logging

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ignite_engine.step import backward as module
from ignite_engine.step.backward import backward
from tests.kit.tiny import linear, one


@pytest.fixture
def by_torch(monkeypatch):
    """The losses that ``Tensor.backward`` was called for."""
    losses = []
    original = Tensor.backward

    def counted(self, *args, **kwargs):
        losses.append(self)
        original(self, *args, **kwargs)

    monkeypatch.setattr(Tensor, "backward", counted)
    return losses


def loss_of(model):
    loss = model(torch.full((4, 3), 0.7)).square().mean()
    return loss


def gradients(model):
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None])


def test_gradients_have_the_bits_of_torchs_own(by_torch):
    models, share = [linear(), linear()], torch.tensor(1 / 3)
    for _ in range(3):
        backward(loss_of(models[0]), share)
    assert not by_torch
    for _ in range(3):
        loss_of(models[1]).backward(share)

    assert torch.equal(gradients(models[0]), gradients(models[1])) and one(models[0]).abs().sum() > 0


def test_hooks_of_the_graph_and_of_parameters_are_called():
    model, calls = linear(), list[str]()
    loss = loss_of(model)
    loss.register_hook(lambda gradient: calls.append("loss"))
    next(model.parameters()).register_post_accumulate_grad_hook(lambda parameter: calls.append("parameter"))
    backward(loss, torch.ones(()))

    assert calls == ["loss", "parameter"]


class Subclass(Tensor):
    pass


class Mode(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def test_a_subclass_and_a_function_mode_get_torchs_own(by_torch):
    model = linear()
    backward(loss_of(model).as_subclass(Subclass), torch.ones(()))
    assert type(by_torch[0]) is Subclass  # which reaches it again by its own function
    by_torch.clear()
    with Mode():
        backward(loss_of(model), torch.ones(()))

    assert by_torch


def test_a_functorch_transform_gets_torchs_refusal():
    def function(inputs):
        loss = inputs.square()
        backward(loss, torch.ones(()))
        return loss

    with pytest.raises(RuntimeError, match="functorch transform"):
        torch.func.grad(function)(torch.ones(()))


def test_the_debug_log_of_the_graph_is_written(caplog):
    with caplog.at_level(logging.DEBUG, logger=torch.autograd.graph.__name__):
        backward(loss_of(linear()), torch.ones(()))

    assert any("Executing" in record.getMessage() for record in caplog.records)


def test_a_loss_without_a_graph_is_torchs_error():
    with pytest.raises(RuntimeError, match="does not require grad"):
        backward(torch.ones(()), torch.ones(()))


def test_without_the_private_name_torchs_own_is_called(by_torch, monkeypatch):
    monkeypatch.setattr(module, "_run", None)
    model = linear()
    backward(loss_of(model), torch.ones(()))

    assert len(by_torch) == 1 and gradients(model).abs().sum() > 0


def test_private_names_are_where_this_torch_has_them():
    assert module._run is torch.autograd.graph._engine_run_backward
    assert module._inside_functorch() is False
