"""Runs of the tiny task, trained in this process."""

from pathlib import Path

from ignite.engine import Events

from ignite_engine.config.load import config_from_dict
from ignite_engine.runs.recipe import build_run

TASK = f"{Path(__file__).with_name('task.py')}:build"


def settings(directory, iterations, sections):
    """The values of a config, the tiny task's with other sections merged in."""
    values = {
        "task": TASK,
        "run": {"directory": str(directory), "max_iterations": iterations, "seed": 3},
        "data": {"batch_size": 4},
        "optimizer": {"name": "AdamW", "lr": 0.01},
        "schedule": {"name": "cosine", "warmup": 5},
        "update": {"accumulation_steps": 2, "clip_norm": 1.0},
        "evaluation": {"every": {"iterations": 7}},
        "ema": {"decay": 0.9},
        "checkpoint": {"every": {"iterations": 10}, "keep_last": 100},
        "logging": {"every": {"iterations": 3}, "console": False, "progress": False, "report": False, "clearml": False},
    }
    for section, given in sections.items():
        values[section] = {**values.get(section, {}), **given}
    return values


def trained(directory, iterations=40, *, stop_at=None, **sections):
    """A run that has ended, or was stopped at an iteration."""
    run = build_run(config_from_dict(settings(directory, iterations, sections)))
    if stop_at is not None:
        stop = run.trainer.request_stop
        run.trainer.add_event_handler(Events.ITERATION_COMPLETED(once=stop_at), lambda: stop("that is all for now"))
    run.train()
    return run
