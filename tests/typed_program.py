"""A program as users write it, fully typed: type checkers read it against the installed wheel; it is not run."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from ignite.engine import Events
from ignite.metrics import Accuracy
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.data import TensorDataset

from ignite_engine import Parallel, Trainer, TrainingEvents, Update, create_evaluator, fit, loader
from ignite_engine.events import Phase
from ignite_engine.handlers import (
    EMA,
    Checkpoint,
    EarlyStopping,
    Evaluation,
    GracefulStop,
    LRSchedule,
    MetricLogger,
    Progress,
    Throughput,
    warmup_cosine,
)
from ignite_engine.runs.load_model import load_model


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, inputs: Tensor) -> Tensor:
        logits: Tensor = self.layer(inputs)
        return logits


Batch = tuple[Tensor, Tensor]


class Losses(NamedTuple):
    fit: Tensor
    size: Tensor


def loss_fn(model: Net, batch: Batch) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def with_extras(model: Net, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    loss = loss_fn(model, batch)
    return loss, {"twice": 2 * loss.detach()}


def by_name(model: Net, batch: Batch) -> dict[str, Tensor]:
    return {"fit": loss_fn(model, batch), "size": model.layer.weight.square().sum()}


def named(model: Net, batch: Batch) -> Losses:
    return Losses(loss_fn(model, batch), model.layer.weight.square().sum())


def predict(model: Net, batch: Batch) -> tuple[Tensor, Tensor]:
    return model(batch[0]), batch[1]


class WeightNorm:
    phase = Phase.MEASURE

    def attach(self, trainer: Trainer, event: Any = Events.EPOCH_COMPLETED) -> None:
        trainer.add_event_handler(event, self)
        trainer.add_event_handler(TrainingEvents.OPTIMIZER_STEP_COMPLETED(every=3), self)

    def __call__(self, trainer: Trainer) -> None:
        trainer.state.metrics["norm"] = 1.0
        iteration: int = trainer.state.iteration
        print(iteration, trainer.state.optimizer_steps, trainer.state.reason)


def main() -> None:
    inputs, targets = torch.randn(64, 4), torch.randint(2, (64,))
    for function in (loss_fn, with_extras, by_name, named):
        fit(Net(), function, (inputs, targets), directory="runs/a", max_epochs=1)
    data = TensorDataset(inputs, targets)
    run = fit(
        Net(),
        loss_fn,
        data,
        {"val": data, "other": (inputs, targets)},
        directory="runs/b",
        max_iters=3,
        optimizer=lambda model: SGD(model.parameters(), lr=0.1),
        schedule=lambda optimizer: warmup_cosine(optimizer, warmup=1),
        predict=predict,
        metrics={"accuracy": Accuracy()},
        best="val/accuracy",
        handlers={
            "MetricLogger": {"every": 2},
            "Checkpoint": {"keep_last": 3},
            "Progress": None,
            "norm": WeightNorm(),
            "often": (WeightNorm(), Events.ITERATION_COMPLETED),
        },
    )
    value: float = run.metrics["val/accuracy"]
    print(value, run.trainer.state.iteration, run.summary["status"], run.evaluate()["iteration"])
    model = Net()
    optimizer = SGD(model.parameters(), lr=0.1)
    trainer = Trainer(Update(model, optimizer, loss_fn, clip_norm=1.0, precision="bf16"), accumulation_steps=2)
    LRSchedule(warmup_cosine(optimizer, 2)).attach(trainer)
    LRSchedule(torch.optim.lr_scheduler.StepLR(optimizer, 1), name="second").attach(trainer, Events.EPOCH_COMPLETED)
    Evaluation(create_evaluator(model, predict, {"accuracy": Accuracy()}), loader(data, 8), name="val").attach(trainer)
    EarlyStopping("val/accuracy", mode="max", patience=3).attach(trainer)
    MetricLogger("runs/c", console=["loss", "val/*"]).attach(trainer, Events.ITERATION_COMPLETED(every=2))
    EMA(0.9).attach(trainer)
    Progress().attach(trainer)
    Throughput(lambda batch: len(batch[0])).attach(trainer)
    checkpoint = Checkpoint("runs/c/checkpoints", best="val/accuracy", mode="max")
    checkpoint.attach(trainer, Events.ITERATION_COMPLETED(every=2) | Events.EPOCH_COMPLETED)
    GracefulStop().attach(trainer)

    @trainer.on(Events.EPOCH_COMPLETED)
    def say(trainer: Trainer) -> None:
        print(trainer.state.epoch)

    path = checkpoint.resume()
    print(path.name if path else "fresh")
    state = trainer.run(loader(data, batch_size=8, shuffle=True), max_epochs=2)
    print(state.metrics["val/accuracy"], load_model("runs/c", task=None))
    with Parallel(backend="gloo", nproc_per_node=2) as parallel:
        parallel.run(print)
