"""How the cost of an iteration grows with handlers, parameter tensors and accumulation: ours beside the plain loop.

    python -m benchmarks.growth [--rounds N] [--micro-batches N] [--json PATH]

All take turns in one process, on one thread; the times are of its CPU. See ``benchmarks/README.md``.
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from ignite.engine import Engine, Events
from torch import nn
from torch.nn.functional import cross_entropy

from benchmarks.contenders import ignite_engines
from benchmarks.contenders.ours import loss_fn
from benchmarks.goals import Goal, print_goals
from benchmarks.machine import machine
from benchmarks.ratios import ratio_of_medians
from benchmarks.turns import TimedBatches, Times, take_turns
from benchmarks.workload import Batch, weights_digest
from ignite_engine import Trainer, Update

HANDLERS, TENSORS, ACCUMULATION = (10, 100, 1000), (10, 100, 1000), (1, 4, 16)
WIDTH = 16
PLAIN, OURS, IGNITE = "plain", "ours", "Ignite"


class Work:
    """A chain of linear layers, each with two tensors, and batches of 32 for it; equal for equal arguments."""

    def __init__(self, tensors: int, micro_batches: int, accumulation: int = 1) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(tensors // 2)))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), foreach=True)
        self.accumulation = accumulation
        distinct = [(torch.randn(32, WIDTH), torch.randint(WIDTH, (32,))) for _ in range(16)]
        batches = list(itertools.islice(itertools.cycle(distinct), micro_batches + 2 * accumulation))
        self.batches = TimedBatches(batches, accumulation, time.process_time)

    def plain(self) -> Callable[[], None]:
        model, optimizer, accumulation = self.model, self.optimizer, self.accumulation

        def turn() -> None:
            for count, (inputs, targets) in enumerate(self.batches, 1):
                loss = cross_entropy(model(inputs), targets)
                (loss if accumulation == 1 else loss / accumulation).backward()
                if count % accumulation == 0:
                    optimizer.step()
                    optimizer.zero_grad()

        return turn

    def ours(self, attach: Callable[[Engine], None]) -> Callable[[], None]:
        trainer = Trainer(Update(self.model, self.optimizer, loss_fn), accumulation_steps=self.accumulation)
        return self._epochs(trainer, attach)

    def ignite(self, attach: Callable[[Engine], None]) -> Callable[[], None]:
        model, optimizer = self.model, self.optimizer

        def step(engine: Engine, batch: Batch) -> None:
            inputs, targets = batch
            optimizer.zero_grad()
            cross_entropy(model(inputs), targets).backward()
            optimizer.step()

        return self._epochs(Engine(step), attach)

    def _epochs(self, trainer: Engine, attach: Callable[[Engine], None]) -> Callable[[], None]:
        attach(trainer)

        def turn() -> None:
            trainer.run(self.batches, max_epochs=trainer.state.epoch + 1)

        return turn


def quiet(count: int) -> Callable[[Engine], None]:
    """Handlers that rarely fire."""
    return lambda trainer: ignite_engines.add_quiet_handlers(trainer, count, 1)


def acting(count: int) -> Callable[[Engine], None]:
    """Handlers that are called in every iteration, and return."""

    def attach(trainer: Engine) -> None:
        for _ in range(count):
            trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: None)

    return attach


def measure(rounds: int, micro_batches: int) -> tuple[Times, dict[str, str]]:
    """Microseconds of CPU per micro-batch by ``row: contender`` and round, and digests of the weights."""
    works: dict[str, Work] = {}
    turns: dict[str, Callable[[], None]] = {}

    def add(row: str, contender: str, make: Callable[[Work], Callable[[], None]], **shape: int) -> None:
        tensors = shape.get("tensors", 10)
        count = micro_batches if tensors < 1000 else max(1, micro_batches // 8)  # each takes long
        work = Work(tensors, count, shape.get("accumulation", 1))
        works[f"{row}: {contender}"], turns[f"{row}: {contender}"] = work, make(work)

    for kind, attach, counts in (("rarely fire", quiet, (0, *HANDLERS)), ("always act", acting, HANDLERS[:2])):
        for count in counts:
            row = f"{count} handlers that {kind}" if count else "no handler"
            if count == 0:
                add(row, PLAIN, Work.plain)
            add(row, OURS, lambda work, attach=attach, count=count: work.ours(attach(count)))  # type: ignore[misc]
            add(row, IGNITE, lambda work, attach=attach, count=count: work.ignite(attach(count)))  # type: ignore[misc]
    for count in TENSORS[1:]:  # 10 are above
        add(f"{count} tensors", PLAIN, Work.plain, tensors=count)
        add(f"{count} tensors", OURS, lambda work: work.ours(quiet(0)), tensors=count)
    for count in ACCUMULATION[1:]:
        add(f"accumulation {count}", PLAIN, Work.plain, accumulation=count)
        add(f"accumulation {count}", OURS, lambda work: work.ours(quiet(0)), accumulation=count)

    def timed(name: str) -> float:
        turns[name]()
        return 1e6 * works[name].batches.seconds

    times = take_turns({name: partial(timed, name) for name in turns}, rounds)
    return times, {name: weights_digest(work.model) for name, work in works.items()}


def plain_of(name: str, times: Times) -> str:
    """The plain loop that a contender is compared with."""
    row = name.rpartition(": ")[0]
    return f"{row}: {PLAIN}" if f"{row}: {PLAIN}" in times else f"no handler: {PLAIN}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; the exit code is 1 if contenders did not do the same work."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.growth", description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--micro-batches", type=int, default=96, help=f"in a round, a multiple of {ACCUMULATION[-1]}")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    if options.micro_batches < 1 or options.micro_batches % ACCUMULATION[-1]:
        parser.error(f"--micro-batches must be a positive multiple of {ACCUMULATION[-1]}, got {options.micro_batches}.")
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)  # that handlers of long intervals never act in a short run
    times, digests = measure(options.rounds, options.micro_batches)
    equal = all(digests[name] == digests[plain_of(name, times)] for name in times)
    print(f"{machine()}\n{options.rounds} rounds of {options.micro_batches} micro-batches, CPU time")
    print(f"{'':<40}{'us':>9}{'to plain, us':>14}  to plain [95 %]")
    for name, values in times.items():
        plain = times[plain_of(name, times)]
        ratio = "" if values is plain else str(ratio_of_medians(values, plain))
        print(f"{name:<40}{median(values):>9.1f}{median(values) - median(plain):>14.1f}  {ratio}")
    print("all ended with the weights of their plain loop" if equal else "THE WEIGHTS DIFFER: not the same work")
    rows = ["no handler", *(f"{HANDLERS[-1]} handlers that rarely fire", f"{TENSORS[-1]} tensors", "accumulation 16")]
    goals = []
    for row in rows:
        name = f"{row}: {OURS}"
        goals.append(Goal.of(f"{row}: ours / plain", ratio_of_medians(times[name], times[plain_of(name, times)]), None))
    print_goals(goals)
    if options.json is not None:
        report: dict[str, Any] = {"machine": machine(), "us_per_micro_batch": times, "equal_work": equal}
        options.json.write_text(json.dumps(report | {"goals": [asdict(each) for each in goals]}, indent=1) + "\n")
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
