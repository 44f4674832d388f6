"""What is written and read where large tables are saved by the rows that changed, beside full checkpoints.

    python -m benchmarks.delta_saves [--mib 1024] [--columns 32] [--touched 0.05] [--rounds 7] [--threads 1]
                                     [--writers 1] [--directory DIR] [--json PATH]

One process. A table and the state that a row-wise optimizer keeps of it; before each save a share of the rows changes.
By turns it is saved by rows and in full, until the chain is as long as it gets. Then, by turns, both are restored as a
process does that resumes: the newest valid checkpoint is looked for, which verifies it, and loaded. See
``benchmarks/README.md``.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.goals import Goal
from benchmarks.machine import machine
from benchmarks.ratios import ratio_of_medians
from ignite_engine.checkpointing import CheckpointStore, Retention, read_manifest
from ignite_engine.checkpointing.changed_rows import ChangedRows
from ignite_engine.checkpointing.comparison import compare
from ignite_engine.checkpointing.contents import Extracted
from ignite_engine.checkpointing.nested import replaced
from ignite_engine.checkpointing.plain_data import tensors_of
from ignite_engine.checkpointing.shards import Shards

BYTES_GOAL, RESTORE_GOAL = 10.0, 2.0
KINDS = {"model": "model", "optimizer": "optimizer"}


class Tables:
    """A table, the state of its optimizer, and what else a small model has.

    Args:
        mib: size of the table.
        columns: of its rows, of 4 bytes each.
    """

    def __init__(self, mib: int, columns: int) -> None:
        self.rows = mib * (1 << 20) // (4 * columns)
        self.table, self.sums = torch.randn(self.rows, columns), torch.rand(self.rows)
        self.dense = torch.randn(256, 256)

    def state(self) -> dict[str, Any]:
        options = {"lr": 0.1, "params": ["table.weight"]}
        return {
            "model": {"table.weight": self.table, "head.weight": self.dense},
            "optimizer": {"state": {"table.weight": {"sum": self.sums}}, "param_groups": [options]},
        }

    def train(self, touched: float) -> None:
        """Change so many of the rows."""
        chosen = torch.randperm(self.rows)[: int(touched * self.rows)]
        self.table[chosen] += 0.1
        self.sums[chosen] += 1.0
        self.dense += 0.1


class Saves:
    """Both ways to save, each in its folder."""

    def __init__(self, directory: Path, tables: Tables, writers: int) -> None:
        self.tables, self.writers = tables, writers
        self.stores = {name: CheckpointStore(directory / name) for name in ("full", "rows")}
        self._changed = ChangedRows(self.stores["rows"].directory, ["table.*"])
        self.taking: list[float] = []
        """Seconds of comparing and copying, by save of rows."""

    def save(self, name: str, iteration: int) -> tuple[float, Path]:
        """Seconds until it is on disk, and where."""
        store, began = self.stores[name], time.perf_counter()
        if name == "full":
            path = store.save(
                self.tables.state(), {}, iteration=iteration, epoch=1, extracted=Extracted(writers=self.writers)
            )
            seconds = time.perf_counter() - began
            store.apply(Retention(keep_last=1))
            return seconds, path
        state = self.tables.state()
        placeholders, taken = self._changed.take(state, tensors_of(state), KINDS, iteration=iteration)
        parts = replaced(state, placeholders)
        self.taking.append(time.perf_counter() - began)
        path = store.save(parts, {}, iteration=iteration, epoch=1, extracted=Extracted(Shards(), taken, self.writers))
        self._changed.committed(path)
        return time.perf_counter() - began, path

    def bytes(self, name: str) -> int:
        """Of the newest one, without what it needs."""
        return sum(file.bytes for file in self.stores[name].checkpoints()[-1].manifest.files.values())

    def restore(self, name: str) -> tuple[float, dict[str, Any]]:
        """Seconds, and the parts, as a new process reads them."""
        store, began = CheckpointStore(self.stores[name].directory), time.perf_counter()
        newest = store.latest().checkpoint
        assert newest is not None
        loaded = store.load(newest.path).shared
        return time.perf_counter() - began, loaded


@dataclass
class Measured:
    """Seconds and bytes by kind of checkpoint: ``full``, ``rows``, and ``base``, with which a chain begins."""

    seconds: dict[str, list[float]] = field(default_factory=lambda: {"full": [], "rows": [], "base": []})
    bytes: dict[str, list[int]] = field(default_factory=lambda: {"full": [], "rows": [], "base": []})
    taking: list[float] = field(default_factory=list)
    restoring: dict[str, list[float]] = field(default_factory=lambda: {"full": [], "rows": []})
    same_bits: bool = True


def measure(directory: Path, tables: Tables, touched: float, rounds: int, writers: int) -> Measured:
    """Save until the second base is due, then restore what there is before it."""
    saves, found, iteration = Saves(directory, tables, writers), Measured(), 0
    while True:
        iteration += 1
        tables.train(touched)
        seconds, path = saves.save("rows", iteration)
        kind = "rows" if read_manifest(path).needs else "base"
        if kind == "base" and iteration > 1:
            shutil.rmtree(path)
            break
        for name, took in ((kind, seconds), ("full", saves.save("full", iteration)[0])):
            found.seconds[name].append(took)
            found.bytes[name].append(saves.bytes("full" if name == "full" else "rows"))
    found.taking = saves.taking[1:-1]
    for _ in range(rounds):
        restored = {name: saves.restore(name) for name in random.sample(["full", "rows"], 2)}
        for name, (seconds, _) in restored.items():
            found.restoring[name].append(seconds)
        found.same_bits &= all(part.same for part in compare(restored["full"][1], restored["rows"][1]))
    return found


def report(found: Measured) -> list[Goal]:
    """Print the figures."""
    mib = {name: median(values) / 2**20 for name, values in found.bytes.items()}
    for name, seconds in found.seconds.items():
        print(f"{name}: {len(seconds)} saves, median {mib[name]:,.1f} MiB in {median(seconds):.2f} s")
    print(f"of a save of rows, to find and copy them: {median(found.taking):.2f} s")
    written = [*found.bytes["base"], *found.bytes["rows"]]
    fewer = mib["full"] / mib["rows"]
    with_base = median(found.bytes["full"]) * len(written) / sum(written)
    print(f"bytes: {fewer:.1f} times fewer (goal {BYTES_GOAL:.0f}); with the base of the chain {with_base:.1f} times")
    for name, seconds in found.restoring.items():
        print(f"restored from {name}: {median(seconds):.2f} s")
    ratio = ratio_of_medians(found.restoring["rows"], found.restoring["full"])
    print(f"rows to full: {ratio}, goal {RESTORE_GOAL:.0f}; the same bits: {found.same_bits}")
    return [
        Goal("bytes of a save of changed rows / in full", 1 / fewer, 1 / BYTES_GOAL),
        Goal.of("restored from changed rows / from a full checkpoint", ratio, RESTORE_GOAL),
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code: 1 if other bits were restored."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mib", type=int, default=1024, help="size of the table")
    parser.add_argument("--columns", type=int, default=32, help="of the table")
    parser.add_argument("--touched", type=float, default=0.05, help="share of the rows that change before each save")
    parser.add_argument("--rounds", type=int, default=7, help="of restoring")
    parser.add_argument("--threads", type=int, default=1, help="of torch")
    parser.add_argument("--writers", type=int, default=1, help="of both kinds of saves")
    parser.add_argument("--directory", type=Path, help="default: a temporary folder")
    parser.add_argument("--json", type=Path, help="write every figure there")
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory(dir=options.directory) as directory:
        tables = Tables(options.mib, options.columns)
        found = measure(Path(directory), tables, options.touched, options.rounds, options.writers)
    goals = report(found)
    if options.json:
        rows = [asdict(each) for each in goals]
        options.json.write_text(json.dumps({"machine": machine(), **asdict(found), "goals": rows}, indent=2))
    return 0 if found.same_bits else 1


if __name__ == "__main__":
    sys.exit(main())
