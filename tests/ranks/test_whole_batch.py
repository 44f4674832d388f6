"""Ranks with ragged tokens, uneven shards, a short tail or no batch at all train as one process on the whole batch."""

from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ignite.engine import Events
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset

from ignite_engine import Trainer, Update, loader
from ignite_engine.ranks import agreement
from tests.kit.tiny import linear, one
from tests.ranks.forkserver import on_ranks

pytestmark = pytest.mark.distributed

SAMPLES, SIZE, STEPS = 23, 2, 2
COUNTS = (1, 5, 2, 3)
"""Batches of each rank where each has data of its own."""
CASES = (
    [(world, data, empty) for world, data, empty in product((2, 3, 4), ("list", "stream"), (False, True))]
    + [(world, "loader", False) for world in (2, 3, 4)]
    + [(4, "one sample", True)]
)


def sample(index):
    """Between 1 and 5 tokens of 3 features, padded to 5, and which of them are tokens."""
    generator = torch.Generator().manual_seed(index)
    return torch.randn(5, 3, generator=generator), torch.arange(5) <= index * 7 % 5


class Ragged(Dataset[Any]):
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


def loss_fn(model, batch):
    _, inputs, real = batch
    return (model(inputs[real]).squeeze(1) - inputs[real].sum(1)).square().mean()


def tokens(batch):
    return int(batch[2].sum())


def data_of(data, rank, empty):
    if data in ("loader", "one sample"):
        return loader(Ragged(1 if data == "one sample" else SAMPLES), SIZE, shuffle=True)
    batches = []
    for number in range(0 if empty and rank == 0 else COUNTS[rank]):
        first = 10 * rank + 2 * number
        last = number == COUNTS[rank] - 1  # one sample
        ids = [first] if last else [first, first + 1]
        inputs, real = zip(*map(sample, ids), strict=True)
        batches.append((torch.tensor(ids), torch.stack(inputs), torch.stack(real)))
    return batches if data == "list" else Stream(batches)


def train(rank, data, empty):
    model = linear()
    wrapped = DistributedDataParallel(model)
    update = Update(wrapped, torch.optim.AdamW(model.parameters(), lr=0.05), loss_fn, weight_fn=tokens, clip_norm=1.0)
    trainer, seen = Trainer(update, STEPS), list[list[int]]()

    @trainer.on(Events.ITERATION_COMPLETED)
    def note():
        group = trainer.state.batch[: len(trainer.state.batch) - trainer.state.padding]
        seen.append([int(each) for ids, _, _ in group for each in ids])

    trainer.run(data_of(data, rank, empty), max_epochs=2)
    return {"seen": seen, "weights": one(model).clone()}


def _rank(place, folder):
    torch.set_num_threads(1)
    reports = {}
    for world in (2, 3, 4):
        if place < world:
            dist.init_process_group("gloo", init_method=f"file://{folder}/{world}", rank=place, world_size=world)
            for case in CASES:
                if case[0] == world:
                    reports[case] = train(place, *case[1:])
            agreement.forget_groups()
            dist.destroy_process_group()
    torch.save(reports, f"{folder}/{place}.pt")


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole_batch")
    on_ranks(4, _rank, folder, joined=False)
    return [torch.load(folder / f"{place}.pt", weights_only=False) for place in range(4)]


@pytest.mark.row("B11")
@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_weights_are_those_of_one_process_with_the_whole_batch(reports, case):
    world, data, empty = case
    ranks = [report[case] for report in reports[:world]]
    assert any(not any(each["seen"]) for each in ranks) == empty, "a rank without a batch"
    model = linear()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    updates = [[index for each in ranks for index in each["seen"][step]] for step in range(len(ranks[0]["seen"]))]
    for update in updates:
        inputs, real = zip(*map(sample, update), strict=True)
        optimizer.zero_grad()
        loss_fn(model, (update, torch.stack(inputs), torch.stack(real))).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    expected = sorted(range(1 if data == "one sample" else SAMPLES)) * 2
    if data in ("list", "stream"):
        alone = [data_of("list", rank, empty) for rank in range(world)]
        expected = [int(each) for batches in alone for ids, _, _ in batches for each in ids] * 2
    assert sorted(index for update in updates for index in update) == sorted(expected), "each sample once an epoch"
    for each in ranks:
        torch.testing.assert_close(each["weights"], one(model).detach(), rtol=0, atol=2e-6)
