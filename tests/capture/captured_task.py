"""A tiny task that can be captured, and its command in a process whose cache of compiled code is no use."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from ignite_engine import Task
from tests.checkpointing.file_faults import make_read_only, mount_small_file_system
from tests.faults.commands import main

CACHE = "TORCHINDUCTOR_CACHE_DIR"


def build(options: Mapping[str, Any]) -> Task:
    inputs = torch.randn(40, 8, generator=torch.Generator().manual_seed(0))

    def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return nn.functional.mse_loss(model(batch[0]), batch[1])

    return Task(
        model=nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Dropout(0.2), nn.Linear(16, 1)),
        loss_fn=loss_fn,
        train_set=TensorDataset(inputs, inputs[:, :1].sin()),
    )


def main_with_a_full_cache(arguments: list[str]) -> int:
    """The cache is on a disk with room for a few small files."""
    return _main_on(arguments, 64)


def main_with_a_cache_that_is_not_written(arguments: list[str]) -> int:
    """The cache is on a disk that cannot be written."""
    return _main_on(arguments, 64, read_only=True)


def _main_on(arguments: list[str], size_kib: int, *, read_only: bool = False) -> int:
    cache = Path(arguments[1]).parent / "disk"
    cache.mkdir()
    mount_small_file_system(cache, size_kib)
    if read_only:
        make_read_only(cache)
    os.environ[CACHE] = str(cache)
    return main(arguments)
