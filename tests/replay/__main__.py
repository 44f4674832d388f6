"""Time travel tried at random and at length: ``python -m tests.replay [SECTION ...] [--trials N]``.

A section prints a line for each trial that failed, and rows for the table of ``docs/time_travel.md``; code 1 if any.
``tests/replay/test_trials.py`` runs a few of each.
"""

from __future__ import annotations

import argparse
import logging
import random
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.replay.trials import SECTIONS, Trial


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.replay")
    parser.add_argument("sections", nargs="*", choices=[*SECTIONS, []], help="default: all")
    parser.add_argument("--trials", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    logging.disable(logging.WARNING)
    failed = 0
    for name in options.sections or SECTIONS:
        with tempfile.TemporaryDirectory(prefix=f"replay-{name}-") as folder:
            failed += _section(name, SECTIONS[name], Path(folder), random.Random(options.seed), options.trials)
    return int(failed > 0)


def _section(
    name: str,
    trials: Callable[[Path, random.Random, int], Iterator[Trial]],
    folder: Path,
    draw: random.Random,
    count: int,
) -> int:
    results: dict[str, list[Trial]] = {}
    for trial in trials(folder, draw, count):
        results.setdefault(trial.kind, []).append(trial)
        if trial.problem is not None:
            print(f"{name}: {trial.kind}: {trial.problem}", flush=True)
    for kind, of_kind in results.items():
        right = sum(trial.problem is None for trial in of_kind)
        replayed = sum(trial.replayed for trial in of_kind) / len(of_kind)
        print(f"| {name}: {kind} | {right} of {len(of_kind)} | {replayed:.1f} |", flush=True)
    return sum(trial.problem is not None for of_kind in results.values() for trial in of_kind)


if __name__ == "__main__":
    sys.exit(main())
