"""A task that trains on the files of a directory, a window each, and may kill itself once, where it is told to.

Options: ``directory``, whose ``hours`` hold the windows; ``kill``: ``iteration`` or ``window``, and its number.
"""

import os
import signal
from pathlib import Path

import numpy as np
import torch
from ignite.engine import Events
from torch import nn
from torch.utils.data import TensorDataset

from ignite_engine import Task, TrainingEvents, Windows
from ignite_engine.ext.windows import Files


def write(folder, *numbers):
    """Windows of 10 to 14 samples; number 3 is empty."""
    folder.mkdir(parents=True, exist_ok=True)
    for number in numbers:
        random = np.random.default_rng(number)
        count = 0 if number == 3 else 10 + number % 5
        np.savez(folder / "new.npz", x=random.normal(size=(count, 4)).astype("f4"), y=random.integers(0, 3, count))
        os.replace(folder / "new.npz", folder / f"hour_{number:02d}.npz")


class KillsOnce:
    def __init__(self, folder, where, number):
        self.marker, self.where, self.number = folder / "killed", where, number

    def attach(self, trainer):
        event = {"iteration": Events.ITERATION_COMPLETED, "window": TrainingEvents.WINDOW_COMPLETED}[self.where]
        trainer.add_event_handler(event(once=self.number), self)

    def __call__(self):
        if not self.marker.exists():
            self.marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)


def open_hour(path):
    columns = np.load(path)
    return TensorDataset(torch.from_numpy(columns["x"]), torch.from_numpy(columns["y"]))


def build(options):
    folder = Path(options["directory"])
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.3), nn.Linear(8, 3))

    def loss_fn(model, batch):
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    return Task(
        model=model,
        loss_fn=loss_fn,
        train_set=Windows(Files(folder / "hours", "hour_*.npz", end="end"), open_hour, wait_s=60, poll_s=0.02),
        handlers=[KillsOnce(folder, *options["kill"])] if options.get("kill") else [],
    )
