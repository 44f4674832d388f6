"""What ``loader()`` costs a sample: batches of 64 from memory, against torch's ``DataLoader`` over the same dataset.

    python -m benchmarks.loading [--rounds N] [--samples N] [--large N] [--json PATH]

In each round every contender reads its dataset once, shuffled, in an order drawn for the round; measured is CPU time,
that of the workers too. See ``benchmarks/README.md`` for how to read it.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import json
import random
import resource
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from benchmarks.goals import Goal
from benchmarks.machine import machine
from benchmarks.ratios import ratio_of_medians
from ignite_engine import loader

BATCH = 64
PLAIN, OURS = "DataLoader", "loader()"


@dataclass(frozen=True)
class Setting:
    """A kind of dataset, and the ratio that is not to be exceeded."""

    samples: type[Tiny]
    workers: int
    goal: float | None = None


class Tiny(Dataset[Tensor]):
    """Two floats."""

    numbers = 2

    def __init__(self, length: int) -> None:
        self.length, self.rows = length, torch.randn(64, self.numbers)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Tensor:
        return self.rows[index % 64]


class Large(Tiny):
    """100 KB."""

    numbers = 25_000


class InBatches(Tiny):
    """Tiny, of which a batch is read at once."""

    def __getitems__(self, indices: Sequence[int]) -> list[Tensor]:
        return list(self.rows[torch.tensor(indices) % 64])


class Drawing(Tiny):
    """Tiny, with a number of each generator."""

    def __getitem__(self, index: int) -> Tensor:
        return self.rows[index % 64] * (random.random() + np.random.rand()) + torch.rand(2)


SETTINGS = {
    "tiny": Setting(Tiny, 0, goal=3.0),
    "100 KB": Setting(Large, 0, goal=1.5),
    "tiny, __getitems__": Setting(InBatches, 0),
    "tiny, draws": Setting(Drawing, 0),
    "tiny, 2 workers": Setting(Tiny, 2),
    "100 KB, 2 workers": Setting(Large, 2),
    "tiny, draws, 2 workers": Setting(Drawing, 2),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; the exit code is 0 whatever it says."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.loading", description=__doc__)
    parser.add_argument("--rounds", type=int, default=15, help="counted rounds, default 15")
    parser.add_argument("--samples", type=int, default=20_000, help="tiny ones in a round, default 20000")
    parser.add_argument("--large", type=int, default=2_000, help="large ones in a round, default 2000")
    parser.add_argument("--json", type=Path, help="write every round there")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    times = measure(options.rounds, options.samples, options.large)
    print("  ".join(f"{name} {value}" for name, value in machine().items()))
    for name, of in times.items():
        ratio, goal = ratio_of_medians(of[OURS], of[PLAIN]), SETTINGS[name].goal
        verdict = "" if goal is None else f"   goal {goal}: {'met' if ratio.value <= goal else 'missed'}"
        print(f"{name:24} {median(of[PLAIN]):7.2f} us   {median(of[OURS]):7.2f} us   {ratio}{verdict}")
    if options.json:
        goals = [
            Goal.of(f"loader() / DataLoader, {name}", ratio_of_medians(of[OURS], of[PLAIN]), SETTINGS[name].goal)
            for name, of in times.items()
        ]
        report = {"machine": machine(), "us_per_sample": times, "goals": [asdict(each) for each in goals]}
        options.json.write_text(json.dumps(report))
    return 0


def measure(rounds: int, samples: int, large: int) -> dict[str, dict[str, list[float]]]:
    """Microseconds of CPU per sample of each contender in each round; the first is not counted."""
    made: dict[tuple[str, str], DataLoader[Any]] = {}
    for name, setting in SETTINGS.items():
        dataset = setting.samples(large if setting.samples is Large else samples)
        options: dict[str, Any] = {"shuffle": True, "num_workers": setting.workers}
        made[name, PLAIN] = DataLoader(dataset, BATCH, **options)
        made[name, OURS] = loader(dataset, BATCH, **options)
    times: dict[str, dict[str, list[float]]] = {name: {PLAIN: [], OURS: []} for name in SETTINGS}
    draw = random.Random(0)
    # those with workers after the others: a fork makes its parent copy each page that it writes
    for with_workers, number in itertools.product((False, True), range(rounds + 1)):
        names = [name for name, setting in SETTINGS.items() if (setting.workers > 0) == with_workers]
        for name in draw.sample(names, len(names)):
            for contender in draw.sample([PLAIN, OURS], 2):
                data = made[name, contender]
                began = cpu()
                for _ in data:
                    pass
                if number:
                    times[name][contender].append(1e6 * (cpu() - began) / len(data.dataset))  # type: ignore[arg-type]
    return times


def keep_memory() -> None:
    """Let glibc keep what is freed; whether it returns batches of 6 MB and gets them anew is else a matter of luck."""
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option is not None:
        set_option(-3, 32 << 20)  # M_MMAP_THRESHOLD
        set_option(-1, 1 << 30)  # M_TRIM_THRESHOLD


def cpu() -> float:
    """Seconds of this process and of its children that have ended."""
    used = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(each.ru_utime + each.ru_stime for each in used)


if __name__ == "__main__":
    keep_memory()
    sys.exit(main())
