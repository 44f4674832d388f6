"""A run that Ctrl-C stops in the middle of an epoch and that is resumed ends with the bits of one that was not stopped.

    python examples/resume.py [runs/resume]

With dropout, shuffled data, momentum, a schedule and accumulation: all of it continues where it was.
"""

from __future__ import annotations

import signal
import sys

import ignite.distributed as idist
import torch
from ignite.engine import Events
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from ignite_engine import Trainer, Update, loader, seed_everything
from ignite_engine.handlers import Checkpoint, GracefulStop, LRSchedule, MetricLogger, warmup_cosine
from ignite_engine.runs.run_directory import weights_sha256


def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    inputs, targets = batch
    return nn.functional.mse_loss(model(inputs), targets)


def run(directory: str, stop_after: int | None = None) -> Trainer:
    """Start the run of ``directory`` or resume it; press Ctrl-C after an iteration."""
    seed_everything(0)
    inputs = torch.randn(400, 8)
    samples = TensorDataset(inputs, inputs.square().mean(dim=1, keepdim=True))
    layers = [nn.Linear(8, 32), nn.Tanh(), nn.Dropout(0.1), nn.Linear(32, 1)]
    model = nn.Sequential(*layers).to(idist.device())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    trainer = Trainer(Update(model, optimizer, loss_fn, clip_norm=1.0), accumulation_steps=4)
    LRSchedule(warmup_cosine(optimizer, warmup=5)).attach(trainer)
    MetricLogger(directory, console=False).attach(trainer, Events.ITERATION_COMPLETED(every=3))
    checkpoint = Checkpoint(f"{directory}/checkpoints")
    checkpoint.attach(trainer, Events.EPOCH_COMPLETED)
    GracefulStop(exit=False).attach(trainer)  # without exit=False the process would end with code 130
    if stop_after is not None:
        press_ctrl_c = Events.ITERATION_COMPLETED(once=stop_after)
        trainer.add_event_handler(press_ctrl_c, lambda: signal.raise_signal(signal.SIGINT))
    checkpoint.resume()
    trainer.run(loader(samples, batch_size=10, shuffle=True), max_epochs=3)  # 10 iterations an epoch
    state, name = trainer.state, directory.rpartition("/")[2]
    print(f"{name}, {state.start.value}: {state.status} at {state.iteration}, weights {weights_sha256(model)[:16]}")
    return trainer


def main(directory: str = "runs/resume") -> None:
    whole = run(f"{directory}/whole")
    run(f"{directory}/stopped", stop_after=13)
    resumed = run(f"{directory}/stopped")
    same = all(map(torch.equal, weights_of(whole), weights_of(resumed)))
    print("the same bits" if same else "other bits")


def weights_of(trainer: Trainer) -> list[Tensor]:
    return [each.detach() for each in trainer.update.model.parameters()]


if __name__ == "__main__":
    main(*sys.argv[1:])
