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

    def __init__(self, count: int = 38) -> None:
        self.count, self.read = count, list[int]()

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, Tensor]:
        self.read.append(index)
        inputs = torch.linspace(-1, 1, WIDTH) * index / self.count + 0.1 * torch.randn(WIDTH)
        noise = random.random() + float(np.random.rand())
        return inputs + noise, torch.tensor(index % 3), torch.tensor(float(index % 4 > 0))


class InBatches(Noisy):
    """Read a batch at a time."""

    def __getitems__(self, indices: list[int]) -> Any:
        return default_collate([self[index] for index in indices])


def as_it_is(batch: Any) -> Any:
    return batch


class Net(nn.Module):
    def __init__(self, norm: type[nn.Module] = nn.BatchNorm1d) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, 16), norm(16), nn.ReLU(), nn.Dropout(0.3))
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


def total_weight(batch: Any) -> float:
    return 1.0 + float(batch[2].sum())


def announce(trainer: Any) -> None:
    trainer.state.metrics["val/announced"] = 1.0


def build(options: Mapping[str, Any]) -> Task:
    model = Net(nn.LayerNorm if options.get("layer_norm") else nn.BatchNorm1d)
    kind, count = InBatches if options.get("batches") else Noisy, options.get("samples", 38)
    metric = Loss(functional.cross_entropy)
    groups = {"body": list(model.layers.parameters()), "head": list(model.head.parameters())}
    return Task(
        model,
        two_losses if options.get("losses") else cross_entropy,
        kind(count),
        {"val": kind(8)},
        predict=lambda model, batch: (model(batch[0]), batch[1]),
        metrics={"loss": metric},
        parameter_groups=groups if options.get("groups") else groups["body"] if options.get("body") else None,
        weight_fn={"some": heaviness, "all": total_weight}.get(options.get("weights", "")),
        collate_fn=as_it_is if options.get("batches") else jittered if options.get("collate") else None,
        handlers=[(announce, TrainingEvents.EVALUATION_COMPLETED)],
    )
