"""The data of drawn cases: datasets, samplers and iterables as users write them."""

import random
from typing import Any

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    Subset,
    WeightedRandomSampler,
    get_worker_info,
)

from ignite_engine import Windows, loader

CLASSES = 10


def nothing():
    """Where no stop is due while a sample is read."""


when_read = nothing
"""Called within each read of a sample or batch of data of one's own, in the process that trains and in its workers."""


class Samples(Dataset[Any]):
    """Samples that are functions of their index, but for what the augmentation draws."""

    def __init__(self, count, augmentation):
        generator = torch.Generator().manual_seed(count)
        self.inputs = torch.randn(count, 6, generator=generator)
        self.words = torch.randint(CLASSES, (count, 3), generator=generator)
        self.targets = torch.randint(CLASSES, (count,), generator=generator)
        self.augmentation = augmentation

    def __len__(self):
        return len(self.inputs)

    def __getitem__(self, index):
        inputs = self.inputs[index] + noise(self.augmentation, 6)
        when_read()
        return inputs, self.words[index], self.targets[index]


class BatchedSamples(Samples):
    def __getitems__(self, indices):
        return [self[index] for index in indices]


class Stream(IterableDataset[Any]):
    """The samples one after another, shared out to the workers."""

    def __init__(self, samples):
        self.samples = samples

    def __iter__(self):
        worker = get_worker_info()
        first, step = (worker.id, worker.num_workers) if worker is not None else (0, 1)
        for index in range(first, len(self.samples), step):
            yield self.samples[index]


class EpochSampler(Sampler[int]):
    """An order of its own for each epoch, as DistributedSampler has."""

    def __init__(self, length):
        self.length, self.epoch = length, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        yield from torch.randperm(self.length, generator=torch.Generator().manual_seed(self.epoch)).tolist()

    def __len__(self):
        return self.length


class EpochBatchSampler(BatchSampler):
    def set_epoch(self, epoch):
        self.sampler.set_epoch(epoch)


class StatefulSampler(Sampler[int]):
    """An order drawn from a generator whose state is saved."""

    def __init__(self, length):
        self.length, self.generator, self.next = length, torch.Generator().manual_seed(3), 0
        self.order = []

    def __iter__(self):
        if self.next == 0:
            self.order = torch.randperm(self.length, generator=self.generator).tolist()
        while self.next < self.length:
            self.next += 1
            yield self.order[self.next - 1]
        self.next = 0

    def __len__(self):
        return self.length

    def state_dict(self):
        return {"order": list(self.order), "next": self.next, "generator": self.generator.get_state()}

    def load_state_dict(self, state):
        self.order, self.next = list(state["order"]), state["next"]
        self.generator.set_state(state["generator"])


class Unsized:
    """Batches without a length: the same ones each pass; or as many as the pass's number says."""

    def __init__(self, batches, augmentation="none", *, varying=False):
        self.batches, self.augmentation, self.varying, self.passes = batches, augmentation, varying, 0

    def __iter__(self):
        left_out = self.passes % 2 if self.varying else 0
        self.passes += 1
        for inputs, words, targets in self.batches[left_out:]:
            drawn = noise(self.augmentation, inputs.shape)
            when_read()
            yield inputs + drawn, words, targets


class StatefulBatches:
    """Batches that say where they stand, as a user's own loader may."""

    def __init__(self, batches):
        self.batches, self.next = batches, 0

    def __iter__(self):
        while self.next < len(self.batches):
            self.next += 1
            when_read()
            yield self.batches[self.next - 1]
        self.next = 0

    def state_dict(self):
        return {"next": self.next}

    def load_state_dict(self, state):
        self.next = state["next"]


class RewoundBatches:
    """The same, as its own iterator, which begins anew where it is asked for one."""

    def __init__(self, batches):
        self.batches, self.next, self.loaded = batches, 0, False

    def __iter__(self):
        self.next = self.next if self.loaded else 0
        self.loaded = False
        return self

    def __next__(self):
        if self.next == len(self.batches):
            raise StopIteration
        self.next += 1
        when_read()
        return self.batches[self.next - 1]

    def state_dict(self):
        return {"next": self.next}

    def load_state_dict(self, state):
        self.next, self.loaded = state["next"], True


class RewoundLoader(DataLoader[Any]):
    """A loader of a user's that is its own iterator, and begins anew where it is asked for one."""

    def __iter__(self):
        self.iterator = super().__iter__()
        return self

    def __next__(self):
        return next(self.iterator)


class Endless:
    """Batches for ever."""

    def __init__(self, batches):
        self.batches = batches

    def __iter__(self):
        while True:
            yield from self.batches


