"""What Ignite's metrics lack: sums, extremes and times of an interval, which MetricLogger reduces with its means."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from time import perf_counter
from typing import Any, Literal

import torch

from ignite_engine.devices import widest_float

How = Literal["sum", "mean", "max", "min"]
CHUNK = 64
"""Numbers that are kept one by one until they are added up together: one at a time would cost more."""


class Running:
    """A sum or an extreme of numbers that come in chunks, in constant memory; nothing is read from the device.

    Args:
        how: ``sum`` and ``mean`` keep the sum.
    """

    def __init__(self, how: How) -> None:
        self.how, self.count = how, 0
        self._total: torch.Tensor | None = None
        self._bad_at: torch.Tensor | None = None

    def add(self, chunk: Sequence[Any], iterations: Sequence[int] | None = None) -> None:
        """Take numbers, or tensors of one element.

        Args:
            iterations: of the numbers, for :meth:`bad_at`.
        """
        values = _stacked(chunk)
        part = values.sum() if self.how in ("sum", "mean") else values.max() if self.how == "max" else values.min()
        if iterations is not None:
            first, last = iterations[0], iterations[-1]
            if last - first + 1 == len(chunk):  # not a copy to the device, which the host would wait for
                places = torch.arange(first, last + 1, dtype=values.dtype, device=values.device)
            else:
                places = torch.tensor(iterations, dtype=values.dtype, device=values.device)
            bad_at = torch.where(torch.isfinite(values), math.inf, places).min()
            self._bad_at = bad_at if self._bad_at is None else torch.minimum(self._bad_at.to(bad_at.device), bad_at)
        self._join(part, len(chunk))

    def append(self, later: Running) -> None:
        """Take what another one was given after this one."""
        if later._total is not None:
            self._join(later._total, later.count)

    def _join(self, part: torch.Tensor, count: int) -> None:
        if self._total is not None:
            total = self._total.to(part.device)
            if self.how in ("sum", "mean"):
                part = total + part
            else:
                part = torch.maximum(total, part) if self.how == "max" else torch.minimum(total, part)
        self._total, self.count = part, self.count + count

    def number(self) -> float:
        """The sum or the extreme; NaN for an extreme of none."""
        none = 0.0 if self.how in ("sum", "mean") else math.nan
        return none if self._total is None else self._total.item()

    def bad_at(self) -> float:
        """The first iteration whose number is not finite, infinity if all are."""
        return math.inf if self._bad_at is None else self._bad_at.item()

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count, "total": self._total, "bad_at": self._bad_at}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.count, self._total, self._bad_at = state["count"], state["total"], state["bad_at"]


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
        self.reset()

    def update(self, value: float | torch.Tensor) -> None:
        """Take a number, or a tensor of one element, whose value is kept."""
        if isinstance(value, torch.Tensor):
            value = value.detach().clone().reshape(())
        self.take(value)

    def take(self, value: Any) -> None:
        """Update with a tensor that is not changed afterwards, so that it need not be copied."""
        self.values.append(value)
        if len(self.values) == CHUNK:
            self._fold()

    @property
    def count(self) -> int:
        """How many numbers it was given."""
        return self._running.count + len(self.values)

    def reset(self) -> None:
        """Forget what it was given."""
        self.values: list[Any] = []
        """What it was given last, and is not added up yet."""
        self._running = Running(self.how)

    def reduced(self) -> tuple[float, float]:
        """This rank's part for :meth:`over_ranks`: the number, and of how many."""
        self._fold()
        return self._running.number(), float(self._running.count)

    def state_dict(self) -> dict[str, Any]:
        return {"values": packed(self.values), **self._running.state_dict()}

    def continue_from(self, state: Mapping[str, Any]) -> None:
        """What a checkpoint had comes before what it was given since."""
        values, running = self.values, self._running
        self.reset()
        self.values = unpacked(state["values"])
        self._running.load_state_dict(state)
        if running.count:
            self._fold()
            self._running.append(running)
        for value in values:
            self.take(value)

    def _fold(self) -> None:
        if self.values:
            self._running.add(self.values)
            self.values = []

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


def packed(values: Sequence[Any]) -> Any:
    """Scalar tensors of one kind as one tensor, else a list: in a checkpoint each tensor is a record of its own.

    Those that a checkpoint had are on the CPU, and the later ones may be on a device.
    """
    return _stack(values) if values and _are_alike(values) else list(values)


def unpacked(values: Any) -> list[Any]:
    """What was :func:`packed`."""
    return list(values.unbind() if isinstance(values, torch.Tensor) else values)


def _are_alike(values: Sequence[Any]) -> bool:
    first = values[0]
    return all(isinstance(value, torch.Tensor) and value.shape == () and value.dtype is first.dtype for value in values)


def _stack(values: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.stack([value.to(values[-1].device) for value in values])


def _stacked(values: Sequence[Any]) -> torch.Tensor:
    """Scalars as one tensor on the device of the last tensor, of the widest type that it has."""
    device = next((value.device for value in reversed(values) if isinstance(value, torch.Tensor)), None)
    if device is None:
        return torch.tensor([float(value) for value in values], dtype=torch.float64)
    wide = widest_float(device)
    if _are_alike(values):
        return _stack(values).to(wide)
    numbers = [value if isinstance(value, torch.Tensor) else torch.tensor(value, dtype=wide) for value in values]
    return torch.stack([number.reshape(()).to(device, wide) for number in numbers])
