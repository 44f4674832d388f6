"""A tiny task with everything that a replay must bring back: dropout, augmentation, a metric, an average, workers.

``task_options`` may plant one difference in it: ``{"plant": {"what": "weight", "iteration": 7}}``; with ``wide`` the
number of threads decides bits; ``stop_at`` is an iteration at which it asks to stop.
"""

import math
import random
from typing import Any

import torch
from ignite.engine import Events
from ignite.metrics import Accuracy
from torch import nn
from torch.utils.data import Dataset, get_worker_info

from ignite_engine import Task, TrainingEvents

FEATURES, CLASSES = 6, 3


class Noisy(Dataset[Any]):
    """Samples by their index with noise that is drawn; ``plant`` changes one of them, or the seed of one worker."""

    def __init__(self, count, plant, *, noise=0.1):
        generator = torch.Generator().manual_seed(count)
        self.inputs = torch.randn(count, FEATURES, generator=generator)
        self.targets = (self.inputs[:, :CLASSES] * 2).argmax(1)
        self.plant, self.noise = plant, noise

    def __len__(self):
        return len(self.inputs)

    def __getitem__(self, index):
        what, at = self.plant.get("what"), self.plant.get("sample")
        if what == "sample" and index == at:
            index = (index + 1) % len(self)
        worker = get_worker_info()
        if what == "worker" and (worker is None or worker.id == self.plant.get("worker", 0)):
            torch.manual_seed(torch.initial_seed() + 1 if index == at else torch.initial_seed())
        noise = self.noise * torch.randn(FEATURES) + 0.01 * random.random()
        return self.inputs[index] + noise, self.targets[index]


class Plant:
    """Changes one weight by one unit in the last place, or a rate, at one iteration."""

    def __init__(self, plant):
        self.what, self.iteration = plant.get("what"), plant.get("iteration", 10**9)

    def attach(self, trainer):
        trainer.add_event_handler(Events.ITERATION_COMPLETED(once=self.iteration), self.change_weight)
        trainer.add_event_handler(TrainingEvents.OPTIMIZER_STEP_STARTED(once=self.iteration), self.change_rate)

    def change_weight(self, trainer):
        if self.what == "weight":
            weight = trainer.update.model[0].weight
            value = weight.data[0, 0].item()
            weight.data[0, 0] = torch.nextafter(torch.tensor(value), torch.tensor(math.inf))

    def change_rate(self, trainer):
        if self.what == "rate":
            for optimizer in trainer.update.optimizers.values():
                optimizer.param_groups[0]["lr"] *= 1.01


class Stop:
    def __init__(self, at):
        self.at = at

    def attach(self, trainer):
        if self.at is not None:
            trainer.add_event_handler(Events.ITERATION_COMPLETED(once=self.at), lambda: trainer.request_stop("a test"))


class Wide(nn.Module):
    """A sum of so many numbers that the number of threads decides its last bits."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.register_buffer("numbers", torch.randn(300_000), persistent=False)

    def forward(self, logits):
        return logits + 1e-2 * (self.scale * self.numbers).sum()


def loss_fn(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def predict(model, batch):
    return model(batch[0]), batch[1]


def build(options):
    plant = options.get("plant") or {}
    norm = nn.LayerNorm if options.get("sharded") else nn.BatchNorm1d  # whose statistics are each rank's own
    model = nn.Sequential(nn.Linear(FEATURES, 8), norm(8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, CLASSES))
    if options.get("wide"):
        model.append(Wide())
        model.append(nn.Softsign())
    return Task(
        model,
        loss_fn,
        Noisy(options.get("samples", 48), plant),
        {"val": Noisy(16, {}, noise=0.0)},
        predict,
        {"accuracy": Accuracy()},
        handlers=[*([Plant(plant)] if plant else []), Stop(options.get("stop_at"))],
    )
