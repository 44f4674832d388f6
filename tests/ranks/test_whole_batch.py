"""Ranks with ragged tokens, uneven shards, a short tail or no batch at all train as one process on the whole batch."""

import logging
from itertools import chain

import pytest
import torch
from ignite.engine import Events
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset

from ignite_engine import Trainer, Update, loader
from ignite_engine.handlers import Checkpoint
from tests.kit.processes import ranks
from tests.kit.tiny import Numbers, linear, mse, one

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
    if data in ("loader", "one sample"):
        return loader(Ragged(1 if data == "one sample" else SAMPLES), SIZE, shuffle=True)
    batches = [batch_of(ids) for ids in ids_of(rank, empty)]
    return batches if data == "list" else Stream(batches)


def train(rank, data, empty):
    model = linear()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    weighted = {"weight_fn": lambda batch: int(batch[2].sum()), "clip_norm": 1.0}
    trainer, seen = Trainer(Update(DistributedDataParallel(model), optimizer, loss_fn, **weighted), STEPS), []

    @trainer.on(Events.ITERATION_COMPLETED)
    def note():
        group = trainer.state.batch[: len(trainer.state.batch) - trainer.state.padding]
        seen.append([int(each) for ids, _, _ in group for each in ids])

    trainer.run(data_of(data, rank, empty), max_epochs=2)
    return seen, one(model)


CASES = [
    (2, "list", False),
    (2, "stream", True),
    (2, "loader", False),
    (3, "list", True),
    (3, "loader", False),
    (4, "stream", False),
    (4, "one sample", True),
]


@pytest.mark.row("B11")
@pytest.mark.parametrize(("world", "data", "empty"), CASES)
def test_weights_are_those_of_one_process_with_the_whole_batch(world, data, empty):
    found = ranks(world, train, data, empty)
    assert any(not any(seen) for seen, _ in found) == empty, "a rank without a batch"
    model = linear()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    updates = [[*chain(*of_ranks)] for of_ranks in zip(*(seen for seen, _ in found), strict=True)]
    for ids in updates:
        optimizer.zero_grad()
        loss_fn(model, batch_of(ids)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    expected = list(range(1 if data == "one sample" else SAMPLES))
    if data in ("list", "stream"):
        expected = [index for rank in range(world) for ids in ids_of(rank, empty) for index in ids]
    assert sorted(chain(*updates)) == sorted(expected * 2), "each sample once an epoch"
    for _, weights in found:
        torch.testing.assert_close(weights, one(model), rtol=0, atol=2e-6)


# ------------------------------------------------------------------------------------------------ micro-batches dealt


def see(rank, folder, stop_at=None):
    """The samples of each of this rank's micro-batches that counts, by epoch and iteration, and what was warned of."""
    seen, lines = [], []
    handler = logging.Handler(logging.WARNING)
    handler.addFilter(lambda record: "samples" in record.getMessage())
    handler.emit = lambda record: lines.append(record.getMessage())

    def update(engine, batch):
        real = batch[: len(batch) - engine.state.padding]
        seen.append((engine.state.epoch, engine.state.iteration, [each.tolist() for each in real]))

    trainer = Trainer(update, global_micro_batches=5)
    checkpoint = Checkpoint(folder)
    checkpoint.attach(trainer)
    checkpoint.resume()

    @trainer.on(Events.ITERATION_COMPLETED)
    def stop():
        if trainer.state.iteration == stop_at:
            trainer.request_stop("here")
            trainer.vote_at_next_boundary()

    logging.getLogger("ignite_engine").addHandler(handler)
    trainer.run(loader(torch.arange(29), 2, shuffle=True), max_epochs=2)
    logging.getLogger("ignite_engine").removeHandler(handler)
    return seen, lines


def seen_on(world, folder, stop_at=None):
    """Epoch, iteration and micro-batches of all ranks, in the order of ranks."""
    found = [see(0, folder, stop_at)] if world == 1 else ranks(world, see, folder, stop_at)
    assert not any(lines for _, lines in found), "the position means the same on any number of ranks"
    joined = []
    for same in zip(*(seen for seen, _ in found), strict=True):
        assert len({each[:2] for each in same}) == 1
        joined.append((*same[0][:2], [*chain(*(each[2] for each in same))]))
    return joined


def test_run_continues_on_another_number_of_ranks_with_the_next_micro_batch(tmp_path):
    parts = []
    for world, stop_at in ((2, 1), (4, 2), (1, 3), (3, 5), (2, None)):
        parts += seen_on(world, tmp_path / "parts", stop_at)
    whole = seen_on(1, tmp_path / "whole")
    assert parts == whole and len(whole) == 6
    assert whole[0][2] != whole[3][2], "each epoch has its own order"
    samples = [sample for _, _, group in whole for batch in group for sample in batch]
    assert sorted(samples) == sorted([*range(29)] * 2)


def learn(rank, wrap):
    """Weights and losses with the ordinary update."""
    model = linear(dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = Trainer(
        Update(wrap(model), optimizer, mse, weight_fn=lambda batch: len(batch[0])), global_micro_batches=5
    )
    losses = []
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: losses.append(float(trainer.state.output["loss"])))
    trainer.run(loader(Numbers(23, dtype=torch.float64), 2, shuffle=True), max_epochs=2)
    return one(model), torch.tensor(losses)


@pytest.mark.parametrize("world", [2, 3, 4])
def test_update_learns_the_same_on_uneven_shares_and_a_short_tail(world):
    """23 samples in batches of 2 make 12 micro-batches; 5 on 2 to 4 ranks are uneven, and 2 are left at the end."""
    weights, losses = learn(0, lambda model: model)
    found = ranks(world, learn, DistributedDataParallel)
    for each, _ in found:
        torch.testing.assert_close(each, weights, rtol=0, atol=1e-12)
    mean = torch.stack([each for _, each in found]).mean(0)
    torch.testing.assert_close(mean, losses, rtol=1e-6, atol=0)
