"""Evaluate a moving average of the weights, keep its best checkpoint, and stop when it no longer improves.

    python examples/early_stopping_ema.py [runs/early_stopping_ema]

A fifth of the training labels are wrong: a network that is trained for long learns them, too.
"""

from __future__ import annotations

import sys

import ignite.distributed as idist
import torch
from ignite.engine import Events
from ignite.metrics import Accuracy, Loss
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from ignite_engine import Trainer, Update, create_evaluator, loader, seed_everything
from ignite_engine.handlers import EMA, Checkpoint, EarlyStopping, Evaluation, MetricLogger


def predict(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    inputs, targets = batch
    return model(inputs), targets


def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(*predict(model, batch))


def main(directory: str = "runs/early_stopping_ema", *, epochs: int = 50) -> Trainer:
    """Train, or resume; the model has the best weights at the end."""
    seed_everything(0)
    inputs = torch.randn(800, 8)
    targets = inputs[:, :3].argmax(dim=1)
    noisy = torch.where(torch.rand(400) < 0.2, torch.randint(3, (400,)), targets[:400])
    train_set, val_set = TensorDataset(inputs[:400], noisy), TensorDataset(inputs[400:], targets[400:])
    model = nn.Sequential(nn.Linear(8, 256), nn.ReLU(), nn.Linear(256, 3)).to(idist.device())

    trainer = Trainer(Update(model, torch.optim.AdamW(model.parameters(), lr=1e-2), loss_fn))
    EMA(0.95).attach(trainer)  # evaluations are of the average
    metrics = {"loss": Loss(nn.functional.cross_entropy), "accuracy": Accuracy()}
    evaluation = Evaluation(create_evaluator(model, predict, metrics), loader(val_set, batch_size=200), name="val")
    evaluation.attach(trainer, Events.EPOCH_COMPLETED)
    EarlyStopping("val/loss", patience=4).attach(trainer)
    MetricLogger(directory).attach(trainer, Events.EPOCH_COMPLETED)
    checkpoint = Checkpoint(f"{directory}/checkpoints", keep_last=1, best="val/loss")
    checkpoint.attach(trainer, Events.EPOCH_COMPLETED)
    checkpoint.resume()
    trainer.run(loader(train_set, batch_size=32, shuffle=True), max_epochs=epochs)

    checkpoint.restore_best()
    best = checkpoint.best
    assert best is not None
    print(f"{trainer.state.reason}; the model has the average of iteration {best.iteration}: {best.value:.4f}")
    return trainer


if __name__ == "__main__":
    main(*sys.argv[1:])
