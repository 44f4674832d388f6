"""Clicks that come in windows, each evaluated before it is trained on: the task of ``configs/click_stream.yaml``.

    make train CONFIG=configs/click_stream.yaml

Ids of any size are hashed to the rows of one table. Its gradients are sparse: an optimizer of its own steps the rows
that a batch has used, and another one the dense layers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from ignite.metrics import Loss
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from ignite_engine import Task, Windows
from ignite_engine.ext.sparse import hash_ids

COLUMNS, IDS = 4, 500  # sparse features of a sample, and different ids of each


class Network(nn.Module):
    """Ids ``(batch, columns)`` to logits ``(batch,)``."""

    def __init__(self, rows: int, width: int) -> None:
        super().__init__()
        self.table = nn.Embedding(rows, width, sparse=True)
        self.layers = nn.Sequential(nn.Linear(COLUMNS * width, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, ids: Tensor) -> Tensor:
        salt = torch.arange(COLUMNS, device=ids.device)  # the same id is another one in another column
        logits: Tensor = self.layers(self.table(hash_ids(ids, self.table.num_embeddings, salt)).flatten(1)).squeeze(1)
        return logits


def make_window(number: int, samples: int) -> TensorDataset:
    """A function of its number: a click is likely where the effects of a sample's ids are large."""
    effects = torch.randn(COLUMNS, IDS, generator=torch.Generator().manual_seed(0))
    draws = torch.Generator().manual_seed(1 + number)
    ranks = torch.randint(IDS, (samples, COLUMNS), generator=draws)
    logits = effects.gather(1, ranks.T).sum(dim=0)
    clicks = torch.bernoulli(logits.sigmoid(), generator=draws)
    return TensorDataset(10**12 + 7_919_999_983 * ranks, clicks)


def predict(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    ids, clicks = batch
    return model(ids), clicks


def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Log loss in nats per sample."""
    return functional.binary_cross_entropy_with_logits(*predict(model, batch))


def build(options: Mapping[str, Any]) -> Task:
    """The task; ``options`` are those of :func:`task`."""
    return task(**options)


def task(windows: int, samples: int, rows: int, width: int) -> Task:
    """``samples`` are those of a window, ``rows`` those of the table, ``width`` the features of an id."""
    model = Network(rows, width)
    return Task(
        model=model,
        loss_fn=loss_fn,
        train_set=Windows(range(windows), lambda number: make_window(number, samples)),
        test_sets={"next": make_window(windows, samples)},
        predict=predict,
        metrics={"loss": Loss(functional.binary_cross_entropy_with_logits)},
        parameter_groups={"table": [model.table.weight], "dense": list(model.layers.parameters())},
    )
