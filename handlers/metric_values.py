"""How the value of a metric is published: as a number, or as lists of numbers."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from numbers import Real
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from ignite_engine.ranks import agreement
from ignite_engine.state import TrainingState
from ignite_engine.text import as_float, plain_metric

MOST = 1000
"""Numbers of a metric that a log takes."""


def publish(state: TrainingState, values: Mapping[str, Any]) -> None:
    """Write what metrics gave, by whole names: a number, or for a log the lists of several; other objects are not.

    Raises:
        ValueError: a number that no float can hold.
    """
    parts = [value for value in values.values() if isinstance(value, Mapping)]
    for name, value in values.items():
        if isinstance(value, Real) or (isinstance(value, torch.Tensor) and value.numel() == 1):
            state.metrics[name] = as_float(f"The metric {name!r}", value)
        # Ignite writes a mapping and each of its parts
        elif not any(value is part for whole in parts for part in whole.values()):
            try:
                plain = plain_metric(name, value)
            except ValueError:
                continue
            if (count := len(tree_leaves(plain))) <= MOST:
                state.metrics[name] = plain
            elif agreement.rank() == 0:
                warnings.warn(
                    f"The metric {name!r} is {count} numbers, and a log takes {MOST:,}: it is not logged.", stacklevel=2
                )
