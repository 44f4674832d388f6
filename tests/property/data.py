"""The data of cases: datasets, samplers and iterables as users write them."""

import random

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
    default_collate,
    get_worker_info,
)

from ignite_engine import loader
from tests.data.kinds import EpochSampler
from tests.kit.tiny import RewoundLoader
from tests.property.models import samples_of


class Samples(Dataset):
    """Functions of their number, but for what the augmentation draws; ``read`` is called for each."""

    def __init__(self, count, augmentation="none", first=0, nan_at=None, read=None):
        self.columns, self.augmentation, self.nan_at, self.read = samples_of(count, first), augmentation, nan_at, read

    def __len__(self):
        return len(self.columns[0])

    def __getitem__(self, index):
        inputs, *rest = (column[index] for column in self.columns)
        inputs = inputs + noise(self.augmentation, 6)
        if self.read is not None:
            self.read()
        return inputs * float("nan") if index == self.nan_at else inputs, *rest


class BatchedSamples(Samples):
    def __getitems__(self, indices):
        return [self[index] for index in indices]


class Stream(IterableDataset):
    """The samples one after another, shared out to the workers."""

    def __init__(self, samples):
        self.samples = samples

    def __iter__(self):
        worker = get_worker_info()
        first, step = (worker.id, worker.num_workers) if worker is not None else (0, 1)
        for index in range(first, len(self.samples), step):
            yield self.samples[index]


class StatefulStream(IterableDataset):
    """The same with a place, which it keeps itself, on one process."""

    def __init__(self, samples):
        self.samples, self.next = samples, 0

    def __iter__(self):
        for place in range(self.next, len(self.samples)):
            self.next = place + 1
            yield self.samples[place]
        self.next = 0

    def state_dict(self):
        return {"next": self.next}

    def load_state_dict(self, state):
        self.next = state["next"]


class EpochBatchSampler(BatchSampler):
    def set_epoch(self, epoch):
        self.sampler.set_epoch(epoch)


class StatefulSampler(Sampler):
    """An order drawn from a generator whose state is saved."""

    def __init__(self, length):
        self.length, self.generator, self.next, self.order = length, torch.Generator().manual_seed(3), 0, []

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
    """Batches without a length: the same ones each pass, or as many as the pass's number says, or endless."""

    def __init__(self, batches, augmentation="none", *, varying=False, endless=False, read=None):
        self.batches, self.augmentation, self.read = batches, augmentation, read
        self.varying, self.endless, self.passes = varying, endless, 0

    def __iter__(self):
        left_out = self.passes % 2 if self.varying else 0
        self.passes += 1
        while True:
            for inputs, *rest in self.batches[left_out:]:
                drawn = noise(self.augmentation, inputs.shape)
                if self.read is not None:
                    self.read()
                yield inputs + drawn, *rest
            if not self.endless:
                return


class StatefulBatches:
    """Batches that say where they stand; with an own iterator they begin anew where they are asked for one."""

    def __init__(self, batches, read=None, *, own_iterator=False):
        self.batches, self.read, self.own_iterator, self.next, self.loaded = batches, read, own_iterator, 0, False

    def __iter__(self):
        if not self.own_iterator:
            return self._rest()
        self.next, self.loaded = self.next if self.loaded else 0, False
        return self

    def _rest(self):
        while self.next < len(self.batches):
            yield next(self)
        self.next = 0

    def __next__(self):
        if self.next == len(self.batches):
            raise StopIteration
        self.next += 1
        if self.read is not None:
            self.read()
        return self.batches[self.next - 1]

    def state_dict(self):
        return {"next": self.next}

    def load_state_dict(self, state):
        self.next, self.loaded = state["next"], True


class OwnStream:
    """Windows of a user's own stream."""

    def __init__(self, names):
        self.names, self.taken = names, 0

    def next_window(self):
        if self.taken == len(self.names):
            raise StopIteration
        self.taken += 1
        return self.names[self.taken - 1]

    def state_dict(self):
        return {"taken": self.taken}

    def load_state_dict(self, state):
        self.taken = state["taken"]


def noise(kind, shape):
    """Small numbers drawn from a global generator."""
    if kind == "torch":
        return 0.1 * torch.randn(shape)
    if kind == "numpy":
        return torch.from_numpy(0.1 * np.random.standard_normal(shape)).float()
    return 0.1 * random.random() if kind == "python" else 0.0


def noisy_collate(items):
    inputs, *rest = default_collate(items)
    return inputs + 0.1 * torch.randn(inputs.shape), *rest


def batches_of(samples, size):
    if not len(samples):
        return []
    return [default_collate([samples[at] for at in part]) for part in torch.arange(len(samples)).split(size)]


