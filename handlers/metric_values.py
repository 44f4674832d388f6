"""How the value of a metric is published: as a number, or as lists of numbers."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from numbers import Real
from typing import Any

import torch

from ignite_engine.ranks import agreement
from ignite_engine.state import TrainingState
from ignite_engine.text import as_float, plain_metric

MOST = 1000
"""Numbers of a metric that a log takes."""


def publish(state: TrainingState, values: Mapping[str, Any]) -> None:
    """Write what metrics gave, by whole names: a number, or for a log the lists of several; other objects are not."""
    parts = [value for value in values.values() if isinstance(value, Mapping)]
    for name, value in values.items():
        number = number_of(value, name)
        if number is not None:
            state.metrics[name] = number
        # Ignite writes a mapping and each of its parts
        elif not any(value is part for whole in parts for part in whole.values()):
            try:
                plain = plain_metric(name, value)
            except ValueError:
                continue
            if (count := _count(plain)) <= MOST:
                state.metrics[name] = plain
            elif agreement.rank() == 0:
                warnings.warn(
                    f"The metric {name!r} is {count} numbers, and a log takes {MOST:,}: it is not logged.", stacklevel=2
                )


def number_of(value: Any, name: str) -> float | None:
    """A metric's value as a number; None: it is several, or none.

    Raises:
        ValueError: no float can hold it.
    """
    if isinstance(value, torch.Tensor):
        return float(value) if value.numel() == 1 else None
    return as_float(f"The metric {name!r}", value) if isinstance(value, Real) else None


def _count(value: Any) -> int:
    if isinstance(value, Mapping):
        return sum(map(_count, value.values()))
    return sum(map(_count, value)) if isinstance(value, list) else 1
