"""Sharpness-aware minimization: two passes over the group in each step, through ``Update.accumulate``.

    python examples/sam.py [runs/sam]

The gradient is taken not at the weights but where the loss is highest near them (Foret et al. 2021, arXiv 2010.01412).
Accumulation, precision, clipping, several ranks, events, checkpoints and resume are those of any ``Update``.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import ignite.distributed as idist
import torch
from ignite.engine import Engine, Events
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from ignite_engine import Trainer, Update, loader, seed_everything
from ignite_engine.handlers import EMA, Checkpoint, MetricLogger

RHO = 0.05


class SharpnessAwareUpdate(Update):
    """Reports ``loss`` at the weights and ``loss/nearby`` at distance ``RHO`` up the gradient."""

    def accumulate(self, engine: Engine, micro_batches: Sequence[Any], scales: list[float]) -> dict[str, Tensor]:
        output = super().accumulate(engine, micro_batches, scales)
        trained = [parameter for parameter in self.model.parameters() if parameter.grad is not None]
        weights = [parameter.detach().clone() for parameter in trained]
        climb(trained)
        try:
            nearby = super().accumulate(engine, micro_batches, scales)
        finally:  # also where the second pass raises, so that what is saved then are the weights
            put_back(trained, weights)
        return output | {"loss/nearby": nearby["loss"]}


def climb(parameters: Sequence[Tensor]) -> None:
    """Move by ``RHO`` up the gradient."""
    with torch.no_grad():
        norm = torch.stack([parameter.grad.norm() for parameter in parameters if parameter.grad is not None]).norm()
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.add_(parameter.grad * (RHO / (norm + 1e-12)))


def put_back(parameters: Sequence[Tensor], weights: Sequence[Tensor]) -> None:
    with torch.no_grad():
        for parameter, weight in zip(parameters, weights, strict=True):
            parameter.copy_(weight)


def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    inputs, targets = batch
    return nn.functional.cross_entropy(model(inputs), targets)


def main(directory: str = "runs/sam", *, epochs: int = 5) -> Trainer:
    """Train, or resume."""
    seed_everything(0)
    inputs = torch.randn(512, 8)
    samples = TensorDataset(inputs, inputs[:, :3].argmax(dim=1))
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 3)).to(idist.device())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    trainer = Trainer(SharpnessAwareUpdate(model, optimizer, loss_fn, clip_norm=1.0), accumulation_steps=2)
    EMA(0.99).attach(trainer)
    MetricLogger(directory).attach(trainer, Events.EPOCH_COMPLETED)
    checkpoint = Checkpoint(f"{directory}/checkpoints", strict=True)  # refuses a run that could not be resumed exactly
    checkpoint.attach(trainer, Events.EPOCH_COMPLETED)
    checkpoint.resume()
    trainer.run(loader(samples, batch_size=16, shuffle=True), max_epochs=epochs)
    return trainer


if __name__ == "__main__":
    main(*sys.argv[1:])
