"""Metrics of Ignite on 1 to 4 ranks, some without a sample: the counts and means of one process."""

import time
from typing import Any

import ignite.distributed as idist
import pytest
import torch
import torch.distributed as dist
from ignite.engine import Events
from ignite.metrics import Accuracy, Average, ConfusionMatrix, EpochMetric, Loss, Precision
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import TensorDataset

from ignite_engine import Trainer, TrainingEvents, Update, create_evaluator, loader
from ignite_engine.handlers import Evaluation
from ignite_engine.ranks import agreement, use_mesh
from tests.ranks.forkserver import on_ranks

pytestmark = pytest.mark.distributed


def samples(count):
    generator = torch.Generator().manual_seed(3)
    return TensorDataset(torch.randn(count, 3, generator=generator), torch.randint(3, (count,), generator=generator))


class Stream:
    """Batches of one rank, without a length."""

    def __init__(self, data):
        self.data = data

    def __iter__(self):
        return iter(self.data)


def metrics_of(count, *, sized):
    metrics = {
        "accuracy": Accuracy(),
        "loss": Loss(nn.functional.cross_entropy),
        "precision": Precision(average="macro"),
        "mean": Average(output_transform=lambda output: output[0].sum(1, keepdim=True)),
        "all": EpochMetric(lambda predictions, targets: float((predictions.sum(1) * targets).sum())),
        "counts": ConfusionMatrix(3),
    }
    evaluator = create_evaluator(nn.Identity(), lambda model, batch: (model(batch[0]), batch[1]), metrics)
    trainer, seen = Trainer(lambda engine, batch: None), list[Any]()
    evaluator.add_event_handler(Events.ITERATION_COMPLETED, lambda: seen.extend(evaluator.state.output[0].tolist()))
    data = loader(samples(count), 2)
    Evaluation(evaluator, data if sized else Stream(data)).attach(trainer)
    trainer.run([0], max_epochs=1)
    found = {key: torch.as_tensor(value).double().tolist() for key, value in evaluator.state.metrics.items()}
    return {"metrics": found, "logged": trainer.state.metrics["val/accuracy"], "seen": seen}


def stopped(rank, world):
    """Rank 0 has no batch, the last one many slow ones; rank 0 is asked to stop."""

    def slow():
        for index in range(400 if rank == world - 1 else 2 * min(rank, 1)):
            time.sleep(0.02)
            yield torch.tensor([float(index)])

    evaluator = create_evaluator(nn.Identity(), lambda model, batch: batch, {"mean": Average()})
    trainer = Trainer(lambda engine, batch: None)
    Evaluation(evaluator, Stream(slow())).attach(trainer)
    if rank == 0:
        trainer.add_event_handler(TrainingEvents.EVALUATION_STARTED, lambda: trainer.request_stop("here"))
    state = trainer.run([0], max_epochs=1)
    return state.status, "val/mean" in state.metrics, evaluator.state.iteration < 400


class Slow(Stream):
    """Batches of one rank, with a length, that take longer than the time between two votes."""

    def __len__(self):
        return len(self.data)

    def __iter__(self):
        for each in self.data:
            time.sleep(0.1)
            yield each


def slow(rank, *, stop):
    """Rank 1 has 2 batches, the others 8."""
    evaluator = create_evaluator(nn.Identity(), lambda model, batch: batch, {"mean": Average()})
    trainer = Trainer(lambda engine, batch: None)
    Evaluation(evaluator, Slow([torch.tensor([float(index)]) for index in range(2 if rank == 1 else 8)])).attach(
        trainer
    )
    if stop and rank == 1:
        evaluator.add_event_handler(Events.ITERATION_COMPLETED(once=2), lambda: trainer.request_stop("here"))
    state = trainer.run([0], max_epochs=1)
    return state.status, state.metrics.get("val/mean"), evaluator.state.iteration


def invariant_mean():
    """Of four micro-batches: on three ranks one has two of them."""
    model = nn.Linear(3, 3)
    update = Update(model, torch.optim.SGD(model.parameters(), lr=0.1), lambda model, batch: None, rank_invariant=True)
    evaluator = create_evaluator(model, lambda model, batch: batch[0].sum(1, keepdim=True), {"mean": Average()})
    Evaluation(evaluator, loader(samples(7), 2))(Trainer(update, global_micro_batches=4))
    return float(evaluator.state.metrics["mean"])


def _rank(place, folder):
    torch.set_num_threads(1)
    reports = {}
    for world in (2, 3, 4):
        if place < world:
            dist.init_process_group("gloo", init_method=f"file://{folder}/{world}", rank=place, world_size=world)
            for count, sized in ((3, True), (17, True), (1, False), (17, False)):
                reports[world, count, sized] = metrics_of(count, sized=sized)
            if world == 2:
                reports["slow"] = slow(place, stop=False), slow(place, stop=True)
            if world == 3:
                reports["stopped"] = stopped(place, world)
                reports["invariant"] = invariant_mean()
            if world == 4:
                use_mesh(init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor")))
                reports["tensor parallel"] = metrics_of(1, sized=True)
                use_mesh(None)
            agreement.forget_groups()
            idist.finalize()  # else Ignite takes the next group for this one
    torch.save(reports, f"{folder}/{place}.pt")


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    folder = tmp_path_factory.mktemp("collectives")
    on_ranks(4, _rank, folder, joined=False)
    return [torch.load(folder / f"{place}.pt", weights_only=False) for place in range(4)]


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("count", "sized"), [(3, True), (17, True), (1, False), (17, False)])
def test_metrics_are_those_of_one_process(reports, count, sized):
    whole = metrics_of(count, sized=sized)
    assert len(whole["seen"]) == count
    for world in (2, 3, 4):
        each_rank = [report[world, count, sized] for report in reports[:world]]
        assert sorted(each for report in each_rank for each in report["seen"]) == sorted(whole["seen"])
        assert any(not report["seen"] for report in each_rank) == (count < world)
        for report in each_rank:
            assert report["logged"] == pytest.approx(whole["logged"], abs=1e-6)
            for name, value in whole["metrics"].items():
                assert torch.tensor(report["metrics"][name]).allclose(torch.tensor(value), rtol=1e-6, atol=1e-6), name
            assert report["metrics"]["counts"] == whole["metrics"]["counts"]


@pytest.mark.row("C2")
def test_ranks_that_share_data_share_the_lack_of_it(reports):
    found = [report["tensor parallel"] for report in reports]
    assert [len(each["seen"]) for each in found] == [1, 1, 0, 0]
    assert all(each["metrics"] == metrics_of(1, sized=True)["metrics"] for each in found)


@pytest.mark.row("C2")
def test_all_ranks_stop_in_an_evaluation_that_some_have_ended(reports):
    outcomes = [report["stopped"] for report in reports[:3]]
    assert outcomes == [("interrupted", False, True)] * 3


def test_a_rank_with_fewer_batches_votes_along_until_its_peers_have_none(reports):
    completed, stopped = zip(*(report["slow"] for report in reports[:2]), strict=True)
    mean = (sum(range(8)) + 0 + 1) / 10
    assert completed == (("completed", pytest.approx(mean), 8), ("completed", pytest.approx(mean), 2))
    assert [each[:2] for each in stopped] == [("interrupted", None)] * 2 and stopped[0][2] < 8


def test_sums_of_several_lengths_have_the_same_bits(reports):
    assert [report["invariant"] for report in reports[:3]] == [invariant_mean()] * 3
