"""A step of DDP on two ranks: ours beside a loop by hand that reduces once in each accumulated step.

    python -m benchmarks.ddp [--rounds N] [--steps N] [--width N] [--json PATH]

Two gloo processes on this machine, one thread each, in which the contenders take turns. See ``benchmarks/README.md``.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

from benchmarks.contenders.ours import loss_fn
from benchmarks.goals import Goal, print_goals
from benchmarks.machine import installed, machine
from benchmarks.ratios import ratio_of_medians
from benchmarks.turns import TimedBatches, Times, on_ranks, take_turns
from benchmarks.workload import ACCUMULATION, CLIP_NORM
from ignite_engine import Trainer, Update

RANKS = 2
PLAIN, OURS, ACCELERATE = "by hand", "ours", "Accelerate"


class Work:
    """A perceptron and this rank's micro-batches of a round."""

    def __init__(self, steps: int, width: int) -> None:
        torch.manual_seed(0)
        layers = [layer for _ in range(4) for layer in (nn.Linear(width, width), nn.ReLU())]
        self.module = nn.Sequential(*layers)
        self.optimizer = torch.optim.AdamW(self.module.parameters(), foreach=True)
        torch.manual_seed(dist.get_rank())
        count = (steps + 2) * ACCUMULATION
        batches = [(torch.randn(32, width), torch.randint(width, (32,))) for _ in range(count)]
        self.batches = TimedBatches(batches, ACCUMULATION, time.perf_counter)

    def by_hand(self) -> Callable[[], None]:
        model, optimizer = DistributedDataParallel(self.module, gradient_as_bucket_view=True), self.optimizer

        def turn() -> None:
            for count, (inputs, targets) in enumerate(self.batches, 1):
                last = count % ACCUMULATION == 0
                with contextlib.nullcontext() if last else model.no_sync():
                    loss = cross_entropy(model(inputs), targets)
                    (loss / ACCUMULATION).backward()
                if last:
                    clip_grad_norm_(model.parameters(), CLIP_NORM)
                    optimizer.step()
                    optimizer.zero_grad()

        return turn

    def ours(self) -> Callable[[], None]:
        model = DistributedDataParallel(self.module, gradient_as_bucket_view=True)
        trainer = Trainer(Update(model, self.optimizer, loss_fn, clip_norm=CLIP_NORM), accumulation_steps=ACCUMULATION)

        def turn() -> None:
            trainer.run(self.batches, max_epochs=trainer.state.epoch + 1)

        return turn

    def accelerate(self) -> Callable[[], None]:
        """In the process group that is there."""
        from accelerate import Accelerator

        rank = str(dist.get_rank())
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}  # asked for, and not used
        os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": str(dist.get_world_size())} | address
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATION)
        model, optimizer = accelerator.prepare(self.module, self.optimizer)

        def turn() -> None:
            for inputs, targets in self.batches:
                with accelerator.accumulate(model):
                    loss = cross_entropy(model(inputs), targets)
                    accelerator.backward(loss)
                    if accelerator.sync_gradients:
                        accelerator.clip_grad_norm_(model.parameters(), CLIP_NORM)
                    optimizer.step()
                    optimizer.zero_grad()

        return turn


def measure(rounds: int, steps: int, width: int) -> Times:
    """Seconds per optimizer step of each contender in each round, on rank 0.

    Raises:
        RuntimeError: a contender ended with other weights.
    """
    return on_ranks(RANKS, _work, rounds, steps, width)


def _work(rounds: int, steps: int, width: int) -> Times:
    makers = {PLAIN: Work.by_hand, OURS: Work.ours}
    if installed("accelerate"):
        makers[ACCELERATE] = Work.accelerate
    works = {name: Work(steps, width) for name in makers}

    def timed(name: str, turn: Callable[[], None]) -> float:
        dist.barrier()
        turn()
        return works[name].batches.seconds * ACCUMULATION

    found = take_turns({name: partial(timed, name, makers[name](work)) for name, work in works.items()}, rounds)
    expected = works[PLAIN].module.state_dict()
    for name, work in works.items():
        if not all(torch.equal(each, expected[key]) for key, each in work.module.state_dict().items()):
            raise RuntimeError(f"{name} ended with other weights than the loop by hand.")
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table, write the JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ddp", description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--steps", type=int, default=50, help=f"of {ACCUMULATION} micro-batches, in a round")
    parser.add_argument("--width", type=int, default=256, help="of the model's four layers")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    if not installed("accelerate"):
        print("accelerate is not installed, so it is left out")
    times = measure(options.rounds, options.steps, options.width)
    print(
        f"{machine()}\n{RANKS} ranks, {options.rounds} rounds of {options.steps} steps of {ACCUMULATION} micro-batches"
    )
    for name, values in times.items():
        to = f"   to {PLAIN}: {ratio_of_medians(values, times[PLAIN])}"
        print(f"{name:12}{1e3 * median(values):8.2f} ms a step, {1 / median(values):8.1f} steps/s{to}")
    print("all ended with the same weights")
    goals = [
        Goal.of(f"DDP on {RANKS} ranks: {name} / by hand", ratio_of_medians(values, times[PLAIN]), None)
        for name, values in times.items()
        if name != PLAIN
    ]
    print_goals(goals)
    if options.json is not None:
        report = {"machine": machine(), "seconds_per_step": times, "goals": [asdict(each) for each in goals]}
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
