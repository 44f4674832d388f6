"""Random numbers of a sample from its seed alone, where only the generators that are drawn from are seeded.

Seeding Python, NumPy and torch costs 7 µs, more than many samples, and most datasets draw from one of them or none.

1. **Watch.** The first calls in each process are seeded in full, and after each it is seen which generators it drew
   from. Those are seeded for every call from then on. torch's always is: ``torch.initial_seed()`` reads its seed
   without a draw, and it is the cheapest.
2. **Notice.** A generator that nobody drew from stands at a known place. After each call the place is compared: of
   Python the next 64 bits of a fixed stream, of NumPy the end of its state in memory. Both take 0.1 µs.
3. **Repeat.** A call that has moved a generator which was not seeded for it is made again with it seeded, and so are
   all that follow: what it returned, or the error that it raised, came of the wrong numbers. So a dataset that begins
   to draw late reads one sample twice, once for each generator and process; a collate function that does, gets its
   samples read anew, as it may have changed them.

Every call that draws has the numbers it would have if each were seeded in full. Exceptions are calls that only read the
state of Python's or NumPy's generator or put back what they drew, if none of the first calls moved that generator: they
see another state. So does the first call that moves it where what it drew is kept for the repetition, as in a cache.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from ignite_engine import rng

_NOBODYS_SEED = 2849163701  # a call that seeds with a number of its own ends elsewhere
_BEGINNING = random.Random(_NOBODYS_SEED).getstate()
_seed_torch = torch.default_generator.manual_seed


class SeededCalls:
    """Calls functions with the generators seeded, at least those from which they draw.

    The generators are left anywhere.

    Args:
        watched: so many calls are seeded in full, to see from which generators they draw.
    """

    def __init__(self, watched: int) -> None:
        self._python = self._numpy = False
        self._to_watch = watched
        self.failed: Any = None
        """The argument of the last call that has raised."""

    @property
    def leaves_numpy(self) -> bool:
        """Calls neither seed NumPy's generator nor are expected to draw from it."""
        return not self._numpy and self._to_watch <= 0

    def each(
        self,
        function: Callable[[Any], Any],
        arguments: Sequence[Any],
        seeds: Sequence[int],
        *,
        place: bytes | None = None,
        renew: Callable[[], Any] | None = None,
    ) -> list[Any]:
        """``function`` of each argument, drawing as after ``rng.seed_host`` with its seed.

        Args:
            place: as :func:`rng.undisturbed` gives it; None: unknown.
            renew: makes the argument of a single call that is repeated; None: it is given again.
        """
        if self._to_watch > 0:
            return [self._watched(function, argument, seed) for argument, seed in zip(arguments, seeds, strict=True)]
        python, numpy, at = self._python, self._numpy, rng.numpy_place()
        numpy = numpy or at is None
        before = b"" if numpy else _without_half(at, place)
        if not python:
            random.setstate(_BEGINNING)
        draw, seed_torch, moved = random.getrandbits, _seed_torch, False
        results: list[Any] = []
        for argument, seed, mark in zip(arguments, seeds, _first_draws(len(arguments)), strict=True):
            seed_torch(seed)
            if python:
                random.seed(seed)
            if numpy:
                np.random.seed(seed & 0xFFFFFFFF)
            try:
                result = function(argument)
            except Exception:
                self.failed = argument
                moved = not python and draw(64) != mark
                if not moved and (numpy or at.raw == before):
                    raise
                break
            if (python or not (moved := draw(64) != mark)) and (numpy or at.raw == before):
                results.append(result)
            else:
                break
        else:
            return results
        self._python, self._numpy = python or moved, self._numpy or (not numpy and at.raw != before)
        rest = [renew()] if renew is not None else arguments[len(results) :]
        return results + self.each(function, rest, seeds[len(results) :], place=place, renew=renew)

    def _watched(self, function: Callable[[Any], Any], argument: Any, seed: int) -> Any:
        rng.seed_host(seed)
        at = rng.numpy_place()
        before = None if at is None else at.raw
        try:
            result = function(argument)
        except Exception:
            self.failed = argument
            raise
        self._python = self._python or random.getrandbits(64) != random.Random(seed).getrandbits(64)
        self._numpy = self._numpy or (at is not None and at.raw != before)
        self._to_watch -= 1
        return result


def _without_half(at: Any, place: bytes | None) -> bytes:
    """Where NumPy's generator is without a half of a pair of normal numbers, which would be drawn without a move."""
    if at.raw != place:
        np.random.seed(_NOBODYS_SEED)
    before: bytes = at.raw
    return before


@lru_cache(maxsize=8)
def _first_draws(count: int) -> tuple[int, ...]:
    """What 64 bits from the beginning on are, draw by draw."""
    generator = random.Random()
    generator.setstate(_BEGINNING)
    return tuple(generator.getrandbits(64) for _ in range(count))
