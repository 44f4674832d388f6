"""What it costs that two ranks agree on stops: a DDP step with the engine's vote, with a vote in every step, without.

    python -m benchmarks.stop_vote [--rounds N] [--steps N] [--width N] [--json PATH]

Two gloo ranks on this machine, one thread each. In each round every contender takes the same number of steps, in an
order drawn for the round. See ``benchmarks/README.md`` for how to read it.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.overhead import machine
from benchmarks.ratios import ratio_of_medians
from ignite_engine.ranks import agreement

RANKS = 2
NONE, ENGINE, EVERY = "no vote", "the engine's vote", "a vote in every step"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.stop_vote", description=__doc__)
    parser.add_argument("--rounds", type=int, default=30, help="counted rounds, default 30")
    parser.add_argument("--steps", type=int, default=200, help="steps of a contender in a round, default 200")
    parser.add_argument("--width", type=int, default=256, help="of the model's four layers, default 256")
    parser.add_argument("--json", type=Path, help="write every round there")
    options = parser.parse_args(arguments)
    times = measure(options.rounds, options.steps, options.width)
    print("  ".join(f"{name} {value}" for name, value in machine().items()))
    for name, values in times.items():
        cost = ratio_of_medians(values, times[NONE])
        print(f"{name:22} {1e6 * median(values):8.1f} us a step   to {NONE}: {cost}")
    if options.json:
        options.json.write_text(json.dumps({"machine": machine(), "seconds_per_step": times}))
    return 0


def measure(rounds: int, steps: int, width: int) -> dict[str, list[float]]:
    """Seconds per step of each contender in each round, on rank 0."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ["OMP_NUM_THREADS"] = "1"
        mp.spawn(_rank, (folder, rounds, steps, width), nprocs=RANKS)  # type: ignore[attr-defined,no-untyped-call]
        times: dict[str, list[float]] = json.loads((Path(folder) / "times.json").read_text())
        return times


def _rank(rank: int, folder: str, rounds: int, steps: int, width: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    torch.manual_seed(0)
    layers = [layer for _ in range(4) for layer in (nn.Linear(width, width), nn.ReLU())]
    model = DistributedDataParallel(nn.Sequential(*layers))
    optimizer = torch.optim.AdamW(model.parameters())
    inputs, vote, iteration = torch.randn(32, width), agreement.Vote(), 0
    votes: dict[str, Callable[[int], Any]] = {
        NONE: lambda iteration: 0,
        ENGINE: lambda iteration: vote.poll(iteration, 0),
        EVERY: lambda iteration: vote.poll(iteration, 0, now=True),
    }
    times: dict[str, list[float]] = {name: [] for name in votes}
    draw = random.Random(0)  # the same order on both ranks
    for count in range(rounds + 2):
        for name in draw.sample(list(votes), len(votes)):
            dist.barrier()
            vote.restart(iteration)
            started = time.perf_counter()
            for _ in range(steps):
                iteration += 1
                optimizer.zero_grad()
                model(inputs).square().mean().backward()
                optimizer.step()
                votes[name](iteration)
            if count >= 2:  # the first rounds warm up
                times[name].append((time.perf_counter() - started) / steps)
    if rank == 0:
        (Path(folder) / "times.json").write_text(json.dumps(times))
    agreement.forget_groups()
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
