"""What the same bits on any number of ranks cost, as ``benchmarks/README.md`` describes."""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

import torch
from ignite.engine import Events
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

from benchmarks.goals import Goal
from benchmarks.machine import machine
from benchmarks.ratios import ratio_of_medians
from benchmarks.turns import Times, on_ranks, take_turns
from ignite_engine import Trainer, Update, loader
from ignite_engine.ranks import agreement

GOALS = {1: 1.05, 2: 1.10}
FEATURES = 256


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the ratios; the exit code is 0 whatever they are."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.rank_invariant", description=__doc__)
    parser.add_argument("--rounds", type=int, default=30, help="per contender, default 30")
    parser.add_argument("--steps", type=int, default=12, help="updates in a round, default 12")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2], help="default 1 2")
    parser.add_argument("--micro-batches", type=int, default=4, help="of an update, over all ranks, default 4")
    parser.add_argument("--batch", type=int, default=64, help="samples of a micro-batch, default 64")
    parser.add_argument("--width", type=int, default=1024, help="of the hidden layers, default 1024: 2.6 M parameters")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    goals: list[Goal] = []
    for ranks in options.ranks:
        times = measured(ranks, vars(options))
        usual, ours = times["usual"], times["invariant"]
        ratio = ratio_of_medians(ours, usual)
        goal = f", goal {GOALS[ranks]:.2f}" if ranks in GOALS else ""
        print(
            f"{ranks} rank{'s' * (ranks > 1)}: {'DDP' if ranks > 1 else 'ordinary'} {median(usual) * 1e3:.2f} ms, "
            f"rank-invariant {median(ours) * 1e3:.2f} ms an update, ratio {ratio}{goal} "
            f"(fastest rounds {min(usual) * 1e3:.2f}, {min(ours) * 1e3:.2f} ms)",
            flush=True,
        )
        what = f"{ranks} rank{'s' * (ranks > 1)}: rank-invariant update / {'DDP' if ranks > 1 else 'ordinary'}"
        goals.append(Goal.of(what, ratio, GOALS.get(ranks)))
    if options.json is not None:
        options.json.write_text(json.dumps({"machine": machine(), "goals": [asdict(each) for each in goals]}))
    return 0


def measured(ranks: int, options: dict[str, Any]) -> Times:
    """Seconds per update of each round, by contender, on so many ranks."""
    return on_ranks(ranks, _work, options)


def _work(options: dict[str, Any]) -> Times:
    contenders = {name: _Contender(name == "invariant", options) for name in ("usual", "invariant")}
    return take_turns({name: each.one_round for name, each in contenders.items()}, options["rounds"])


class _Contender:
    """A trainer whose epochs are the rounds; a perceptron, so that the gradients are large for the computation."""

    def __init__(self, invariant: bool, options: dict[str, Any]) -> None:
        torch.manual_seed(0)
        width, batch, steps = options["width"], options["batch"], options["steps"]
        widths = (FEATURES, width, width, width, FEATURES)
        layers: list[nn.Module] = []
        for ins, outs in itertools.pairwise(widths):
            layers += [nn.Linear(ins, outs), nn.GELU()]
        model: nn.Module = nn.Sequential(*layers)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        if agreement.world_size() > 1 and not invariant:
            model = DistributedDataParallel(model, gradient_as_bucket_view=True)
        update = Update(model, optimizer, _loss, clip_norm=1.0, accumulate="rank_invariant" if invariant else None)
        self.trainer = Trainer(update, global_micro_batches=options["micro_batches"])
        samples = torch.randn(batch * options["micro_batches"] * (steps + 1), FEATURES)
        self.data = loader(TensorDataset(samples), batch)
        self.steps, self.epochs, self.ends = steps, 0, list[float]()
        self.trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: self.ends.append(time.perf_counter()))

    def one_round(self) -> float:
        """Seconds per update, without the first of an epoch and the start of a run."""
        self.ends.clear()
        self.epochs += 1
        self.trainer.run(self.data, max_epochs=self.epochs)
        assert len(self.ends) == self.steps + 1
        return float((self.ends[-1] - self.ends[0]) / self.steps)


def _loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    (inputs,) = batch
    return nn.functional.mse_loss(model(inputs), inputs)


if __name__ == "__main__":
    sys.exit(main())
