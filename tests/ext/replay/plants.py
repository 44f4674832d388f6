"""Pairs of runs of which one has a planted difference."""

from __future__ import annotations

import random
from dataclasses import dataclass

from ignite_engine.ext.replay import bring_to
from tests.ext.replay.runs import trained

PLANTS = ("weight", "sample", "rate", "worker", "threads")


@dataclass(frozen=True)
class Planted:
    """What must be found.

    Attributes:
        iteration: at which.
        names: one of these words is in its name.
        setting: in a line about the settings.
    """

    iteration: int
    names: tuple[str, ...]
    setting: str


def plant(what, folder, *, seed, iterations):
    """Train ``run`` and ``other`` in a folder, the other one with the difference."""
    draw = random.Random(f"{what} {seed}")
    sections = {
        "run": {"seed": seed, "threads": 1},
        "data": {"batch_size": 4, "num_workers": 2 if what == "worker" else 0},
        # one unit in the last place may be gone after the next step
        "logging": {
            "every": 5,
            "trail": 1 if what == "weight" else 4,
            "console": False,
            "clearml": False,
            "report": False,
            "progress": False,
        },
        "task_options": {"wide": what == "threads"},
    }
    trained(folder / "run", iterations, **sections)
    iteration = draw.randint(1, iterations - 1)
    if what == "threads":
        trained(folder / "other", iterations, **sections | {"run": {"seed": seed, "threads": 2}})
        return Planted(1, ("output loss", "gradient"), "run.threads")
    options = {"what": what, "iteration": iteration}
    found = Planted(iteration, ("the rate lr",), "task_options.plant")
    if what == "weight":
        found = Planted(iteration, ("0.weight after the step",), found.setting)
    elif what in ("sample", "worker"):
        sample, iteration = _sample(folder / "run", draw, iterations)
        options["sample"] = sample
        found = Planted(iteration, ("the bytes of the batch",), found.setting)
    trained(folder / "other", iterations, **sections | {"task_options": {"wide": False, "plant": options}})
    return found


def _sample(folder, draw, iterations):
    """A sample, and the first iteration in which it is; the worker in the middle of the batch reads it."""
    epoch = 6
    iteration = draw.randint(1, min(epoch, iterations))
    with bring_to(folder, at=iteration, before=1) as moment:
        samples = moment.iterations[iteration].samples or []
    return draw.choice(samples[0]), iteration
