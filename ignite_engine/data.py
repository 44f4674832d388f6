"""Loaders that resume: order from (seed, pass, position), randomness of a sample from (seed, pass, index).

``loader()`` builds one; :func:`resumable` rebuilds a plain ``DataLoader`` into one from its public attributes;
:class:`DataSource` is what the Trainer iterates over: it groups micro-batches and knows its position.
"""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    default_collate,
)
from torch.utils.data.distributed import DistributedSampler

from ignite_engine import agreement, rng
from ignite_engine.accumulation import Group

logger = logging.getLogger(__name__)

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


def _already_collated(batch: Any) -> Any:
    return batch


class _WorkerInit:
    """Loader workers ignore Ctrl-C: it goes to the whole group, and the training process shuts them down itself."""

    def __init__(self, user: Callable[[int], None] | None) -> None:
        self.user = user

    def __call__(self, worker: int) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        if self.user is not None:
            self.user(worker)


def loader(
    dataset: Dataset[Any], batch_size: int = 1, *, shuffle: bool = False, seed: int = 0, **dataloader_options: Any
) -> DataLoader[Any]:
    """A ``DataLoader`` over ``dataset`` that resumes at any batch, bit for bit.

    Args:
        dataset: map-style (``__len__`` and ``__getitem__``).
        batch_size: samples per batch and rank; the last batch may be smaller.
        shuffle: a new order each epoch, a function of (seed, epoch).
        seed: the same on every rank.
        dataloader_options: further arguments of ``DataLoader`` (``num_workers``, ``collate_fn``, ``pin_memory``, ...).

    Raises:
        TypeError: the dataset has no length, or an option that this function sets itself is given.
        ValueError: ``batch_size`` is below 1 or the dataset is empty.
    """
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
        raise TypeError(
            f"loader() needs a dataset with __len__ and __getitem__, got {type(dataset).__name__}: "
            "give iterable data to run() in a plain DataLoader."
        )
    for option in ("sampler", "batch_sampler", "generator"):
        if option in dataloader_options:
            raise TypeError(f"loader() sets {option} itself: use a plain DataLoader for an order of your own.")
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size}.")
    if not len(dataset):
        raise ValueError("The dataset is empty: it must hold at least one sample.")
    sampler = ResumableSampler(
        len(dataset), shuffle=shuffle, seed=seed, rank=agreement.rank(), world_size=agreement.world_size()
    )
    collate_fn = dataloader_options.pop("collate_fn", None) or default_collate
    init = dataloader_options.pop("worker_init_fn", None)
    return DataLoader(
        SeededDataset(dataset, collate_fn, seed),
        batch_size=batch_size,
        sampler=sampler,
        collate_fn=_already_collated,
        worker_init_fn=_WorkerInit(init) if dataloader_options.get("num_workers") else None,
        # an own generator: making an iterator would else draw from the global one
        generator=torch.Generator().manual_seed(rng.mix(seed, 2) >> 1),
        **dataloader_options,
    )


def resumable(data: Any) -> Any:
    """``data``, or the same plain ``DataLoader`` rebuilt by :func:`loader`, sharded over the ranks.

    Only a ``DataLoader`` itself (no subclass) over map-style data with torch's sequential, random (without
    replacement) or distributed sampler is rebuilt; anything else is returned as it is.
    """
    if type(data) is not DataLoader or isinstance(data.dataset, IterableDataset) or data.batch_size is None:
        return data
    sampler = data.sampler
    if isinstance(sampler, ResumableSampler) or not hasattr(data.dataset, "__len__") or not len(data.dataset):
        return data
    if type(sampler) is SequentialSampler:
        shuffle, seed = False, 0
    elif type(sampler) is RandomSampler and not sampler.replacement and sampler.num_samples == len(data.dataset):
        generator = data.generator or sampler.generator
        own_seed = generator.initial_seed() if generator is not None else torch.initial_seed()
        shuffle, seed = True, agreement.broadcast_int(rng.mix(own_seed) >> 1)
    elif type(sampler) is DistributedSampler and (sampler.num_replicas, sampler.rank) == (
        agreement.world_size(),
        agreement.rank(),
    ):
        shuffle, seed = sampler.shuffle, sampler.seed
    else:
        return data
    options: dict[str, Any] = {"num_workers": data.num_workers}
    if data.num_workers:
        options["prefetch_factor"] = data.prefetch_factor
        options["persistent_workers"] = data.persistent_workers
        options["multiprocessing_context"] = data.multiprocessing_context
    logger.info("DataLoader rebuilt to resume exactly: shuffle=%s, seed=%s, sharded over the ranks.", shuffle, seed)
    rebuilt = loader(
        data.dataset,
        data.batch_size,
        shuffle=shuffle,
        seed=seed,
        drop_last=data.drop_last,
        collate_fn=data.collate_fn,
        worker_init_fn=data.worker_init_fn,
        timeout=data.timeout,
        pin_memory=data.pin_memory,
        **options,
    )
    # a random sampler's seed is this process's own: a resumed run goes on with the saved one
    rebuilt.sampler.adopts_seed = type(sampler) is RandomSampler  # type: ignore[attr-defined]  # our sampler
    return rebuilt


