"""An optimizer with a closure: LBFGS, which computes the loss several times in each step.

    python examples/lbfgs.py [runs/lbfgs]

``Update`` and ``fit`` step without a closure, so the update is one's own; each of its iterations sees all the data.
Events, logging, checkpoints, stops and resume are those of any run.
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
from ignite_engine.handlers import Checkpoint, MetricLogger


class ClosureUpdate:
    """``update(engine, batch)``; ``loss`` is that before the step, ``evaluations`` how often the step computed it."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.LBFGS) -> None:
        self.model, self.optimizers = model, {"optimizer": optimizer}  # schedules and others look here

    def stateful(self) -> Iterator[tuple[str, Any, bool]]:
        """What is in checkpoints: name, object, and whether it is the same on every rank."""
        yield "model", self.model, True
        yield "optimizer", self.optimizers["optimizer"], True

    def __call__(self, engine: Engine, batch: Any) -> dict[str, Tensor]:
        batch = convert_tensor(batch, device=idist.device())
        evaluations = 0

        def closure() -> Tensor:
            nonlocal evaluations
            evaluations += 1
            self.optimizers["optimizer"].zero_grad()
            loss = loss_fn(self.model, batch)
            torch.autograd.backward(loss)
            return loss

        optimizer: Any = self.optimizers["optimizer"]  # torch's LBFGS has no types
        loss = optimizer.step(closure)
        engine.state.optimizer_steps += 1  # type: ignore[attr-defined]  # a TrainingState
        engine.fire_event(TrainingEvents.OPTIMIZER_STEP_COMPLETED)  # schedules and averages follow it
        return {"loss": loss.detach(), "evaluations": torch.tensor(float(evaluations))}


def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    inputs, targets = batch
    return nn.functional.mse_loss(model(inputs), targets)


def main(directory: str = "runs/lbfgs", *, steps: int = 20) -> Trainer:
    """Train, or resume."""
    seed_everything(0)
    inputs = torch.linspace(-3, 3, 128).unsqueeze(1)
    samples = TensorDataset(inputs, torch.sin(2 * inputs))
    model = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 1)).to(idist.device())
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.8, max_iter=10)
    trainer = Trainer(ClosureUpdate(model, optimizer))
    MetricLogger(directory).attach(trainer, Events.EPOCH_COMPLETED)
    checkpoint = Checkpoint(f"{directory}/checkpoints", strict=True)  # refuses a run that could not be resumed exactly
    checkpoint.attach(trainer, Events.EPOCH_COMPLETED)
    checkpoint.resume()
    trainer.run(loader(samples, batch_size=len(samples)), max_epochs=steps)  # one step of all the data each epoch
    return trainer


if __name__ == "__main__":
    main(*sys.argv[1:])
