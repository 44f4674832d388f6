"""The work of the overhead benchmark as a task: `ignite-engine eject` makes the plain loops beside this file of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import AdamW
from torch.utils.data import TensorDataset

from ignite_engine import Task


def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    inputs, targets = batch
    return cross_entropy(model(inputs), targets)


def build(options: Mapping[str, Any]) -> Task:
    """The perceptron of `benchmarks/workload.py`, and as many samples as it has."""
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))
    samples = TensorDataset(torch.randn(1536, 64), torch.randint(10, (1536,)))
    return Task(
        model,
        loss_fn,
        samples,
        optimizer=lambda model: AdamW(model.parameters(), lr=1e-3, foreach=True),
    )
