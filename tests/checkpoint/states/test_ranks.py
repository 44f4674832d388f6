"""What ranks hold: values that must be the same, tensors that are sharded."""

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from ignite_engine import Trainer, TrainingEvents, Update, loader
from ignite_engine.errors import NotExact, RanksDiffer
from ignite_engine.handlers import Checkpoint, DigestTrail
from tests.kit.processes import ranks
from tests.kit.refusals import refuses
from tests.kit.tiny import Numbers, linear, mse

# -- values that differ between ranks ----------------------------------------------------------------------------------


class Scaled(nn.Module):
    """A loss with a parameter that nothing reduces."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, model, batch):
        inputs, targets = batch
        return nn.functional.mse_loss(self.scale * model(inputs), targets)


def ddp_trainer(model, loss_fn=mse, *others):
    model = DistributedDataParallel(model)
    return Trainer(Update(model, torch.optim.SGD([*model.parameters(), *others], lr=0.1), loss_fn))


def spoiled(rank, iteration):
    """Rank 1's weights change by themselves after an iteration."""
    trainer = ddp_trainer(linear())

    def add():
        if rank == 1:
            with torch.no_grad():
                trainer.update.model.module[2].weight.view(-1)[0] += 1

    trainer.add_event_handler(TrainingEvents.OPTIMIZER_STEP_COMPLETED(once=iteration), add)
    return trainer


def with_a_margin(rank):
    margin = Scaled()
    return ddp_trainer(linear(), margin, margin.scale)


def apart(rank):
    """Without DDP; a rate of 0 leaves the weights alike."""
    model = linear()
    return Trainer(Update(model, torch.optim.Adam(model.parameters(), lr=0.0), mse))


# how it is trained, for how long, and the tensor that is named
DIFFER = {
    "DDP broadcasts statistics": (lambda rank: ddp_trainer(nn.Sequential(linear(), nn.BatchNorm1d(1))), 6, None),
    "nothing reduces a parameter": (with_a_margin, 6, "parameters.loss_fn.scale"),
    "without DDP": (apart, 1, "optimizer.0.weight.exp_avg"),
    "after the last comparison": (lambda rank: spoiled(rank, 5), 6, "model.2.weight"),
}


def reasons(rank, make, iterations):
    trainer = make(rank)
    trainer.run(loader(Numbers(48), 2), max_iters=iterations)
    return [reason for reason in trainer.reproducibility() if "different values" in reason]


@pytest.mark.parametrize(("make", "iterations", "name"), DIFFER.values(), ids=list(DIFFER))
def test_what_differs_between_ranks_is_named(make, iterations, name):
    for found in ranks(2, reasons, make, iterations):
        assert len(found) == (name is not None) and all(name in reason for reason in found)


def refused_ranks(rank, folder):
    strict = with_a_margin(rank)
    Checkpoint(folder, strict=True).attach(strict)
    refuses(lambda: strict.run(loader(Numbers(48), 2), max_iters=6), NotExact, "loss_fn.scale")
    trailed = spoiled(rank, 3)
    DigestTrail(folder, every=1, compare_ranks=True).attach(trailed)
    error = refuses(lambda: trailed.run(loader(Numbers(48), 2), max_iters=6), RanksDiffer, "iteration 3 model.2.weight")
    return strict.state.iteration, str(error)


def test_ranks_that_differ_end_a_strict_run_at_its_save_and_a_digest_trail_at_once(tmp_path):
    first, second = ranks(2, refused_ranks, tmp_path)
    assert first == second and first[0] == 6


# -- sharded ----------------------------------------------------------------------------------------------------------


class Counting(torch.optim.AdamW):
    """Its state has an entry that is of no parameter."""

    def step(self, closure=None):
        self.state["steps"] = torch.tensor(1 + int(self.state.get("steps", 0)))
        return super().step(closure)


def by_a_function(folder, iterations):
    """A sharded part and a frozen whole one, two groups, trained by a function of one's own."""
    torch.manual_seed(3)
    model = nn.Sequential(linear(), nn.Linear(1, 1).requires_grad_(False))
    fully_shard(model[0])
    groups = [{"params": model[1].parameters()}, {"params": model[0].parameters()}]
    optimizer = Counting(groups, lr=0.1)

    def update(engine, batch):
        optimizer.zero_grad()
        mse(model, batch).backward()
        optimizer.step()

    trainer = Trainer(update)
    trainer.register("model", model, shared=True)
    trainer.register("optimizer", optimizer, shared=True)
    checkpoint = Checkpoint(folder)
    checkpoint.attach(trainer)
    checkpoint.resume()
    trainer.run(loader(Numbers(16), 2), max_iters=iterations)
    weights = [getattr(parameter, "full_tensor", lambda each=parameter: each)() for parameter in model.parameters()]
    return torch.cat([each.detach().reshape(-1) for each in weights]), int(optimizer.state["steps"])


def resumed_sharded(rank, folder):
    whole, steps = by_a_function(folder / "whole", 6)
    by_a_function(folder / "cut", 3)
    resumed, again = by_a_function(folder / "cut", 6)
    return torch.equal(resumed, whole), steps, again


def test_torchs_own_optimizer_of_a_sharded_model_is_resumed(tmp_path):
    assert ranks(2, resumed_sharded, tmp_path) == [(True, 6, 6)] * 2
