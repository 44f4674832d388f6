"""Handwritten digits, 8 x 8 pixels, a small CNN and a held-out test set: the task of ``configs/digits.yaml``.

pip install 'ignite-engine[examples]'    # the images come with scikit-learn
make train CONFIG=configs/digits.yaml
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from ignite.metrics import Accuracy, Loss
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from ignite_engine import Task


class Rotated(Dataset[tuple[Tensor, Tensor]]):
    """Images turned by up to so many degrees, drawn from torch's generator, which the loader seeds for each sample."""

    def __init__(self, digits: TensorDataset, rotation: float) -> None:
        self.digits, self.rotation = digits, math.radians(rotation)

    def __len__(self) -> int:
        return len(self.digits)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        image, digit = self.digits[index]
        angle = self.rotation * (2 * torch.rand(()).item() - 1)
        matrix = torch.tensor([[[math.cos(angle), -math.sin(angle), 0.0], [math.sin(angle), math.cos(angle), 0.0]]])
        grid = nn.functional.affine_grid(matrix, [1, *image.shape], align_corners=False)
        return nn.functional.grid_sample(image[None], grid, align_corners=False)[0], digit


class Network(nn.Module):
    """Images ``(batch, 1, 8, 8)`` to logits ``(batch, 10)``; the width is that of the first block, a multiple of 8."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        body = [*block(1, width), *block(width, 2 * width), nn.MaxPool2d(2), *block(2 * width, 4 * width)]
        head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(dropout), nn.Linear(4 * width, 10)]
        self.layers = nn.Sequential(*body, *head)

    def forward(self, images: Tensor) -> Any:
        return self.layers(images)


def block(inputs: int, outputs: int) -> tuple[nn.Module, ...]:
    return nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.GroupNorm(8, outputs), nn.ReLU()


def load_splits(split_seed: int) -> tuple[TensorDataset, ...]:
    """Images from 0 to 1 and their digits, split at random: for tests, validation and training."""
    pixels, digits = map(torch.from_numpy, load_digits(return_X_y=True))
    images, targets = pixels.float().reshape(-1, 1, 8, 8) / 16, digits.long()
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(split_seed))
    return tuple(TensorDataset(images[part], targets[part]) for part in torch.split(order, [359, 359, 1079]))


def build(options: Mapping[str, Any]) -> Task:
    """The task; ``options`` are those of :func:`task`."""
    return task(**options)


def task(width: int, dropout: float, rotation: float, split_seed: int) -> Task:
    test, val, train = load_splits(split_seed)
    return Task(
        model=Network(width, dropout),
        loss_fn=lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1]),
        train_set=Rotated(train, rotation),
        val_sets={"val": val},
        test_sets={"test": test},
        predict=lambda model, batch: (model(batch[0]), batch[1]),
        metrics={"loss": Loss(nn.functional.cross_entropy), "accuracy": Accuracy()},
    )
