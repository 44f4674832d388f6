"""Forgetting random sets of samples, compared with runs that have left them out from their start.

python -m tests.replay.forgetting [--sets 50] [--seed 0]
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ignite_engine import rng
from ignite_engine.config.load import config_from_dict, load_config
from ignite_engine.replay.forget import Forgetting, begin_to_forget, plan_to_forget
from ignite_engine.runs.recipe import build_run
from tests.builders import on_two_ranks

TASK = f"{Path(__file__).with_name('features.py')}:build"
SAMPLES, BATCH, STEPS, ITERATIONS = 240, 3, 2, 60
VARIANTS: list[dict[str, Any]] = [
    {},
    {"task_options": {"samples": SAMPLES, "layer_norm": True, "collate": True, "weights": "all"}},
    {"data": {"drop_last": True}, "update": {"precision": "bf16"}},
    {"task_options": {"samples": SAMPLES, "layer_norm": True, "batches": True}},
    {"update": {"accumulation_steps": None, "global_micro_batches": 4}},
    {"data": {"shuffle": False}, "ema": {"decay": 0.9}},
    {"update": {"accumulation_steps": None, "global_micro_batches": 4, "rank_invariant": True}},
]


def settings(directory: Path, variant: Mapping[str, Any], exclude: Path | None = None) -> dict[str, Any]:
    values: dict[str, Any] = {
        "task": TASK,
        "task_options": {"samples": SAMPLES, "layer_norm": True},
        "run": {"name": "run", "directory": str(directory), "max_iterations": ITERATIONS, "seed": 2},
        "data": {"batch_size": BATCH, "exclude": None if exclude is None else str(exclude)},
        "optimizer": {"name": "AdamW", "lr": 0.01},
        "schedule": {"name": "cosine", "warmup": 0.1},
        "update": {"accumulation_steps": STEPS, "clip_norm": 1.0},
        "evaluation": {"every": {"iterations": 20}, "sanity_batches": 0},
        "checkpoint": {"every": {"iterations": 5}, "keep_last": 100},
        "logging": {"every": {"iterations": 1}, "console": False, "progress": False, "report": False, "clearml": False},
    }
    values["logging"] |= {"memory": False, "throughput": False}
    for section, given in variant.items():
        values[section] = {**values.get(section, {}), **given}
    return values


def train(values: Mapping[str, Any]) -> None:
    build_run(config_from_dict(dict(values))).train()


def drawn_sets(number: int, seed: int) -> list[list[int]]:
    """A few samples, many, or all of a few batches or of an iteration in the order of the data."""
    draw = random.Random(seed)
    sets = []
    for kind in range(number):
        count = draw.choice([1, 2, 5, 40])
        if kind % 3 == 2:  # without shuffling, whole batches
            first = draw.randrange(0, SAMPLES - 4 * BATCH * STEPS, BATCH)
            sets.append(list(range(first, first + draw.choice([1, 2, 4]) * BATCH * STEPS)))
        else:
            sets.append(draw.sample(range(SAMPLES), count))
    return sets


def logged(folder: Path, after: int) -> list[dict[str, Any]]:
    """The lines after an iteration, without clocks."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [
        {key: value for key, value in line.items() if "time" not in key and not key.endswith("_s")}
        for line in lines
        if line["iteration"] > after
    ]


def weights_of(folder: Path) -> str:
    return str(json.loads((folder / "summary.json").read_text())["weights_sha256"])


def forget_sets(folder: Path, variant: Mapping[str, Any], sets: list[list[int]], ranks: int) -> list[Forgetting]:
    """Forget each of the sets; every new run has the bits of one with the exclusion from its start."""
    old, plans = folder / "old", list[Forgetting]()

    def on_ranks(what: Any, meeting: str) -> None:
        def cases(rank: int) -> dict[str, Any]:
            torch.set_num_threads(1)
            what()
            return {}

        if ranks == 1:
            with rng.isolated():
                what()
        else:
            on_two_ranks(cases, folder / meeting)

    def new_runs() -> None:
        for number, plan in enumerate(plans):
            train(settings(folder / f"whole_{number}", variant, folder / f"list_{number}.txt"))
            if plan.first_use is not None:
                build_run(load_config(plan.directory / "config.yaml")).train()

    on_ranks(lambda: train(settings(old, variant)), "meeting_old")
    before = {path: path.read_bytes() for path in old.rglob("*") if path.is_file()}
    for number, indices in enumerate(sets):
        samples = folder / f"list_{number}.txt"
        samples.write_text("\n".join(map(str, indices)))
        plan = plan_to_forget(old, samples, folder / f"new_{number}")
        plans.append(plan)
        if plan.first_use is not None:
            begin_to_forget(plan)
    on_ranks(new_runs, "meeting_new")
    for number, plan in enumerate(plans):
        whole = folder / f"whole_{number}"
        if plan.first_use is None:
            assert weights_of(whole) == weights_of(old), f"{plan}: {sorted(plan.excluded)}"
            continue
        assert weights_of(plan.directory) == weights_of(whole), f"{plan}: {sorted(plan.excluded)}"
        assert weights_of(plan.directory) != weights_of(old), f"{plan}: nothing was forgotten"
        assert logged(plan.directory, plan.checkpoint_iteration) == logged(whole, plan.checkpoint_iteration)
        # the first use is where the runs part, and not before
        lines = list(zip(logged(old, 0), logged(whole, 0), strict=True))
        parted = next(mine["iteration"] for mine, theirs in lines if mine != theirs)
        assert parted == plan.first_use.iteration, plan
    assert before == {path: path.read_bytes() for path in old.rglob("*") if path.is_file()}
    return plans


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sets", type=int, default=50, help="on 1 rank and again on 2")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    sets = drawn_sets(options.sets, options.seed)
    for ranks in (1, 2):
        saved, found = 0, 0
        for number, variant in enumerate(VARIANTS):
            with tempfile.TemporaryDirectory() as folder:
                plans = forget_sets(Path(folder), variant, sets[number :: len(VARIANTS)], ranks)
            saved += sum(plan.checkpoint_iteration for plan in plans)
            found += len(plans)
        print(f"{ranks} rank(s): {found} sets forgotten to the bit, from update {saved / found:.1f} of {ITERATIONS} on")
    return 0


if __name__ == "__main__":
    sys.exit(main())
