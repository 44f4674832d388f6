"""The batches of an evaluation: whose loader, on which ranks, and where there are none."""

import json
import multiprocessing
from pathlib import Path
from typing import Any

import pytest
import torch
from ignite.engine import Events
from ignite.metrics import Average
from ignite.metrics.metric import BatchWise
from torch import nn
from torch.utils.data import DataLoader, Dataset, Subset
from torchdata.stateful_dataloader import StatefulDataLoader

from ignite_engine import Trainer, TrainingEvents, create_evaluator, loader
from ignite_engine.data import end_workers
from ignite_engine.handlers import Checkpoint, Evaluation
from tests.handlers.evaluation.test_handler import Batches, averaging, evaluator_of, model_of
from tests.kit.tiny import Numbers, numbers_loader, trainer_of
from tests.ranks.forkserver import on_ranks


class Seen(Dataset[Any]):
    def __len__(self):
        return 24

    def __getitem__(self, index):
        return torch.tensor([float(index)])


@pytest.mark.parametrize("workers", [0, 2])
def test_training_loader_can_be_evaluated_in_the_middle_of_its_pass(workers):
    """Workers that persist have one iterator: a second pass would end that of the training."""
    options = {"num_workers": workers, "persistent_workers": True} if workers else {}
    data, trained, evaluated = loader(Seen(), batch_size=4, **options), list[float](), list[float]()
    trainer = Trainer(lambda engine, batch: trained.extend(batch.flatten().tolist()))
    evaluator = create_evaluator(nn.Linear(1, 1), lambda model, batch: evaluated.extend(batch.flatten().tolist()))
    evaluation = Evaluation(evaluator, data)
    evaluation.attach(trainer, Events.ITERATION_COMPLETED(every=2))
    trainer.run(data, max_epochs=2)
    for each in (data, evaluation._loader()):
        end_workers(each._iterator, each)

    assert trained == [*range(24)] * 2
    assert evaluated == [*range(24)] * 6


def test_loader_without_a_batch_is_refused_before_training():
    trainer = trainer_of()
    Evaluation(evaluator_of(model_of(trainer)), DataLoader(Subset(Numbers(4), []), batch_size=2)).attach(trainer)
    with pytest.raises(ValueError, match=r"^The evaluation of 'val' needs a batch, got 0: give"):
        trainer.run(numbers_loader())
    assert trainer.state.iteration == 0


# -- ranks ------------------------------------------------------------------------------------------------------------


def _one_of_two_ranks(rank, folder):
    report = {}

    trainer = Trainer(lambda engine, batch: None)
    evaluator = create_evaluator(nn.Linear(1, 1), lambda model, batch: batch, {"mean": Average()})
    mine = list[float]()
    evaluator.add_event_handler(
        Events.ITERATION_COMPLETED, lambda: mine.extend(evaluator.state.output.flatten().tolist())
    )
    Evaluation(evaluator, DataLoader(Seen(), batch_size=4)).attach(trainer)
    report["mean"] = trainer.run([0], max_epochs=1).metrics["val/mean"]
    report["mine"] = mine

    for name, data in (
        ("sized", DataLoader(Subset(Seen(), range(4 * (1 - rank))), batch_size=2, sampler=range(4 * (1 - rank)))),
        ("list", [torch.ones(1)] * (2 - 2 * rank)),
        ("unsized", Batches(2 - 2 * rank)),
    ):
        trainer = Trainer(lambda engine, batch: None)
        Evaluation(averaging(), data).attach(trainer)
        report[name] = trainer.run([0, 1], max_epochs=1).metrics["val/mean"]
    trainer = Trainer(lambda engine, batch: None)
    Evaluation(averaging(), Batches(0)).attach(trainer)
    try:
        trainer.run([0, 1], max_epochs=1)
    except ValueError as error:
        report["none"] = str(error)
    evaluator = averaging()
    Average().attach(evaluator, "of the batch", usage=BatchWise())
    Evaluation(evaluator, [torch.ones(1)] * (2 + rank)).attach(trainer := Trainer(lambda engine, batch: None))
    try:
        trainer.run([0, 1], max_epochs=1)
    except ValueError as error:
        report["by batch"] = str(error)
    (Path(folder) / f"{rank}.json").write_text(json.dumps(report))


@pytest.mark.slow
@pytest.mark.distributed
def test_on_two_ranks_a_plain_loader_is_sharded_and_a_rank_without_a_batch_has_its_peers_metrics(
    tmp_path,
):
    on_ranks(2, _one_of_two_ranks, tmp_path)
    reports = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1)]

    assert [each["mean"] for each in reports] == [11.5, 11.5]
    assert sorted(reports[0]["mine"] + reports[1]["mine"]) == [*range(24)], "each sample once"
    for name, mean in (("sized", 1.5), ("list", 1.0), ("unsized", 0.5)):
        assert [each[name] for each in reports] == [mean] * 2, name
    line = "The evaluation of 'val' needs a batch, got 0, 0 by rank: give data that has one."
    assert [each["none"] for each in reports] == [line] * 2
    line = "computes the metric 'of the batch' after each batch, on all ranks together, and the ranks have 2, 3 batches"
    assert all(line in each["by batch"] for each in reports), "each would wait for the other until its timeout"


@pytest.mark.parametrize("kind", [loader, StatefulDataLoader])
def test_no_worker_of_an_evaluation_is_left(kind):
    """Torchdata's were ended by the garbage collector, which waited 5 s for each."""
    trainer, data = trainer_of(), kind(Numbers(6), 2, num_workers=2)
    Evaluation(create_evaluator(model_of(trainer), lambda model, batch: None), data).attach(trainer)
    trainer.add_event_handler(
        TrainingEvents.EVALUATION_COMPLETED, lambda: alive.append(len(multiprocessing.active_children()))
    )
    alive = [len(multiprocessing.active_children())]
    trainer.run(numbers_loader(4), max_epochs=2)
    assert alive == alive[:1] * 3


def test_order_of_a_shuffled_evaluation_does_not_depend_on_the_process():
    def evaluated(seed):
        seen, trainer = list[float](), trainer_of()
        torch.manual_seed(seed)
        evaluator = create_evaluator(nn.Linear(1, 1), lambda model, batch: seen.extend(batch.flatten().tolist()))
        Evaluation(evaluator, DataLoader(Seen(), 4, shuffle=True)).attach(trainer)
        trainer.run(numbers_loader(), max_epochs=1)
        return seen

    assert evaluated(1) == evaluated(2) and sorted(evaluated(1)) == [float(each) for each in range(24)]


@pytest.mark.parametrize("at", [Events.ITERATION_COMPLETED(once=9), Events.EPOCH_COMPLETED(once=2)])
def test_repeated_evaluation_of_the_training_loader_is_of_the_same_pass(at, tmp_path):
    """The resumed process has not opened the pass yet, whose order and random numbers it has."""

    def evaluated(folder, *, stop):
        trainer, seen = trainer_of(), list[Any]()
        data = numbers_loader(10, shuffle=True, drop_last=True)

        def note(model, batch):
            seen.append(batch[0].tolist())
            if stop:
                trainer.request_stop("enough")

        Evaluation(create_evaluator(model_of(trainer), note), data).attach(trainer, at)
        checkpoint = Checkpoint(folder)
        checkpoint.attach(trainer)
        checkpoint.resume()
        trainer.run(data, max_epochs=2)
        return seen

    whole = evaluated(tmp_path / "whole", stop=False)
    assert len(evaluated(tmp_path / "cut", stop=True)) == 1
    assert evaluated(tmp_path / "cut", stop=False) == whole
