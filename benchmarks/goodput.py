"""How much of the time a run trains whose ranks are killed again and again, and whether it ends with the same bits.

    python -m benchmarks.goodput [--minutes 10] [--every 15] [--json PATH]

Two runs of a small GPT on 2 ranks with ``--restarts`` and a copy in memory after each iteration: one that nobody
disturbs, and one of which one rank or both get SIGKILL at random instants, ``--every`` seconds apart in the mean.
Printed are the goodput (the time that the undisturbed run takes for its iterations, as a share of the killed one's),
the time from each kill to the first new update, and both digests.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import yaml

ROOT = Path(__file__).resolve().parents[1]
GOAL = 0.95
RANKS, SECONDS_BEFORE = 2, 20.0
BOTH = 0.3
"""The share of kills that kill both ranks."""
LOOK_S = 0.005


@dataclass
class Measured:
    """What one run has come to.

    Attributes:
        seconds: from the start of the first rank to the end of the last one. The parent imports before, and ends after.
        points: seconds since the start of the command, and the iteration that had been done.
        kills: seconds since then, and the ranks that were killed.
        recovered: from each kill to the first new update; kills before it count with the first.
    """

    seconds: float
    summary: Mapping[str, Any]
    points: list[tuple[float, int]]
    kills: list[tuple[float, int]] = field(default_factory=list)
    recovered: list[float] = field(default_factory=list)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, and return 1 where a goal is missed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.goodput", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0, help="of the run that is killed, default 10")
    parser.add_argument("--every", type=float, default=15.0, help="seconds between kills in the mean, default 15")
    parser.add_argument("--seed", type=int, default=0, help="of the instants")
    parser.add_argument("--json", type=Path, help="write what was measured there")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        first = measure(Path(folder) / "first", 1000, until_s=SECONDS_BEFORE)
        (began, before), (ended, after) = first.points[len(first.points) // 3], first.points[-1]
        iterations = max(round(60 * options.minutes * (after - before) / (ended - began) * 0.95), 20)
        print(f"{iterations} iterations of {1000 * (ended - began) / (after - before):.0f} ms.", flush=True)
        killed = measure(Path(folder) / "killed", iterations, every_s=options.every, draw=random.Random(options.seed))
        whole = measure(Path(folder) / "whole", iterations)
    rows = table(killed, whole)
    for name, value in rows.items():
        print(f"{name:48} {value}")
    if options.json is not None:
        values = {"killed": vars(killed), "whole": vars(whole)}
        options.json.write_text(json.dumps(values, indent=1) + "\n")
    reached = goodput(killed, whole) >= GOAL
    return int(not reached or killed.summary["weights_sha256"] != whole.summary["weights_sha256"])


def update_s(whole: Measured) -> float:
    """Seconds of an update that nobody disturbs."""
    (began, before), (ended, after) = whole.points[0], whole.points[-1]
    return (ended - began) / (after - before)


def goodput(measured: Measured, whole: Measured) -> float:
    """The share of the time in which updates were done that were kept, 0 to 1."""
    return float(measured.summary["iteration"]) * update_s(whole) / measured.seconds


def bound(killed: Measured) -> float:
    """The goodput that theory gives for these failures and saves on disk.

    Source: Young 1974, Communications of the ACM 17(9); Daly 2006, Future Generation Computer Systems 22(3).
    """
    if not killed.kills:
        return 1.0
    between_s, save_s = killed.seconds / len(killed.kills), killed.summary["checkpoints"]["save_s"] or 0.0
    return 1.0 - math.sqrt(2 * save_s / between_s) - sum(killed.recovered) / killed.seconds


def table(killed: Measured, whole: Measured) -> dict[str, str]:
    """What was measured, as text."""
    same = killed.summary["weights_sha256"] == whole.summary["weights_sha256"]
    both = sum(ranks > 1 for _, ranks in killed.kills)
    lost_s = killed.seconds - whole.seconds
    return {
        "SIGKILLs": f"{len(killed.kills)} in {killed.seconds / 60:.1f} min, {both} of both ranks",
        "an update": f"{1000 * update_s(whole):.0f} ms",
        "goodput": f"{100 * goodput(killed, whole):.1f} % (undisturbed: {100 * goodput(whole, whole):.1f} %)",
        "lost to the failures": f"{100 * lost_s / killed.seconds:.1f} %, "
        f"{lost_s / max(len(killed.kills), 1):.2f} s each",
        "from SIGKILL to the first new update": f"{median(killed.recovered or [0.0]):.2f} s in the median, "
        f"{max(killed.recovered or [0.0]):.2f} s at most",
        "bound of Young and Daly, saves on disk": f"{100 * bound(killed):.1f} %",
        "final weights": "the bits of the undisturbed run" if same else "OTHER BITS than the undisturbed run",
    }


# -- runs -------------------------------------------------------------------------------------------------------------


def measure(
    folder: Path, iterations: int, *, every_s: float | None = None, draw: Any = None, until_s: float | None = None
) -> Measured:
    """Run to the end, or so many seconds.

    Args:
        every_s: seconds between kills in the mean; None: none.
    """
    folder.mkdir()
    config = folder / "config.yaml"
    config.write_text(yaml.safe_dump(settings(folder, iterations)))
    command = [sys.executable, "-m", "ignite_engine", "train", str(config), "--restarts", "10000"]
    began = time.time()
    with subprocess.Popen(
        [*command, "--nproc-per-node", str(RANKS)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stderr=(folder / "errors.txt").open("w"),
    ) as process:
        result = follow(process, folder, began, iterations, every_s, draw, until_s)
    if process.returncode and until_s is None:
        print((folder / "errors.txt").read_text()[-4000:], file=sys.stderr)
        raise SystemExit(f"the run ended with code {process.returncode}")
    result.summary = json.loads((folder / "run" / "summary.json").read_text())
    return result


def follow(
    process: subprocess.Popen[bytes],
    folder: Path,
    began: float,
    iterations: int,
    every_s: float | None,
    draw: Any,
    until_s: float | None,
) -> Measured:
    """Watch the run, and kill what is to be killed."""
    result, newest, at_kill = Measured(0.0, {}, []), (0, 0), (0, 0)
    first: list[psutil.Process] = []
    started, next_kill, killed_at = 0.0, float("inf"), 0.0
    while process.poll() is None:
        if not first and (first := ranks_of(process)):
            started = min(rank.create_time() for rank in first)
        pid, iteration, done_at = progress(folder)
        if (pid, iteration) != newest and iteration:
            newest = (pid, iteration)
            result.points.append((done_at - began, iteration))
            if killed_at and pid != at_kill[0] and iteration > at_kill[1]:
                result.recovered.append(done_at - killed_at)
                killed_at = 0.0
            if every_s is not None and not killed_at and next_kill == float("inf"):
                # not sooner than it trains: an iteration at which a rank dies twice ends the run
                since = began + result.kills[-1][0] if result.kills else time.time()
                next_kill = max(time.time() + 1.0, since + draw.expovariate(1 / every_s))
        if iteration >= iterations and not result.seconds and not ranks_of(process):
            result.seconds = time.time() - started
        if until_s is not None and time.time() - began > until_s + 5.0:
            process.send_signal(signal.SIGTERM)
            until_s = None
        if time.time() >= next_kill and (ranks := ranks_of(process)):
            chosen = ranks if draw.random() < BOTH else [draw.choice(ranks)]
            at_kill, killed_at, next_kill = newest, time.time(), float("inf")
            for rank in chosen:
                rank.kill()
            result.kills.append((killed_at - began, len(chosen)))
        time.sleep(LOOK_S)
    return result


def ranks_of(process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    """The ranks, or none where not all of them live."""
    try:
        children = psutil.Process(process.pid).children()
        ranks = [child for child in children if "resource_tracker" not in " ".join(child.cmdline())]
    except psutil.Error:  # one has ended meanwhile
        return []
    return ranks if len(ranks) == RANKS else []


def progress(folder: Path) -> tuple[int, int, float]:
    """The process, the iteration and the time of rank 0's newest update."""
    try:
        pid, iteration, at = (folder / "progress").read_text().split()
        return int(pid), int(iteration), float(at)
    except (FileNotFoundError, ValueError):
        return 0, 0, 0.0


