"""A metric whose state was captured in the middle of an epoch continues in another one to the same bits."""

import io

import pytest
import torch
from ignite.engine import Engine, Events
from ignite.metrics import (
    Accuracy,
    Average,
    ConfusionMatrix,
    EpochMetric,
    Loss,
    MetricGroup,
    MutualInformation,
    Precision,
    Recall,
    RunningAverage,
    TopKCategoricalAccuracy,
)
from ignite.metrics.metric import RunningBatchWise
from torch import nn

from ignite_engine.states import metrics as metric_state


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
    "loss": cross_entropy,
    "lambda of metrics": f1,
    "list of outputs": lambda: EpochMetric(spread),
    "running average": lambda: RunningAverage(output_transform=lambda output: output[0].sum()),
    "running average of a metric": lambda: RunningAverage(Accuracy()),
    "confusion matrix": lambda: ConfusionMatrix(3),
    "average": lambda: Average(output_transform=lambda output: output[0].mean()),
    "top k": lambda: TopKCategoricalAccuracy(2),
    "group": lambda: MetricGroup({"accuracy": Accuracy(), "loss": cross_entropy()}),
    "more than its state_dict tells": MutualInformation,
}


def engine_with(name):
    engine = Engine(lambda engine, batch: batch)
    METRICS[name]().attach(engine, name)
    return engine


def batches():
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(5, 3, generator=generator), torch.randint(0, 3, (5,), generator=generator)) for _ in range(6)]


def through_a_file(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.row("C5")
@pytest.mark.parametrize("name", METRICS)
def test_metric_goes_on_where_it_was(name):
    whole = engine_with(name).run(batches()).metrics[name]
    first = engine_with(name)
    first.run(batches()[:3])
    saved = through_a_file({name: metric_state.capture(each) for name, each in metric_state.metrics_of(first).items()})
    second = engine_with(name)

    @second.on(Events.EPOCH_STARTED)
    def go_on():
        for name, metric in metric_state.metrics_of(second).items():
            metric_state.restore(metric, saved[name])

    rest = second.run(batches()[3:]).metrics[name]
    assert list(saved) == [name]
    assert str(rest) == str(whole) != str(engine_with(name).run(batches()[3:]).metrics[name])


def test_every_metric_of_an_engine_is_found():
    engine = Engine(lambda engine, batch: batch)
    parts = Precision(average=False)
    metrics = {"a": Accuracy(), "b": parts.mean(), "c": RunningAverage(Accuracy()), "d": parts}
    for name, metric in metrics.items():
        metric.attach(engine, name, usage=RunningBatchWise() if name == "c" else "epoch_wise")
    by_hand = Accuracy()
    engine.add_event_handler(Events.ITERATION_COMPLETED(every=2), by_hand.iteration_completed)

    assert metric_state.metrics_of(engine) == {**metrics, "unnamed 0 Accuracy": by_hand}


@pytest.mark.cuda
def test_tensors_come_back_to_the_device():
    one, other = Accuracy(device="cuda"), Accuracy(device="cuda")
    first, second = (tuple(each.cuda() for each in batch) for batch in batches()[:2])
    one.update(first)
    other.reset()
    metric_state.restore(other, through_a_file(metric_state.capture(one)))
    for metric in (one, other):
        metric.update(second)

    assert other._num_correct.device.type == "cuda" and one.compute() == other.compute()
