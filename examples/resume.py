"""A run that is interrupted in the middle of an epoch and resumed ends with the bits of one that nobody stopped.

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
from ignite_engine.handlers import Checkpoint, GracefulStop, LRSchedule, MetricLogger
from ignite_engine.schedules import warmup_cosine


def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    inputs, targets = batch
    return nn.functional.mse_loss(model(inputs), targets)


def run(directory: str, stop_after: int | None = None) -> Tensor:
    """Start the run of ``directory``, or resume it; Ctrl-C comes after an iteration. The weights at its end."""
    seed_everything(0)
    inputs = torch.randn(4000, 8)
    samples = TensorDataset(inputs, inputs.square().mean(dim=1, keepdim=True))
    layers = [nn.Linear(8, 32), nn.Tanh(), nn.Dropout(0.1), nn.Linear(32, 1)]
    model = nn.Sequential(*layers).to(idist.device())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    trainer = Trainer(Update(model, optimizer, loss_fn, clip_norm=1.0), accumulation_steps=4)
    LRSchedule(warmup_cosine(optimizer, warmup=5)).attach(trainer)
    MetricLogger(directory).attach(trainer, Events.ITERATION_COMPLETED(every=50))  # and directory/metrics.jsonl
    checkpoint = Checkpoint(f"{directory}/checkpoints")
    checkpoint.attach(trainer, Events.EPOCH_COMPLETED)  # and on a stop
    GracefulStop(exit=False).attach(trainer)  # without exit=False the process would end with code 130
    if stop_after is not None:
        press_ctrl_c = Events.ITERATION_COMPLETED(once=stop_after)
        trainer.add_event_handler(press_ctrl_c, lambda: signal.raise_signal(signal.SIGINT))
    checkpoint.resume()
    trainer.run(loader(samples, batch_size=10, shuffle=True), max_epochs=3)  # 100 iterations an epoch
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def main(directory: str = "runs/resume") -> None:
    print("A run that nobody stops:")
    whole = run(f"{directory}/whole")
    print("\nThe same run, interrupted after iteration 130:")
    run(f"{directory}/stopped", stop_after=130)
    print("\nThe same command again:")
    resumed = run(f"{directory}/stopped")
    print(f"\n{len(whole)} weights, of which {(whole != resumed).sum().item()} differ.")


if __name__ == "__main__":
    main(*sys.argv[1:])
