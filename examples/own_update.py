"""An update of your own: two forwards and two backwards in each step, as sharpness-aware minimization needs them.

    python examples/own_update.py [runs/own_update]

The gradient is that where the loss is highest near the weights (Foret et al. 2021, arXiv 2010.01412).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import ignite.distributed as idist
import torch
from ignite.engine import Engine, Events
from ignite.utils import convert_tensor
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from ignite_engine import Trainer, TrainingEvents, loader, seed_everything
from ignite_engine.handlers import EMA, Checkpoint, MetricLogger
from ignite_engine.update import BaseUpdate


class SharpnessAwareUpdate(BaseUpdate):
    """``update(engine, batch)``; ``loss`` is at the weights, ``loss/nearby`` at distance ``rho`` up the gradient."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, rho: float) -> None:
        self.model, self.optimizers, self.rho = model, {"optimizer": optimizer}, rho  # EMA and others look here

    def stateful(self) -> Iterator[tuple[str, Any, bool]]:
        """What is in checkpoints: name, object, and whether it is the same on every rank."""
        yield "model", self.model, True
        yield "optimizer", self.optimizers["optimizer"], True

    def __call__(self, engine: Engine, batch: Any) -> dict[str, Tensor]:
        batch = convert_tensor(batch, device=idist.device(), non_blocking=True)
        parameters = list(self.model.parameters())
        loss = loss_fn(self.model, batch)
        gradients = torch.autograd.grad(loss, parameters)
        norm = torch.nn.utils.get_total_norm(gradients) + 1e-12
        offsets = [gradient * (self.rho / norm) for gradient in gradients]
        with torch.no_grad():
            for parameter, offset in zip(parameters, offsets, strict=True):
                parameter.add_(offset)
        nearby = loss_fn(self.model, batch)
        torch.autograd.backward(nearby)
        with torch.no_grad():
            for parameter, offset in zip(parameters, offsets, strict=True):
                parameter.sub_(offset)
        self.optimizers["optimizer"].step()
        self.optimizers["optimizer"].zero_grad()
        engine.state.optimizer_steps += 1  # type: ignore[attr-defined]  # a TrainingState
        engine.fire_event(TrainingEvents.OPTIMIZER_STEP_COMPLETED)  # schedules and averages follow it
        return {"loss": loss.detach(), "loss/nearby": nearby.detach()}


def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def main(directory: str = "runs/own_update", *, epochs: int = 5, rho: float = 0.05) -> Trainer:
    """Train, or resume."""
    seed_everything(0)
    inputs = torch.randn(512, 8)
    samples = TensorDataset(inputs, inputs[:, :3].argmax(dim=1))
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 3)).to(idist.device())
    trainer = Trainer(SharpnessAwareUpdate(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), rho))
    EMA(0.99).attach(trainer)
    MetricLogger(directory).attach(trainer, Events.EPOCH_COMPLETED)
    checkpoint = Checkpoint(f"{directory}/checkpoints", strict=True)  # refuses a run that could not be resumed exactly
    checkpoint.attach(trainer, Events.EPOCH_COMPLETED)
    checkpoint.resume()
    trainer.run(loader(samples, batch_size=32, shuffle=True), max_epochs=epochs)
    return trainer


if __name__ == "__main__":
    main(*sys.argv[1:])
