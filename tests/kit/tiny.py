"""Tiny models and trainers, each run of which is a function of its arguments alone."""

import re
from typing import Any

import torch
from ignite.engine import Events
from torch import nn
from torch.utils.data import DataLoader, Dataset

from ignite_engine import Trainer, TrainingEvents, Update, loader
from ignite_engine.handlers import Checkpoint, MetricLogger


class Numbers(Dataset[Any]):
    """``count`` samples ``(inputs, target)`` that are functions of their index; remembers which were loaded."""

    def __init__(self, count, features=3, dtype=torch.float32):
        generator = torch.Generator().manual_seed(count)
        self.inputs = torch.randn(count, features, generator=generator, dtype=dtype)
        self.targets = torch.randn(count, 1, generator=generator, dtype=dtype)
        self.loaded = []

    def __len__(self):
        return len(self.inputs)

    def __getitem__(self, index):
        self.loaded.append(index)
        return self.inputs[index], self.targets[index]


class Passes:
    """Data without a length: each pass gives the next of ``counts`` batches, the counts in turn."""

    def __init__(self, *counts):
        self.counts, self.passes = counts, 0

    def __iter__(self):
        number, self.passes = self.passes, self.passes + 1
        for index in range(self.counts[number % len(self.counts)]):
            yield torch.tensor([100.0 * (number + 1) + index])


class RewoundLoader(DataLoader):
    """A loader that is its own iterator, and begins anew where it is asked for one."""

    def __iter__(self):
        self.iterator = super().__iter__()
        return self

    def __next__(self):
        return next(self.iterator)


def mse(model, batch):
    inputs, targets = batch
    return nn.functional.mse_loss(model(inputs), targets)


def linear(features=3, dtype=torch.float32, *, dropout=False):
    torch.manual_seed(7)
    layers = [nn.Linear(features, 4, dtype=dtype), nn.Tanh(), nn.Linear(4, 1, dtype=dtype)]
    if dropout:
        layers.insert(2, nn.Dropout(0.5))
    return nn.Sequential(*layers)


def trainer_of(model=None, accumulation_steps=None, lr=0.1, **options):
    model = linear() if model is None else model
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    return Trainer(Update(model, optimizer, mse, **options), accumulation_steps)


def one(model):
    """All weights in one vector."""
    return torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])


def weights(trainer):
    return one(trainer.update.model).clone()


def events_of(engine, events=tuple(Events)):
    """Gets ``(event, epoch, iteration)`` for every event that ``engine`` fires from now on."""
    seen = []

    def record(name):
        def handler(*_, **__):
            seen.append((name, engine.state.epoch, engine.state.iteration))

        return handler

    for event in events:
        if event.name not in ("EXCEPTION_RAISED",):
            engine.add_event_handler(event, record(event.name))
    return seen


def numbers_loader(count=12, batch_size=2, **options):
    return loader(Numbers(count), batch_size, **options)


OURS = tuple(TrainingEvents)


def without_address(value):
    """``str(value)``, the same in every process: several of them must name the tests alike."""
    return re.sub(r" at 0x[0-9a-f]+", "", str(value))


def logging_to(tracker, run, die_at=None):
    """A trainer that logs to ``run`` and the tracker, resumed from it; it raises ZeroDivisionError after ``die_at``."""
    trainer, checkpoint = trainer_of(), Checkpoint(run / "checkpoints")
    MetricLogger(run, console=False).attach(trainer)
    tracker.attach(trainer)
    checkpoint.attach(trainer, Events.ITERATION_COMPLETED(every=4))
    if die_at is not None:
        trainer.add_event_handler(TrainingEvents.RESUME_POINT(once=die_at), lambda: 1 / 0)
    checkpoint.resume()
    return trainer
