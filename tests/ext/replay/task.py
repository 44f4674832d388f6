"""A tiny task with everything that a replay must bring back: dropout, augmentation, a metric, an average, workers.

``task_options`` may plant one difference in it: ``{"plant": {"weight": 7}}`` at that iteration; ``stop_at`` is
an iteration at which it asks to stop.
"""

import math
import random
from typing import Any

import torch
from ignite.engine import Events
from ignite.metrics import Accuracy
from torch import nn
from torch.utils.data import Dataset

from ignite_engine import Task

FEATURES, CLASSES = 6, 3


class Noisy(Dataset[Any]):
    """Samples by their index with noise that is drawn; ``plant`` changes one of them."""

    def __init__(self, count, plant, *, noise=0.1):
        generator = torch.Generator().manual_seed(count)
        self.inputs = torch.randn(count, FEATURES, generator=generator)
        self.targets = (self.inputs[:, :CLASSES] * 2).argmax(1)
        self.plant, self.noise = plant, noise

    def __len__(self):
        return len(self.inputs)

    def __getitem__(self, index):
        if index == self.plant.get("sample"):
            index = (index + 1) % len(self)
        noise = self.noise * torch.randn(FEATURES) + 0.01 * random.random()
        return self.inputs[index] + noise, self.targets[index]


class Plant:
    """Changes one weight by one unit in the last place at one iteration, and asks to stop at another."""

    def __init__(self, iteration, stop_at):
        self.iteration, self.stop_at = iteration, stop_at

    def attach(self, trainer):
        stop = lambda: trainer.request_stop("a test")  # noqa: E731
        for iteration, act in ((self.iteration, self.change_weight), (self.stop_at, stop)):
            if iteration is not None:
                trainer.add_event_handler(Events.ITERATION_COMPLETED(once=iteration), act)

    def change_weight(self, trainer):
        weight = trainer.update.model[0].weight
        weight.data[0, 0] = torch.nextafter(weight.data[0, 0], torch.tensor(math.inf))


def loss_fn(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def predict(model, batch):
    return model(batch[0]), batch[1]


def build(options):
    plant = options.get("plant") or {}
    norm = nn.LayerNorm if options.get("sharded") else nn.BatchNorm1d  # whose statistics are each rank's own
    model = nn.Sequential(nn.Linear(FEATURES, 8), norm(8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, CLASSES))
    return Task(
        model,
        loss_fn,
        Noisy(options.get("samples", 48), plant),
        {"val": Noisy(16, {}, noise=0.0)},
        predict,
        {"accuracy": Accuracy()},
        handlers=[Plant(plant.get("weight"), options.get("stop_at"))],
    )
