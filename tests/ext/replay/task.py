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

from ignite_engine import Task, TrainingEvents

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
    """Changes one thing by a little at one iteration, and asks to stop at another."""

    def __init__(self, plant, stop_at):
        self.plant, self.stop_at = plant, stop_at

    def attach(self, trainer):
        for what, iteration in self.plant.items():
            if what in PLANTED:
                event, change = PLANTED[what]
                trainer.add_event_handler(event(once=iteration), change)
        if self.stop_at is not None:
            trainer.add_event_handler(
                Events.ITERATION_COMPLETED(once=self.stop_at), lambda: trainer.request_stop("a test")
            )


def nudge(tensor):
    """One element by one unit in the last place."""
    first = tensor.detach().view(-1)
    first[0] = torch.nextafter(first[0], torch.tensor(math.inf))


def change_moment(trainer):
    next(iter(trainer.update.optimizers["optimizer"].state.values()))["exp_avg"].mul_(1.01)


def change_average(trainer):
    trainer.registry.objects["ema"].state_dict()["weights"]["4.bias"].mul_(1.01)


def change_rate(trainer):
    trainer.update.optimizers["optimizer"].param_groups[0]["lr"] *= 1.001


PLANTED = {
    "weight": (Events.ITERATION_COMPLETED, lambda trainer: nudge(trainer.update.model[0].weight)),
    "mean": (Events.ITERATION_COMPLETED, lambda trainer: nudge(trainer.update.model[1].running_mean)),
    "gradient": (TrainingEvents.OPTIMIZER_STEP_STARTED, lambda trainer: trainer.update.model[4].weight.grad.mul_(1.01)),
    "moment": (Events.ITERATION_COMPLETED, change_moment),
    "rate": (Events.ITERATION_STARTED, change_rate),
    "random": (Events.ITERATION_STARTED, lambda trainer: torch.rand(1)),
    "average": (Events.ITERATION_COMPLETED, change_average),
}


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
        handlers=[Plant(plant, options.get("stop_at"))],
    )
