"""Loops that call the gated pair at every micro-batch, and the loop written by hand that they equal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW
from torch.optim import lr_scheduler as torch_schedulers

from ignite_engine.ext.accumulation import (
    GradientAccumulationOptimizer,
    initialize,
)
from tests.builders import Numbers, linear, mse, one

DOUBLE = torch.float64


def micro_batches(count: int) -> list[Any]:
    data = Numbers(2 * count, dtype=DOUBLE)
    return [(data.inputs[i : i + 2], data.targets[i : i + 2]) for i in range(0, 2 * count, 2)]


def made(steps: int, **options: Any) -> tuple[nn.Module, GradientAccumulationOptimizer, Any]:
    """A model and the pair over AdamW and a scheduler that takes a tenth off the LR at each update."""
    model = linear(dtype=DOUBLE)
    optimizer = AdamW(model.parameters(), lr=0.1)
    scheduler = torch_schedulers.MultiplicativeLR(optimizer, lambda epoch: 0.9)
    return model, *initialize(model, optimizer, scheduler, steps, **options)


def by_hand(groups: Sequence[Sequence[Any]]) -> tuple[Tensor, list[float]]:
    """Weights and LRs after one update for each group, its gradient that of the mean of the losses."""
    model, lrs = linear(dtype=DOUBLE), []
    optimizer = AdamW(model.parameters(), lr=0.1)
    scheduler = torch_schedulers.MultiplicativeLR(optimizer, lambda epoch: 0.9)
    for group in groups:
        optimizer.zero_grad()
        torch.stack([mse(model, batch) for batch in group]).mean().backward()
        optimizer.step()
        scheduler.step()
        lrs.append(scheduler.get_last_lr()[0])
    return one(model), lrs


def clear_first(model: nn.Module, optimizer: Any, scheduler: Any, batch: Any) -> None:
    optimizer.zero_grad()
    with optimizer.autocast():
        loss = mse(model, batch)
    optimizer.backward(loss)
    optimizer.step()
    scheduler.step()


def clear_last(model: nn.Module, optimizer: Any, scheduler: Any, batch: Any) -> None:
    with optimizer.autocast():
        loss = mse(model, batch)
    optimizer.backward(loss)
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()


def gradient(model: nn.Module) -> Tensor:
    return torch.cat([p.grad.reshape(-1) for p in model.parameters() if p.grad is not None])


def close(weights: Tensor, expected: Tensor) -> bool:
    return torch.allclose(weights, expected, rtol=1e-12, atol=1e-13)
