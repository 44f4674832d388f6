"""Small states to save, each a function of the iteration so that a test can tell one from another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from ignite_engine.checkpointing import CheckpointStore


def shared_parts(iteration: int, size: int = 300) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(iteration)
    return {
        "model": {"weight": torch.randn(size, 100, generator=generator), "bias": torch.randn(3, generator=generator)},
        "counters": {"iteration": iteration},
    }


def local_parts(iteration: int, rank: int = 0) -> dict[str, Any]:
    return {"rng": {"torch": torch.full((8,), 1000 * rank + iteration, dtype=torch.int64)}}


def save(store: CheckpointStore, iteration: int, *, size: int = 300, **options: Any) -> Path:
    return store.save(shared_parts(iteration, size), local_parts(iteration), iteration=iteration, epoch=1, **options)


def holds(store: CheckpointStore, path: Path, iteration: int, size: int = 300) -> bool:
    """Whether a checkpoint loads with exactly the bits that were saved at that iteration."""
    loaded = store.load(path)
    shared = shared_parts(iteration, size)
    return (
        loaded.manifest.iteration == loaded.shared["counters"]["iteration"] == iteration
        and all(torch.equal(loaded.shared["model"][name], shared["model"][name]) for name in shared["model"])
        and torch.equal(loaded.local["rng"]["torch"], local_parts(iteration)["rng"]["torch"])
    )


def left_over(directory: Path) -> list[str]:
    """Names in a store's directory that are no committed checkpoint."""
    return sorted(each.name for each in directory.iterdir() if not each.name.startswith("iteration_"))
