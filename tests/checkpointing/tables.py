"""A model with a large table, the state of its optimizer and what is small, saved by the rows that changed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ignite_engine.checkpointing import CheckpointStore
from ignite_engine.checkpointing.changed_rows import ChangedRows
from ignite_engine.checkpointing.contents import Extracted
from ignite_engine.checkpointing.nested import replaced
from ignite_engine.checkpointing.plain_data import tensors_of
from ignite_engine.checkpointing.shards import Shards

KINDS = {"model": "model", "optimizer": "optimizer", "ema": "average"}
ROWS = 200


def parts(iteration: int, rows: int = ROWS) -> dict[str, Any]:
    """A function of the iteration, at which rows ``iteration % 7``, ... of all tables differ from those of the last."""
    table, sums = torch.arange(rows * 5.0).reshape(rows, 5), torch.zeros(rows)
    for step in range(1, iteration + 1):
        table[step % 7 :: 40] += step
        sums[step % 7 :: 40] += step
    options = {"lr": 0.1, "params": ["table.weight", "head.weight"]}
    head = torch.full((3, 3), float(iteration))
    return {
        "model": {"table.weight": table, "head.weight": head},
        "optimizer": {
            "state": {"table.weight": {"sum": sums, "step": torch.tensor(float(iteration))}, "head.weight": {}},
            "param_groups": [options],
        },
        "ema": {"updates": iteration, "weights": {"table.weight": table / 2}},
        "counters": {"iteration": iteration},
    }


class Saving:
    """What a process that saves keeps between its saves."""

    def __init__(self, directory: Path, *patterns: str) -> None:
        self.store = CheckpointStore(directory)
        self.changed = ChangedRows(directory, patterns or ["table.*"])

    def save(
        self, iteration: int, state: dict[str, Any] | None = None, *, writers: int | None = None, **options: Any
    ) -> Path:
        state = parts(iteration) if state is None else state
        placeholders, tables = self.changed.take(state, tensors_of(state), KINDS, iteration=iteration)
        shared = replaced(state, placeholders)
        path = self.store.save(
            shared, {}, iteration=iteration, epoch=1, extracted=Extracted(Shards(), tables, writers), **options
        )
        self.changed.committed(path)
        return path

    def needs(self) -> dict[int, list[int]]:
        """By iteration of what is on disk, in the order of saves: the iterations that it needs."""
        return {
            each.iteration: [int(name[10:18]) for name in each.manifest.needed] for each in self.store.checkpoints()
        }


def loaded(path: Path) -> dict[str, Any]:
    return CheckpointStore(path.parent).load(path).shared


def holds(path: Path, iteration: int) -> bool:
    """Whether a checkpoint gives back exactly the bits of that iteration."""
    return same(loaded(path), parts(iteration))


def same(first: Any, second: Any) -> bool:
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(same(first[key], second[key]) for key in first)
    if isinstance(first, Tensor):
        return first.dtype == second.dtype and first.shape == second.shape and bits(first) == bits(second)
    return bool(first == second)


def bits(tensor: Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