def data_of(case, folder, read=None, rank=0, batch_size=None):
    """What the case trains on; ``read`` is called within each read of a sample or batch."""
    kind, size = case.data, batch_size or case.batch_size
    nan_at = 5 if case.non_finite else None
    if case.data in EACH_ITS_OWN_LENGTH and case.batches:
        first, count = 1000 * rank, case.batches[rank] * size - (size > 1 and case.batches[rank] > 0)
    else:
        first, count = 0, case.samples
    samples = (BatchedSamples if kind == "__getitems__" else Samples)(count, case.augmentation, first, nan_at, read)
    options = {"num_workers": int(case.workers[0])}
    if case.workers == "2 persistent":
        options["persistent_workers"] = True
    if case.augmentation == "collate":
        options["collate_fn"] = noisy_collate
    own = torch.Generator().manual_seed(11)
    sized = options | {"drop_last": case.drop_last}
    if kind.startswith("windows"):
        return windows_of(case, folder, options, read)
    if "StatefulDataLoader" in kind:
        from torchdata.stateful_dataloader import StatefulDataLoader

        if kind.startswith("IterableDataset"):
            return StatefulDataLoader((Stream if case.seed % 2 else StatefulStream)(samples), size, **sized)
        drawn = {"shuffle": "shuffled" in kind or "own" in kind, "generator": own if "own" in kind else None}
        return StatefulDataLoader(samples, size, **drawn, **sized)
    indexed = {
        "loader": lambda: loader(samples, size, seed=2, **sized),
        "loader shuffled": lambda: loader(samples, size, shuffle=True, seed=2, **sized),
        "DataLoader": lambda: DataLoader(samples, size, **sized),
        "DataLoader shuffled": lambda: DataLoader(samples, size, shuffle=True, **sized),
        "__getitems__": lambda: DataLoader(samples, size, shuffle=True, **sized),
        "DataLoader own generator": lambda: DataLoader(samples, size, shuffle=True, generator=own, **sized),
        "DataLoader list of indices": lambda: DataLoader(samples, size, sampler=list(range(count))[::-1], **sized),
        "DataLoader, its own iterator": lambda: RewoundLoader(samples, size, **sized),
        "batch_sampler": lambda: DataLoader(
            samples, batch_sampler=BatchSampler(RandomSampler(samples), size, case.drop_last), **options
        ),
        "batch_sampler with set_epoch": lambda: DataLoader(
            samples, batch_sampler=EpochBatchSampler(EpochSampler(count), size, case.drop_last), **options
        ),
        "weighted sampler": lambda: DataLoader(
            samples, size, sampler=WeightedRandomSampler(torch.arange(1.0, count + 1), count), **sized
        ),
        "sampler with set_epoch": lambda: DataLoader(samples, size, sampler=EpochSampler(count), **sized),
        "sampler with a state": lambda: DataLoader(samples, size, sampler=StatefulSampler(count), **sized),
        "IterableDataset": lambda: DataLoader(Stream(samples), size, **sized),
    }
    if kind in indexed:
        return indexed[kind]()
    batches = batches_of(Samples(count, first=first, nan_at=nan_at), size)
    return {
        "list of batches": lambda: batches,
        "unknown length": lambda: Unsized(batches, read=read),
        "unknown length, drawn": lambda: Unsized(batches, "torch", read=read),
        "unknown length, varying": lambda: Unsized(batches, varying=True, read=read),
        "iterable with a state": lambda: StatefulBatches(batches, read),
        "iterable with a state, its own iterator": lambda: StatefulBatches(batches, read, own_iterator=True),
        "endless": lambda: Unsized(batches, endless=True, read=read),
    }[kind]()


EACH_ITS_OWN_LENGTH = ("list of batches", "unknown length, drawn", "iterable with a state", "StatefulDataLoader")


def windows_of(case, folder, options, read):
    """Windows of so many samples as ``case.windows`` says, some of them empty, numbered through."""
    from ignite_engine.ext.windows import Files, Windows

    firsts = [sum(case.windows[:at]) for at in range(len(case.windows))]
    whole = Samples(sum(case.windows), case.augmentation, read=read)

    def open_window(name):
        at = int(name.stem.split("_")[1]) if hasattr(name, "stem") else int(name)
        part = Subset(whole, range(firsts[at], firsts[at] + case.windows[at]))
        if case.data == "windows without a state":
            return Unsized(batches_of(part, case.batch_size)) if len(part) else None
        if not len(part) and case.seed % 2:
            return None
        return loader(part, case.batch_size, shuffle=True, seed=2, **options)

    names = list(range(len(case.windows)))
    if case.data == "windows, files":
        (folder / "hours").mkdir(exist_ok=True)
        for at in names:
            (folder / "hours" / f"hour_{at}").touch()
    stream = {
        "windows, files": lambda: Files(folder / "hours", "hour_*"),
        "windows, own": lambda: OwnStream(names),
        "windows, an iterator": lambda: iter(names),
    }.get(case.data, lambda: names)()
    return Windows(stream, open_window, per_epoch=case.per_epoch, max_updates=case.max_updates)


def evaluation_data(case, training):
    """What the case evaluates on."""
    samples = Samples(7, case.augmentation if case.augmentation != "collate" else "none")
    if case.evaluation == "windows":
        return training.again
    return {
        "own": lambda: loader(samples, 2, seed=5),
        "training": lambda: training if case.data != "endless" else loader(samples, 2, seed=5),
        "plain DataLoader": lambda: DataLoader(samples, 2, shuffle=True),
        "list": lambda: batches_of(Samples(7), 3),
    }[case.evaluated]()
