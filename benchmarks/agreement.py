"""What it costs that two ranks agree on stops: a DDP step with the engine's row, with one by gloo, without.

    python -m benchmarks.agreement [--rounds N] [--steps N] [--width N] [--json PATH]

Two gloo ranks on this machine, one thread each. In each round every contender takes the same number of steps, in an
order drawn for the round. See ``benchmarks/README.md`` for how to read it.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.goals import Goal
from benchmarks.machine import machine
from benchmarks.ratios import ratio_of_medians
from benchmarks.turns import Times, on_ranks, take_turns
from ignite_engine.ranks import agreement

RANKS = 2
NONE, ENGINE, GLOO = "no exchange", "the engine's row", "a row by gloo, read a step later"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.agreement", description=__doc__)
    parser.add_argument("--rounds", type=int, default=30, help="counted rounds, default 30")
    parser.add_argument("--steps", type=int, default=200, help="steps of a contender in a round, default 200")
    parser.add_argument("--width", type=int, default=256, help="of the model's four layers, default 256")
    parser.add_argument("--json", type=Path, help="write every round there")
    options = parser.parse_args(arguments)
    times = measure(options.rounds, options.steps, options.width)
    print("  ".join(f"{name} {value}" for name, value in machine().items()))
    for name, values in times.items():
        cost = ratio_of_medians(values, times[NONE])
        print(f"{name:32} {1e6 * median(values):8.1f} us a step   to {NONE}: {cost}")
    goal = Goal.of("step with a row of requests / without", ratio_of_medians(times[ENGINE], times[NONE]), None)
    if options.json:
        report = {"machine": machine(), "seconds_per_step": times, "goals": [asdict(goal)]}
        options.json.write_text(json.dumps(report))
    return 0


def measure(rounds: int, steps: int, width: int) -> Times:
    """Seconds per step of each contender in each round, on rank 0."""
    return on_ranks(RANKS, _work, rounds, steps, width)


def _work(rounds: int, steps: int, width: int) -> Times:
    torch.manual_seed(0)
    layers = [layer for _ in range(4) for layer in (nn.Linear(width, width), nn.ReLU())]
    model = DistributedDataParallel(nn.Sequential(*layers))
    optimizer = torch.optim.AdamW(model.parameters())
    inputs = torch.randn(32, width)

    def turn(exchange: Callable[[], object]) -> Callable[[], float]:
        def timed() -> float:
            dist.barrier()
            started = time.perf_counter()
            for _ in range(steps):
                optimizer.zero_grad()
                model(inputs).square().mean().backward()
                optimizer.step()
                exchange()
            return (time.perf_counter() - started) / steps

        return timed

    row = [0.0] * 4
    group = dist.new_group(backend="gloo")
    sent: Any = None

    def by_gloo() -> None:
        nonlocal sent
        if sent is not None:
            sent.wait()
        sent = dist.all_reduce(torch.tensor(row, dtype=torch.float64), group=group, async_op=True)

    exchanges: dict[str, Callable[[], object]] = {
        NONE: lambda: None,
        ENGINE: lambda: agreement.gather_floats(row),
        GLOO: by_gloo,
    }
    return take_turns({name: turn(exchange) for name, exchange in exchanges.items()}, rounds)


if __name__ == "__main__":
    sys.exit(main())
