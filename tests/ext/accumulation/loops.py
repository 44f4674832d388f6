"""Loops that call the gated pair at every micro-batch, and the loop written by hand that they equal."""

import torch
from torch.optim import AdamW
from torch.optim import lr_scheduler as torch_schedulers

from ignite_engine.ext.accumulation import (
    initialize,
)
from tests.kit.tiny import Numbers, linear, mse, one

DOUBLE = torch.float64


def micro_batches(count):
    data = Numbers(2 * count, dtype=DOUBLE)
    return [(data.inputs[i : i + 2], data.targets[i : i + 2]) for i in range(0, 2 * count, 2)]


def made(steps, **options):
    """A model and the pair over AdamW and a scheduler that takes a tenth off the LR at each update."""
    model = linear(dtype=DOUBLE)
    optimizer = AdamW(model.parameters(), lr=0.1)
    scheduler = torch_schedulers.MultiplicativeLR(optimizer, lambda epoch: 0.9)
    return model, *initialize(model, optimizer, scheduler, steps, **options)


def by_hand(groups):
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


def clear_first(model, optimizer, scheduler, batch):
    optimizer.zero_grad()
    with optimizer.autocast():
        loss = mse(model, batch)
    optimizer.backward(loss)
    optimizer.step()
    scheduler.step()


def clear_last(model, optimizer, scheduler, batch):
    with optimizer.autocast():
        loss = mse(model, batch)
    optimizer.backward(loss)
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()


def gradient(model):
    return torch.cat([p.grad.reshape(-1) for p in model.parameters() if p.grad is not None])


def close(weights, expected):
    return torch.allclose(weights, expected, rtol=1e-12, atol=1e-13)
