"""A ClearML task of a run: values, config, the newest checkpoint and how it ended; without a server offline.

    python examples/clearml_run.py [runs/clearml_run]

Offline the session is a folder and, at the end, a zip file for ``clearml.Task.import_offline_session``. A resumed run
continues its task. With a server in clearml.conf leave ``offline`` out.
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
from ignite_engine.handlers import Checkpoint, ClearMLLogger, MetricLogger

CONFIG = {"lr": 1e-2, "batch_size": 32, "width": 32}


def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    inputs, targets = batch
    return nn.functional.cross_entropy(model(inputs), targets)


def main(directory: str = "runs/clearml_run", *, epochs: int = 4) -> Trainer:
    """Train, or resume."""
    seed_everything(0)
    inputs = torch.randn(512, 8)
    samples = TensorDataset(inputs, inputs[:, :3].argmax(dim=1))
    width = int(CONFIG["width"])
    model = nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, 3)).to(idist.device())
    trainer = Trainer(Update(model, torch.optim.AdamW(model.parameters(), lr=CONFIG["lr"]), loss_fn))
    clearml = ClearMLLogger(directory, project="examples", task="clearml_run", config=CONFIG, offline=True)
    MetricLogger(directory, sinks=[clearml]).attach(trainer, Events.ITERATION_COMPLETED(every=4))
    checkpoint = Checkpoint(f"{directory}/checkpoints")
    checkpoint.attach(trainer, Events.EPOCH_COMPLETED)
    checkpoint.resume()
    trainer.run(loader(samples, batch_size=int(CONFIG["batch_size"]), shuffle=True), max_epochs=epochs)
    for path in sorted(Path(directory, "clearml").rglob("*.zip")):
        print(f"clearml.Task.import_offline_session({str(path)!r})")
    return trainer


if __name__ == "__main__":
    main(*sys.argv[1:])
