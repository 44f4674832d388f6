"""Runs with a mirror, each in a process of its own or on ranks of one, started in a child of a fork server."""

import json
import os
import signal
import time
from pathlib import Path

import torch
from ignite.engine import Events

from ignite_engine import Trainer, Update
from ignite_engine.ext.mirror.remote import Remote
from ignite_engine.handlers import Checkpoint
from ignite_engine.ranks import agreement
from tests.kit.sharded import gathered, in_layout
from tests.kit.tiny import linear, mse, numbers_loader
from tests.ranks.forked import on_ranks

START = "tests.ext.mirror.runs:start"
MODULES = ("tests.ext.mirror.runs", "s3fs")
KILLED = -signal.SIGKILL


def start(folder, mirror, ranks, options):
    """Train on so many ranks from the newest checkpoint of both places."""
    return on_ranks(Path(folder).parent, ranks, lambda rank: train(Path(folder), mirror, **options))


def train(
    folder,
    mirror,
    *,
    iterations=12,
    kill_at=None,
    invariant=False,
    layout="plain",
    **save,
):
    """The run, to its end; rank 0 writes what it ends with."""
    torch.manual_seed(agreement.rank())
    model, _ = in_layout(layout, linear(dropout=True))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    trainer = Trainer(
        Update(model, optimizer, mse, rank_invariant=invariant), global_micro_batches=4 if invariant else None
    )
    checkpoint = Checkpoint(folder, mirror=mirror, **save)
    checkpoint.attach(trainer, Events.ITERATION_COMPLETED(every=2))
    found = checkpoint.resume()
    if kill_at is not None:
        trainer.add_event_handler(Events.ITERATION_COMPLETED(once=kill_at), lambda: kill(mirror))
    trainer.run(numbers_loader(96, 2, shuffle=True), max_iters=iterations)
    end = {
        "weights": torch.cat([gathered(value.detach()).flatten() for value in model.parameters()]).tolist(),
        "moments": [gathered(state["exp_avg"]).sum().item() for state in optimizer.state.values()],
        "resumed": None if found is None else found.name,
    }
    if agreement.rank() == 0:
        folder.with_suffix(".json").write_text(json.dumps(end))
    return trainer


def kill(mirror):
    """The machine is gone, after more than its first checkpoint was uploaded."""
    while agreement.rank() == 0 and not any(there.iteration >= 4 for there in Remote(mirror).checkpoints()[0]):
        time.sleep(0.05)
    agreement.wait_for_all()
    os.killpg(0, signal.SIGKILL)


def end_of(folder):
    end = json.loads(folder.with_suffix(".json").read_text())
    return end
