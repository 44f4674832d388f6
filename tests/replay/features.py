"""A task whose options turn on what a training loop may have to do; its data draws from all three generators."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from ignite.metrics import Loss
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import default_collate

from ignite_engine import Task, TrainingEvents

WIDTH = 6


class Noisy:
    """Samples ``(inputs, target, weight)``: what is added to them is drawn anew each time."""

    def __len__(self) -> int:
        return 38

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, float]:
        inputs = torch.linspace(-1, 1, WIDTH) * index / 38 + 0.1 * torch.randn(WIDTH)
        noise = random.random() + float(np.random.rand())
        return inputs + noise, torch.tensor(index % 3), float(index % 4 > 0)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3))
        self.head = nn.Linear(16, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(self.layers(inputs))  # type: ignore[no-any-return]  # torch's modules return Any


def cross_entropy(model: nn.Module, batch: Any) -> Tensor:
    return functional.cross_entropy(model(batch[0]), batch[1])


def two_losses(model: nn.Module, batch: Any) -> Any:
    logits = model(batch[0])
    losses = {"class": functional.cross_entropy(logits, batch[1]), "size": 0.01 * logits.square().mean()}
    return losses, {"accuracy": (logits.argmax(1) == batch[1]).float().mean()}


def jittered(samples: list[Any]) -> Any:
    inputs, *others = default_collate(samples)
    return inputs + 0.01 * torch.randn(inputs.shape), *others


def heaviness(batch: Any) -> float:
    """Zero for the batches that begin with some samples."""
    return float(batch[2].sum()) if batch[2][0] else 0.0


def announce(trainer: Any) -> None:
    print("evaluated")


def build(options: Mapping[str, Any]) -> Task:
    model = Net()
    metric = Loss(functional.cross_entropy)
    groups = {"body": list(model.layers.parameters()), "head": list(model.head.parameters())}
    return Task(
        model,
        two_losses if options.get("losses") else cross_entropy,
        Noisy(),
        {"val": Noisy()},
        predict=lambda model, batch: (model(batch[0]), batch[1]),
        metrics={"loss": metric},
        parameter_groups=groups if options.get("groups") else None,
        weight_fn=heaviness if options.get("weights") else None,
        collate_fn=jittered if options.get("collate") else None,
        handlers=[(announce, TrainingEvents.EVALUATION_COMPLETED)],
    )
