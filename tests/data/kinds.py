"""Every kind of data that a run takes, as users write them. Batches are ``(inputs, targets)`` of known values."""

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    Sampler,
    WeightedRandomSampler,
)
from torchdata import nodes
from torchdata.stateful_dataloader import StatefulDataLoader

import ignite_engine
from ignite_engine import loader
from tests.kit.floors import of
from tests.kit.tiny import RewoundLoader


def sample(number):
    """What is known of it, and a random number, as an augmentation draws one."""
    return torch.tensor([float(number), number % 3 - 1.0, torch.rand(()).item()]), torch.tensor([number / 10])


def batch(*numbers):
    return tuple(torch.stack(column) for column in zip(*map(sample, numbers), strict=True))


class Samples(Dataset):
    """Sample i is ``sample(first + i)``; remembers which were loaded. Its length may be changed."""

    def __init__(self, count=7, first=0):
        self.count, self.first, self.loaded = count, first, []

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        self.loaded.append(index)
        return sample(self.first + index)


class EpochSampler(Sampler):
    """An order that is a function of the epoch, as that of DistributedSampler; with ``grows`` more samples in each."""

    def __init__(self, count=7, grows=0):
        self.count, self.grows, self.epoch, self.told = count, grows, 0, []

    def set_epoch(self, epoch):
        self.epoch = epoch
        self.told.append(epoch)

    def __len__(self):
        return self.count + self.grows * self.epoch

    def __iter__(self):
        return iter(torch.randperm(len(self), generator=torch.Generator().manual_seed(self.epoch)).tolist())


class Misjudged(EpochSampler):
    """Batches of 7 shuffled samples, 3 in the first epoch and 4 in the next; it says ``off`` more."""

    def __init__(self, off):
        super().__init__()
        self.off = off

    def __len__(self):
        return (3, 4)[self.epoch % 2] + self.off

    def __iter__(self):
        order = torch.randperm(7, generator=torch.Generator().manual_seed(self.epoch))
        yield from (each.tolist() for each in order.split((3, 2)[self.epoch % 2]))


class Around(Sampler):
    """A sampler in a sampler, as accelerate's and lightning's wrap the user's."""

    def __init__(self, sampler):
        self.sampler = sampler

    def __iter__(self):
        return iter(self.sampler)

    def __len__(self):
        return len(self.sampler)


class Sized:
    """Batches with a length and no state."""

    def __len__(self):
        return 4

    def __iter__(self):
        yield from map(batch, range(4))


class Unsized:
    """Passes of 3, 5 and 2 batches without a length, each a function of the pass's number."""

    number = 0

    def set_epoch(self, epoch):
        self.number = epoch

    def __iter__(self):
        for index in range((3, 5, 2)[self.number % 3]):
            yield batch(10 * self.number + index)


class Stream:
    """Four batches in a pass, without a length; goes on where its state says, and tells a stop between two reads.

    Attributes:
        next: the number of the next one.
    """

    count = 4

    def __init__(self):
        self.next = 0

    def __iter__(self):
        while self.next < self.count:
            self.next += 1
            yield batch(self.next)
        self.next = 0

    def state_dict(self):
        return {"next": self.next}

    def load_state_dict(self, state):
        self.next = state["next"]


class DrawingStream(Stream):
    """With a length; draws from the global generator at the start of a pass, as a DataLoader does."""

    def __len__(self):
        return self.count

    def __iter__(self):
        torch.rand(())
        return super().__iter__()


class PromptStream(DrawingStream):
    """Taken up at the end of a pass it begins the next one at once."""

    def load_state_dict(self, state):
        self.next = state["next"] % self.count


class PassStream(Stream):
    """Counts its passes, too, which are other batches each."""

    passes = 0

    def __iter__(self):
        while self.next < self.count:
            self.next += 1
            yield batch(10 * self.passes + self.next)
        self.next, self.passes = 0, self.passes + 1

    def state_dict(self):
        return {"next": self.next, "passes": self.passes}

    def load_state_dict(self, state):
        self.next, self.passes = state["next"], state["passes"]


