"""A task of which one rank fails in a given way, and a run of it on forked ranks.

Options: ``how`` it fails, ``rank`` that does (default 1), ``at`` which of its batches (default 5), ``notes``: a folder
in which a file ``failed`` says when.
"""

import argparse
import os
import signal
import sys
import time
from pathlib import Path

import ignite.distributed as idist
import torch
from ignite.engine import Events
from torch import nn
from torch.utils.data import TensorDataset

from ignite_engine import Parallel, Task
from ignite_engine.cli import commands
from ignite_engine.config import load_config


class Broken:
    """A handler that raises."""

    def __init__(self, at, note):
        self.at, self.note = at, note

    def attach(self, trainer):
        trainer.add_event_handler(Events.ITERATION_COMPLETED(once=self.at), self)

    def __call__(self, trainer):
        self.note()
        raise KeyError("no such key")


class Unreadable(TensorDataset):
    """The sample that is read after as many others raises."""

    def __init__(self, after, *tensors):
        super().__init__(*tensors)
        self.left = after

    def __getitem__(self, index):
        self.left -= 1
        if self.left < 0:
            raise OSError(5, "a sample is damaged")
        return super().__getitem__(index)


class Growing:
    """A state of each rank's own that has grown beyond the disk from iteration ``at`` on, where it fails."""

    def __init__(self, fails, at, note):
        self.fails, self.at, self.note, self.size = fails, at, note, 1

    def attach(self, trainer):
        trainer.register("growing", self)
        if self.fails:
            trainer.add_event_handler(Events.ITERATION_COMPLETED(once=self.at), self.grow)

    def grow(self):
        self.note()
        self.size = 1_000_000

    def state_dict(self):
        return {"numbers": torch.zeros(self.size)}

    def load_state_dict(self, state):
        self.size = len(state["numbers"])


def fail(how):
    if how == "raise":
        raise ValueError("a sample is broken")
    if how == "exit":
        sys.exit(3)
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if how == "hang":
        time.sleep(600)


def build(options):
    how, at = options.get("how", ""), options.get("at", 5)
    fails = idist.get_rank() == options.get("rank", 1)
    if fails and how == "build":
        raise ValueError("no model here")
    calls = []

    def note():
        if "notes" in options:
            (Path(options["notes"]) / "failed").touch()

    def loss_fn(model, batch):
        calls.append(1)
        time.sleep(0.15)  # several heartbeats before it fails
        if fails and len(calls) == at:
            note()
            fail(how)
        return nn.functional.mse_loss(model(batch[0]), batch[1])

    torch.manual_seed(1)
    readable = at if fails and how == "read" else 1000
    data = Unreadable(readable, torch.randn(96, 4), torch.randn(96, 1))
    return Task(
        handlers=[Broken(at, note)] if fails and how == "handler" else [Growing(fails, at, note)] * (how == "disk"),
        model=nn.Linear(4, 1),
        loss_fn=loss_fn,
        train_set=data,
    )


def train(config, ranks, options):
    """As ``train --nproc-per-node``, on ranks that are forked: they need not import torch again."""
    arguments = argparse.Namespace(command="train", traceback=False)
    with Parallel(backend="gloo", nproc_per_node=ranks, start_method="fork", **options) as parallel:
        parallel.run(commands._rank_main, commands._train, load_config(Path(config), []), arguments)
