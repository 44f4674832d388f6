"""A tiny task with dropout and random augmentation, whose data or evaluation can wait where a test wants to break in.

Options: ``block_at``: the sample index that takes 20 s (once: a marker file in ``directory`` is left, and later runs
don't wait); ``slow_step_s``, ``slow_evaluation_s``: seconds per micro-batch; ``count_batches``: each evaluated batch
leaves a character in the file ``evaluated_RANK``.
"""

import json
import os
import time
from pathlib import Path
from typing import Any

import ignite.distributed as idist
import torch
from ignite.engine import Events
from ignite.metrics import Accuracy
from torch import nn
from torch.utils.data import Dataset

from ignite_engine import Task, TrainingEvents


class Points(Dataset[Any]):
    def __init__(self, options, length, *, blocks):
        generator = torch.Generator().manual_seed(7)
        self.x = torch.randn(length, 8, generator=generator)
        self.y = torch.randint(0, 3, (length,), generator=generator)
        self.block_at = options.get("block_at") if blocks else None
        self.marker = Path(options["directory"]) / "blocked"

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        if index == self.block_at and not self.marker.exists():
            self.marker.touch()
            time.sleep(20.0)
        return self.x[index] + 0.1 * torch.randn(8), self.y[index]


class ReductionCounter:
    """Counts DDP's gradient reductions by a communication hook; leaves its process id and its count in files."""

    def __init__(self, directory):
        self.directory, self.reductions = directory, 0
        self.saved = []

    def attach(self, trainer):
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

        def hook(state, bucket):
            self.reductions += 1
            return allreduce_hook(None, bucket)

        trainer.update.model.register_comm_hook(None, hook)
        trainer.add_event_handler(Events.STARTED, self.say_pid)
        trainer.add_event_handler(TrainingEvents.CHECKPOINT_SAVED, self.note_saved)
        trainer.add_event_handler(Events.COMPLETED, self.say_count)

    def say_pid(self):
        (self.directory / f"pid_{idist.get_rank()}").write_text(str(os.getpid()))

    def note_saved(self, trainer):
        self.saved.append((trainer.state.iteration, trainer.state.saved_iteration))

    def say_count(self, trainer):
        state = trainer.state
        said = {
            "reductions": self.reductions,
            "optimizer_steps": state.optimizer_steps,
            "micro_batches": state.micro_batches,
            "saved": self.saved,
        }
        (self.directory / f"reductions_{idist.get_rank()}.json").write_text(json.dumps(said))


def build(options):
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 3))
    directory = Path(options["directory"])

    def loss_fn(model, batch):
        if not (directory / "fast").exists():
            (directory / "stepping").touch()
            time.sleep(options.get("slow_step_s", 0.0))
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    def predict(model, batch):
        if not (directory / "fast").exists() and options.get("slow_evaluation_s"):
            (directory / "evaluating").touch()
            time.sleep(options["slow_evaluation_s"])
        if options.get("count_batches"):
            with (directory / f"evaluated_{idist.get_rank()}").open("a") as file:
                file.write(".")
        return model(batch[0]), batch[1]

    return Task(
        handlers=[ReductionCounter(directory)] if options.get("count_reductions") else [],
        model=model,
        loss_fn=loss_fn,
        train_set=Points(options, 103, blocks=True),
        val_sets={"val": Points(options, 50, blocks=False)},
        predict=predict,
        metrics={"accuracy": Accuracy()},
    )
