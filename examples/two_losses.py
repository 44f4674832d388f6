"""A step with two losses by name: they are summed, in their order, and each has its own curve.

    python examples/two_losses.py [runs/two_losses]

One body with two heads: one tells which of three numbers is the largest, the other restores the inputs.
"""

from __future__ import annotations

import sys

import ignite.distributed as idist
import torch
from ignite.engine import Events
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from ignite_engine import Trainer, Update, loader, seed_everything
from ignite_engine.handlers import Checkpoint, MetricLogger


class TwoHeads(nn.Module):
    """Inputs ``(batch, 8)`` to logits ``(batch, 3)`` and restored inputs ``(batch, 8)``."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 32), nn.ReLU())
        self.classifier, self.decoder = nn.Linear(32, 3), nn.Linear(32, 8)

    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        features = self.body(inputs)
        return self.classifier(features), self.decoder(features)


def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The losses, which are trained on and logged as ``loss/<name>``, and values that are logged only."""
    inputs, targets = batch
    logits, restored = model(inputs)
    losses = {
        "class": nn.functional.cross_entropy(logits, targets),
        "restored": 0.5 * nn.functional.mse_loss(restored, inputs),
    }
    return losses, {"accuracy": (logits.argmax(dim=1) == targets).float().mean()}


def main(directory: str = "runs/two_losses", *, epochs: int = 5) -> Trainer:
    """Train, or resume."""
    seed_everything(0)
    inputs = torch.randn(512, 8)
    samples = TensorDataset(inputs, inputs[:, :3].argmax(dim=1))
    model = TwoHeads().to(idist.device())
    trainer = Trainer(Update(model, torch.optim.AdamW(model.parameters(), lr=1e-2), loss_fn, clip_norm=1.0))
    MetricLogger(directory, console=["loss", "loss/*", "accuracy"]).attach(trainer, Events.EPOCH_COMPLETED)
    checkpoint = Checkpoint(f"{directory}/checkpoints")
    checkpoint.attach(trainer, Events.EPOCH_COMPLETED)
    checkpoint.resume()
    trainer.run(loader(samples, batch_size=32, shuffle=True), max_epochs=epochs)
    return trainer


if __name__ == "__main__":
    main(*sys.argv[1:])