def noise(kind, shape):
    """Small numbers drawn from a global generator."""
    if kind == "torch":
        return 0.1 * torch.randn(shape)
    if kind == "numpy":
        return torch.from_numpy(0.1 * np.random.standard_normal(shape)).float()
    return 0.1 * random.random() if kind == "python" else 0.0


def noisy_collate(items):
    inputs, words, targets = torch.utils.data.default_collate(items)
    return inputs + 0.1 * torch.randn(inputs.shape), words, targets


def data_of(plan):
    """What the case trains on."""
    kind, numbers = plan["data"], plan["numbers"]
    batch_size = numbers["batch size"]
    dataset = (BatchedSamples if kind == "__getitems__" else Samples)(numbers["samples"], plan["augmentation"])
    options = {"num_workers": int(plan["workers"][0])}
    if plan["workers"] == "2 persistent":
        options["persistent_workers"] = True
    if plan["augmentation"] == "collate":
        options["collate_fn"] = noisy_collate
    own = torch.Generator().manual_seed(11)
    sized = options | {"drop_last": plan["drop_last"] == "yes"}
    match kind:
        case "loader in order" | "loader shuffled":
            return loader(dataset, batch_size, shuffle=kind.endswith("shuffled"), seed=2, **sized)
        case "DataLoader in order":
            return DataLoader(dataset, batch_size, **sized)
        case "DataLoader shuffled" | "__getitems__":
            return DataLoader(dataset, batch_size, shuffle=True, **sized)
        case "DataLoader own generator":
            return DataLoader(dataset, batch_size, shuffle=True, generator=own, **sized)
        case "DataLoader list of indices":
            return DataLoader(dataset, batch_size, sampler=list(range(len(dataset)))[::-1], **sized)
        case "DataLoader, its own iterator":
            return RewoundLoader(dataset, batch_size, **sized)
        case "batch_sampler":
            return DataLoader(dataset, batch_sampler=BatchSampler(RandomSampler(dataset), batch_size, False), **options)
        case "batch_sampler with set_epoch":
            batches = EpochBatchSampler(EpochSampler(len(dataset)), batch_size, False)
            return DataLoader(dataset, batch_sampler=batches, **options)
        case "weighted sampler":
            weights = torch.arange(1.0, len(dataset) + 1)
            return DataLoader(dataset, batch_size, sampler=WeightedRandomSampler(weights, len(dataset)), **sized)
        case "sampler with set_epoch":
            return DataLoader(dataset, batch_size, sampler=EpochSampler(len(dataset)), **sized)
        case "sampler with a state":
            return DataLoader(dataset, batch_size, sampler=StatefulSampler(len(dataset)), **sized)
        case "IterableDataset":
            return DataLoader(Stream(dataset), batch_size, **sized)
    if "StatefulDataLoader" in kind:
        from torchdata.stateful_dataloader import StatefulDataLoader

        if kind.startswith("IterableDataset"):
            return StatefulDataLoader(Stream(dataset), batch_size, **sized)
        if kind.endswith("own generator"):
            return StatefulDataLoader(dataset, batch_size, shuffle=True, generator=own, **sized)
        return StatefulDataLoader(dataset, batch_size, shuffle=kind.endswith("shuffled"), **sized)
    batches = list(DataLoader(Samples(numbers["samples"], "none"), batch_size, generator=own))
    if kind == "windows":
        blocks = torch.arange(len(dataset)).split(batch_size)
        parts = [Subset(dataset, torch.cat(blocks[first::3]).tolist()) for first in range(3)]
        return Windows([0, 1, 2], lambda at: loader(parts[at], batch_size, shuffle=True, seed=2, **options))
    return {
        "windows without a state": lambda: Windows([0, 1, 2], lambda at: Unsized(batches[at::3])),
        "list of batches": lambda: batches,
        "unknown length": lambda: Unsized(batches),
        "unknown length, drawn": lambda: Unsized(batches, "torch"),
        "unknown length, varying": lambda: Unsized(batches, varying=True),
        "iterable with a state": lambda: StatefulBatches(batches),
        "iterable with a state, its own iterator": lambda: RewoundBatches(batches),
        "endless": lambda: Endless(batches),
    }[kind]()


def evaluation_data(plan, training):
    """What the case evaluates on."""
    kind, dataset = (
        plan["evaluation data"],
        Samples(9, plan["augmentation"] if plan["augmentation"] != "collate" else "none"),
    )
    if kind == "training" and plan["data"] != "endless":
        return training
    if kind == "plain DataLoader":
        return DataLoader(dataset, 2, shuffle=True)
    if kind == "list":
        return list(DataLoader(Samples(9, "none"), 4, generator=torch.Generator().manual_seed(1)))
    return loader(dataset, 2, seed=5)
