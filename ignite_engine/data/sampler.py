"""Order from (seed, pass, position), randomness of a sample from (seed, pass, index)."""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain, repeat
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import BatchSampler, Dataset, Sampler, Subset
from torch.utils.data.distributed import DistributedSampler

from ignite_engine import rng
from ignite_engine.data.seeding import SeededCalls
from ignite_engine.errors import shapes_of

Key = tuple[int, int]
_BLOCK = 8192


@dataclass(frozen=True)
class Dealing:
    """Deals out the global order: of each ``cycle`` consecutive batches this rank gets ``first`` to ``end - 1``.

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

    @property
    def inexact(self) -> str | None:
        """Why the order of a pass is not a function of seed and pass; None: it is one."""
        return None

    @property
    def drawn_order(self) -> str | None:
        """A hash of the order of the pass, where more than seed, pass and length decides it; None: nothing does."""
        return None

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

    def data_length(self, pass_number: int | None = None) -> int:
        """Samples in the data now, perhaps more than at the start of the pass.

        Args:
            pass_number: of which pass, as an order of the user's own may be longer in later ones; None: the present.
        """
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
            return zip(repeat(self.pass_number), _numbers(self._dealt(self.dealing, start)))
        if self.shuffle:
            share = self._permutation()[self.skipped + self.rank :: self.world_size]
            order = _numbers(share[start:])
        else:
            order = range(self.skipped + self.rank + start * self.world_size, self.length, self.world_size)
        return zip(repeat(self.pass_number), order)

    def _dealt(self, dealing: Dealing, start: int) -> Tensor:
        """Indices of this rank's samples from sample ``start`` on, after those that are skipped."""
        order = self._order()[self.skipped + start :]
        cycle = dealing.batch_size * dealing.cycle
        whole = torch.nn.functional.pad(order, (0, -len(order) % cycle), value=-1).view(-1, cycle)
        own = whole[:, dealing.batch_size * dealing.first : dealing.batch_size * dealing.end].reshape(-1)
        return own[own >= 0]

    def first(self, count: int) -> list[int]:
        """The first ``count`` samples of the pass, over all ranks."""
        return self._order()[:count].tolist()

    def _order(self) -> Tensor:
        return self._permutation() if self.shuffle else torch.arange(self.length)

    def _permutation(self) -> Tensor:
        generator = torch.Generator().manual_seed(rng.mix(self.seed, self.pass_number) >> 1)
        return torch.randperm(self.length, generator=generator)

    def __len__(self) -> int:
        if self.dealing is not None:
            batch_size = self.dealing.batch_size
            first, end, cycle = (batch_size * at for at in (self.dealing.first, self.dealing.end, self.dealing.cycle))
            cycles, rest = divmod(max(0, self.length - self.skipped), cycle)
            return cycles * (end - first) + len(range(first, min(end, rest)))
        return len(range(self.skipped + self.rank, self.length, self.world_size))


class DrawnSampler(ResumableSampler):
    """The order of a sampler over map-style data, drawn anew for each pass: a function of (seed, pass).

    Args:
        drawn: finite, of indices, for all ranks together; ``set_epoch`` tells it the pass, if it has that.

    Raises:
        TypeError: it has no length, is one rank's share, or yields other things than indices.
    """

    def __init__(self, drawn: Any, *, seed: int, rank: int, world_size: int) -> None:
        if not hasattr(drawn, "__len__") or isinstance(drawn, DistributedSampler | BatchSampler):
            kind = type(drawn).__name__
            if isinstance(drawn, DistributedSampler):
                raise TypeError(f"sampler is a {kind}: leave it out, the samples are shared out to the ranks anyway.")
            raise TypeError(f"sampler must have a length and yield indices, got a {kind}: give it in a DataLoader.")
        super().__init__(drawn, shuffle=True, seed=seed, rank=rank, world_size=world_size)
        self.drawn = drawn
        self._last: tuple[int, Tensor, str] | None = None
        """The last pass, its order, and a hash of that."""
        self._repeats = True

    def data_length(self, pass_number: int | None = None) -> int:
        self._set_epoch(self.pass_number if pass_number is None else pass_number)
        return len(self.drawn)

    def _set_epoch(self, pass_number: int) -> None:
        if hasattr(self.drawn, "set_epoch"):
            self.drawn.set_epoch(pass_number)

    @property
    def inexact(self) -> str | None:
        self._permutation()
        if self._repeats:
            return None
        return f"the order of {type(self.drawn).__name__} is not a function of random numbers and the epoch"

    def _permutation(self) -> Tensor:
        if self._last is None or self._last[0] != self.pass_number:
            order = self._draw()
            if self._last is None:
                self._repeats = torch.equal(order, self._draw())
            self._last = (self.pass_number, order, hashlib.sha256(order.numpy().data).hexdigest()[:16])
        return self._last[1]

    @property
    def drawn_order(self) -> str | None:
        self._permutation()
        assert self._last is not None
        return self._last[2]

    def _draw(self) -> Tensor:
        seed = rng.mix(self.seed, self.pass_number, 3)
        own = getattr(self.drawn, "generator", None)
        own = own if isinstance(own, torch.Generator) else None
        before = None if own is None else own.get_state()
        with rng.isolated():
            rng.seed_host(seed)
            if own is not None:
                own.manual_seed(seed >> 1)
            self._set_epoch(self.pass_number)
            order = [*self.drawn]
        if own is not None and before is not None:
            own.set_state(before)
        try:
            return torch.tensor([*map(operator.index, order)], dtype=torch.int64)  # of tensors, too
        except TypeError:
            raise TypeError(
                f"sampler must yield indices, and {type(self.drawn).__name__} yields a {type(order[0]).__name__}: give "
                "it in a BatchSampler, as batch_sampler of a DataLoader."
            ) from None


