"""The order of samples as a function of (seed, pass, position)."""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Iterable, Iterator, Sequence, Sized
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, repeat
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import BatchSampler, Sampler
from torch.utils.data.distributed import DistributedSampler

from ignite_engine import rng

Key = tuple[int, int]


@dataclass(frozen=True)
class Dealing:
    """Deals out the global order: of each ``cycle`` consecutive batches this rank gets ``first`` to ``end - 1``.

    So which samples make up a batch does not depend on the number of ranks.
    """

    batch_size: int
    cycle: int
    first: int
    end: int

    def own(self, batches: int) -> int:
        """How many of the next ``batches`` in a cycle belong to this rank."""
        return len(range(self.first, min(self.end, batches)))


class ResumableSampler(Sampler[Key]):
    """One global order per (seed, pass), sharded over the ranks by position, without padding.

    Args:
        data: what is sampled, or its length.

    Yields ``(pass, index)``, so that loader workers know the pass of each sample. The first ``start`` samples of this
    rank are skipped without being loaded: the cost of resuming does not grow with the position. Without a ``start``
    it is iterated by hand: it reads the length of its data first, and the next pass is another one.
    """

    @property
    def inexact(self) -> str | None:
        """Why the order of a pass is not a function of seed and pass; None if it is."""
        return None

    @property
    def drawn_order(self) -> str | None:
        """A hash of the order of the pass, if more than seed, pass and length determines it; else None."""
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
        order = self._order()
        shares = (order[part.start : part.stop : part.step] for part in self._places(self.start or 0))
        keys = zip(repeat(self.pass_number), chain.from_iterable(shares))
        if self.start is None:
            self.pass_number += 1
        return keys

    def _places(self, start: int) -> Iterable[range]:
        """Of this rank's samples in the order of the pass, from sample ``start`` on, after those that are skipped."""
        if (dealing := self.dealing) is None:
            return [range(self.skipped + self.rank + start * self.world_size, self.length, self.world_size)]
        first, end, cycle = (dealing.batch_size * at for at in (dealing.first, dealing.end, dealing.cycle))
        begins = range(self.skipped + start, self.length, cycle)
        return (range(begin + first, min(begin + end, self.length)) for begin in begins)

    def first(self, count: int) -> list[int]:
        """The first ``count`` samples of the pass over all ranks."""
        return list(self._order()[:count])

    def _order(self) -> Sequence[int]:
        # not a list: there may be 10^8 numbers, each of which takes 32 bytes as an object
        return self._permutation().numpy().data if self.shuffle else range(self.length)

    def _permutation(self) -> Tensor:
        generator = torch.Generator().manual_seed(rng.mix(self.seed, self.pass_number) >> 1)
        return torch.randperm(self.length, generator=generator)

    def __len__(self) -> int:
        return sum(map(len, self._places(0)))


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
