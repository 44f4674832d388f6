"""A task of which one rank fails.

Options: ``how`` it fails, ``rank`` that does (default 1).
"""

import os
import signal
import sys
import threading

import ignite.distributed as idist
import torch
from ignite.engine import Events
from torch import nn
from torch.utils.data import TensorDataset

from ignite_engine import Task

AT = 5
"""Which of its batches it fails at."""


class Broken:
    """A handler that raises."""

    def attach(self, trainer):
        trainer.add_event_handler(Events.ITERATION_COMPLETED(once=AT), self)

    def __call__(self, trainer):
        raise KeyError("no such key")


class Unreadable(TensorDataset):
    """After as many samples as in AT batches one cannot be read."""

    left = 4 * AT

    def __getitem__(self, index):
        self.left -= 1
        if self.left < 0:
            raise OSError(5, "a sample is damaged")
        return super().__getitem__(index)


def broken():
    raise ValueError("a sample is broken")


HOW = {
    "raise": broken,
    "exit": lambda: sys.exit(3),
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "hang": lambda: threading.Event().wait(600),
}


def build(options):
    how, fails, calls = options["how"], idist.get_rank() == options.get("rank", 1), []
    if fails and how == "build":
        raise ValueError("no model here")

    def loss_fn(model, batch):
        calls.append(1)
        if fails and how in HOW and len(calls) == AT:
            HOW[how]()
        return nn.functional.mse_loss(model(batch[0]), batch[1])

    torch.manual_seed(1)
    kind = Unreadable if fails and how == "read" else TensorDataset
    data = kind(torch.randn(96, 4), torch.randn(96, 1))
    handlers = [Broken()] if fails and how == "handler" else []
    return Task(model=nn.Linear(4, 1), loss_fn=loss_fn, train_set=data, handlers=handlers)
