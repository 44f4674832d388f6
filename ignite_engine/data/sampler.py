"""Order from (seed, pass, position), randomness of a sample from (seed, pass, index)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import repeat
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, Sampler, Subset

from ignite_engine import rng

Key = tuple[int, int]


@dataclass(frozen=True)
class Dealing:
    """Of each ``cycle`` consecutive batches of the global order, this rank's are those from ``first`` to ``end - 1``.

    So which samples make up a batch does not depend on the number of ranks.
    """

    batch_size: int
    cycle: int
    first: int
    end: int


class ResumableSampler(Sampler[Key]):
    """One global order per (seed, pass), sharded over the ranks by position, without padding.

    Args:
        data: what is sampled, or its length.

    Yields ``(pass, index)``, so that loader workers know the pass of each sample. The first ``start`` samples of this
    rank are skipped without being loaded: the cost of resuming does not grow with the position. Without a ``start``
    it is iterated by hand, and reads the length of its data first.
    """

    def __init__(self, data: Sized | int, *, shuffle: bool, seed: int, rank: int, world_size: int) -> None:
        self._data = range(data) if isinstance(data, int) else data
        self.shuffle, self.seed = shuffle, seed
        self.rank, self.world_size = rank, world_size
        self.pass_number = 0
        self.start: int | None = None
        self.skipped = 0
        """Samples at the start of the global order that are not dealt out: another number of ranks consumed them."""
        self.dealing: Dealing | None = None
        """Whole batches are dealt out, not single samples; ``start`` then counts samples over all ranks."""
        self.adopts_seed = False
        self.length = len(self._data)
        """Samples in the pass, over all ranks."""

    def data_length(self) -> int:
        """Samples in the data now, perhaps more than at the start of the pass."""
        return len(self._data)

    @contextmanager
    def by_hand(self, dealing: Dealing | None = None) -> Iterator[None]:
        """Iterate it by hand, from the first sample, in the middle of a pass that a source counts."""
        before = self.start, self.pass_number, self.length, self.skipped, self.dealing
        self.start, self.skipped, self.dealing = None, 0, dealing
        try:
            yield
        finally:
            self.start, self.pass_number, self.length, self.skipped, self.dealing = before

    def __iter__(self) -> Iterator[Key]:
        if self.start is None:
            self.length = self.data_length()
        start = self.start or 0
        order: Iterable[int]
        if self.dealing is not None:
            return zip(repeat(self.pass_number), self._dealt(self.dealing, start).tolist())
        if self.shuffle:
            shard = self._permutation()[self.skipped + self.rank :: self.world_size]
            order = shard[start:].tolist()
        else:
            order = range(self.skipped + self.rank + start * self.world_size, self.length, self.world_size)
        return zip(repeat(self.pass_number), order)

    def _dealt(self, dealing: Dealing, start: int) -> Tensor:
        """Indices of this rank's samples from sample ``start`` on, after those that are skipped."""
        order = self._permutation() if self.shuffle else torch.arange(self.length)
        order = order[self.skipped + start :]
        cycle = dealing.batch_size * dealing.cycle
        whole = torch.nn.functional.pad(order, (0, -len(order) % cycle), value=-1).view(-1, cycle)
        own = whole[:, dealing.batch_size * dealing.first : dealing.batch_size * dealing.end].reshape(-1)
        return own[own >= 0]

    def _permutation(self) -> Tensor:
        generator = torch.Generator().manual_seed(rng.mix(self.seed, self.pass_number) >> 1)
        return torch.randperm(self.length, generator=generator)

    def __len__(self) -> int:
        if self.dealing is not None:
            each = self.dealing.batch_size
            first, end, cycle = (each * at for at in (self.dealing.first, self.dealing.end, self.dealing.cycle))
            cycles, rest = divmod(max(0, self.length - self.skipped), cycle)
            return cycles * (end - first) + len(range(first, min(end, rest)))
        return len(range(self.skipped + self.rank, self.length, self.world_size))


class SeededDataset(Dataset[Any]):
    """A dataset whose random choices depend on (seed, pass, index) alone: the same with any number of workers.

    It collates too, with random numbers keyed by the batch's first sample. So are those of a dataset that reads whole
    batches (``__getitems__``), which is asked for one batch at a time: they depend on what the batch holds, so on the
    batch size and the number of ranks, but not on the number of workers nor on where a run was resumed.

    The generators of the process are restored, which matters where samples are made in the training process.
    """

    def __init__(self, dataset: Any, collate_fn: Callable[[list[Any]], Any], seed: int) -> None:
        self.dataset, self.collate_fn, self.seed = dataset, collate_fn, seed
        self._reads_batches = _reads_batches(dataset)

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, key: Key) -> Any:
        return self.__getitems__([key])

    def __getitems__(self, keys: Sequence[Key]) -> Any:
        return rng.undisturbed(self._batch, keys)

    def _batch(self, keys: Sequence[Key]) -> Any:
        (pass_number, first), samples = keys[0], []
        if self._reads_batches:
            rng.seed_host(rng.mix(self.seed, pass_number, first))
            samples = self.dataset.__getitems__([index for _, index in keys])
        else:
            for pass_number, index in keys:
                rng.seed_host(rng.mix(self.seed, pass_number, index))
                samples.append(self.dataset[index])
        rng.seed_host(rng.mix(self.seed, pass_number, first, 1))
        return self.collate_fn(samples)


def _reads_batches(dataset: Any) -> bool:
    """Whether ``dataset`` itself reads several samples at once; torch's Subset only passes that on."""
    while isinstance(dataset, Subset) and type(dataset).__getitems__ is Subset.__getitems__:
        dataset = dataset.dataset
    return callable(getattr(dataset, "__getitems__", None))
