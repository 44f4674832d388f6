"""Runs of the tiny task, trained in this process by the command line, and a small script's run."""

import functools
import json
from pathlib import Path

import torch
import yaml
from ignite.engine import Events

from ignite_engine import Trainer, Update, loader
from ignite_engine.handlers import Checkpoint, MetricLogger
from tests.kit.fitting import QUIET, with_handlers
from tests.kit.refusals import command
from tests.kit.tiny import Numbers, linear, mse

TASK = f"{Path(__file__).with_name('task.py')}:build"


def config(directory, iterations, **sections):
    """The tiny task's, with other sections and settings of handlers, by their names; ``...`` leaves one out."""
    values = {
        "task": TASK,
        "run": {"directory": str(directory), "max_iterations": iterations, "seed": 3},
        "data": {"batch_size": 4},
        "optimizer": {"name": "AdamW", "lr": 0.01},
        "schedule": {"name": "cosine", "warmup": 5},
        "update": {"accumulation_steps": 2, "clip_norm": 1.0},
        "handlers": {
            **QUIET,
            "Evaluation": {"every": 7},
            "EMA": {"decay": 0.9},
            "Checkpoint": {"every": 10, "keep_last": 100},
            "MetricLogger": {"every": 3, "console": False},
            "MemoryLogger": {},
            "Throughput": {},
            "StepTimes": {},
        },
    }
    entries = {name: given for name, given in sections.items() if name[0].isupper()}
    values["handlers"] = with_handlers(values["handlers"], entries)
    for section in sections.keys() - entries.keys():
        merged = {**values.get(section, {}), **sections[section]}
        values[section] = {key: value for key, value in merged.items() if value is not ...}
    directory.parent.mkdir(exist_ok=True, parents=True)
    path = directory.parent / f"{directory.name}.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


def trained(directory, iterations=40, **sections):
    """A run that has ended, or was stopped by the task's option ``stop_at``; its folder."""
    command("train", config(directory, iterations, **sections))
    return directory


def content(folder):
    """Every file of a folder, with the time at which it was changed."""
    return {
        str(path.relative_to(folder)): (path.stat().st_mtime_ns, path.read_bytes() if path.is_file() else b"")
        for path in folder.rglob("*")
    }


def edit_lines(path, edit):
    """Change what a log says: ``edit`` gets its lines, decoded."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    edit(lines)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def script(
    directory, *, data=None, attach=lambda trainer: None, log_at=Events.ITERATION_COMPLETED, invariant=False, **save
):
    """A run of a program of its own, as ``replay`` takes it: its trainer, and what its ``run()`` gets."""
    torch.manual_seed(1)
    model = linear(dropout=True)
    update = Update(
        model, torch.optim.SGD(model.parameters(), lr=0.1), mse, accumulate="rank_invariant" if invariant else None
    )
    trainer = Trainer(update, global_micro_batches=4 if invariant else None)
    MetricLogger(directory, console=False).attach(trainer, log_at)
    Checkpoint(directory / "checkpoints", keep_last=9, **save).attach(trainer)
    attach(trainer)
    data = data() if data else loader(Numbers(20), 4, shuffle=True, seed=5)
    return trainer, {"data": data, "max_epochs": 4}


def scripted(**options):
    return functools.partial(script, **options)
