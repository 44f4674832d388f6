"""Ranks with ragged tokens, uneven shards, a short tail or no batch at all train as one process on the whole batch."""

from itertools import chain

import pytest
import torch
from ignite.engine import Events
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset

from ignite_engine import Trainer, Update, loader
from tests.kit.processes import ranks
from tests.kit.tiny import linear, one

SAMPLES, SIZE, STEPS = 23, 2, 2
COUNTS = (1, 5, 2, 3)
"""Batches of each rank where each has data of its own."""


def sample(index):
    """Between 1 and 5 tokens of 3 features, padded to 5, and which of them are tokens."""
    generator = torch.Generator().manual_seed(index)
    return torch.randn(5, 3, generator=generator), torch.arange(5) <= index * 7 % 5


class Ragged(Dataset):
    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        return index, *sample(index)


class Stream:
    """Without a length."""

    def __init__(self, batches):
        self.batches = batches

    def __iter__(self):
        return iter(self.batches)


def batch_of(ids):
    inputs, real = zip(*map(sample, ids), strict=True)
    return torch.tensor(ids), torch.stack(inputs), torch.stack(real)


def loss_fn(model, batch):
    _, inputs, real = batch
    return (model(inputs[real]).squeeze(1) - inputs[real].sum(1)).square().mean()


def ids_of(rank, empty):
    """The samples of each batch of this rank, the last of which has one; rank 0 may have none."""
    count = 0 if empty and rank == 0 else COUNTS[rank]
    firsts = [10 * rank + 2 * number for number in range(count)]
    return [[first] if first == firsts[-1] else [first, first + 1] for first in firsts]


def data_of(data, rank, empty):
    if data in ("loader", "dealt", "one sample"):
        return loader(Ragged(1 if data == "one sample" else SAMPLES), SIZE, shuffle=True)
    batches = [batch_of(ids) for ids in ids_of(rank, empty)]
    return batches if data == "list" else Stream(batches)


def train(rank, data, empty):
    model = linear()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    weighted = {"weight_fn": lambda batch: int(batch[2].sum()), "clip_norm": 1.0}
    steps = {"global_micro_batches": 5} if data == "dealt" else {"accumulation_steps": STEPS}
    trainer = Trainer(Update(DistributedDataParallel(model), optimizer, loss_fn, **weighted), **steps)
    seen, losses = [], []

    @trainer.on(Events.ITERATION_COMPLETED)
    def note():
        losses.append(float(trainer.state.output["loss"]))
        group = trainer.state.batch[: len(trainer.state.batch) - trainer.state.group.padding]
        seen.append([int(each) for ids, _, _ in group for each in ids])

    trainer.run(data_of(data, rank, empty), max_epochs=2)
    return seen, torch.tensor(losses), one(model)


CASES = [
    (2, "list", False),
    (2, "stream", True),
    (3, "loader", False),
    (2, "dealt", False),
    (4, "dealt", False),  # 12 micro-batches, 5 for each update: uneven shares, and at the end 2 for 4 ranks
    (4, "one sample", True),
    *(
        pytest.param(*case, marks=pytest.mark.nightly)
        for case in ((2, "loader", False), (3, "list", True), (4, "stream", False))
    ),
]


@pytest.mark.row("B11")
@pytest.mark.parametrize(("world", "data", "empty"), CASES)
def test_weights_are_those_of_one_process_with_the_whole_batch(world, data, empty):
    found = ranks(world, train, data, empty)
    assert any(not any(seen) for seen, _, _ in found) == empty, "a rank without a batch"
    model = linear()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    updates = [[*chain(*of_ranks)] for of_ranks in zip(*(seen for seen, _, _ in found), strict=True)]
    losses = []
    for ids in updates:
        optimizer.zero_grad()
        losses.append(loss_fn(model, batch_of(ids)))
        losses[-1].backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    expected = list(range(1 if data == "one sample" else SAMPLES))
    if data in ("list", "stream"):
        expected = [index for rank in range(world) for ids in ids_of(rank, empty) for index in ids]
    assert sorted(chain(*updates)) == sorted(expected * 2), "each sample once an epoch"
    mean = torch.stack([each for _, each, _ in found]).mean(0)
    torch.testing.assert_close(mean, torch.stack(losses).detach(), rtol=1e-5, atol=0)
    for _, _, weights in found:
        torch.testing.assert_close(weights, one(model), rtol=0, atol=2e-6)
