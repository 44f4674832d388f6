"""The judge of ``windows``: a random run over windows, stopped once or twice at a random event and resumed.

Or killed there, or stopped and gone on with in the same process. Compared with the whole run are the loss, epoch and
window of each iteration, the value of each evaluation, every line of the log, the counters and the weights at the end.
"""

from __future__ import annotations

import logging
import random
import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import torch
from ignite.engine import Events
from ignite.metrics import Average
from torch import Tensor
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from ignite_engine import Trainer, TrainingEvents, Update, Windows, create_evaluator, loader
from ignite_engine.data import Files
from ignite_engine.handlers import EMA, Checkpoint, Evaluation, MetricLogger
from tests.builders import Numbers, linear, mse, weights
from tests.search.common import PASSED, Failure, Result, case_seeds

STREAMS = ("list", "array", "files", "own", "iterable")
WAYS = ("stopped", "killed", "same process")
LOADERS = ("loader", "plain", "drawn batches", "stateful", "workers")
EVALUATIONS = ("none", "before training", "a stream of its own")
SAVES = {
    "window": TrainingEvents.WINDOW_COMPLETED,
    "second iteration": Events.ITERATION_COMPLETED(every=2),
    "never": Events.COMPLETED,
}
STOPS = {
    "iteration": Events.ITERATION_COMPLETED,
    "window started": TrainingEvents.WINDOW_STARTED,
    "window completed": TrainingEvents.WINDOW_COMPLETED,
    "epoch started": Events.EPOCH_STARTED,
    "epoch completed": Events.EPOCH_COMPLETED,
    "evaluation": TrainingEvents.EVALUATION_STARTED,
}


@dataclass(frozen=True)
class Case:
    """What a number stands for."""

    counts: list[int]
    stream: str
    loader: str
    evaluation: str
    save: str
    stop: str
    stops: tuple[int, ...]
    steps: int | None
    per_epoch: int | None
    limit: int | None
    length: dict[str, int]
    average: bool
    weighted: bool
    background: bool
    way: str
    log_every: int
    planted: bool = False
    """A counter that changes the loss and is not saved: the judge must find it."""


def drawn(number: int) -> Case:
    """The case of a number."""
    draw = random.Random(number)
    counts = [draw.choice([0, 1, 2, 3, 5, 8]) for _ in range(draw.randint(2, 6))]
    counts[0] = counts[0] if any(counts) else 3
    return Case(
        counts,
        draw.choice(STREAMS),
        draw.choice(LOADERS if draw.random() < 0.2 else LOADERS[:4]),
        draw.choice(EVALUATIONS),
        draw.choice(list(SAVES)),
        draw.choice(list(STOPS)),
        tuple(draw.randint(1, 6) for _ in range(draw.randint(1, 2))),
        draw.choice([None, 1, 2, 3]),
        draw.choice([None, None, 1, 2, 3]),
        draw.choice([None, None, None, 3, 5]),
        draw.choice([{"max_epochs": 1}, {"max_epochs": 2}, {"max_epochs": 3}, {"max_iters": 7}]),
        draw.random() < 0.3,
        draw.random() < 0.2,
        draw.random() < 0.3,
        draw.choice(WAYS),
        draw.choice([1, 2, 5]),
    )


class Killed(Exception):
    """In the place of SIGKILL: nothing is saved after it."""


class Own:
    """A stream of a user's own."""

    def __init__(self, counts: list[int]) -> None:
        self.counts, self.taken = counts, 0

    def next_window(self) -> int:
        if self.taken == len(self.counts):
            raise StopIteration
        self.taken += 1
        return self.counts[self.taken - 1]

    def state_dict(self) -> dict[str, Any]:
        return {"taken": self.taken}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.taken = state["taken"]


