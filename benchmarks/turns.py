"""Contenders that take turns in one process, or in the same processes on several ranks."""

from __future__ import annotations

import json
import random
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

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


def on_ranks(ranks: int, work: Callable[..., Times], *arguments: Any) -> Times:
    """What ``work(*arguments)`` returns on rank 0 of so many gloo processes, of one thread each.

    Args:
        work: a function at the top level of a module.
    """
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_rank, (ranks, folder, work, arguments), nprocs=ranks)  # type: ignore[attr-defined,no-untyped-call]
        found: Times = json.loads((Path(folder) / "found.json").read_text())
        return found


def _rank(rank: int, ranks: int, folder: str, work: Callable[..., Times], arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    if ranks > 1:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    found = work(*arguments)
    if rank == 0:
        (Path(folder) / "found.json").write_text(json.dumps(found))
    if ranks > 1:
        agreement.forget_groups()
        dist.destroy_process_group()
