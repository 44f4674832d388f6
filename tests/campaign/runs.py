"""Whole runs from a config, in separate processes: train, kill, resume, compare with the uninterrupted run."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ignite_engine.checkpointing import CheckpointStore
from ignite_engine.checkpointing.digests import digests
from ignite_engine.checkpointing.filesystem import LOCK_NAME
from tests.campaign.resuming import Difference
from tests.faults.fork_server import ForkServer
from tests.faults.processes import write_config_like

HERE = Path(__file__).parent
MAIN = "ignite_engine.cli:main"
ITERATIONS = 16
QUIET = dict.fromkeys(["console", "progress", "memory", "throughput", "clearml", "report"], False)
CONFIG: dict[str, Any] = {
    "task": f"{HERE / 'task.py'}:build",
    "run": {"max_epochs": 4, "seed": 3, "threads": 1},
    "data": {"batch_size": 4, "num_workers": 0},  # 12 batches, the last one short
    "optimizer": {"name": "AdamW", "lr": 0.01},
    "schedule": {"name": "cosine", "warmup": 3},
    "update": {"precision": "bf16", "accumulation_steps": 3, "clip_norm": 1.0},  # 4 updates an epoch
    "evaluation": {"every": {"epochs": 1}},
    "ema": {"decay": 0.8},
    "checkpoint": {"every": 3, "keep_last": 2, "best": "val/accuracy", "mode": "max", "strict": True},
    "logging": {"every": 2, **QUIET},
}


@dataclass
class Bench:
    """Where the items of a campaign run.

    Attributes:
        folder: that of one item, empty at its start.
        servers: two, for the processes before and after a fault.
        kept: what later items need of earlier ones, by name.
    """

    folder: Path
    servers: tuple[ForkServer, ForkServer]
    kept: dict[str, Any]


@dataclass(frozen=True)
class Item:
    """One fault, and what must come of it; ``run`` returns facts to note, or raises ``Difference``."""

    section: str
    key: str
    run: Callable[[Bench], dict[str, Any]]


def write_config(folder: Path, **sections: Any) -> Path:
    """A config in ``folder`` whose run directory is ``folder/run``."""
    return write_config_like(CONFIG, folder, sections)


def train(bench: Bench, config: Path, *arguments: str, server: int = 0) -> int:
    """Run the command to its end, whatever that is; its exit code."""
    return bench.servers[server].call(MAIN, ["train", str(config), *arguments], output=config.parent / "output.txt")


def reference(bench: Bench, name: str, *arguments: str, **sections: Any) -> dict[str, Any]:
    """The result of the uninterrupted run; computed once and kept under ``name``."""
    if name not in bench.kept:
        folder = bench.folder / "reference"
        config = write_config(folder, **sections)
        if train(bench, config, *arguments) != 0:
            raise Difference(f"the uninterrupted run failed: {tail(folder)}")
        bench.kept[name] = end_of(folder)
        if bench.kept[name]["status"] != "completed":
            raise Difference(f"the uninterrupted run is {bench.kept[name]['status']}")
        shutil.rmtree(folder)
    end: dict[str, Any] = bench.kept[name]
    return end


def resume_and_compare(bench: Bench, config: Path, expected: dict[str, Any], *arguments: str) -> None:
    """Run the same command again, in another process; it must end as the uninterrupted run.

    Raises:
        Difference: it fails, or ends otherwise.
    """
    code = train(bench, config, *arguments, server=1)
    if code != 0:
        raise Difference(f"the resumed run ended with code {code}: {tail(config.parent)}")
    compare(expected, end_of(config.parent))


def compare(expected: dict[str, Any], found: dict[str, Any]) -> None:
    for name, value in expected.items():
        if value == found[name]:
            continue
        if isinstance(value, list):
            pairs = zip([*value, None], [*found[name], None], strict=False)
            raise Difference(f"{name}: expected, found: {next(pair for pair in pairs if pair[0] != pair[1])}")
        if isinstance(value, dict):
            keys = [key for key in {**value, **found[name]} if value.get(key) != found[name].get(key)]
            raise Difference(f"{name}: other {', '.join(keys[:5])}")
        raise Difference(f"{name}: expected {value}, found {found[name]}")


def end_of(folder: Path) -> dict[str, Any]:
    """Weights, every part of the last checkpoint, every line of the log, and how it ended."""
    run = folder / "run"
    summary = json.loads((run / "summary.json").read_text())
    newest = CheckpointStore(run / "checkpoints").latest()
    if newest.checkpoint is None or newest.checkpoint.iteration != summary["iteration"]:
        raise Difference(f"the newest checkpoint is {newest}, the run ended at iteration {summary['iteration']}")
    parts: dict[str, str] = {}
    for rank in range(newest.checkpoint.manifest.world_size):
        loaded = CheckpointStore(run / "checkpoints").load(newest.checkpoint.path, rank)
        parts |= {f"rank {rank}: {name}": value for name, value in digests({**loaded.shared, **loaded.local}).items()}
        del parts[f"rank {rank}: trainer.checkpoints"]  # a stop adds one
    return {
        "lines": (run / "metrics.jsonl").read_text().splitlines(),
        "weights": summary["weights_sha256"],
        "parts": parts,
        "status": summary["status"],
        "place": [summary[name] for name in ("iteration", "epoch", "reason", "optimizer_steps")],
    }


def newest_iteration(folder: Path) -> int | None:
    """Of the newest valid checkpoint; None if there is none.

    Raises:
        Difference: a committed checkpoint is not valid.
    """
    newest = CheckpointStore(folder / "run" / "checkpoints").latest()
    if newest.skipped:
        raise Difference(f"a committed checkpoint is not valid: {newest.skipped}")
    return newest.checkpoint.iteration if newest.checkpoint else None


def names_in(folder: Path) -> list[str]:
    """The entries of the folder of checkpoints, but for the lock that a killed run leaves."""
    directory = folder / "run" / "checkpoints"
    return sorted({each.name for each in directory.iterdir()} - {LOCK_NAME}) if directory.is_dir() else []


def committed_in(folder: Path) -> list[str]:
    """The names of the committed checkpoints; a killed run also leaves its lock, and perhaps a temporary folder."""
    return [name for name in names_in(folder) if name.startswith("iteration_")]


def tail(folder: Path) -> str:
    """The last lines that the processes printed."""
    output = folder / "output.txt"
    lines = output.read_text(errors="replace").strip().splitlines() if output.exists() else []
    return " / ".join(lines[-3:])