class DrawnBatches:
    """So many batches, drawn from the global generators when they are fetched."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[Any]:
        for _ in range(self.count):
            yield torch.randn(2, 3), torch.randn(2, 1)


def windows_of(case: Case, folder: Path) -> Windows:
    def open_window(name: Any) -> Any:
        count = int(name.read_text() if isinstance(name, Path) else name)
        if case.loader == "drawn batches":
            return DrawnBatches(count)
        if case.loader in ("loader", "workers"):
            return loader(Numbers(count), 2, shuffle=True, seed=1, num_workers=int(case.loader == "workers"))
        kind = DataLoader if case.loader == "plain" else StatefulDataLoader
        return kind(Numbers(count), 2, shuffle=True) if count else None

    kinds: dict[str, Any] = {"list": list, "array": np.array, "own": Own, "iterable": iter}
    stream = Files(folder, "hour_*") if case.stream == "files" else kinds[case.stream](case.counts)
    return Windows(stream, open_window, per_epoch=case.per_epoch, limit=case.limit)


def train(
    case: Case, folder: Path, run: Path | None, stops: tuple[int, ...], log: Path
) -> tuple[Trainer, list[Any], bool]:
    """One process's part of a run, what happened in it, and whether it was stopped each time."""
    torch.manual_seed(5)
    model, told, calls = linear(dropout=True), list[Any](), [0]

    def loss_fn(model: Any, batch: Any) -> Tensor:
        calls[0] += int(case.planted)
        return mse(model, batch) * (1 + calls[0])

    weigh = {"weight_fn": lambda batch: len(batch[0])} if case.weighted else {}
    trainer = Trainer(Update(model, torch.optim.AdamW(model.parameters(), 0.01), loss_fn, **weigh), case.steps)
    state, windows = trainer.state, windows_of(case, folder)
    if case.average:
        EMA(0.9).attach(trainer)
    trainer.add_event_handler(
        Events.ITERATION_COMPLETED,
        lambda: told.append((state.iteration, state.epoch, state.windows, float(state.output["loss"]))),
    )
    if case.evaluation != "none":
        evaluator = create_evaluator(model, mse, {"loss": Average()})
        before = case.evaluation == "before training"
        data = windows.again if before else Windows([3, 0, 4], lambda count: loader(Numbers(count), 2))
        event = TrainingEvents.WINDOW_STARTED if before else TrainingEvents.WINDOW_COMPLETED
        Evaluation(evaluator, data).attach(trainer, event)
        trainer.add_event_handler(
            TrainingEvents.EVALUATION_COMPLETED,
            lambda: told.append(("evaluated", state.iteration, state.windows, state.metrics["val/loss"])),
        )
    MetricLogger(log, console=False).attach(trainer, Events.ITERATION_COMPLETED(every=case.log_every))
    if run is not None:
        checkpoint = Checkpoint(run, background=case.background)
        checkpoint.attach(trainer, SAVES[case.save])
        checkpoint.resume()
    left = [0]

    def stop_if_due() -> None:
        left[0] -= 1
        if left[0] == 0:
            if case.way == "killed":
                raise Killed
            trainer.request_stop("here")

    trainer.add_event_handler(STOPS[case.stop], stop_if_due)
    for left[0] in stops:
        try:
            trainer.run(windows, **case.length)
        except Killed:
            return trainer, told, True
        if trainer.state.status != "interrupted":
            return trainer, told, False
    if not stops or case.way == "same process":
        left[0] = 0
        trainer.run(windows, **case.length)
    return trainer, told, bool(stops)


def difference(case: Case, folder: Path) -> tuple[str, str | None]:
    """The outcome, and what differs first."""
    for index, count in enumerate(case.counts):
        (folder / f"hour_{index}").write_text(str(count))
    whole, expected, _ = train(case, folder, None, (), folder / "whole")
    found: list[Any] = []
    stopped = False
    here = case.way == "same process"
    for stops in [case.stops] if here else [*((each,) for each in case.stops), ()]:
        trainer, told, was_stopped = train(case, folder, None if here else folder / "run", stops, folder / "log")
        found += told
        stopped = stopped or was_stopped
        if stops and not was_stopped:
            break
    outcome = PASSED if stopped else "not stopped"
    for each in (*(each for each in expected if each not in found), *(each for each in found if each not in expected)):
        return outcome, f"{each} of the {'whole' if each in expected else 'resumed'} run alone"
    for name in ("iteration", "epoch", "windows", "optimizer_steps", "status"):
        one, other = getattr(whole.state, name), getattr(trainer.state, name)
        if one != other:
            return outcome, f"state.{name}: {one} != {other}"
    logs = [(folder / name / "metrics.jsonl").read_text().splitlines() for name in ("whole", "log")]
    for ours, theirs in zip_longest(*logs):
        if ours != theirs:
            return outcome, f"the log: {ours} != {theirs}"
    return outcome, None if torch.equal(weights(whole), weights(trainer)) else "weights"


def judged(cases: dict[int, Case]) -> Result:
    result, began = Result("windows", next(iter(cases), 0), FEATURES), time.monotonic()
    for number, case in cases.items():
        _judge(result, number, case)
    result.seconds = time.monotonic() - began
    return result


def run(seed: int, cases: int | None, minutes: float | None) -> Result:
    """Judge the cases ``seed``, ``seed + 1``, ..."""
    result, began = Result("windows", seed, FEATURES), time.monotonic()
    for number in case_seeds(seed, cases, minutes):
        _judge(result, number, drawn(number))
    result.seconds = time.monotonic() - began
    return result


def _judge(result: Result, number: int, case: Case) -> None:
    folder = Path(tempfile.mkdtemp(prefix="windows_"))
    level = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        outcome, reason = difference(case, folder)
    except Exception as error:
        outcome, reason = "", f"{type(error).__name__}: {error}"
    finally:
        logging.disable(level)
        shutil.rmtree(folder, ignore_errors=True)
    if reason is not None:
        result.failures.append(Failure("windows", number, reason))
        print(result.failures[-1], flush=True)
        return
    result.outcomes[outcome] += 1
    if outcome == PASSED:
        result.exercised.update(f"{name}: {value}" for name, value in _values(case).items())


def _values(case: Case) -> dict[str, Any]:
    return {
        "stream": case.stream,
        "loader": case.loader,
        "evaluation": case.evaluation,
        "save": case.save,
        "stop": case.stop,
        "accumulation": case.steps,
        "per_epoch": case.per_epoch,
        "limit": case.limit,
        "way": case.way,
    }


FEATURES = tuple(
    f"{name}: {value}"
    for name, values in {
        "stream": STREAMS,
        "loader": LOADERS,
        "evaluation": EVALUATIONS,
        "save": SAVES,
        "stop": STOPS,
        "accumulation": (None, 1, 2, 3),
        "per_epoch": (None, 1, 2, 3),
        "limit": (None, 3, 5),
        "way": WAYS,
    }.items()
    for value in values
)
