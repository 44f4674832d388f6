"""Find a learning rate before the run: Ignite's finder raises it from update to update until the loss diverges.

    python examples/lr_finder.py [runs/lr_finder]

The finder puts model and optimizer back afterwards, so the run that follows begins as it would have without it.
"""

from __future__ import annotations

import sys

import ignite.distributed as idist
import torch
from ignite.engine import Events
from ignite.handlers import FastaiLRFinder
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from ignite_engine import Trainer, Update, loader, seed_everything
from ignite_engine.handlers import Checkpoint, MetricLogger


def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    inputs, targets = batch
    return nn.functional.cross_entropy(model(inputs), targets)


def build(lr: float) -> tuple[nn.Module, torch.optim.Optimizer]:
    seed_everything(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 3)).to(idist.device())
    return model, torch.optim.AdamW(model.parameters(), lr=lr)


def find_lr(samples: TensorDataset) -> float:
    """The rate at which the loss falls fastest."""
    model, optimizer = build(lr=1e-6)
    searching = Trainer(Update(model, optimizer, loss_fn))  # one of its own: nothing of the search is in the run
    finder = FastaiLRFinder()
    kept = {"model": model, "optimizer": optimizer}
    with finder.attach(
        searching, to_save=kept, output_transform=lambda output: output["loss"].item(), num_iter=60
    ) as it:
        it.run(loader(samples, batch_size=32, shuffle=True), max_epochs=10)
    lr: float = finder.lr_suggestion()
    return lr


def main(directory: str = "runs/lr_finder", *, epochs: int = 3) -> Trainer:
    """Train, or resume, with the rate that was found."""
    inputs = torch.randn(512, 8, generator=torch.Generator().manual_seed(0))
    samples = TensorDataset(inputs, inputs[:, :3].argmax(dim=1))
    lr = find_lr(samples)
    print(f"learning rate {lr:.2g}")
    model, optimizer = build(lr)
    trainer = Trainer(Update(model, optimizer, loss_fn))
    MetricLogger(directory, console=["loss"]).attach(trainer, Events.EPOCH_COMPLETED)
    checkpoint = Checkpoint(f"{directory}/checkpoints")
    checkpoint.attach(trainer, Events.EPOCH_COMPLETED)
    checkpoint.resume()
    trainer.run(loader(samples, batch_size=32, shuffle=True), max_epochs=epochs)
    return trainer


if __name__ == "__main__":
    main(*sys.argv[1:])
