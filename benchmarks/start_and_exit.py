"""Seconds from the start of a process to its first iteration, and from its last line to its end.

    python -m benchmarks.start_and_exit [--rounds N] [--contenders import,plain,ignite,ours,handlers] [--json PATH]

Each contender is a process of its own, in an order drawn for each round, and does a run of 40 iterations of a tiny
model in one thread. Measured is its CPU time, which other processes disturb less, and the time on the clock. ``import``
imports torch and ends: what ending costs without any training.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

GOAL_EXIT_S = 0.2
GOAL_START = 1.18
"""First iteration to the plain loop's, CPU time: 2.4 s where importing torch and one iteration take 2.03."""
ITERATIONS = 40
CONTENDERS = ("import", "plain", "ignite", "ours", "handlers")
COLUMNS = ("first iteration, CPU s", "first iteration, s", "exit, CPU s", "exit, s")


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print the table; returns 0 whatever it says."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.start_and_exit", description=__doc__)
    parser.add_argument("--rounds", type=int, default=15, help="counted rounds, default 15")
    parser.add_argument("--contenders", default=",".join(CONTENDERS), help="default: all")
    parser.add_argument("--json", type=Path, help="write every round there")
    parser.add_argument("--as", dest="one", choices=CONTENDERS, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.one:
        run(options.one)
        return 0
    from benchmarks.goals import Goal, print_goals
    from benchmarks.machine import machine
    from benchmarks.ratios import ratio_of_medians

    names, draw = options.contenders.split(","), random.Random(0)
    rows: dict[str, list[tuple[float, ...]]] = {name: [] for name in names}
    for number in range(options.rounds + 1):
        for name in draw.sample(names, len(names)):
            row = measured(name)
            if number:  # the first fills the disk's cache
                rows[name].append(row)
    print("  ".join(f"{name} {value}" for name, value in machine().items()))
    print(f"{'':10}{''.join(f'{column:>24}' for column in COLUMNS)}{'first, CPU, to plain':>28}")
    for name, each in rows.items():
        columns = list(zip(*each, strict=True))
        ratio = ratio_of_medians(columns[0], [row[0] for row in rows["plain"]]) if "plain" in rows else ""
        print(f"{name:10}{''.join(f'{median(column):24.3f}' for column in columns)}{ratio!s:>28}")
    goals = []
    for name in [name for name in ("ours", "handlers") if {name, "plain"} <= rows.keys()]:
        start = ratio_of_medians([row[0] for row in rows[name]], [row[0] for row in rows["plain"]])
        above = median(row[2] for row in rows[name]) - median(row[2] for row in rows["plain"])
        goals.append(Goal.of(f"first iteration of {name} / plain, CPU time", start, GOAL_START))
        goals.append(Goal(f"exit of {name} above plain, s of CPU", above, GOAL_EXIT_S))
    print_goals(goals)
    if options.json:
        found = {"machine": machine(), "columns": COLUMNS, "rounds": rows, "goals": [asdict(each) for each in goals]}
        options.json.write_text(json.dumps(found, indent=1))
    return 0


def measured(name: str) -> tuple[float, ...]:
    """One process: a row of :data:`COLUMNS`."""
    command = [sys.executable, "-m", "benchmarks.start_and_exit", "--as", name]
    began = time.monotonic()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        said = process.stdout.read()
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    ended = time.monotonic()
    if process.returncode:
        raise RuntimeError(f"Contender {name} ended with exit code {process.returncode}; its traceback is above.")
    first_cpu, first, last_cpu, last = json.loads(said)
    return first_cpu, first - began, usage.ru_utime + usage.ru_stime - last_cpu, ended - last


def run(name: str) -> None:
    """Be the contender; prints the clocks at its first iteration and at its end."""
    os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = "1"
    import torch

    torch.set_num_threads(1)
    first: list[float] = []

    def note() -> None:
        if not first:
            first.extend(_clocks())

    if name == "import":
        note()
    else:
        model = torch.nn.Linear(8, 2)
        optimizer = torch.optim.AdamW(model.parameters())
        data = [(torch.randn(4, 8), torch.zeros(4, dtype=torch.long)) for _ in range(ITERATIONS)]
        {"plain": _plain, "ignite": _ignite, "ours": _ours, "handlers": _handlers}[name](model, optimizer, data, note)
    print(json.dumps([*first, *_clocks()]), flush=True)


def _clocks() -> tuple[float, float]:
    return time.process_time(), time.monotonic()


def _plain(model: Any, optimizer: Any, data: Any, note: Callable[[], None]) -> None:
    from torch.nn.functional import cross_entropy

    for inputs, targets in data:
        optimizer.zero_grad()
        cross_entropy(model(inputs), targets).backward()
        optimizer.step()
        note()


def _ignite(model: Any, optimizer: Any, data: Any, note: Callable[[], None]) -> None:
    from ignite.engine import Events, create_supervised_trainer
    from torch.nn.functional import cross_entropy

    trainer = create_supervised_trainer(model, optimizer, cross_entropy)
    trainer.add_event_handler(Events.ITERATION_COMPLETED, note)
    trainer.run(data)


def _ours(model: Any, optimizer: Any, data: Any, note: Callable[[], None], attach: Any = None) -> None:
    from ignite.engine import Events
    from torch.nn.functional import cross_entropy

    from ignite_engine import Trainer, Update

    trainer = Trainer(Update(model, optimizer, lambda model, batch: cross_entropy(model(batch[0]), batch[1])))
    trainer.add_event_handler(Events.ITERATION_COMPLETED, note)
    if attach is not None:
        attach(trainer)
    trainer.run(data, max_epochs=1)


def _handlers(model: Any, optimizer: Any, data: Any, note: Callable[[], None]) -> None:
    from ignite.engine import Events

    from ignite_engine.handlers import Checkpoint, GracefulStop, MemoryLogger, MetricLogger, Throughput

    with tempfile.TemporaryDirectory() as folder:

        def attach(trainer: Any) -> None:
            Checkpoint(folder, background=True).attach(trainer)
            MetricLogger(folder, console=False).attach(trainer)
            GracefulStop().attach(trainer)
            for handler in (Throughput(), MemoryLogger()):
                handler.attach(trainer, Events.ITERATION_COMPLETED(every=10))

        _ours(model, optimizer, data, note, attach)


if __name__ == "__main__":
    sys.exit(main())
