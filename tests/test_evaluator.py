"""An evaluation has no side effect on the model, its modes or its data, and its engine runs again after an error."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ignite.metrics import Accuracy
from torch import nn

from ignite_engine import create_evaluator, loader
from ignite_engine.evaluator import eval_mode, whole_pass
from tests.builders import Numbers, linear


def test_predictions_are_made_without_gradients_in_the_precision_asked_for() -> None:
    seen: list[Any] = []

    def predict(model: nn.Module, batch: Any) -> Any:
        output = model(batch[0])
        seen.append((output.requires_grad, output.dtype))
        return output

    create_evaluator(linear(), predict, precision="bf16").run([(torch.ones(2, 3),)])

    assert seen == [(False, torch.bfloat16)]
    with pytest.raises(ValueError, match="precision must be one of fp32, bf16, fp16, got 'half'"):
        create_evaluator(linear(), predict, precision="half")


def test_metrics_are_attached_under_their_names() -> None:
    evaluator = create_evaluator(linear(), lambda model, batch: batch, {"accuracy": Accuracy()})

    assert evaluator.run([(torch.tensor([1, 0]), torch.tensor([1, 1]))]).metrics == {"accuracy": 0.5}


def test_ddp_is_evaluated_by_the_module_inside() -> None:
    class Wrapper(nn.Module):
        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self.module = module

        def no_sync(self) -> Any: ...

    model, seen = linear(), list[nn.Module]()
    create_evaluator(Wrapper(model), lambda model, batch: seen.append(model)).run([1])

    assert seen[0] is model


def test_an_engine_runs_again_after_an_error() -> None:
    def predict(model: nn.Module, batch: int) -> int:
        if batch == 2:
            raise OSError("no data")
        return batch

    evaluator = create_evaluator(linear(), predict)
    with pytest.raises(OSError, match="no data"):
        evaluator.run([1, 2])

    assert evaluator.run([1, 3]).output == 3  # Ignite's returns None, without running


@pytest.mark.parametrize("fails", [False, True])
def test_modes_are_restored_module_by_module(fails: bool) -> None:
    model = nn.Sequential(nn.Dropout(), nn.Dropout())
    model[1].eval()
    try:
        with eval_mode(model):
            assert not any(module.training for module in model.modules())
            if fails:
                raise KeyError
    except KeyError:
        pass

    assert [module.training for module in model.modules()] == [True, True, False]


def test_a_pass_over_the_training_loader_restores_its_position() -> None:
    data = loader(Numbers(6), 2)
    data.sampler.start = 4
    with whole_pass(data):
        assert len(list(data)) == 3

    assert data.sampler.start == 4
    with whole_pass([1, 2]):
        pass
