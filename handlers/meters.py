"""Sums, means, extremes and times of an interval, in constant memory; MetricLogger reduces all of them together."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from time import perf_counter
from typing import Any, Literal

import torch

from ignite_engine.devices import widest_float

CHUNK = 64
"""Numbers that are kept one by one until they are added up together: one at a time would cost more."""


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

    def __init__(self, how: Literal["sum", "mean", "max", "min"], of: str | None = None) -> None:
        if how not in ("sum", "mean", "max", "min"):
            raise ValueError(f"Meter got how={how!r}, expected 'sum', 'mean', 'max' or 'min'.")
        self.how, self.of = how, of
        self.reset()

    def reset(self) -> None:
        """Forget what it was given."""
        self._values: list[Any] = []
        """What it was given last, and is not added up yet."""
        self._added = 0
        self._total: torch.Tensor | None = None

    @property
    def count(self) -> int:
        """How many numbers it was given."""
        return self._added + len(self._values)

    def update(self, value: float | torch.Tensor) -> None:
        """Take a number, or a tensor of one element, whose value is kept."""
        if isinstance(value, torch.Tensor):
            value = value.detach().clone().reshape(())
        self.take(value)

    def take(self, value: Any) -> None:
        """Update with a tensor that is not changed afterwards, so that it need not be copied."""
        self._values.append(value)
        if len(self._values) == CHUNK:
            self._add_up()

    def reduced(self) -> tuple[float, float]:
        """This rank's part for :meth:`over_ranks`: the number, and of how many."""
        self._add_up()
        none = 0.0 if self.how in ("sum", "mean") else math.nan
        return none if self._total is None else self._total.item(), float(self._added)

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

    def state_dict(self) -> dict[str, Any]:
        values: Any = self._values
        if values and all(isinstance(value, torch.Tensor) and value.dtype == values[0].dtype for value in values):
            values = torch.stack(self._tensors())  # each one would be a record of the checkpoint
        return {"values": values, "count": self._added, "total": self._total}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """What a checkpoint had comes before what it was given since."""
        later = copy.copy(self)
        self._values, self._added, self._total = [*state["values"]], state["count"], state["total"]
        if later._total is not None:
            self._add_up()
            self._join(later._total, later._added)
        for value in later._values:
            self.take(value)

    def _add_up(self) -> None:
        if not self._values:
            return
        values = torch.stack(self._tensors())
        values = values.to(widest_float(values.device))
        self._values = []
        self._join(values.sum() if self.how in ("sum", "mean") else getattr(values, self.how)(), len(values))

    def _join(self, part: torch.Tensor, count: int) -> None:
        if self._total is not None:
            join = {"max": torch.maximum, "min": torch.minimum}.get(self.how, torch.add)
            part = join(self._total.to(part.device), part)
        self._total, self._added = part, self._added + count

    def _tensors(self) -> list[torch.Tensor]:
        """The last values, on the device of the last tensor: those that a checkpoint had are on the CPU."""
        tensors = [value for value in self._values if isinstance(value, torch.Tensor)]
        device = tensors[-1].device if tensors else torch.device("cpu")
        wide = widest_float(device)
        is_mixed = len(tensors) < len(self._values) or len({tensor.dtype for tensor in tensors}) > 1
        return [
            value.reshape(()).to(device, wide if is_mixed else None)
            if isinstance(value, torch.Tensor)
            else torch.tensor(float(value), dtype=wide, device=device)
            for value in self._values
        ]


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
