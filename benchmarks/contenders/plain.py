"""The plain loop, the baseline: what `eject` makes of the settings, with the benchmark's model and batches in it."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

from benchmarks.workload import ACCUMULATION, Batch, Workload

EJECTED = Path(__file__).with_name("ejected")


def bare(work: Workload) -> None:
    _run("bare", work, updates=work.epochs * len(work.batches))


def full(work: Workload) -> None:
    _run("full", work, updates=work.epochs * len(work.batches) // ACCUMULATION)


def _run(setting: str, work: Workload, *, updates: int) -> None:
    """Run the program; what it reads, and where it prints, is replaced, as for every contender."""

    class Epoch:
        """A pass over the batches in memory."""

        def __init__(self, data: Any, number: int) -> None:
            work.batches.gate()
            self.batches = work.batches.batches

        def __len__(self) -> int:
            return len(self.batches)

        def __getitem__(self, number: int) -> Batch:
            return self.batches[number]

    def log(text: str, flush: bool = False) -> None:
        if setting == "full" and "loss" in text:
            work.log.append(float(text.rpartition(" ")[2]))

    names = runpy.run_path(str(EJECTED / f"{setting}.py"))
    main = names["main"]
    parts = {"model": work.model, "loss_fn": names["loss_fn"], "train_set": None, "optimizer": lambda _: work.optimizer}
    main.__globals__.update(build=lambda options: parts, Epoch=Epoch, ITERATIONS=updates, print=log)
    main()