class Rewound:
    """Its own iterator, which begins anew where it is asked for one."""

    at = 0

    def __iter__(self):
        self.at = 0
        return self

    def __next__(self):
        if self.at == 5:
            raise StopIteration
        self.at += 1
        return batch(self.at)


class RewoundStream(Rewound):
    """With a state, from which it goes on."""

    loaded = False

    def __iter__(self):
        self.at, self.loaded = self.at if self.loaded else 0, False
        return self

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at, self.loaded = state["at"], True


class StreamOfSamples(IterableDataset):
    """For torchdata: one sample at a time, with the place of a ``Stream``."""

    def __init__(self):
        self.next = 0

    def __iter__(self):
        while self.next < 5:
            self.next += 1
            yield sample(self.next)
        self.next = 0

    def state_dict(self):
        return {"next": self.next}

    def load_state_dict(self, state):
        self.next = state["next"]


class Generated(IterableDataset):
    """A stream without a state, which torchdata replays."""

    def __iter__(self):
        yield from map(sample, range(5))


class CountingIterator:
    """With a state."""

    def __init__(self):
        self.next = 0

    def __iter__(self):
        return self

    def __next__(self):
        if self.next == 5:
            raise StopIteration
        self.next += 1
        return sample(self.next - 1)

    def state_dict(self):
        return {"next": self.next}

    def load_state_dict(self, state):
        self.next = state["next"]


class Counted(IterableDataset):
    """A stream whose iterator has a state."""

    def __iter__(self):
        return CountingIterator()


def stateful(*arguments, **options):
    return StatefulDataLoader(*arguments, **options)


def nodes_of_samples():
    order = nodes.SamplerWrapper(DistributedSampler(range(7), 1, 0, shuffle=True))
    batches = nodes.Batcher(nodes.Mapper(order, sample), 2, drop_last=False)
    return nodes.Loader(nodes.Mapper(batches, lambda rows: tuple(map(torch.stack, zip(*rows, strict=True)))))


def window(name):
    """Of odd ones a plain DataLoader, of even ones a loader()."""
    make = DataLoader if name % 2 else loader
    return make(Samples(2 + name % 2, first=10 * name), 1, shuffle=True)


KINDS = {
    "loader": lambda: loader(Samples(), 2, shuffle=True, seed=3),
    "loader with a weighted sampler": lambda: loader(Samples(), 2, sampler=WeightedRandomSampler([1.0] * 7, 7)),
    "loader with a sampler that grows": lambda: loader(Samples(20), 2, sampler=EpochSampler(4, grows=3)),
    "DataLoader": lambda: DataLoader(Samples(), 2, shuffle=True),
    "DataLoader of single samples": lambda: DataLoader(Samples(5), batch_size=None, shuffle=True),
    "DataLoader with an own sampler": lambda: DataLoader(Samples(), 2, sampler=EpochSampler()),
    "DataLoader with a batch sampler": lambda: DataLoader(
        Samples(20), batch_sampler=BatchSampler(Around(EpochSampler(4, grows=3)), 2, drop_last=False)
    ),
    "list": lambda: [batch(number) for number in range(4)],
    "sized": Sized,
    "unsized": Unsized,
    "stream": Stream,
    "stream that draws": DrawingStream,
    "stream that begins at once": PromptStream,
    "stream that counts passes": PassStream,
    "begins anew": Rewound,
    "begins anew, with a state": RewoundStream,
    "loader that begins anew": lambda: RewoundLoader(Samples(5), batch_size=None),
    "torchdata": lambda: stateful(Samples(), 2, shuffle=True),
    "torchdata with a generator": lambda: stateful(
        Samples(), 2, shuffle=True, generator=torch.Generator().manual_seed(torch.initial_seed() % 9)
    ),
    "torchdata's nodes": nodes_of_samples,
    "torchdata over a stream": lambda: stateful(StreamOfSamples(), 1),
    "torchdata over a generator": lambda: stateful(Generated(), 1),
    "torchdata over an iterator": lambda: stateful(Counted(), 1),
    **of(
        "windows",
        {
            "windows": lambda: ignite_engine.Windows([1, 2], window),
            "windows by epochs": lambda: ignite_engine.Windows([1, 2, 3, 4], window, per_epoch=2),
        },
    ),
}
