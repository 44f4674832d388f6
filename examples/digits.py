"""Handwritten digits: the 1,797 images of 8 x 8 pixels bundled with scikit-learn, a small CNN, a held-out test set.

The task of ``configs/digits.yaml``; ``pip install ignite-engine[examples]`` installs scikit-learn, and the images with
it: nothing else is downloaded.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from ignite.metrics import Accuracy, Loss
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset

from ignite_engine import Task

CLASSES = 10
BRIGHTEST = 16.0  # maximum pixel value in scikit-learn's data
GROUPS = 8  # of the group normalization


@dataclass(frozen=True)
class Options:
    """The config's ``task_options``."""

    width: int = 32  # channels of the first block; the second has twice, the third four times as many
    dropout: float = 0.3  # probability, before the last layer
    rotation: float = 12.0  # maximum rotation of a training image, in degrees, either way
    split_seed: int = 0  # of the split into training, validation and test images; not the run's seed

    def __post_init__(self) -> None:
        if self.width < GROUPS or self.width % GROUPS:
            raise ValueError(f"width must be a multiple of {GROUPS}, got {self.width}.")
        if self.rotation < 0:
            raise ValueError(f"rotation must be at least 0 degrees, got {self.rotation}.")


class Digits(Dataset[tuple[Tensor, Tensor]]):
    """Images ``(1, 8, 8)`` from 0 to 1, fp32, and their digits, int64, shape ``()``.

    Args:
        images: shape ``(count, 1, 8, 8)``.
        digits: shape ``(count,)``.
        rotation: maximum angle in degrees; each access draws one from torch's generator, which the loader seeds per
            sample. 0: no rotation.
    """

    def __init__(self, images: Tensor, digits: Tensor, *, rotation: float = 0.0) -> None:
        self.images, self.digits, self.rotation = images, digits, rotation

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        image = self.images[index]
        return self._turned(image) if self.rotation else image, self.digits[index]

    def _turned(self, image: Tensor) -> Tensor:
        angle = math.radians(self.rotation) * (2 * torch.rand(()).item() - 1)
        cosine, sine = math.cos(angle), math.sin(angle)
        matrix = torch.tensor([[[cosine, -sine, 0.0], [sine, cosine, 0.0]]])
        grid = functional.affine_grid(matrix, [1, *image.shape], align_corners=False)
        turned: Tensor = functional.grid_sample(image[None], grid, align_corners=False)
        return turned[0]


class Network(nn.Module):
    """Images ``(batch, 1, 8, 8)`` to logits ``(batch, 10)``: three convolutions, average pooling, one linear layer."""

    def __init__(self, options: Options) -> None:
        super().__init__()
        width = options.width
        self.layers = nn.Sequential(
            *block(1, width),
            *block(width, 2 * width),
            nn.MaxPool2d(2),
            *block(2 * width, 4 * width),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Dropout(options.dropout),
            nn.Linear(4 * width, CLASSES),
        )

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.layers(images)
        return logits


def block(inputs: int, outputs: int) -> tuple[nn.Module, ...]:
    """A 3 x 3 convolution of equal size, and GroupNorm: it has no buffers, which weight averaging would not average."""
    return nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.GroupNorm(GROUPS, outputs), nn.ReLU()


def load_splits(seed: int) -> dict[str, tuple[Tensor, Tensor]]:
    """Images and digits of ``train`` (3/5), ``val`` (1/5) and ``test`` (1/5), split at random by ``seed``."""
    try:
        from sklearn.datasets import load_digits
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "the images are part of scikit-learn, which is not installed: pip install 'ignite-engine[examples]'"
        ) from error
    pixels, digits = load_digits(return_X_y=True)
    images = torch.from_numpy(pixels).float().reshape(-1, 1, 8, 8) / BRIGHTEST
    targets = torch.from_numpy(digits).long()
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))
    fifth = len(images) // 5
    parts = {"test": order[:fifth], "val": order[fifth : 2 * fifth], "train": order[2 * fifth :]}
    return {name: (images[part], targets[part]) for name, part in parts.items()}


def predict(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Logits ``(batch, 10)`` and digits ``(batch,)``."""
    images, digits = batch
    return model(images), digits


def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Cross-entropy in nats per image."""
    return functional.cross_entropy(*predict(model, batch))


def build(options: Mapping[str, Any]) -> Task:
    """The task; ``options`` are the fields of :class:`Options`.

    Raises:
        ModuleNotFoundError: scikit-learn is not installed.
        TypeError: an unknown option.
        ValueError: an option with an invalid value.
    """
    chosen = Options(**options)
    splits = load_splits(chosen.split_seed)
    return Task(
        model=Network(chosen),
        loss_fn=loss_fn,
        train_set=Digits(*splits["train"], rotation=chosen.rotation),
        val_sets={"val": Digits(*splits["val"])},
        test_sets={"test": Digits(*splits["test"])},
        predict=predict,
        metrics={"loss": Loss(functional.cross_entropy), "accuracy": Accuracy()},
    )
