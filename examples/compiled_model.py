"""A model in ``torch.compile``: what is saved and resumed is the model inside, so a run may switch it on and off.

    python examples/compiled_model.py [runs/compiled_model] [BACKEND]

The default backend, inductor, calls a C++ compiler on a CPU and takes some seconds at first; ``eager`` only traces.
"""

from __future__ import annotations

import sys
from typing import cast

import ignite.distributed as idist
import torch
from ignite.engine import Events
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from ignite_engine import Trainer, Update, loader, seed_everything
from ignite_engine.handlers import Checkpoint, MetricLogger


def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    inputs, targets = batch
    return nn.functional.cross_entropy(model(inputs), targets)


def main(directory: str = "runs/compiled_model", backend: str | None = "inductor", *, epochs: int = 4) -> Trainer:
    """Train, or resume; ``backend=None`` does not compile."""
    seed_everything(0)
    inputs = torch.randn(512, 8)
    samples = TensorDataset(inputs, inputs[:, :3].argmax(dim=1))
    plain = nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 3))
    plain = plain.to(idist.device())
    # one graph per shape of a batch: with dynamic shapes a resumed run might use another graph than the whole one
    compiled = plain if backend is None else torch.compile(plain, backend=backend, dynamic=False)
    model = cast(nn.Module, compiled)  # typed as a function

    trainer = Trainer(Update(model, torch.optim.AdamW(model.parameters(), lr=1e-3), loss_fn))
    MetricLogger(directory).attach(trainer, Events.EPOCH_COMPLETED)
    checkpoint = Checkpoint(f"{directory}/checkpoints")
    checkpoint.attach(trainer, Events.EPOCH_COMPLETED)
    checkpoint.resume()
    trainer.run(loader(samples, batch_size=32, shuffle=True), max_epochs=epochs)
    return trainer


if __name__ == "__main__":
    main(*sys.argv[1:])
