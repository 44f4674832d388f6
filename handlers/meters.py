"""What Ignite's metrics lack: sums, extremes and times of an interval, which MetricLogger reduces with its means."""

from __future__ import annotations

import math
from collections.abc import Sequence
from time import perf_counter
from typing import Any, Literal

import torch

How = Literal["sum", "mean", "max", "min"]


class Meter:
    """One number per log point for ``state.meters``, from what it was given since the last, on all ranks.

    Args:
        how: ``sum``, ``mean``, ``max`` or ``min`` of the numbers, whichever rank they come from.
        of: of this value in ``state.output`` (``grad_norm``, a name of the update's own); None: of what
            :meth:`update` is given.

    Nothing is read from the device before the log point. Nothing is written where no rank has a number.

    Raises:
        ValueError: ``how`` is none of these.
    """

    def __init__(self, how: How, of: str | None = None) -> None:
        if how not in ("sum", "mean", "max", "min"):
            raise ValueError(f"Meter got how={how!r}, expected 'sum', 'mean', 'max' or 'min'.")
        self.how, self.of = how, of
        self.values: list[Any] = []
        """What :meth:`update` was given since the last log point; in checkpoints."""

    def update(self, value: float | torch.Tensor) -> None:
        """Take a number, or a tensor of one element, of which the value is kept."""
        if isinstance(value, torch.Tensor):
            value = value.detach().clone().reshape(())
        self.values.append(value)

    def reduced(self, values: torch.Tensor) -> tuple[float, float]:
        """This rank's part for :meth:`over_ranks`: the number, and of how many.

        Args:
            values: float64, shape ``(count,)``.
        """
        count = float(values.numel())
        if self.how in ("sum", "mean"):
            return values.sum().item(), count
        if not count:
            return math.nan, 0.0
        return (values.max() if self.how == "max" else values.min()).item(), count

    def over_ranks(self, parts: Sequence[tuple[float, float]]) -> float | None:
        """The number over all ranks, None if no rank has any."""
        given = [part for part in parts if part[1]]
        if not given:
            return None
        numbers = [number for number, _ in given]
        if any(map(math.isnan, numbers)):
            return math.nan
        if self.how in ("max", "min"):
            return max(numbers) if self.how == "max" else min(numbers)
        return sum(numbers) / (1 if self.how == "sum" else sum(count for _, count in given))


class Stopwatch(Meter):
    """Milliseconds of a block, ``with stopwatch:``, by the host's clock: the mean over its uses and the ranks."""

    def __init__(self) -> None:
        super().__init__("mean")
        self._started = 0.0

    def __enter__(self) -> Stopwatch:
        self._started = perf_counter()
        return self

    def __exit__(self, *error: object) -> None:
        self.update(1e3 * (perf_counter() - self._started))
