"""A tiny task with dropout whose ranks die where a test wants it.

Options: ``directory``: of the test's files; ``step_s``: seconds of an iteration; ``deaths``: a list of ``rank``, ``at``
(an iteration; 0: while the task is built), ``how`` (a signal's name, ``raise`` or ``hang``), ``times`` and
``after_s`` (seconds before it aborts). Each rank leaves its
process id in the file ``pid_RANK``, and its newest iteration in ``at_RANK``.
"""

import os
import signal
import time
from pathlib import Path
from typing import Any

import ignite.distributed as idist
import torch
from ignite.engine import Events
from torch import nn
from torch.utils.data import Dataset

from ignite_engine import Task

SAMPLES = 160


class Points(Dataset[Any]):
    def __init__(self):
        generator = torch.Generator().manual_seed(7)
        self.x = torch.randn(SAMPLES, 8, generator=generator)
        self.y = torch.randint(0, 3, (SAMPLES,), generator=generator)

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        return self.x[index] + 0.1 * torch.randn(8), self.y[index]


class Deaths:
    def __init__(self, options):
        self.folder, self.step_s = Path(options["directory"]), options.get("step_s", 0.0)
        self.deaths = options.get("deaths", [])

    def attach(self, trainer):
        trainer.add_event_handler(Events.ITERATION_STARTED, self)

    def __call__(self, trainer):
        at = os.open(self.folder / f"at_{idist.get_rank()}", os.O_WRONLY | os.O_CREAT, 0o644)
        os.pwrite(at, b"%8d" % trainer.state.iteration, 0)  # a file that is emptied first would be so at many kills
        os.close(at)
        time.sleep(self.step_s)
        self.at(trainer.state.iteration)

    def at(self, moment):
        for number, death in enumerate(self.deaths):
            if death["at"] == moment and death.get("rank", 0) == int(os.environ.get("LOCAL_RANK", "0")):
                died = self.folder / f"died_{number}"
                times = len(died.read_text()) if died.exists() else 0
                if times < death.get("times", 1):
                    died.write_text("x" * (times + 1))
                    if death["how"] == "hang":
                        time.sleep(1000.0)
                    if death["how"] == "SIGABRT":
                        time.sleep(death.get("after_s", 0.0))
                    if death["how"] == "raise":
                        raise ArithmeticError("a program's own error")
                    os.kill(os.getpid(), getattr(signal, death["how"]))


def build(options):
    deaths = Deaths(options)
    (deaths.folder / f"pid_{idist.get_rank()}").write_text(str(os.getpid()))
    deaths.at(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 3))

    def loss_fn(model, batch):
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    return Task(model=model, loss_fn=loss_fn, train_set=Points(), handlers=[deaths])
