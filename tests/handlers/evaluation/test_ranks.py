"""Metrics of Ignite on several ranks, some without a sample: the counts and means of one process."""

import time

import pytest
import torch
from ignite.engine import Events
from ignite.metrics import Accuracy, Average, ConfusionMatrix, EpochMetric, Loss, Precision
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from ignite_engine import Trainer, TrainingEvents, create_evaluator, loader
from ignite_engine.handlers import Evaluation
from tests.kit.processes import ranks
from tests.kit.sharded import in_layout
from tests.kit.tiny import Passes

EACH = Events.ITERATION_COMPLETED


class Stream:
    """Batches of one rank, without a length."""

    def __init__(self, data):
        self.data = data

    def __iter__(self):
        return iter(self.data)


def averaging():
    return create_evaluator(nn.Identity(), lambda model, batch: batch, {"mean": Average()})


def numbers(count):
    return [torch.tensor([float(index)]) for index in range(count)]


def evaluated(evaluator, data, prepare=lambda trainer: None):
    """The trainer's state after a run with one evaluation."""
    trainer = Trainer(lambda engine, batch: None)
    Evaluation(evaluator, data).attach(trainer)
    prepare(trainer)
    return trainer.run([0, 1], max_epochs=1)


def metrics_of(rank, count, sized=True, layout=None):
    if layout is not None:
        in_layout(layout)
    generator = torch.Generator().manual_seed(3)
    samples = TensorDataset(torch.randn(count, 3, generator=generator), torch.randint(3, (count,), generator=generator))
    metrics = {
        "accuracy": Accuracy(),
        "loss": Loss(nn.functional.cross_entropy),
        "precision": Precision(average="macro"),
        "mean": Average(output_transform=lambda output: output[0].sum(1, keepdim=True)),
        "all": EpochMetric(lambda predictions, targets: float((predictions.sum(1) * targets).sum())),
        "counts": ConfusionMatrix(3),
    }
    evaluator = create_evaluator(nn.Identity(), lambda model, batch: (model(batch[0]), batch[1]), metrics)
    seen = []
    evaluator.add_event_handler(EACH, lambda: seen.extend(evaluator.state.output[0].tolist()))
    # a plain loader is sharded, too
    state = evaluated(evaluator, DataLoader(samples, 2) if sized else Stream(loader(samples, 2)))
    found = {key: torch.as_tensor(value).double() for key, value in evaluator.state.metrics.items()}
    return found | {"logged": torch.tensor(state.metrics["val/accuracy"]).double()}, seen


@pytest.mark.row("C2")
@pytest.mark.parametrize(
    ("world", "count", "sized"), [(2, 17, True), (2, 1, False), (4, 3, True), (4, 17, True), (4, 1, False)]
)
def test_metrics_are_those_of_one_process(world, count, sized):
    whole, samples = metrics_of(0, count)
    found = ranks(world, metrics_of, count, sized)
    assert len(samples) == count and sorted(each for _, seen in found for each in seen) == sorted(samples)
    assert any(not seen for _, seen in found) == (count < world)
    for metrics, _ in found:
        assert torch.equal(metrics.pop("counts"), whole["counts"])
        assert all(torch.allclose(value, whole[name], rtol=1e-6, atol=1e-6) for name, value in metrics.items())


@pytest.mark.row("C2")
def test_ranks_that_share_data_share_the_lack_of_it():
    found = ranks(4, metrics_of, 1, True, "tp+fsdp")
    assert [len(seen) for _, seen in found] == [1, 1, 0, 0]
    whole, _ = metrics_of(0, 1)
    assert all(torch.allclose(metrics[name], whole[name]) for metrics, _ in found for name in whole)


def refused(rank):
    with pytest.raises(ValueError) as caught:
        evaluated(averaging(), Passes(0))
    return str(caught.value)


def test_data_without_a_batch_is_refused_on_both():
    first, second = ranks(2, refused)
    assert first == second and "'val' needs a batch, got 0, 0 by rank" in first


def votes_along(rank, stops):
    """Rank 0 has no batch, rank 1 has 2, the last one many slow ones; rank 0 is asked to stop."""

    def slow():
        for index in range([0, 2, 400 if stops else 8][rank]):
            time.sleep(0.09)  # longer than the time between two votes
            yield torch.tensor([float(index)])

    def prepare(trainer):
        if stops and rank == 0:
            trainer.add_event_handler(TrainingEvents.EVALUATION_STARTED, lambda: trainer.request_stop("here"))

    evaluator = averaging()
    state = evaluated(evaluator, Stream(slow()), prepare)
    return state.status, state.metrics.get("val/mean"), evaluator.state.iteration


@pytest.mark.row("C2")
def test_ranks_with_fewer_batches_vote_along_until_their_peers_have_none():
    mean = pytest.approx((sum(range(8)) + 0 + 1) / 10)
    assert ranks(3, votes_along, False) == [("completed", mean, count) for count in (0, 2, 8)]
    stopped = ranks(3, votes_along, True)
    assert {each[:2] for each in stopped} == {("interrupted", None)} and stopped[2][2] < 400
