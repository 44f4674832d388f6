"""A task whose loss depends on what no checkpoint holds, if asked.

Option ``forgets``: ``generator``, ``counter``: objects of its own; ``seed``: it draws other numbers in each process;
``clock``: an object whose state is a time; ``everything``: it cannot be built.
"""

import random
import time

import torch
from torch import nn
from torch.utils.data import TensorDataset

from ignite_engine import Task


class ForgetfulLoss:
    """Holds a generator and a counter, and no ``state_dict``."""

    def __init__(self, forgets):
        self.forgets, self.calls = forgets, 0
        # in anything but a set it would be saved
        self.noise = {torch.Generator().manual_seed(5)} if forgets == "generator" else set()

    def __call__(self, model, batch):
        inputs, targets = batch
        if self.forgets == "generator":
            inputs = inputs + 0.1 * torch.randn(inputs.shape, generator=next(iter(self.noise)))
        loss = nn.functional.cross_entropy(model(inputs), targets)
        if self.forgets == "counter":
            self.calls += 1
            loss = loss * (1 + 0.01 * self.calls)
        return loss * random.SystemRandom().random() if self.forgets == "seed" else loss


class Clock:
    def attach(self, trainer):
        trainer.register("clock", self)

    def state_dict(self):
        return {"now": time.perf_counter()}

    def load_state_dict(self, state):
        pass


def build(options):
    forgets = options.get("forgets")
    if forgets == "everything":
        raise ValueError("nothing is left")
    generator = torch.Generator().manual_seed(7)
    data = TensorDataset(torch.randn(50, 8, generator=generator), torch.randint(0, 3, (50,), generator=generator))
    model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.2), nn.Tanh(), nn.Linear(16, 3))
    handlers = [Clock()] if forgets == "clock" else []
    return Task(model, ForgetfulLoss(forgets), train_set=data, val_sets={"val": data}, handlers=handlers)
