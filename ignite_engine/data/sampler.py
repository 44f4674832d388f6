"""Order from (seed, pass, position), randomness of a sample from (seed, pass, index)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import Dataset, Sampler

from ignite_engine import rng

Key = tuple[int, int]


class ResumableSampler(Sampler[Key]):
    """One global order per (seed, pass), dealt out to the ranks by position, without padding.

    Yields ``(pass, index)``, so that loader workers learn the pass with each sample. ``start`` samples of this rank
    are left out without being loaded: the cost of resuming does not grow with the position.
    """

    def __init__(self, length: int, *, shuffle: bool, seed: int, rank: int, world_size: int) -> None:
        self.length, self.shuffle, self.seed = length, shuffle, seed
        self.rank, self.world_size = rank, world_size
        self.pass_number = 0
        self.start = 0
        self.adopts_seed = False

    def __iter__(self) -> Iterator[Key]:
        order: Iterable[int] = range(self.length)
        if self.shuffle:
            generator = torch.Generator().manual_seed(rng.mix(self.seed, self.pass_number) >> 1)
            order = torch.randperm(self.length, generator=generator)[self.rank :: self.world_size][
                self.start :
            ].tolist()
        else:
            order = range(self.rank + self.start * self.world_size, self.length, self.world_size)
        pass_number = self.pass_number
        return ((pass_number, index) for index in order)

    def __len__(self) -> int:
        return len(range(self.rank, self.length, self.world_size))


class SeededDataset(Dataset[Any]):
    """A dataset whose random choices depend on (seed, pass, index) alone: the same with any number of workers.

    It collates too, so that randomness there is keyed as well (by the batch's first sample). The generators of the
    process are left as they were, which matters where samples are made in the training process.
    """

    def __init__(self, dataset: Dataset[Any], collate_fn: Callable[[list[Any]], Any], seed: int) -> None:
        self.dataset, self.collate_fn, self.seed = dataset, collate_fn, seed

    def __len__(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]  # map-style: loader() has checked

    def __getitem__(self, key: Key) -> Any:
        return self.__getitems__([key])

    def __getitems__(self, keys: Sequence[Key]) -> Any:
        return rng.undisturbed(self._batch, keys)

    def _batch(self, keys: Sequence[Key]) -> Any:
        samples = []
        for pass_number, index in keys:
            rng.seed_host(rng.mix(self.seed, pass_number, index))
            samples.append(self.dataset[index])
        pass_number, index = keys[0]
        rng.seed_host(rng.mix(self.seed, pass_number, index, 1))
        return self.collate_fn(samples)
