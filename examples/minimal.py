"""A whole run from its parts: it trains, logs, saves, stops on Ctrl-C, and goes on when it is started again.

    python examples/minimal.py [runs/minimal]

The task is made up: which of the first three of eight numbers is the largest?
"""

from __future__ import annotations

import sys

import ignite.distributed as idist
import torch
from ignite.engine import Events
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from ignite_engine import Trainer, Update, loader, seed_everything
from ignite_engine.handlers import Checkpoint, GracefulStop, MetricLogger


def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """The mean over the batch."""
    inputs, targets = batch
    return nn.functional.cross_entropy(model(inputs), targets)


def main(directory: str = "runs/minimal", *, epochs: int = 5) -> Trainer:
    """Train, or resume."""
    seed_everything(0)
    inputs = torch.randn(512, 8)
    samples = TensorDataset(inputs, inputs[:, :3].argmax(dim=1))
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 3)).to(idist.device())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    trainer = Trainer(Update(model, optimizer, loss_fn))  # which moves each batch to the model's device
    MetricLogger(directory).attach(trainer, Events.EPOCH_COMPLETED)  # a line, and directory/metrics.jsonl
    checkpoint = Checkpoint(f"{directory}/checkpoints")
    checkpoint.attach(trainer, Events.EPOCH_COMPLETED)  # and on a stop
    GracefulStop().attach(trainer)
    checkpoint.resume()
    trainer.run(loader(samples, batch_size=32, shuffle=True), max_epochs=epochs)
    return trainer


if __name__ == "__main__":
    main(*sys.argv[1:])
