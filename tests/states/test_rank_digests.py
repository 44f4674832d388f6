"""What ranks train apart is noticed by its values, named, and refused by ``strict``."""

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ignite_engine import Trainer, TrainingEvents, Update, loader
from ignite_engine.errors import NotExact, RanksDiffer
from ignite_engine.handlers import Checkpoint, DigestTrail
from tests.kit.tiny import Numbers, linear, mse
from tests.ranks.forkserver import on_ranks

pytestmark = pytest.mark.distributed


class Scaled(nn.Module):
    """A loss with a parameter that nothing reduces."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, model, batch):
        inputs, targets = batch
        return nn.functional.mse_loss(self.scale * model(inputs), targets)


def trainer_of(model, loss_fn=mse, *others):
    return Trainer(Update(model, torch.optim.SGD([*model.parameters(), *others], lr=0.1), loss_fn))


def run(trainer, iterations=6):
    trainer.run(loader(Numbers(48), 2), max_iters=iterations)
    return [reason for reason in trainer.reproducibility() if "the ranks have different values" in reason]


def spoil_on_rank_1(rank, trainer, iteration):
    def add():
        if rank == 1:
            with torch.no_grad():
                trainer.update.model.module[2].weight.view(-1)[0] += 1

    trainer.add_event_handler(TrainingEvents.OPTIMIZER_STEP_COMPLETED(once=iteration), add)


def compared(rank, folder):
    with_statistics = nn.Sequential(linear(), nn.BatchNorm1d(1))
    assert run(trainer_of(DistributedDataParallel(with_statistics))) == []  # DDP broadcasts them

    margin = Scaled()
    (reason,) = run(trainer_of(DistributedDataParallel(linear()), margin, margin.scale))
    assert reason == "the ranks have different values of parameters.loss_fn.scale: rank 0's are saved"

    margin = Scaled()
    strict = trainer_of(DistributedDataParallel(linear()), margin, margin.scale)
    Checkpoint(f"{folder}/strict", strict=True).attach(strict)
    with pytest.raises(NotExact, match=r"loss_fn\.scale"):
        run(strict)
    assert strict.state.iteration == 1

    apart = linear()
    warming_up = Trainer(Update(apart, torch.optim.Adam(apart.parameters(), lr=0.0), mse))
    (reason,) = run(warming_up, 1)  # a rate of 0 leaves the weights alike
    assert "optimizer.0.weight.exp_avg" in reason

    late = trainer_of(DistributedDataParallel(linear()))
    spoil_on_rank_1(rank, late, 5)
    (reason,) = run(late)  # by the comparison after the last iteration
    assert "model.2.weight" in reason

    trailed = trainer_of(DistributedDataParallel(linear()))
    spoil_on_rank_1(rank, trailed, 3)
    DigestTrail(folder, every=1, compare_ranks=True).attach(trailed)
    with pytest.raises(RanksDiffer, match=r"at iteration 3: model\.2\.weight is the first of 1 tensors"):
        run(trailed)


def test_what_differs_between_ranks_is_named(tmp_path):
    on_ranks(2, compared, tmp_path)
