"""The order of samples and what their random numbers depend on, below the loader."""

import random
import tracemalloc
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, Subset

from ignite_engine import Trainer, loader
from ignite_engine.data import ResumableSampler, SeededDataset


class Reads(Dataset[Any]):
    """Samples of an index and a random number, read alone or many at once; counts the reads."""

    def __init__(self):
        self.reads = []

    def __len__(self):
        return 7

    def __getitem__(self, index):
        self.reads.append(1)
        return index, random.random()


class ReadsBatches(Reads):
    def __getitems__(self, indices):
        self.reads.append(len(indices))
        return [(index, random.random()) for index in indices]


class ReadsBatchesOnly(ReadsBatches):
    __getitem__ = None


def batches(dataset, **options):
    return [(indices.tolist(), drawn.tolist()) for indices, drawn in loader(dataset, shuffle=True, seed=3, **options)]


@pytest.mark.parametrize("kind", [ReadsBatches, ReadsBatchesOnly])
@pytest.mark.parametrize("plain", [False, True])
def test_dataset_that_reads_batches_is_asked_for_batches(kind, plain):
    dataset = kind()
    data = DataLoader(dataset, batch_size=3) if plain else loader(dataset, 3)
    Trainer(lambda engine, batch: None).run(data)

    assert dataset.reads == [3, 3, 1]


def test_random_numbers_of_a_dataset_that_reads_batches_do_not_depend_on_the_workers():
    alone = batches(ReadsBatches(), batch_size=3)

    assert batches(ReadsBatches(), batch_size=3, num_workers=2) == alone
    assert batches(ReadsBatches(), batch_size=2) != alone
    assert len({number for _, drawn in alone for number in drawn}) == 7


class UsesUpItsKeys(Reads):
    def __len__(self):
        return 120

    def __getitems__(self, keys):
        made = []
        while keys:
            key = keys.pop(0)
            made.append((key, random.random() if key >= 90 else 0.0))
        return made


def test_batch_that_is_read_again_is_asked_for_the_same_samples():
    read = [each for batch in loader(UsesUpItsKeys(), 5, collate_fn=list) for each in batch]
    assert [key for key, _ in read] == [*range(120)]


def test_subset_keeps_the_random_numbers_of_each_sample():
    """Torch's Subset has ``__getitems__`` whatever it is a subset of."""
    whole, part = Reads(), Subset(Reads(), range(7))
    by_3 = {pair for indices, drawn in batches(part, batch_size=3) for pair in zip(indices, drawn, strict=True)}

    assert by_3 == {
        pair for indices, drawn in batches(whole, batch_size=2) for pair in zip(indices, drawn, strict=True)
    }
    nested = Subset(Subset(ReadsBatches(), range(7)), range(7))
    assert batches(nested, batch_size=3) == batches(ReadsBatches(), batch_size=3)


def test_single_sample_is_a_batch_of_one():
    data = SeededDataset(Reads(), list, seed=1)

    assert data[(0, 4)] == data.__getitems__([(0, 4)]) and data[(0, 4)] != data[(1, 4)]
    assert len(data) == 7


def test_length_may_be_given_as_a_number():
    sampler = ResumableSampler(5, shuffle=False, seed=0, rank=1, world_size=2)

    assert list(sampler) == [(0, 1), (0, 3)] and len(sampler) == 2


def test_loader_that_is_iterated_by_hand_sees_what_was_added():
    data = list(range(4))
    batches = loader(data, 2)
    assert len(list(batches)) == 2
    data += [4, 5]

    assert torch.cat(list(batches)).tolist() == data


def test_stopped_run_leaves_the_loader_at_its_first_sample():
    trainer = Trainer(lambda engine, batch: engine.terminate())
    data = loader(list(range(4)))
    trainer.run(data)

    assert torch.cat(list(data)).tolist() == [0, 1, 2, 3]


def test_order_of_a_large_pass_is_not_a_list_of_numbers():
    """A Python number takes 32 bytes and its place in a list 8: of 400,000 samples 16 MB."""
    sampler = ResumableSampler(400_000, shuffle=True, seed=3, rank=0, world_size=2)
    tracemalloc.start()
    try:
        first, seen = next(iter(sampler)), sum(1 for _ in sampler)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()

    assert seen == 200_000 and first[0] == 0 and peak < 3e6


class HasNoNext(Reads):
    def __getitem__(self, index):
        return next(iter([index] if index != 4 else []))


@pytest.mark.parametrize("workers", [0, 2])
def test_stop_iteration_of_a_sample_or_of_a_collate_function_is_an_error(workers):
    """Else it would end the pass, and the epoch be filled from another one."""
    trainer = Trainer(lambda engine, batch: None)
    with pytest.raises(RuntimeError, match=r"HasNoNext\[4\] raised StopIteration, which would end the pass"):
        trainer.run(loader(HasNoNext(), 3, num_workers=workers))
    data = loader(Reads(), 3, collate_fn=lambda samples: next(iter(samples[1:])), num_workers=workers)
    with pytest.raises(RuntimeError, match=r"collate_fn for the batch from Reads\[6\] on raised StopIteration"):
        trainer.run(data)
