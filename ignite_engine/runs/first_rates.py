"""The rates of a torch scheduler ahead of the run: whether it seems to count updates where it steps once per epoch."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Sequence

import torch
from torch.optim import SGD
from torch.optim.lr_scheduler import LRScheduler

from ignite_engine import rng

_LOOK_AHEAD = 1000
"""Steps that are looked at at most."""


def rates_of(scheduler: LRScheduler, steps: int) -> list[float]:
    """The highest rate of all parameter groups at each of the first ``steps`` steps; empty: it cannot be copied.

    A copy steps, over an optimizer of its own: the scheduler and its optimizer stay as they are.
    """
    groups = [
        {key: float(value) if key == "lr" else copy.deepcopy(value) for key, value in group.items() if key != "params"}
        for group in scheduler.optimizer.param_groups
    ]
    substitute = SGD([{**group, "params": [torch.zeros(())]} for group in groups])
    rates: list[float] = []
    with rng.isolated(), warnings.catch_warnings(action="ignore"):
        try:
            ahead = copy.deepcopy(scheduler, {id(scheduler.optimizer): substitute})
            while len(rates) < steps:
                rates.append(max(float(group["lr"]) for group in substitute.param_groups))
                ahead.step()
        except Exception:  # the user's function, asked for a step that its run may not have
            pass
    return rates


def doubtful_rates(scheduler: LRScheduler, updates: int | None, epochs: int | None) -> Sequence[float]:
    """The first three rates of a scheduler that seems to count updates, if it stepped once per epoch; else none.

    It seems so where the first epoch would train at 0, and where the run has too few epochs: the rate would stay below
    half of what it reaches by updates, or would not move though it moves by updates.
    """
    by_update = rates_of(scheduler, min(updates or _LOOK_AHEAD, _LOOK_AHEAD))
    by_epoch = by_update[: epochs or _LOOK_AHEAD]
    if not by_update or max(by_update) <= 0:
        return []
    is_low = max(by_epoch) < max(by_update) / 2
    stays = _spread(by_epoch) < 0.01 and _spread(by_update) > 0.1
    return by_epoch[:3] if by_epoch[0] == 0 or is_low or stays else []


def _spread(rates: Sequence[float]) -> float:
    return (max(rates) - min(rates)) / (max(rates) or 1.0)
