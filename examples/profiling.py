"""What a step spends its time on: the parts of a step as curves, and the operators of three iterations as a table.

    python examples/profiling.py [runs/profiling]

The loss sorts far more numbers than it needs to. The table has ``aten::sort`` at its top; the trace beside it opens in
https://ui.perfetto.dev. A resumed run is profiled again, under the numbers of its own iterations.
"""

from __future__ import annotations

import sys
from pathlib import Path

import ignite.distributed as idist
import torch
from ignite.engine import Events
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from ignite_engine import Trainer, Update, loader, seed_everything
from ignite_engine.handlers import Checkpoint, MetricLogger, Profiler, StepTimes

PARTS = ["loss", "time/step_ms", "time/data_wait_ms", "time/forward_ms", "time/backward_ms", "time/optimizer_ms"]


def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Of the half of the samples with the largest errors; sorts each 3,000 times over."""
    inputs, targets = batch
    errors = (model(inputs) - targets).square().flatten()
    largest = errors.repeat(3000).sort(descending=True).values
    loss: Tensor = largest[: len(largest) // 2].mean()
    return loss


def main(directory: str = "runs/profiling", *, iterations: int = 40) -> Trainer:
    """Train, or resume."""
    seed_everything(0)
    inputs = torch.randn(1280, 8)
    samples = TensorDataset(inputs, inputs.sum(dim=1, keepdim=True))
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1)).to(idist.device())
    trainer = Trainer(Update(model, torch.optim.AdamW(model.parameters(), lr=1e-2), loss_fn))
    Profiler(directory, wait=10, warmup=2, active=3).attach(trainer)
    StepTimes().attach(trainer, Events.ITERATION_COMPLETED(every=10))
    MetricLogger(directory, console=PARTS).attach(trainer, Events.ITERATION_COMPLETED(every=10))
    checkpoint = Checkpoint(f"{directory}/checkpoints")
    checkpoint.attach(trainer, Events.EPOCH_COMPLETED)
    checkpoint.resume()
    trainer.run(loader(samples, batch_size=64, shuffle=True), max_iters=iterations)
    for table in sorted(Path(directory, "profiles").glob("*.txt")):
        print(f"{table}:", *table.read_text().splitlines()[:6], sep="\n  ")
    return trainer


if __name__ == "__main__":
    main(*sys.argv[1:])