def _numbers(indices: Tensor) -> Iterator[int]:
    """``indices`` as Python numbers, a block at a time: each takes 32 bytes, and there may be 10^8 of them."""
    return chain.from_iterable(block.tolist() for block in indices.split(_BLOCK))


class SeededDataset(Dataset[Any]):
    """A dataset whose random choices depend on (seed, pass, index) alone: the same with any number of workers.

    It collates too, with random numbers keyed by the batch's first sample. So are those of a dataset that reads whole
    batches (``__getitems__``), which is asked for one batch at a time: they depend on what the batch holds, so on the
    batch size and the number of ranks, but not on the number of workers nor on where a run was resumed.

    Only the generators that are drawn from are seeded (``seeding.py``). All are restored, for what else draws from them
    in this process: training, a dataset that reads this one, a thread of a worker.
    """

    def __init__(self, dataset: Any, collate_fn: Callable[[list[Any]], Any], seed: int) -> None:
        self.dataset, self.collate_fn, self.seed = dataset, collate_fn, seed
        self.reads_batches = reads_whole_batches(dataset)
        self._reading, self._collating = SeededCalls(8 if self.reads_batches else 64), SeededCalls(8)

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, key: Key) -> Any:
        return self.__getitems__([key])

    def __getitems__(self, keys: Sequence[Key]) -> Any:
        """The batch of these samples, all of one pass."""
        numpy_rests = self._reading.leaves_numpy and self._collating.leaves_numpy
        return rng.undisturbed(partial(self._batch, keys), numpy_rests=numpy_rests)

    def _batch(self, keys: Sequence[Key], place: bytes | None) -> Any:
        pass_number, first = keys[0]
        of_pass, indices = rng.mix(self.seed, pass_number), [index for _, index in keys]
        read = partial(self._read, of_pass, indices, place)
        seed = rng.mix_next(rng.mix_next(of_pass, first), 1)
        samples = read()
        try:
            return self._collating.each(self.collate_fn, [samples], [seed], place=place, renew=read)[0]
        except StopIteration as error:
            raise _unfinished(
                f"collate_fn for the batch from {type(self.dataset).__name__}[{indices[0]}] on"
            ) from error
        except Exception as error:
            error.add_note(self._uncollated(indices, self._collating.failed))
            raise

    def _read(self, of_pass: int, indices: list[int], place: bytes | None) -> Any:
        dataset: Any = self.dataset
        try:
            if self.reads_batches:
                seed = rng.mix_next(of_pass, indices[0])
                return self._reading.each(partial(_read_batch, dataset), [indices], [seed], place=place)[0]
            seeds = rng.mix_each(of_pass, indices)
            while type(dataset) is Subset:  # a call less for each sample
                dataset, indices = dataset.dataset, [dataset.indices[index] for index in indices]
            return self._reading.each(partial(operator.getitem, dataset), indices, seeds, place=place)
        except StopIteration as error:
            raise _unfinished(f"{type(dataset).__name__}[{self._reading.failed}]") from error
        except Exception as error:
            error.add_note(f"Raised for {type(dataset).__name__}[{self._reading.failed}].")
            raise

    def _uncollated(self, indices: Sequence[int], samples: Any) -> str:
        """What the samples are, and the first that is not as most of them are."""
        name = type(self.dataset).__name__
        if not isinstance(samples, list) or len(samples) != len(indices) or not samples:
            return f"Raised while {shapes_of(samples)} of {name} was collated."
        kinds = [shapes_of(sample) for sample in samples]
        usual = max(kinds, key=kinds.count)
        odd = next((at for at, kind in enumerate(kinds) if kind != usual), None)
        if odd is None:
            return f"Raised while {len(samples)} samples of {name}, each {usual}, were collated."
        return (
            f"{name}[{indices[odd]}] is {kinds[odd]} and {name}[{indices[kinds.index(usual)]}] is {usual}: return "
            "samples that are alike, or give a collate_fn that makes them so."
        )


def _unfinished(what: str) -> RuntimeError:
    """What is raised in the place of a StopIteration, by which the reader of the batches would end the pass."""
    return RuntimeError(f"{what} raised StopIteration, which would end the pass: give next() a default, or catch it.")


def _read_batch(dataset: Any, indices: Sequence[int]) -> Any:
    return dataset.__getitems__([*indices])  # its own list: a call may be repeated, and may have used it up


def reads_whole_batches(dataset: Any) -> bool:
    """Whether ``dataset`` itself reads several samples at once; torch's Subset only passes that on."""
    while isinstance(dataset, Subset) and type(dataset).__getitems__ is Subset.__getitems__:
        dataset = dataset.dataset
    return callable(getattr(dataset, "__getitems__", None))
