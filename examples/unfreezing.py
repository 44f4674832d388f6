"""Train the head alone at first, and from the third epoch the body too, in a parameter group of its own.

    python examples/unfreezing.py [runs/unfreezing]

A checkpoint knows the groups and what was frozen: a run that is resumed after the change has both groups again.
"""

from __future__ import annotations

import sys

import ignite.distributed as idist
import torch
from ignite.engine import Events
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from ignite_engine import Trainer, Update, loader, seed_everything
from ignite_engine.handlers import Checkpoint, LRSchedule, MetricLogger, constant


class Network(nn.Module):
    """Inputs ``(batch, 8)`` to logits ``(batch, 3)``; the body would come from another run, as in fine_tune.py."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Sequential(nn.Linear(8, 32), nn.ReLU()), nn.Linear(32, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        logits: Tensor = self.head(self.body(inputs))
        return logits


def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    inputs, targets = batch
    return nn.functional.cross_entropy(model(inputs), targets)


def build(unfreeze_at: int = 3) -> Trainer:
    """A trainer whose body is frozen until the epoch ``unfreeze_at``."""
    seed_everything(0)
    model = Network().to(idist.device())
    model.body.requires_grad_(False)
    optimizer = torch.optim.AdamW([{"params": model.head.parameters(), "name": "head"}], lr=1e-2)
    trainer = Trainer(Update(model, optimizer, loss_fn))
    LRSchedule(constant(optimizer)).attach(trainer)  # the group that is added later has its own rate

    @trainer.on(Events.EPOCH_STARTED(once=unfreeze_at))
    def unfreeze() -> None:
        model.body.requires_grad_(True)
        optimizer.add_param_group({"params": list(model.body.parameters()), "lr": 3e-3, "name": "body"})
        print(f"epoch {unfreeze_at}: the body is trained too")

    return trainer


def main(directory: str = "runs/unfreezing", *, epochs: int = 5) -> Trainer:
    """Train, or resume."""
    trainer = build()
    inputs = torch.randn(512, 8, generator=torch.Generator().manual_seed(0))
    samples = TensorDataset(inputs, inputs[:, :3].argmax(dim=1))
    MetricLogger(directory, console=["loss", "lr/*"]).attach(trainer, Events.EPOCH_COMPLETED)
    checkpoint = Checkpoint(f"{directory}/checkpoints", strict=True)
    checkpoint.attach(trainer, Events.EPOCH_COMPLETED)
    checkpoint.resume()
    trainer.run(loader(samples, batch_size=32, shuffle=True), max_epochs=epochs)
    return trainer


if __name__ == "__main__":
    main(*sys.argv[1:])
