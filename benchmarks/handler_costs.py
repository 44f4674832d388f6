"""What each handler of daily use costs an iteration: a trainer that does nothing else, with it and without.

    python -m benchmarks.handler_costs [--rounds N] [--iterations N] [--json PATH]

In each round every contender runs the same number of iterations, in an order drawn for the round. The times are of this
process's CPU, so other processes disturb them less. See ``benchmarks/README.md`` for how to read it.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

import torch
from ignite.engine import Events

from benchmarks.goals import Goal, print_goals
from benchmarks.machine import machine
from benchmarks.turns import Times, cpu_us, take_turns
from ignite_engine import Trainer, TrainingEvents, every
from ignite_engine.handlers import MemoryLogger, MetricLogger, Progress, StepTimes, Throughput
from ignite_engine.handlers.meters import Meter, Stopwatch
from ignite_engine.handlers.profiler import Profiler
from ignite_engine.update.base import FunctionUpdate

UPDATE_EVENTS = (
    TrainingEvents.FORWARD_STARTED,
    TrainingEvents.FORWARD_COMPLETED,
    TrainingEvents.BACKWARD_COMPLETED,
    TrainingEvents.OPTIMIZER_STEP_STARTED,
    TrainingEvents.OPTIMIZER_STEP_COMPLETED,
)
STEP_US = 5000.0
GOAL_PERCENT = 0.5
BARE, LOGGED, ALL = "nothing", "logger, throughput, bar", "all of them"
MEASURED = "times, memory, FLOPs, profiler"


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; the exit code is 0 whatever it says."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.handler_costs", description=__doc__)
    parser.add_argument("--rounds", type=int, default=15, help="counted rounds, default 15")
    parser.add_argument("--iterations", type=int, default=2000, help="of a contender in a round, default 2000")
    parser.add_argument("--json", type=Path, help="write every round there")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    times = measure(options.rounds, options.iterations)
    print("  ".join(f"{name} {value}" for name, value in machine().items()))
    bare = median(times[BARE])
    for name, values in times.items():
        added = median(values) - bare
        print(f"{name:28} {median(values):7.2f} us   {added:+7.2f} us   {100 * added / STEP_US:+6.3f} % of a 5 ms step")
    more = 100 * (median(times[ALL]) - median(times[LOGGED])) / STEP_US
    measured = 100 * (median(times[MEASURED]) - bare) / STEP_US
    goals = [
        Goal(f"intervals and meters beside {LOGGED}, % of a 5 ms step", more, GOAL_PERCENT),
        Goal(f"{MEASURED}, % of a 5 ms step", measured, GOAL_PERCENT),
    ]
    print_goals(goals)
    if options.json:
        report = {"machine": machine(), "us_per_iteration": times, "goals": [asdict(goal) for goal in goals]}
        options.json.write_text(json.dumps(report))
    return 0


def measure(rounds: int, iterations: int) -> Times:
    """Microseconds of CPU per iteration of each contender in each round; the first is not counted."""
    contenders: dict[str, Callable[[Trainer, Path], None]] = {
        BARE: lambda trainer, folder: None,
        "every(epochs=0.25)": lambda trainer, folder: listen(trainer, every(epochs=0.25)),
        "every(samples=10_000)": lambda trainer, folder: listen(trainer, every(samples=10_000)),
        "every(seconds=30)": lambda trainer, folder: listen(trainer, every(seconds=30)),
        "MetricLogger, log every 50": log,
        "  and meters": log_meters,
        "Throughput": lambda trainer, folder: Throughput().attach(trainer),
        "Progress": lambda trainer, folder: Progress().attach(trainer),
        "MemoryLogger, log every 50": lambda trainer, folder: MemoryLogger().attach(trainer),
        "Profiler, before its window": lambda trainer, folder: Profiler(folder, wait=10**9).attach(trainer),
        MEASURED: measure_costs,
        LOGGED: watch,
        ALL: everything,
    }

    def turn(attach: Callable[[Trainer, Path], None]) -> Callable[[], float]:
        def timed() -> float:
            with tempfile.TemporaryDirectory() as folder:
                trainer = made()
                attach(trainer, Path(folder))
                with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
                    return cpu_us(lambda: run(trainer, iterations), iterations)()

        return timed

    return take_turns({name: turn(attach) for name, attach in contenders.items()}, rounds, warmup=1)


def run(trainer: Trainer, iterations: int) -> None:
    trainer.run([torch.zeros(8)] * iterations, max_epochs=1)


def made() -> Trainer:
    """Its update returns what was computed before."""
    output = {"loss": torch.tensor(0.5), "grad_norm": torch.tensor(1.0)}
    return Trainer(lambda engine, batch: output)


def listen(trainer: Trainer, event: Any) -> None:
    trainer.add_event_handler(event, lambda: None)


def log(trainer: Trainer, folder: Path) -> None:
    logger = MetricLogger(folder, console=False)
    logger.attach(trainer, Events.ITERATION_COMPLETED(every=50))


def log_meters(trainer: Trainer, folder: Path) -> None:
    log(trainer, folder)
    stopwatch = trainer.state.meters["time/watched_ms"] = Stopwatch()
    trainer.state.meters["grad_norm/max"] = Meter("max", of="grad_norm")

    def use() -> None:
        with stopwatch:
            pass

    trainer.add_event_handler(Events.ITERATION_STARTED, use)


def watch(trainer: Trainer, folder: Path) -> None:
    log(trainer, folder)
    Throughput().attach(trainer)
    Progress().attach(trainer)


def measure_costs(trainer: Trainer, folder: Path) -> None:
    """What tells the costs of a run, with the events that an Update fires for one micro-batch."""
    made, events = trainer.update, UPDATE_EVENTS

    def update(engine: Any, batch: Any) -> Any:
        handlers = engine._event_handlers
        for event in events:
            if handlers.get(event):
                engine.fire_event(event)
        return made(engine, batch)

    trainer.update = FunctionUpdate(update)
    StepTimes().attach(trainer)
    MemoryLogger().attach(trainer)
    Throughput(flops=1e6).attach(trainer)
    Profiler(folder, wait=10**9).attach(trainer)


def everything(trainer: Trainer, folder: Path) -> None:
    for event in (every(epochs=0.25), every(samples=10_000), every(seconds=30)):
        listen(trainer, event)
    log_meters(trainer, folder)
    Throughput().attach(trainer)
    Progress().attach(trainer)


if __name__ == "__main__":
    sys.exit(main())
