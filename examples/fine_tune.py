"""Start from another run's weights: a network that tells eight classes learns two others from 64 samples.

    python examples/fine_tune.py [runs/fine_tune]

The classes are made of the signs of products of two inputs, which are hard to find from few samples.

A plan says what is taken from the other run: all of the model but its head, which has another number of classes.
"""

from __future__ import annotations

import sys
from pathlib import Path

import ignite.distributed as idist
import torch
from ignite.engine import Events
from ignite.metrics import Accuracy
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from ignite_engine import Trainer, Update, create_evaluator, loader, seed_everything
from ignite_engine.handlers import Checkpoint, Evaluation


class Network(nn.Module):
    """Inputs ``(batch, 6)`` to logits ``(batch, classes)``."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU())
        self.head = nn.Linear(32, classes)

    def forward(self, inputs: Tensor) -> Tensor:
        logits: Tensor = self.head(self.body(inputs))
        return logits


def predict(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    inputs, targets = batch
    return model(inputs), targets


def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(*predict(model, batch))


def run(
    directory: Path, train_set: TensorDataset, val_set: TensorDataset, classes: int, epochs: int, start: Path | None
) -> Trainer:
    """Train or resume the run of ``directory``; a new one begins with the weights of the run ``start``."""
    seed_everything(0)
    model = Network(classes).to(idist.device())
    trainer = Trainer(Update(model, torch.optim.AdamW(model.parameters(), lr=5e-3), loss_fn))
    evaluation = Evaluation(create_evaluator(model, predict, {"accuracy": Accuracy()}), loader(val_set, 512))
    evaluation.attach(trainer, Events.COMPLETED)
    checkpoint = Checkpoint(directory / "checkpoints")
    checkpoint.attach(trainer)
    if checkpoint.resume() is None and start is not None:
        print(checkpoint.load(start, ignore=["model:head.*"]))
    trainer.run(loader(train_set, 64, shuffle=True), max_epochs=epochs)
    return trainer


def main(directory: str = "runs/fine_tune") -> dict[str, float]:
    """The accuracy on the two classes with the weights of the first run, and without."""
    inputs = torch.randn(5000, 6, generator=torch.Generator().manual_seed(0))
    bits = (inputs[:, 0::2] * inputs[:, 1::2] > 0).long()
    eight, two = bits @ torch.tensor([1, 2, 4]), bits[:, 0]
    pretraining = TensorDataset(inputs[:4000], eight[:4000])
    train_set, val_set = TensorDataset(inputs[4000:4064], two[4000:4064]), TensorDataset(inputs[4064:], two[4064:])

    folder = Path(directory)
    run(folder / "pretrained", pretraining, pretraining, 8, 6, None)
    tuned = run(folder / "tuned", train_set, val_set, 2, 25, folder / "pretrained")
    scratch = run(folder / "scratch", train_set, val_set, 2, 25, None)
    accuracies = {"tuned": tuned.state.metrics["val/accuracy"], "from scratch": scratch.state.metrics["val/accuracy"]}
    for name, accuracy in accuracies.items():
        print(f"{name:<12} {accuracy:.1%} of {len(val_set)} samples")
    return accuracies


if __name__ == "__main__":
    main(*sys.argv[1:])