def settings(folder: Path, iterations: int) -> dict[str, Any]:
    """Of a run whose directory is ``folder/run``."""
    return {
        "task": f"{Path(__file__)}:build",
        "task_options": {"progress": str(folder / "progress")},
        "run": {"directory": str(folder / "run"), "max_iterations": iterations, "seed": 1, "threads": 1},
        "data": {"batch_size": 36},
        "optimizer": {"name": "AdamW", "lr": 0.001, "fused": True},
        "update": {"clip_norm": 1.0},
        "handlers": {
            "Checkpoint": {"every": {"minutes": 1}, "memory": 1, "keep_last": 2},
            "MetricLogger": {"every": 50, "console": False},
            "MemoryLogger": {},
            "Throughput": {},
            "StepTimes": {},
            "Progress": None,
        },
    }


def build(options: Mapping[str, Any]) -> Any:
    """The task: a GPT of 4 layers over random bytes, with dropout; rank 0 says which update it has done."""
    import torch
    from ignite.engine import Events
    from torch.utils.data import TensorDataset

    from benchmarks.gpt import GPT, Shape
    from ignite_engine import Task
    from ignite_engine.ranks import agreement

    file = os.open(options["progress"], os.O_WRONLY | os.O_CREAT, 0o644)

    def say(trainer: Any) -> None:
        if agreement.rank() == 0:
            os.pwrite(file, f"{os.getpid()} {trainer.state.iteration} {time.time():.4f}".ljust(64).encode(), 0)

    data = torch.randint(0, 256, (4096, 257), generator=torch.Generator().manual_seed(1))
    return Task(
        model=GPT(Shape(layers=4, heads=4, width=64, context=256, vocabulary=256), dropout=0.1),
        loss_fn=lambda model, batch: model(batch[0], batch[1]),
        train_set=TensorDataset(data[:, :-1], data[:, 1:]),
        handlers=[(say, Events.ITERATION_COMPLETED)],
    )


if __name__ == "__main__":
    sys.exit(main())
