"""A run that logs once in 100,000 iterations: its memory, and what a save costs just before it logs.

    python -m benchmarks.long_interval [--iterations N] [--saves N] [--json PATH]

See ``benchmarks/README.md``.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
import time
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import torch
from ignite.engine import Events
from torch import Tensor, nn

from benchmarks.goals import Goal, print_goals
from benchmarks.machine import machine
from benchmarks.ratios import ratio_of_medians
from ignite_engine import Trainer, TrainingEvents, Update
from ignite_engine.handlers import Checkpoint, MetricLogger

RSS_GOAL_MIB, SAVE_GOAL = 2.0, 1.1
GROWTH_GOAL_KIB = 4.0
"""Values of up to 64 iterations are kept until they are one sum."""
FIRST, LAST = "first iterations", "last iterations"


class Repeated:
    """As many batches as an epoch has, of which two are kept."""

    def __init__(self, iterations: int) -> None:
        torch.manual_seed(0)
        self.iterations, self.batches = iterations, [torch.randn(4, 8) for _ in range(2)]

    def __len__(self) -> int:
        return self.iterations

    def __iter__(self) -> Iterator[Tensor]:
        return (self.batches[index % 2] for index in range(self.iterations))


@dataclass
class Measured:
    """``save_s`` and ``bytes``: of the saves in the first iterations, and in the last before the log point."""

    save_s: dict[str, list[float]] = field(default_factory=lambda: {FIRST: [], LAST: []})
    bytes: dict[str, list[int]] = field(default_factory=lambda: {FIRST: [], LAST: []})
    rss_mib: list[float] = field(default_factory=list)
    logged: list[float] = field(default_factory=list)
    loss_mean: float = 0.0
    """Of all iterations, added up exactly by the benchmark."""


def measure(iterations: int, saves: int, directory: Path) -> Measured:
    """One epoch of ``iterations``, with ``saves`` after the first and as many before the last.

    The memory is read after each tenth of the run but the last, which ends with the log point.

    Raises:
        RuntimeError: the run logged something else than the mean of all its losses.
    """
    found = Measured()
    torch.manual_seed(0)
    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    update = Update(model, optimizer, lambda model, batch: model(batch).square().mean(), clip_norm=1.0)
    trainer = Trainer(update)
    MetricLogger(console=False).attach(trainer, Events.ITERATION_COMPLETED(every=iterations))
    trainer.add_event_handler(TrainingEvents.METRICS_READY, lambda: found.logged.append(trainer.state.metrics["loss"]))
    began = 0.0
    losses = array("d", bytes(8 * iterations))  # a list would grow by a number for each iteration

    def before() -> None:
        nonlocal began
        began = time.perf_counter()

    def after() -> None:
        took, iteration = time.perf_counter() - began, trainer.state.iteration
        losses[iteration - 1] = _loss_of(trainer)
        if iteration <= saves or iterations - saves <= iteration < iterations:
            when = FIRST if iteration <= saves else LAST
            saved = trainer.state.checkpoint_path
            assert saved is not None
            found.save_s[when].append(took)
            found.bytes[when].append(sum(path.stat().st_size for path in saved.iterdir()))
        elif iteration % (iterations // 10) == 0 and iteration < iterations:
            found.rss_mib.append(psutil.Process().memory_info().rss / 2**20)

    def due(engine: Any, iteration: int) -> bool:
        return iteration <= saves or iterations - saves <= iteration < iterations

    trainer.add_event_handler(TrainingEvents.RESUME_POINT, before)
    checkpoint = Checkpoint(directory / "checkpoints", save_at_end=False)
    checkpoint.attach(trainer, Events.ITERATION_COMPLETED(event_filter=due))
    trainer.add_event_handler(TrainingEvents.RESUME_POINT, after)
    trainer.run(Repeated(iterations), max_epochs=1)
    found.loss_mean = math.fsum(losses) / iterations
    if len(found.logged) != 1 or not math.isclose(found.logged[0], found.loss_mean, rel_tol=1e-4):
        raise RuntimeError(f"Logged {found.logged}, where the mean of all losses is {found.loss_mean}.")
    return found


def _loss_of(trainer: Trainer) -> float:
    output: Any = trainer.state.output
    return float(output["loss"])


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the figures, write the JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.long_interval", description=__doc__.split("\n")[0])
    parser.add_argument("--iterations", type=int, default=100_000, help="of the run, which logs once, at its end")
    parser.add_argument("--saves", type=int, default=20, help="at its start, and at its end")
    parser.add_argument("--directory", type=Path, help="to save in; default: a temporary folder")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    if options.saves < 1 or options.iterations < max(100, 10 * options.saves):
        parser.error(
            f"--iterations must be at least 100 and ten times --saves, got {options.iterations} and {options.saves}."
        )
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=options.directory) as folder:
        found = measure(options.iterations, options.saves, Path(folder))
    print(f"{machine()}\n{options.iterations} iterations, one log point, {options.saves} saves at both ends")
    print("memory, MiB, by tenths of the run: " + " ".join(f"{each:.1f}" for each in found.rss_mib))
    for when, seconds in found.save_s.items():
        print(f"{when}: a save {1e3 * median(seconds):.1f} ms, {median(found.bytes[when]):,.0f} bytes")
    took = ratio_of_medians(found.save_s[LAST], found.save_s[FIRST])
    goals = [
        Goal("memory that a long log interval adds, MiB", found.rss_mib[-1] - found.rss_mib[0], RSS_GOAL_MIB),
        Goal("KiB that a save before the log point has more than the first", _growth_kib(found.bytes), GROWTH_GOAL_KIB),
        Goal.of("save before the log point / at first", took, SAVE_GOAL),
    ]
    print_goals(goals)
    if options.json is not None:
        report = {"machine": machine(), **asdict(found), "goals": [asdict(each) for each in goals]}
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0


def _growth_kib(sizes: Mapping[str, Sequence[float]]) -> float:
    return (max(sizes[LAST]) - min(sizes[FIRST])) / 2**10


if __name__ == "__main__":
    sys.exit(main())
