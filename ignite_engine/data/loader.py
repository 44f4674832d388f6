"""Loaders that resume: ``loader()`` builds one, :func:`resumable` rebuilds a plain ``DataLoader`` into one."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    default_collate,
)
from torch.utils.data.distributed import DistributedSampler

from ignite_engine import rng
from ignite_engine.data.sampler import DrawnSampler, ResumableSampler
from ignite_engine.data.seeding import SeededDataset
from ignite_engine.data.workers import WorkerInit
from ignite_engine.errors import EmptyData, check_type, is_whole, shapes_of
from ignite_engine.ranks import agreement, mesh

logger = logging.getLogger(__name__)
_KEPT = (
    *("num_workers", "in_order", "prefetch_factor", "persistent_workers", "multiprocessing_context"),
    *("drop_last", "worker_init_fn", "timeout", "pin_memory"),
)
"""Options of a ``DataLoader`` that is rebuilt."""


def _already_collated(batch: Any) -> Any:
    return batch


class _Alone:
    """A sample without a batch dimension, as a loader with ``batch_size=None`` gives it."""

    def __init__(self, convert: Callable[[Any], Any]) -> None:
        self.convert = convert

    def __call__(self, samples: list[Any]) -> Any:
        return self.convert(samples[0])


def loader(
    dataset: Dataset[Any] | Sequence[Any] | Tensor,
    batch_size: int = 1,
    *,
    shuffle: bool = False,
    seed: int = 0,
    sampler: Any = None,
    **dataloader_options: Any,
) -> DataLoader[Any]:
    """A ``DataLoader`` over ``dataset`` that resumes at any batch, bit for bit.

    Args:
        dataset: map-style (``__len__`` and ``__getitem__``).
        batch_size: samples per batch and data-parallel rank; the last batch may be smaller.
        shuffle: a new order each epoch, a function of (seed, epoch).
        seed: the same on every rank.
        sampler: in the place of ``shuffle``, an order of your own, such as a ``WeightedRandomSampler``: indices for all
            ranks together, drawn for each epoch as a function of (seed, epoch).
        dataloader_options: further arguments of ``DataLoader`` (``num_workers``, ``collate_fn``, ``pin_memory``, ...).

    Raises:
        TypeError: the dataset has no length, or an option that this function sets itself is given.
        ValueError: ``batch_size`` is below 1, or the dataset is empty or a single number.
    """
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
        raise TypeError(
            f"loader() needs a dataset with __len__ and __getitem__, got {type(dataset).__name__}: "
            "give iterable data to run() in a plain DataLoader."
        )
    if getattr(dataset, "ndim", None) == 0:
        raise ValueError(f"dataset must have samples along its first dimension, got {shapes_of(dataset)}.")
    if sampler is not None and shuffle:
        raise TypeError("loader() got shuffle with a sampler, which has an order of its own: leave shuffle out.")
    check_type("batch_size", batch_size, is_whole(batch_size), "a whole number of samples")
    check_type("seed", seed, is_whole(seed), "a whole number")
    if not len(dataset):
        raise EmptyData("The dataset is empty: it must hold at least one sample.")
    place: dict[str, Any] = {"seed": seed, "rank": mesh.data_rank(), "world_size": mesh.data_size()}
    order = ResumableSampler(dataset, shuffle=shuffle, **place) if sampler is None else DrawnSampler(sampler, **place)
    collate_fn = dataloader_options.pop("collate_fn", None) or default_collate
    init = dataloader_options.pop("worker_init_fn", None)
    return DataLoader(
        SeededDataset(dataset, collate_fn, seed),
        batch_size=batch_size,
        sampler=order,
        collate_fn=_already_collated,
        worker_init_fn=WorkerInit(init) if dataloader_options.get("num_workers") else None,
        # an own generator: making an iterator would else draw from the global one
        generator=torch.Generator().manual_seed(rng.mix(seed, 2) >> 1),
        **dataloader_options,
    )


def resumable(data: Any, seed: int | None = None, *, any_sampler: bool = False) -> Any:
    """``data``, or the same plain ``DataLoader`` rebuilt by :func:`loader`, sharded over the ranks.

    Only a ``DataLoader`` itself (no subclass) over map-style data with torch's sequential, random (without
    replacement) or distributed sampler is rebuilt, also with ``batch_size=None``: each sample is a batch. Anything
    else is returned as it is.

    Args:
        seed: of a random order; None: that of its generator or of the process, on rank 0.
        any_sampler: also rebuild one with another sampler of torch's, or on one process with any, whose order is then
            drawn for each pass as a function of (seed, pass).
    """
    if not _is_plain(data):
        return data
    sampler, drawn = data.sampler, None
    if type(sampler) is SequentialSampler:
        shuffle, own_seed = False, 0
    elif type(sampler) is RandomSampler and not sampler.replacement and sampler.num_samples == len(data.dataset):
        shuffle, own_seed = True, _agreed_seed(seed, data.generator or sampler.generator)
    elif type(sampler) is DistributedSampler and (sampler.num_replicas, sampler.rank) == (
        mesh.data_size(),
        mesh.data_rank(),
    ):
        shuffle, own_seed = sampler.shuffle, sampler.seed
    elif any_sampler and _can_be_drawn(sampler):
        shuffle, drawn, own_seed = False, sampler, _agreed_seed(seed, None)
    else:
        return data
    order = f"shuffle={shuffle}" if drawn is None else type(drawn).__name__
    logger.info("DataLoader rebuilt to resume exactly: %s, seed=%s, sharded over the ranks.", order, own_seed)
    rebuilt = loader(
        data.dataset,
        data.batch_size or 1,
        shuffle=shuffle,
        seed=own_seed,
        sampler=drawn,
        collate_fn=data.collate_fn if data.batch_size else _Alone(data.collate_fn),
        **{option: getattr(data, option) for option in _KEPT},
    )
    # a random sampler's seed is this process's own: a resumed run continues with the saved one
    is_of_process = type(sampler) is RandomSampler or (drawn is not None and seed is None)
    rebuilt.sampler.adopts_seed = is_of_process  # type: ignore[attr-defined]  # our sampler
    return rebuilt


def _agreed_seed(seed: int | None, generator: torch.Generator | None) -> int:
    """The same on every rank; a collective, unless it is given."""
    if seed is None:
        own = torch.initial_seed() if generator is None else generator.initial_seed()
        seed = int(agreement.broadcast_object(own))
    return rng.mix(seed) >> 1


def _is_plain(data: Any) -> bool:
    """Whether it is a ``DataLoader`` of torch's own over map-style data, and not one of :func:`loader`."""
    if type(data) is not DataLoader or isinstance(data.dataset, IterableDataset):
        return False
    if data.batch_size is None and data.batch_sampler is not None:
        return False
    rebuilt = isinstance(data.sampler, ResumableSampler)
    return not rebuilt and hasattr(data.dataset, "__len__") and bool(len(data.dataset))


def _can_be_drawn(sampler: Any) -> bool:
    """Whether it is of all ranks together: one of the user's own may yield a rank's share."""
    if isinstance(sampler, DistributedSampler | BatchSampler) or not hasattr(sampler, "__len__"):
        return False
    return mesh.data_size() == 1 or type(sampler).__module__.startswith("torch.utils.data")
