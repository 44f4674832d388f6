"""Contenders that take turns in one process, or in the same processes on several ranks."""

from __future__ import annotations

import json
import os
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from benchmarks.workload import Batch
from ignite_engine.ranks import agreement

WARMUP_ROUNDS = 2

Times = dict[str, list[float]]


def take_turns(turns: Mapping[str, Callable[[], float]], rounds: int, *, warmup: int = WARMUP_ROUNDS) -> Times:
    """What each turn returned, by contender and round; ``warmup`` rounds before them are not counted.

    The order is drawn for each round, the same on all ranks.
    """
    found: Times = {name: [] for name in turns}
    draw = random.Random(0)
    for _ in range(warmup + rounds):
        for name in draw.sample(list(turns), len(turns)):
            found[name].append(turns[name]())
    return {name: each[warmup:] for name, each in found.items()}


def cpu_us(turn: Callable[[], None], iterations: int) -> Callable[[], float]:
    """Microseconds of this process's CPU for each of the ``iterations`` that a turn does."""

    def timed() -> float:
        since = time.process_time()
        turn()
        return (time.process_time() - since) / iterations * 1e6

    return timed


class TimedBatches:
    """Data that times its pass, from the second group to the last: no run's start, first iteration or end.

    Args:
        batches: of at least three groups.
        group: micro-batches of an update; an engine may fetch them together.
        clock: in seconds.

    Attributes:
        seconds: of the last pass, per batch.
    """

    def __init__(self, batches: list[Batch], group: int, clock: Callable[[], float]) -> None:
        self.batches, self.group, self.clock, self.seconds = batches, group, clock, 0.0

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Batch]:
        since, last = 0.0, len(self.batches) - self.group
        for index, batch in enumerate(self.batches):
            if index == self.group:
                since = self.clock()
            if index == last:
                self.seconds = (self.clock() - since) / (last - self.group)
            yield batch


def on_ranks(ranks: int, work: Callable[..., Times], *arguments: Any) -> Times:
    """What ``work(*arguments)`` returns on rank 0 of so many gloo processes, of one thread each; one is this process.

    Args:
        work: a function at the top level of a module.
    """
    if ranks == 1:
        torch.set_num_threads(1)
        return work(*arguments)
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_rank, (ranks, folder, work, arguments), nprocs=ranks)  # type: ignore[attr-defined,no-untyped-call]
        found: Times = json.loads((Path(folder) / "found.json").read_text())
        return found


def _rank(rank: int, ranks: int, folder: str, work: Callable[..., Times], arguments: tuple[Any, ...]) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"  # for those that set the threads themselves
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    found = work(*arguments)
    if rank == 0:
        (Path(folder) / "found.json").write_text(json.dumps(found))
    agreement.forget_groups()
    dist.destroy_process_group()
