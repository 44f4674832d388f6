"""``Update(accumulate="capture")`` against the plain loop, the one whose parts are compiled, and ``Update``.

    python -m benchmarks.captured_update [--rounds N] [--micro-batches N] [--json PATH]

The model of the overhead benchmark in fp32, clipped at 1.0, an update per batch, on one thread. See
``benchmarks/README.md``.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median

import torch
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_

from benchmarks.contenders.ours import loss_fn
from benchmarks.goals import Goal
from benchmarks.machine import machine
from benchmarks.ratios import ratio_of_medians
from benchmarks.turns import Times, cpu_us, take_turns
from benchmarks.workload import CLIP_NORM, LOG_EVERY, build
from ignite_engine import Trainer, Update


def measured(rounds: int, micro_batches: int) -> Times:
    """CPU time of an update in microseconds by contender and round.

    The contenders take turns in one process, in an order drawn for each round; a round is an epoch.
    """
    plain, by_hand, eager, captured = (build(micro_batches, rounds) for _ in range(4))

    def plain_round() -> None:
        for inputs, targets in plain.batches:
            plain.optimizer.zero_grad()
            loss = cross_entropy(plain.model(inputs), targets)
            loss.backward()
            clip_grad_norm_(plain.model.parameters(), CLIP_NORM)
            plain.optimizer.step()

    loss_of = torch.compile(lambda inputs, targets: cross_entropy(by_hand.model(inputs), targets))

    @torch.compile
    def clip_and_step() -> None:
        clip_grad_norm_(by_hand.model.parameters(), CLIP_NORM)
        by_hand.optimizer.step()

    def compiled_round() -> None:
        for inputs, targets in by_hand.batches:
            by_hand.optimizer.zero_grad()
            loss_of(inputs, targets).backward()
            clip_and_step()

    def round_of(trainer: Trainer, batches: object) -> Callable[[], None]:
        def one_round() -> None:
            trainer.run(batches, max_epochs=trainer.state.epoch + 1)  # type: ignore[arg-type]  # sized and iterable

        return one_round

    turns = {
        "plain": plain_round,
        "compiled": compiled_round,
        "Update": round_of(Trainer(Update(eager.model, eager.optimizer, loss_fn, clip_norm=CLIP_NORM)), eager.batches),
        "captured": round_of(
            Trainer(Update(captured.model, captured.optimizer, loss_fn, clip_norm=CLIP_NORM, accumulate="capture")),
            captured.batches,
        ),
    }
    return take_turns({name: cpu_us(turn, micro_batches) for name, turn in turns.items()}, rounds)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print the table, write the JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.captured_update", description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--micro-batches", type=int, default=20 * LOG_EVERY, help=f"a multiple of {LOG_EVERY}")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    times = measured(options.rounds, options.micro_batches)
    print(f"{machine()}\n{options.rounds} rounds of {options.micro_batches} updates, CPU time")
    print(f"{'':<10}{'us':>8}  {'to plain [95 %]':<24}to Update [95 %]")
    rows = {}
    for name, values in times.items():
        ratios = {to: ratio_of_medians(values, times[to]) for to in ("plain", "Update")}
        rows[name] = {"us": values, "ratios": {to: asdict(each) for to, each in ratios.items()}}
        print(f"{name:<10}{median(values):8.1f}  {ratios['plain']!s:<24}{ratios['Update']}")
    goals = [
        Goal.of("captured update / plain", ratio_of_medians(times["captured"], times["plain"]), None),
        Goal.of(
            "captured update / the loop with torch.compile",
            ratio_of_medians(times["captured"], times["compiled"]),
            None,
        ),
        Goal.of("Update, clipping / plain", ratio_of_medians(times["Update"], times["plain"]), None),
    ]
    if options.json is not None:
        report = {"machine": machine(), "contenders": rows, "goals": [asdict(each) for each in goals]}
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
