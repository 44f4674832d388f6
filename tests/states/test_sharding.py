"""What a custom update trains sharded is resumed: torch's own optimizer, registered under a name."""

import pytest
import torch
from torch import nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from ignite_engine import Trainer, Update, loader
from ignite_engine.handlers import Checkpoint
from tests.kit.tiny import Numbers, linear, mse, one
from tests.ranks.forkserver import on_ranks


class _Counting(torch.optim.AdamW):
    """Its state has an entry that is of no parameter."""

    def step(self, closure=None):
        self.state["steps"] = torch.tensor(1 + int(self.state.get("steps", 0)))
        return super().step(closure)


def _train(folder, iterations):
    """A sharded part and a frozen whole one, two groups, trained by a function."""
    torch.manual_seed(3)
    model = nn.Sequential(linear(), nn.Linear(1, 1).requires_grad_(False))
    fully_shard(model[0])
    groups = [{"params": model[1].parameters()}, {"params": model[0].parameters()}]
    optimizer = _Counting(groups, lr=0.1)

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
    weights = [getattr(parameter, "full_tensor", lambda: parameter)().detach() for parameter in model.parameters()]  # noqa: B023
    return weights, int(optimizer.state["steps"]), trainer.reproducibility()


def _is_resumed(rank, folder):
    whole, steps, _ = _train(f"{folder}/whole", 6)
    _train(f"{folder}/cut", 3)
    resumed, again, report = _train(f"{folder}/cut", 6)
    assert all(map(torch.equal, resumed, whole)) and again == steps == 6
    assert report == []


@pytest.mark.slow
@pytest.mark.distributed
def test_torchs_own_optimizer_of_a_sharded_model_is_resumed(tmp_path):
    on_ranks(2, _is_resumed, tmp_path)


def _is_trained_as_by_ddp(rank, folder):
    ends = []
    for name, wrap in (("ddp", DistributedDataParallel), ("replicate", replicate)):
        for iterations in (3, 6):  # the second goes on where the first has ended
            model = wrap(linear())
            trainer = Trainer(Update(model, torch.optim.AdamW(model.parameters(), lr=0.1), mse), 2)
            checkpoint = Checkpoint(f"{folder}/{name}")
            checkpoint.attach(trainer)
            checkpoint.resume()
            trainer.run(loader(Numbers(48), 2), max_iters=iterations)
        ends.append(one(model))
    assert torch.equal(*ends)


@pytest.mark.distributed
def test_a_model_that_replicate_prepares_is_trained_and_resumed_as_by_ddp(tmp_path):
    on_ranks(2, _is_trained_as_by_ddp, tmp_path)