def length_of(data: Any) -> int | None:
    """Batches in one pass over ``data``, None where it does not say."""
    try:
        return len(data)
    except (TypeError, NotImplementedError):
        return None


def end_workers(iterator: Any, data: Any) -> None:
    """Terminate a ``DataLoader`` iterator's worker processes, if it has any; torch would wait 5 s for each."""
    for worker in getattr(iterator, "_workers", ()):
        worker.terminate()
    if iterator is not None and getattr(data, "_iterator", None) is iterator:
        data._iterator = None  # persistent workers: else the next pass would ask the dead ones


class DataSource:
    """What a Trainer iterates: one pass over ``data`` per ``iter()``, in groups, counted by what was consumed.

    Args:
        data: a loader or any iterable of batches.
        accumulation_steps: batches in a group; None hands on the batches themselves.

    ``pass_number`` and ``batch`` are the position: batch ``batch`` of pass ``pass_number`` is the next not yet
    consumed. On several ranks a sized loader that is shorter than its peers' repeats its last batch to the end of
    the longest (``uneven``); :meth:`padded` says what of a group weighs nothing.
    """

    def __init__(self, data: Any, accumulation_steps: int | None) -> None:
        self.data, self.steps = data, accumulation_steps or 1
        self.grouped = accumulation_steps is not None
        self.sampler: ResumableSampler | None = getattr(data, "sampler", None) if type(data) is DataLoader else None
        if not isinstance(self.sampler, ResumableSampler):
            self.sampler = None
        self.pass_number = self.batch = 0
        self.lengths: list[int] | None = None
        self.uneven = False
        self._pending_state: dict[str, Any] | None = None
        self._iterator: Any = None
        self._replayed: Any = None

    def agree_lengths(self) -> None:
        """Exchange the sized loaders' lengths; a collective, once per run.

        Raises:
            ValueError: a rank has no batch at all, or only some ranks know their length.
        """
        own = length_of(self.data)
        rows = agreement.gather_floats([-1.0 if own is None else float(own)])
        lengths = [int(row[0]) for row in rows]
        if len(rows) == 1 or max(lengths) < 0:
            self.lengths = None if own is None else [own]
            return
        if min(lengths) < 1:
            raise ValueError(
                f"Every rank needs at least one batch of data with a known length, got {lengths} by rank: "
                "use fewer ranks, a smaller batch_size or more data."
            )
        self.lengths = lengths
        self.uneven = len(set(lengths)) > 1

    @property
    def batches(self) -> int | None:
        """Batches in one pass on the longest rank, None if unknown."""
        return max(self.lengths) if self.lengths else None

    @property
    def iterations(self) -> int | None:
        """Groups in one pass, None if unknown."""
        return None if self.batches is None else -(-self.batches // self.steps)

    @property
    def inexact(self) -> str | None:
        """Why a resumed run would not see the same bits, None if it would."""
        kind = type(self.data).__name__
        if self.sampler is not None:
            return None
        if hasattr(self.data, "state_dict"):
            workers = getattr(self.data, "num_workers", 0)
            if not workers or hasattr(getattr(self.data, "dataset", None), "state_dict"):
                return None
            return f"{kind} does not save the random numbers of its {workers} workers: samples that draw any differ"
        order = getattr(self.data, "sampler", None)
        if isinstance(getattr(self.data, "dataset", None), IterableDataset):
            order = self.data.dataset
        elif getattr(self.data, "batch_size", 0) is None:
            order = self.data.batch_sampler or order
        by = "" if order is None or type(order) is SequentialSampler else f" with {type(order).__name__}"
        return f"{kind}{by} keeps no state: its batches are replayed"

    def __iter__(self) -> Iterator[Any]:
        """The rest of the current pass, from ``batch`` on."""
        batches = self._from_position()
        if self.uneven and self.batches is not None:
            batches = self._repeat_last(batches, self.batches - self.batch)
        return self._groups(batches) if self.grouped else batches

    def _groups(self, batches: Iterator[Any]) -> Iterator[Group]:
        while group := Group(islice(batches, self.steps)):
            yield group

    def _from_position(self) -> Iterator[Any]:
        if self.sampler is not None:
            assert self.data.batch_size is not None
            self.sampler.pass_number = self.pass_number
            self.sampler.start = min(self.batch * self.data.batch_size, len(self.sampler))
            iterator: Iterator[Any] = iter(self.data)
            self._iterator = iterator
            return iterator
        target = getattr(self.data, "sampler", self.data)
        if hasattr(target, "set_epoch"):
            target.set_epoch(self.pass_number)
        if self._pending_state is not None:
            self.data.load_state_dict(self._pending_state)
            self._pending_state = None
            iterator = self._iterator = iter(self.data)
            at_end = self.batches is not None and self.batch >= self.batches
            return self._perhaps_next_pass(iterator) if at_end else iterator
        iterator = self._iterator = iter(self.data)
        if self.batch:
            logger.warning(
                "%s keeps no state: the %d batches that were consumed are loaded again and left out.",
                type(self.data).__name__,
                self.batch,
            )
            for batch in islice(iterator, self.batch):
                self._replayed = batch
        return iterator

    def _perhaps_next_pass(self, iterator: Iterator[Any]) -> Iterator[Any]:
        """Of a loader whose state is that of a pass's end: some give nothing then, some begin the next pass at once."""
        for batch in iterator:
            self.next_pass()
            yield batch
            yield from iterator

    def _repeat_last(self, batches: Iterator[Any], count: int) -> Iterator[Any]:
        batch, given = None, 0
        for batch in islice(batches, count):
            given += 1
            yield batch
        if given < count and not given:
            batch = self._last_batch()
        for _ in range(count - given):
            yield batch

    def _last_batch(self) -> Any:
        """The last batch of this rank's shard: what an exhausted rank takes part with after a resume."""
        if self.sampler is None:
            if self._replayed is None:
                raise ValueError(
                    f"The {type(self.data).__name__} of this rank was at its end when the run was saved, and its "
                    "peers' were not: resume needs loader(), or as many batches on every rank."
                )
            return self._replayed
        assert self.data.batch_size is not None
        self.sampler.start = (len(self.data) - 1) * self.data.batch_size
        return next(iter(self.data))

    def padded(self, count: int) -> tuple[int, int]:
        """Of the next ``count`` batches: how many repeat the last, and how many do not, over all ranks."""
        assert self.lengths is not None
        real = [max(0, min(count, length - self.batch)) for length in self.lengths]
        return count - real[agreement.rank()], sum(real)

    def abandon(self) -> None:
        """End the workers of the present pass at once: they may be busy for long with what nobody wants any more."""
        end_workers(self._iterator, self.data)
        self._iterator = None

    def next_pass(self) -> None:
        """Begin the next pass at its first batch."""
        self.pass_number, self.batch = self.pass_number + 1, 0

    def state_dict(self) -> dict[str, Any]:
        """The position, and what must be the same for it to mean the same."""
        state: dict[str, Any] = {"pass": self.pass_number, "batch": self.batch}
        own_state = self.sampler is None and hasattr(self.data, "state_dict")
        if self.batches is not None and self.batch >= self.batches and not own_state:
            state = {"pass": self.pass_number + 1, "batch": 0}
        if self.sampler is not None:
            state |= {"seed": self.sampler.seed, "samples": self.sampler.length, "batch_size": self.data.batch_size}
        elif own_state:
            state["loader"] = self.data.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up a position.

        Raises:
            ValueError: the dataset, its seed or the batch size is another one.
        """
        if self.sampler is not None and "seed" in state:
            if self.sampler.adopts_seed:
                self.sampler.seed = self.data.dataset.seed = state["seed"]
            now = {"seed": self.sampler.seed, "samples": self.sampler.length, "batch_size": self.data.batch_size}
            for name, value in now.items():
                if state[name] != value:
                    raise ValueError(
                        f"The checkpoint was made with {name} {state[name]} in its data, now it is {value}: make them "
                        "equal, or leave the position out with resume(ignore=['data'])."
                    )
        self.pass_number, self.batch = state["pass"], state["batch"]
        self._pending_state = state.get("loader")
