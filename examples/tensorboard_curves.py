"""Curves in TensorBoard; a resumed run continues its curves.

python examples/tensorboard_curves.py [runs/tensorboard_curves]          needs tensorboard
tensorboard --logdir runs
"""

from __future__ import annotations

import sys

import ignite.distributed as idist
import torch
from ignite.engine import Events
from torch import Tensor, nn

from ignite_engine import Trainer, Update, loader, seed_everything
from ignite_engine.handlers import Checkpoint, MetricLogger, TensorBoardSink


def loss_fn(model: nn.Module, images: Tensor) -> Tensor:
    """How well the images are restored from four numbers each."""
    return nn.functional.mse_loss(model(images), images)


def main(directory: str = "runs/tensorboard_curves", *, epochs: int = 4) -> Trainer:
    """Train, or resume."""
    seed_everything(0)
    across = torch.linspace(0, 3, 16)
    images = torch.stack([(across + phase).sin().outer((across * phase).cos()) for phase in torch.rand(256) * 3])
    model = nn.Sequential(nn.Flatten(), nn.Linear(256, 4), nn.Tanh(), nn.Linear(4, 256), nn.Unflatten(1, (16, 16)))
    model = model.to(idist.device())
    trainer = Trainer(Update(model, torch.optim.AdamW(model.parameters(), lr=1e-2), loss_fn))

    MetricLogger(directory, sinks=[TensorBoardSink(directory)]).attach(trainer, Events.ITERATION_COMPLETED(every=4))
    checkpoint = Checkpoint(f"{directory}/checkpoints")
    checkpoint.attach(trainer, Events.EPOCH_COMPLETED)
    checkpoint.resume()
    trainer.run(loader(images, batch_size=32, shuffle=True), max_epochs=epochs)
    print(f"tensorboard --logdir {directory}")
    return trainer


if __name__ == "__main__":
    main(*sys.argv[1:])
