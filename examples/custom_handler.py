"""A handler of your own: it counts the losses that jump, logs the count, and is saved and resumed.

    python examples/custom_handler.py [runs/custom_handler]

It keeps what it needs on the device and reads it only when something is logged, so that no GPU waits for it.
"""

from __future__ import annotations

import sys
from typing import Any

import ignite.distributed as idist
import torch
from ignite.engine import Events
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from ignite_engine import Trainer, TrainingEvents, Update, loader, seed_everything
from ignite_engine.events import Phase
from ignite_engine.handlers import Checkpoint, MetricLogger

SPOILED = (23, 50, 71)  # batches of 16 samples, whose targets are a hundred times too large


class LossJumps:
    """Counts the updates whose loss is above ``factor`` times the running mean; writes ``loss_jumps``."""

    phase = Phase.MEASURE  # at an event that also logs: before it logs

    def __init__(self, factor: float = 5.0) -> None:
        self.factor = factor
        self.mean, self.jumps = torch.tensor(torch.inf), torch.tensor(0)

    def attach(self, trainer: Trainer, event: Any = Events.ITERATION_COMPLETED) -> None:
        trainer.register("loss_jumps", self)  # its state_dict() is in checkpoints under this name
        trainer.add_event_handler(event, self)
        trainer.add_event_handler(TrainingEvents.METRICS_READY, self.write)

    def __call__(self, trainer: Trainer) -> None:
        loss = trainer.state.output["loss"]
        self.mean, self.jumps = self.mean.to(loss.device), self.jumps.to(loss.device)
        is_jump = loss > self.factor * self.mean
        self.jumps += is_jump
        usual = torch.where(self.mean.isinf(), loss, 0.9 * self.mean + 0.1 * loss)
        self.mean = torch.where(is_jump, self.mean, usual)

    def write(self, trainer: Trainer) -> None:
        trainer.state.metrics["loss_jumps"] = self.jumps.item()

    def state_dict(self) -> dict[str, Tensor]:
        return {"mean": self.mean, "jumps": self.jumps}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self.mean, self.jumps = state["mean"], state["jumps"]


def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def main(directory: str = "runs/custom_handler", *, batches: int = 100) -> Trainer:
    """Train on the first ``batches``, or resume."""
    seed_everything(0)
    inputs = torch.randn(1600, 4)
    targets = inputs.sum(dim=1, keepdim=True) + torch.randn(1600, 1)
    for batch in SPOILED:
        targets[16 * batch : 16 * (batch + 1)] *= 100
    model = nn.Linear(4, 1).to(idist.device())
    trainer = Trainer(Update(model, torch.optim.SGD(model.parameters(), lr=1e-3), loss_fn, clip_norm=1.0))
    LossJumps().attach(trainer)
    MetricLogger(directory, console=["loss", "loss_jumps"]).attach(trainer, Events.ITERATION_COMPLETED(every=20))
    checkpoint = Checkpoint(f"{directory}/checkpoints")
    checkpoint.attach(trainer, Events.ITERATION_COMPLETED(every=40))
    checkpoint.resume()
    trainer.run(loader(TensorDataset(inputs, targets), batch_size=16), max_iters=batches)
    return trainer


if __name__ == "__main__":
    main(*sys.argv[1:])
