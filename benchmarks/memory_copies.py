"""Copies of the state in shared memory: what they cost an iteration of a small GPT over bytes.

    python -m benchmarks.memory_copies [--rounds N] [--iterations N] [--json PATH]

The contenders take turns in one process, in an order drawn for each round; a round is a run, of which the iterations
count that follow those in which ``auto`` measures. CPU time, so other processes disturb it less. See
``benchmarks/README.md``.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

import torch
from ignite.engine import Events
from torch import Tensor

from benchmarks.goals import Goal, print_goals
from benchmarks.gpt import GPT, Shape
from benchmarks.machine import machine
from benchmarks.ratios import ratio_of_medians
from benchmarks.turns import Times, take_turns
from ignite_engine import Trainer, Update
from ignite_engine.handlers import Checkpoint

SHAPE = Shape(layers=3, heads=4, width=128, context=128, vocabulary=256)
CONTENDERS: dict[str, Any] = {"off": None, "memory=1": 1, "memory=auto": "auto"}
BEFORE = 8
"""Iterations of a round that do not count."""
GOAL = 1.01


def loss_fn(model: GPT, batch: Tensor) -> Tensor:
    """Of windows of bytes, one longer than the context."""
    loss: Tensor = model(batch[:, :-1], batch[:, 1:])
    return loss


def round_of(memory: Any, folder: Path, iterations: int) -> Callable[[], float]:
    """Milliseconds of an iteration, without the first ones."""
    torch.manual_seed(0)
    model = GPT(SHAPE)
    batches = torch.randint(0, 256, (4, 4, SHAPE.context + 1))
    data = [batches[number % 4] for number in range(4 * (BEFORE + iterations))]

    def one_round() -> float:
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        trainer = Trainer(Update(model, optimizer, loss_fn, clip_norm=1.0), 4)
        Checkpoint(folder, memory=memory, save_at_end=False).attach(trainer, Events.COMPLETED)
        began: list[float] = []
        trainer.add_event_handler(Events.ITERATION_STARTED(once=BEFORE + 1), lambda: began.append(time.process_time()))
        ended: list[float] = []
        trainer.add_event_handler(Events.EPOCH_COMPLETED, lambda: ended.append(time.process_time()))
        trainer.run(data, max_epochs=1)
        return (ended[0] - began[0]) / iterations * 1e3

    return one_round


def measured(rounds: int, iterations: int) -> Times:
    """By contender and round."""
    with tempfile.TemporaryDirectory() as folder:
        turns = {
            name: round_of(memory, Path(folder) / str(place), iterations)
            for place, (name, memory) in enumerate(CONTENDERS.items())
        }
        return take_turns(turns, rounds, warmup=1)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print the table, write the JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.memory_copies", description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--iterations", type=int, default=60, help="of a round, those that count")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    times = measured(options.rounds, options.iterations)
    print(f"{machine()}\n{options.rounds} rounds of {options.iterations} iterations, CPU time")
    rows = {}
    for name, values in times.items():
        ratio = ratio_of_medians(values, times["off"])
        rows[name] = {"ms": values, "to_off": asdict(ratio)}
        print(f"{name:<14}{median(values):8.2f} ms   {ratio}")
    goals = [
        Goal.of(f"{name} / off", ratio_of_medians(times[name], times["off"]), GOAL if name == "memory=auto" else None)
        for name in ("memory=1", "memory=auto")
    ]
    print_goals(goals)
    if options.json is not None:
        report = {"machine": machine(), "contenders": rows, "goals": [asdict(goal) for goal in goals]}
        options.json.write_text(json.dumps(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
