"""Runs that are the same on every device, and what a test changes of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from ignite.engine import Events
from torch import Tensor, nn

from ignite_engine import Trainer, Update, loader
from ignite_engine.handlers import Checkpoint
from tests.builders import Numbers, mse

DEVICE = torch.accelerator.current_accelerator() or torch.device("cpu")
SECOND = torch.device(DEVICE.type, torch.accelerator.device_count() - 1) if DEVICE.type != "cpu" else DEVICE
"""The last device; the first one is current."""


class Split(nn.Module):
    """A half on each of two devices."""

    def __init__(self, first: torch.device, second: torch.device) -> None:
        super().__init__()
        self.lower = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.BatchNorm1d(8)).to(first)
        self.upper = nn.Linear(8, 1).to(second)
        self.second = second

    def forward(self, inputs: Tensor) -> Tensor:
        out: Tensor = self.upper(self.lower(inputs).to(self.second)).to(inputs.device)
        return out


def net(device: torch.device, *, dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 1)).to(device)


def trainer_of(model: nn.Module, *, steps: int | None = 2, loss_fn: Any = mse, **options: Any) -> Trainer:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, foreach=False)  # in the order of the CPU's
    return Trainer(Update(model, optimizer, loss_fn, **options), steps)


def data(*, pinned: bool = True, batch_size: int = 4, count: int = 40) -> Any:
    return loader(Numbers(count), batch_size, shuffle=True, pin_memory=pinned)


def bits(model: nn.Module) -> list[Tensor]:
    return [tensor.detach().cpu().clone() for tensor in model.state_dict().values()]


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) and all(torch.equal(*pair) for pair in zip(one, other, strict=True))


def run_saved(model: nn.Module, folder: Path, until: int, *, background: bool = True, **options: Any) -> list[Tensor]:
    """Train on from the newest checkpoint, saving each iteration."""
    trainer = trainer_of(model, **options)
    checkpoint = Checkpoint(folder, keep_last=50, background=background)
    checkpoint.attach(trainer, Events.ITERATION_COMPLETED)
    checkpoint.resume()
    trainer.run(data(), max_iters=until)
    return bits(model)
