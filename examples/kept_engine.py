"""An Ignite engine that is kept: our Checkpoint and GracefulStop are all that is added to it.

    python examples/kept_engine.py [runs/kept_engine]

Press Ctrl-C, or kill it: the same command continues in the middle of the epoch, and ends with the same weights.
"""

from __future__ import annotations

import hashlib
import sys

import torch
from ignite.engine import Events, create_supervised_trainer
from ignite.metrics import RunningAverage
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from ignite_engine.handlers import Checkpoint, GracefulStop


def main(directory: str = "runs/kept_engine", *, epochs: int = 10) -> None:
    """Train, or resume."""
    torch.manual_seed(0)
    inputs = torch.randn(2048, 8)
    samples = TensorDataset(inputs, inputs[:, :3].argmax(dim=1))
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    trainer = create_supervised_trainer(model, optimizer, nn.CrossEntropyLoss())
    RunningAverage(output_transform=float).attach(trainer, "loss")
    trainer.add_event_handler(Events.EPOCH_COMPLETED, lambda: print(trainer.state.epoch, trainer.state.metrics))

    checkpoint = Checkpoint(f"{directory}/checkpoints", to_save={"model": model, "optimizer": optimizer})
    checkpoint.attach(trainer, Events.EPOCH_COMPLETED)  # and on a stop
    GracefulStop().attach(trainer)
    checkpoint.resume()

    trainer.run(DataLoader(samples, batch_size=32, shuffle=True), max_epochs=epochs)
    weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    print(f"{trainer.state.iteration} iterations, weights {hashlib.sha256(weights.numpy().tobytes()).hexdigest()[:12]}")


if __name__ == "__main__":
    main(*sys.argv[1:])
