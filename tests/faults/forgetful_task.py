"""A task whose loss depends on what no checkpoint holds, if asked: a generator in a closure, and a global counter.

Options: ``forgets``: ``generator``, ``counter``, or nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

from ignite_engine import Task

CALLS = 0


def build(options: Mapping[str, Any]) -> Task:
    if options.get("forgets") == "everything":
        raise ValueError("nothing is left")
    noise = torch.Generator().manual_seed(5)

    def loss_fn(model: nn.Module, batch: Any) -> torch.Tensor:
        global CALLS
        inputs, targets = batch
        if options.get("forgets") == "generator":
            inputs = inputs + 0.1 * torch.randn(inputs.shape, generator=noise)
        loss = nn.functional.cross_entropy(model(inputs), targets)
        if options.get("forgets") == "counter":
            CALLS += 1
            loss = loss * (1 + 0.01 * CALLS)
        return loss

    generator = torch.Generator().manual_seed(7)
    data = TensorDataset(torch.randn(50, 8, generator=generator), torch.randint(0, 3, (50,), generator=generator))
    model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.2), nn.Tanh(), nn.Linear(16, 3))
    return Task(model=model, loss_fn=loss_fn, train_set=data, val_sets={"val": data})
