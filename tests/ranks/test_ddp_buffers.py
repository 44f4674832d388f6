"""BatchNorm under DDP: an evaluation sees on every rank what the checkpoint of that step boundary holds."""

import pytest
import torch
from ignite.engine import Events
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ignite_engine import Trainer, Update, create_evaluator, loader
from ignite_engine.handlers import Checkpoint, Evaluation
from tests.kit.tiny import Numbers, mse
from tests.ranks.forkserver import on_ranks


def _train(folder, *, evaluate, **options):
    torch.manual_seed(4)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 1))
    wrapped = DistributedDataParallel(model, **options)
    trainer = Trainer(Update(wrapped, torch.optim.SGD(model.parameters(), lr=0.1), mse), 2)
    seen = []

    def predict(bare, batch):
        seen.append(bare[1].running_mean.clone())
        return bare(batch[0]), batch[1]

    if evaluate:
        evaluation = Evaluation(create_evaluator(wrapped, predict), loader(Numbers(4), 4))
        evaluation.attach(trainer, Events.ITERATION_COMPLETED(once=2))
    else:
        note = Events.ITERATION_COMPLETED(once=2)
        trainer.add_event_handler(note, lambda: seen.append(model[1].running_mean.clone()))
    checkpoint = Checkpoint(f"{folder}/{evaluate}{bool(options)}", keep_last=9)
    checkpoint.attach(trainer, Events.ITERATION_COMPLETED)
    trainer.run(loader(Numbers(24), 2, shuffle=True), max_epochs=2)
    saved = {
        each.iteration: checkpoint.store.load(each.path).shared["model"] for each in checkpoint.store.checkpoints()
    }
    return seen, {"saved": saved[2]["1.running_mean"], **saved[6]}, trainer.reproducibility()


def _rescales():
    """Each rank rescales the rows that it reads of a table with ``max_norm``."""
    torch.manual_seed(4)
    model = DistributedDataParallel(nn.Sequential(nn.Embedding(24, 3, max_norm=0.1), nn.Flatten(), nn.Linear(3, 1)))

    def loss_fn(model, batch):
        rows = batch[0].sum(1, keepdim=True).abs().long() % 24
        return nn.functional.mse_loss(model(rows), batch[1])

    trainer = Trainer(Update(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn))
    before = trainer.reproducibility()
    trainer.run(loader(Numbers(24), 2), max_epochs=1)
    return before + trainer.reproducibility()


def _of_two_models(rank):
    """Evaluated by rank 0 alone: the statistics of a BatchNorm under DDP within a plain model."""
    model = nn.Sequential(DistributedDataParallel(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))), nn.Linear(4, 1))
    model[0].module[1].running_mean.fill_(rank)
    trainer = Trainer(lambda engine, batch: None)
    trainer.update.model = model
    evaluator = create_evaluator(model, lambda model, batch: model(batch[0]))
    Evaluation(evaluator, loader(Numbers(1), 1)).attach(trainer)
    trainer.run([0], max_epochs=1)
    return model[0].module[1].running_mean, model[0].require_forward_param_sync


def _one_of_two_ranks(rank, folder):
    results = [_train(folder, evaluate=evaluate) for evaluate in (True, False)]
    results.append(_train(folder, evaluate=True, broadcast_buffers=False))
    torch.save(results, f"{folder}/{rank}.pt")
    torch.save(_rescales(), f"{folder}/rescaled_{rank}.pt")
    torch.save(_of_two_models(rank), f"{folder}/two_{rank}.pt")


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.timeout(120)
def test_each_rank_evaluates_the_statistics_that_are_saved(tmp_path):
    on_ranks(2, _one_of_two_ranks, tmp_path)
    first, second = (torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(2))
    (seen, end, exactness), (unseen, end_without, _), (own, _, inexact) = first
    assert torch.equal(seen[0], second[0][0][0]) and torch.equal(seen[0], end["saved"])
    # they did differ: nothing was shared where nothing was evaluated, or where DDP is set not to
    assert not torch.equal(unseen[0], second[1][0][0])
    assert not torch.equal(own[0], second[2][0][0])
    # and the training does not notice
    assert all(torch.equal(end[name], end_without[name]) for name in end)
    assert exactness == []
    assert inexact == ["the ranks have different values of model.1.running_mean: rank 0's are saved"]
    before, by_value, after = torch.load(tmp_path / "rescaled_0.pt", weights_only=True)
    assert before == after and before.startswith("0 rescales its weights (max_norm) on each rank by itself")
    assert "different values of" in by_value and "0.weight" in by_value
    for rank in range(2):
        mean, shares = torch.load(tmp_path / f"two_{rank}.pt", weights_only=True)
        assert not mean.any() and shares
