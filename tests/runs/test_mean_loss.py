"""The loss of a set is the mean over its samples, not over its batches."""

import pytest
import torch
from torch import nn

from ignite_engine import create_evaluator
from ignite_engine.runs.mean_loss import mean_loss


def loss_fn(model, batch):
    values = batch["x"] if isinstance(batch, dict) else batch[0] if isinstance(batch, list) else batch
    return values.mean(), {"extra": values.max()}


@pytest.mark.parametrize("wrap", [lambda x: x, lambda x: [x, "label"], lambda x: {"x": x}])
def test_batches_of_other_sizes_weigh_by_their_samples(wrap):
    predict, metrics = mean_loss(loss_fn)
    evaluator = create_evaluator(nn.Identity(), predict, metrics)
    state = evaluator.run([wrap(torch.tensor([1.0, 2.0, 3.0])), wrap(torch.tensor([10.0]))])

    assert state.metrics["loss"] == 4.0


def test_weights_are_those_of_the_task():
    predict, metrics = mean_loss(loss_fn, lambda batch: float(batch[0]))
    evaluator = create_evaluator(nn.Identity(), predict, metrics)

    assert evaluator.run([torch.tensor([1.0]), torch.tensor([3.0])]).metrics["loss"] == 2.5


def test_weight_that_is_no_number_is_refused_as_in_training():
    predict, metrics = mean_loss(loss_fn, lambda batch: batch)
    evaluator = create_evaluator(nn.Identity(), predict, metrics)

    with pytest.raises(ValueError, match=r"^weight_fn must return .* at least 0, got Tensor \[2\] float32\."):
        evaluator.run([torch.ones(2)])


def test_losses_by_name_are_summed():
    predict, metrics = mean_loss(lambda model, batch: {"a": batch.mean(), "b": 2 * batch.mean()})
    evaluator = create_evaluator(nn.Identity(), predict, metrics)

    assert evaluator.run([torch.tensor([1.0, 2.0, 3.0]), torch.tensor([10.0])]).metrics["loss"] == 12.0


def test_a_loss_that_is_a_module_is_evaluated_in_eval_mode():
    class Noisy(nn.Module):
        def __init__(self):
            super().__init__()
            self.dropout, self.frozen = nn.Dropout(0.5), nn.Dropout(0.5).eval()

        def forward(self, model, batch):
            mean = self.frozen(self.dropout(batch)).mean()
            return mean

    noisy = Noisy()
    predict, metrics = mean_loss(noisy)
    evaluator = create_evaluator(nn.Identity(), predict, metrics)

    assert evaluator.run([torch.ones(64)]).metrics["loss"] == 1.0
    assert noisy.training and noisy.dropout.training and not noisy.frozen.training
