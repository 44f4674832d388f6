"""A metric whose state was captured in the middle of an epoch continues in another one to the same bits."""

import pytest
import torch
from ignite.engine import Events
from ignite.metrics import (
    Accuracy,
    ConfusionMatrix,
    EpochMetric,
    Loss,
    MetricGroup,
    MutualInformation,
    Precision,
    Recall,
    RunningAverage,
)
from torch import nn

from ignite_engine import Trainer
from ignite_engine.handlers import Checkpoint


def cross_entropy():
    return Loss(nn.CrossEntropyLoss())


def f1():
    precision, recall = Precision(average=False), Recall(average=False)
    score = (precision * recall * 2 / (precision + recall)).mean()
    return score


def spread(predictions, targets):
    return (predictions.std() + targets.float().std()).item()


METRICS = {
    "accuracy": Accuracy,
    "lambda of metrics": f1,
    "list of outputs": lambda: EpochMetric(spread),
    "running average of a metric": lambda: RunningAverage(Accuracy()),
    "confusion matrix": lambda: ConfusionMatrix(3),
    "group": lambda: MetricGroup({"accuracy": Accuracy(), "loss": cross_entropy()}),
    "more than its state_dict tells": MutualInformation,
}


def batches():
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(5, 3, generator=generator), torch.randint(0, 3, (5,), generator=generator)) for _ in range(6)]


def value_of(name, folder, stops, data=batches):
    """The value of a metric after an epoch in which the run was stopped after these iterations and begun again."""
    for stop in (*stops, 99):
        trainer = Trainer(lambda engine, batch: tuple(batch))
        METRICS[name]().attach(trainer, name)
        checkpoint = Checkpoint(folder)
        checkpoint.attach(trainer)
        checkpoint.resume()
        trainer.add_event_handler(Events.ITERATION_COMPLETED(once=stop), lambda: trainer.request_stop("test"))  # noqa: B023  # called in this turn
        trainer.run(data(), max_epochs=1)
    return trainer.state.metrics[name]


@pytest.mark.row("C5")
@pytest.mark.parametrize("name", METRICS)
def test_metric_goes_on_where_it_was(name, tmp_path):
    whole = value_of(name, tmp_path / "whole", ())
    assert str(value_of(name, tmp_path / "stopped", (3,))) == str(whole)
    assert str(value_of(name, tmp_path / "rest", (), data=lambda: batches()[3:])) != str(whole)
