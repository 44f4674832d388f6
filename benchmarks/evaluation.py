"""What an evaluation costs beside a loop written by hand with the same metrics.

    python -m benchmarks.evaluation [--rounds N] [--batches N] [--json PATH]

A small model, batches in memory, Ignite's Accuracy and Loss. By turns, in an order drawn for each round, they are
evaluated by a plain ``no_grad`` loop that calls ``update``, by Ignite's ``create_supervised_evaluator``, and by
``Evaluation`` within a run. Microseconds of this process's CPU per batch, in one thread. Exit code 1: the
values differ.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median

import torch
from ignite.engine import Events, create_supervised_evaluator
from ignite.metrics import Accuracy, Loss, Metric
from torch import nn
from torch.nn.functional import cross_entropy

from benchmarks.goals import Goal
from benchmarks.machine import machine
from benchmarks.ratios import ratio_of_medians
from benchmarks.workload import Batch
from ignite_engine import Trainer, Update, create_evaluator
from ignite_engine.handlers import Evaluation

GOAL = 1.3
PLAIN, IGNITE, OURS = "plain", "ignite", "ours"


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print the table; returns 1 if the metrics differ."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.evaluation", description=__doc__)
    parser.add_argument("--rounds", type=int, default=15, help="counted rounds, default 15")
    parser.add_argument("--batches", type=int, default=400, help="of an evaluation, default 400")
    parser.add_argument("--json", type=Path, help="write every round there")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    times, values = measure(options.rounds, options.batches)
    print("  ".join(f"{name} {value}" for name, value in machine().items()))
    ratios = {name: ratio_of_medians(each, times[PLAIN]) for name, each in times.items()}
    for name, each in times.items():
        goal = f", goal {GOAL}: {'met' if ratios[name].value <= GOAL else 'missed'}" if name == OURS else ""
        print(f"{name:8} {median(each):7.1f} us a batch, to plain {ratios[name]}{goal}")
    equal = all(each == values[PLAIN] for each in values.values())
    print("all have the same values" if equal else f"THE VALUES DIFFER: {values}")
    if options.json:
        goals = [asdict(Goal.of("Evaluation / plain no_grad loop, CPU time", ratios[OURS], GOAL))]
        found = {"machine": machine(), "us_per_batch": times, "goals": goals}
        options.json.write_text(json.dumps(found, indent=1))
    return 0 if equal else 1


def measure(rounds: int, batches: int) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """CPU time per batch of each contender in each round, the first two of which are not counted; and the values."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    data = [(torch.randn(32, 64), torch.randint(10, (32,))) for _ in range(batches)]
    contenders = {PLAIN: plain(model, data), IGNITE: by_ignite(model, data)}
    times: dict[str, list[float]] = {name: [] for name in (*contenders, OURS)}
    values: dict[str, list[float]] = {}
    draw = random.Random(0)
    # its learning rate is 0: all rounds evaluate the same weights
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    trainer = Trainer(Update(model, optimizer, lambda model, batch: cross_entropy(model(batch[0]), batch[1])))
    evaluation = Evaluation(create_evaluator(model, predict, metrics()), data)

    def ours() -> list[float]:
        evaluation(trainer)
        return [trainer.state.metrics[f"val/{name}"] for name in metrics()]

    contenders[OURS] = ours

    def one_round() -> None:
        for name in draw.sample(list(contenders), len(contenders)):
            began = time.process_time()
            values[name] = contenders[name]()
            times[name].append(1e6 * (time.process_time() - began) / batches)

    trainer.add_event_handler(Events.ITERATION_COMPLETED, one_round)
    trainer.run(data[:1], max_epochs=rounds + 2)
    return {name: each[2:] for name, each in times.items()}, values


def metrics() -> dict[str, Metric]:
    return {"accuracy": Accuracy(), "loss": Loss(cross_entropy)}


def predict(model: nn.Module, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    return model(batch[0]), batch[1]


def plain(model: nn.Module, data: list[Batch]) -> Callable[[], list[float]]:
    def evaluate() -> list[float]:
        own = metrics()
        model.eval()
        with torch.no_grad():
            for inputs, targets in data:
                output = model(inputs), targets
                for metric in own.values():
                    metric.update(output)
        model.train()
        return [float(metric.compute()) for metric in own.values()]

    return evaluate


def by_ignite(model: nn.Module, data: list[Batch]) -> Callable[[], list[float]]:
    evaluator = create_supervised_evaluator(model, metrics())

    def evaluate() -> list[float]:
        values = evaluator.run(data).metrics
        model.train()
        return [values[name] for name in metrics()]

    return evaluate


if __name__ == "__main__":
    sys.exit(main())
