"""What a mirror costs training: the time of an iteration while checkpoints are uploaded beside it.

    python -m benchmarks.mirror [--rounds N] [--iterations N] [--mib N] [--slow] [--json PATH]

One process. By turns a run saves each 20 iterations with a mirror (a directory, written by another thread, durably) and
without; ``--slow`` allows the upload 1 MiB/s, so that one is under way all the time. The saves themselves are in both.
See ``benchmarks/README.md``.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

import torch
from ignite.engine import Events
from torch import nn

from benchmarks.goals import Goal, print_goals
from benchmarks.machine import machine
from benchmarks.ratios import ratio_of_medians
from ignite_engine import Trainer, Update
from ignite_engine.handlers import Checkpoint

GOAL = 1.01
WITH, WITHOUT = "with a mirror", "without"
_EVERY = 20


def measure(directory: Path, mirror: Any, iterations: int, mib: float) -> float:
    """Median seconds of an iteration, its save not counted."""
    torch.manual_seed(0)
    width = max(8, round((mib * 2**20 / 4 / 3) ** 0.5))
    model = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1))  # AdamW holds two more of each
    optimizer = torch.optim.AdamW(model.parameters())
    trainer = Trainer(Update(model, optimizer, lambda model, batch: model(batch).square().mean()))
    checkpoint = Checkpoint(directory, keep_last=1, save_at_end=False, mirror=mirror)
    checkpoint.attach(trainer, Events.ITERATION_COMPLETED(every=_EVERY))
    took: list[float] = []
    began = 0.0

    def start() -> None:
        nonlocal began
        began = time.perf_counter()

    def end() -> None:
        took.append(time.perf_counter() - began)

    trainer.add_event_handler(Events.ITERATION_STARTED, start)
    trainer.add_event_handler(Events.ITERATION_COMPLETED, end)
    batches = [torch.randn(32, width) for _ in range(4)]
    trainer.run([batches[index % 4] for index in range(iterations)], max_epochs=1)
    return median(took[_EVERY:])


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure by turns, print, and write the report."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.mirror")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--iterations", type=int, default=200)
    parser.add_argument("--mib", type=float, default=16.0, help="size of a checkpoint")
    parser.add_argument("--slow", action="store_true", help="an upload at 1 MiB/s")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    times: dict[str, list[float]] = {WITH: [], WITHOUT: []}
    for turn in range(options.rounds):
        kinds = [WITH, WITHOUT]
        random.Random(turn).shuffle(kinds)
        for kind in kinds:
            with tempfile.TemporaryDirectory() as folder:
                place = {"url": f"{folder}/mirror", "max_mib_per_s": 1.0 if options.slow else None}
                mirror = place if kind == WITH else None
                times[kind].append(measure(Path(folder) / "run", mirror, options.iterations, options.mib))
    ratio = ratio_of_medians(times[WITH], times[WITHOUT])
    goals = [Goal.of("iteration with a mirror / without", ratio, GOAL)]
    for kind, values in times.items():
        print(f"{kind:15} {1e3 * median(values):.3f} ms an iteration")
    print_goals(goals)
    if options.json:
        report = {"machine": machine(), "options": {**vars(options), "json": None}, "times": times}
        options.json.write_text(json.dumps(report | {"goals": [asdict(goal) for goal in goals]}, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
