"""What a follower costs training: the time of an iteration while another process evaluates each checkpoint.

    python -m benchmarks.follower [--rounds N] [--iterations N] [--mib N] [--json PATH]

By turns a run saves each 50 iterations with a follower, which always has something to evaluate, and without. Training
has the first core, the follower the second. See ``benchmarks/README.md``.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median

import torch
from ignite.engine import Events
from ignite.metrics import Average

from benchmarks.beside import in_child, measured, model_of, pin, width_of
from benchmarks.goals import Goal, print_goals
from benchmarks.machine import machine
from benchmarks.ratios import ratio_of_medians
from benchmarks.turns import take_turns
from ignite_engine import Trainer, Update, create_evaluator, loader
from ignite_engine.ext.follow import follow
from ignite_engine.handlers import Evaluation
from ignite_engine.text import lines_of

GOAL = 1.01
WITH, WITHOUT = "with a follower", "without"


def follower(run: Path, mib: float, batches: int) -> None:
    """Evaluate what the run saves."""
    logging.disable(logging.WARNING)
    pin(os.getpid(), 1)
    torch.set_num_threads(1)

    def build() -> Trainer:
        model = model_of(mib)
        update = Update(model, torch.optim.AdamW(model.parameters()), lambda model, batch: model(batch).mean())
        trainer = Trainer(update)
        evaluator = create_evaluator(model, lambda model, batch: model(batch[0]).square().mean(), {"loss": Average()})
        data = loader(torch.utils.data.TensorDataset(torch.randn(32 * batches, width_of(model))), batch_size=32)
        Evaluation(evaluator, data).attach(trainer, Events.COMPLETED)
        return trainer

    follow(run, build, wait_s=60)


def beside(folder: Path, iterations: int, mib: float, batches: int) -> tuple[float, int]:
    """Mean seconds of an iteration with a follower, and how many checkpoints it has evaluated meanwhile."""
    run = folder / "run"
    process = in_child(lambda: follower(run, mib, batches))
    try:
        while not (run / "follow" / ".lock").exists():  # it is ready, and waits for the run
            if os.waitpid(process, os.WNOHANG)[0]:
                raise RuntimeError("The follower has ended.")
            time.sleep(0.02)
        seconds = measured(run / "checkpoints", iterations, mib)["mean"]
        return seconds, len(list(lines_of(run / "follow" / "metrics.jsonl")))
    finally:
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure by turns, print, and write the report."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.follower")
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--iterations", type=int, default=900)
    parser.add_argument("--mib", type=float, default=16.0, help="size of a checkpoint")
    parser.add_argument("--batches", type=int, default=60, help="of an evaluation")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    evaluated: list[int] = []

    def run(kind: str) -> float:
        with tempfile.TemporaryDirectory() as folder:
            if kind == WITHOUT:
                return measured(Path(folder) / "checkpoints", options.iterations, options.mib)["mean"]
            seconds, count = beside(Path(folder), options.iterations, options.mib, options.batches)
            evaluated.append(count)
            return seconds

    times = take_turns({kind: (lambda kind=kind: run(kind)) for kind in (WITH, WITHOUT)}, options.rounds, warmup=1)  # type: ignore[misc]  # binds it
    goals = [Goal.of("iteration with a follower / without", ratio_of_medians(times[WITH], times[WITHOUT]), GOAL)]
    for kind, values in times.items():
        print(f"{kind:15} {1e3 * median(values):.3f} ms an iteration")
    print(f"evaluated beside a run: {median(evaluated):g} checkpoints")
    print_goals(goals)
    if options.json:
        report = {
            "machine": machine(),
            "options": {**vars(options), "json": None},
            "times": times,
            "evaluated": evaluated,
            "goals": [asdict(goal) for goal in goals],
        }
        options.json.write_text(json.dumps(report, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
