"""Verdicts of real runs: each with one planted fault, and healthy ones."""

from __future__ import annotations

import gc
import json
import mmap
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ignite.engine import Events
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ignite_engine import Trainer, Update, create_evaluator, loader
from ignite_engine.handlers import Checkpoint, Evaluation, MetricLogger, StepTimes
from ignite_engine.report.goodput import verdict as judge
from tests.builders import Numbers, linear, mse
from tests.ranks.forkserver import on_ranks

pytestmark = pytest.mark.long  # real time: on a machine that is busy, waits for data are long indeed

ITERATIONS = 40
VERDICTS = sys.modules[judge.__module__]


@pytest.fixture(autouse=True)
def one_thread_and_short_runs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(VERDICTS, "SHORTEST_S", 0.3)
    monkeypatch.setattr(VERDICTS, "CROWDED", 2.0)  # the machine of the tests may be busy
    monkeypatch.setattr(VERDICTS, "ASLEEP", 2.0)  # and a step of these runs sleeps
    gc.collect()  # a loader of an earlier test that Python collects waits up to 5 s for each worker: not within a run
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Samples(Numbers):
    def __init__(self, count: int, sleep_s: float = 0.0) -> None:
        super().__init__(count)
        self.sleep_s = sleep_s

    def __getitem__(self, index: int) -> Any:
        if self.sleep_s:  # sleep(0) gives the core away
            time.sleep(self.sleep_s)
        return super().__getitem__(index)


class OpenedAtFirst(Samples):
    """Each process opens it at its first sample, as a file is that cannot be shared."""

    is_open = False

    def __getitem__(self, index: int) -> Any:
        if not self.is_open:
            time.sleep(0.2)
            self.is_open = True
        return super().__getitem__(index)


class SlowState:
    def state_dict(self) -> dict[str, Any]:
        time.sleep(0.03)
        return {}

    def load_state_dict(self, state: Any) -> None: ...


def fresh_memory(mib: int) -> mmap.mmap:
    """In use: what malloc gives may be memory that an earlier test has freed, and the process would not grow."""
    memory = mmap.mmap(-1, mib * 2**20, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory[:] = b"1" * len(memory)
    return memory


class SlowSink:
    name = "slow_sink"

    def write(self, iteration: int, values: Any) -> None:
        time.sleep(0.01)


def trained(
    folder: Path,
    *,
    step_s: float = 0.01,
    sample_s: float = 0.0,
    workers: int = 0,
    evaluate_every: int | None = 20,
    predict_s: float = 0.001,
    save_every: int | None = None,
    background: bool = False,
    slow_state: bool = False,
    handler_s: float = 0.0,
    sinks: tuple[Any, ...] = (),
    log_every: int = 10,
    accumulation_steps: int | None = None,
    leak_mib: int = 0,
    leaks: str = "always",
    iterations: int = ITERATIONS,
) -> StepTimes:
    """A run with a step of 10 ms and what is asked for beside it."""
    model, kept = linear(), list[mmap.mmap]()

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        if step_s:
            time.sleep(step_s)
        epochs = {"always": (1, 2, 3, 4), "in the first epoch": (1,), "for a moment": (1, 2, 3, 4)}[leaks]
        if leak_mib and trainer.state.epoch in epochs:
            kept.append(fresh_memory(leak_mib))
        if leaks == "for a moment" and len(kept) > 9:
            kept.clear()
        return mse(model, batch)

    def predict(model: nn.Module, batch: Any) -> Any:
        time.sleep(predict_s)
        return model(batch[0])

    update = Update(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn)
    trainer = Trainer(update, accumulation_steps)
    if evaluate_every:
        data = loader(Numbers(8), batch_size=2)
        every = Events.ITERATION_COMPLETED(every=evaluate_every)
        Evaluation(create_evaluator(model, predict), data).attach(trainer, every)
    if save_every:
        checkpoint = Checkpoint(folder / "checkpoints", save_at_end=False, background=background)
        checkpoint.attach(trainer, Events.ITERATION_COMPLETED(every=save_every))
    if slow_state:
        trainer.register("slow", SlowState())
    if handler_s:
        trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: time.sleep(handler_s))
    MetricLogger(folder, console=False, sinks=sinks).attach(trainer, Events.ITERATION_COMPLETED(every=log_every))
    times = StepTimes(folder)
    times.attach(trainer, Events.ITERATION_COMPLETED(every=log_every))
    epochs = 4 if leak_mib else 1
    batches = loader(Samples(4 * iterations // epochs, sample_s), batch_size=4, num_workers=workers)
    trainer.run(batches, max_iters=iterations)
    return times


@pytest.mark.parametrize(
    ("plant", "cause"),
    [
        ({"sample_s": 0.003}, "data"),
        ({"save_every": 1, "slow_state": True}, "saving"),
        ({"evaluate_every": 1, "predict_s": 0.01}, "evaluation"),
        ({"handler_s": 0.01}, "handlers"),
        ({"sinks": (SlowSink(),), "log_every": 1}, "logging"),
        ({"leak_mib": 2, "iterations": 60}, "a memory leak"),
        ({"step_s": 0.0, "evaluate_every": None, "iterations": 1500}, "tiny batches"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_planted_fault_is_named(
    tmp_path: Path, plant: dict[str, Any], cause: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if cause == "tiny batches":  # the machine may be slow, or busy
        monkeypatch.setattr(VERDICTS, "TINY_MS", 5.0)
    if cause == "a memory leak":  # the tests before may have left much in this process
        monkeypatch.setattr(VERDICTS, "LEAK", 0.01)
    found = trained(tmp_path, **plant).verdict
    assert found is not None and found.cause == cause, found
    lines = [json.loads(each) for each in (tmp_path / "goodput.jsonl").read_text().splitlines()]
    assert lines[-1]["verdict"] == str(found)


def test_a_loss_that_waits_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(VERDICTS, "ASLEEP", 0.25)
    monkeypatch.setattr(VERDICTS, "NAMED", 2.0)  # the machine of the tests may be busy
    found = trained(tmp_path, step_s=0.03).verdict
    assert found is not None and found.cause == "waiting" and "within the updates" in found.evidence


def test_workers_that_start_anew_in_each_epoch_are_named(tmp_path: Path) -> None:
    remedies = []
    for persistent in (False, True):
        trainer = Trainer(Update(model := linear(), torch.optim.SGD(model.parameters(), lr=0.1), mse))
        times = StepTimes(tmp_path / str(persistent))
        times.attach(trainer, Events.ITERATION_COMPLETED(every=10))
        data = loader(OpenedAtFirst(16), batch_size=4, num_workers=1, persistent_workers=persistent)
        trainer.run(data, max_epochs=6)
        remedies.append("" if times.verdict is None else times.verdict.remedy)
    assert "set data.persistent_workers=true" in remedies[0] and "persistent" not in remedies[1]


def test_too_many_threads_are_named(tmp_path: Path) -> None:
    torch.set_num_threads(64)
    found = trained(tmp_path, sample_s=0.003).verdict
    assert found is not None and found.cause == "too many threads" and "64 threads" in found.evidence


@pytest.mark.parametrize(
    "plant",
    [
        {"save_every": 30, "background": True, "iterations": 80},
        {"accumulation_steps": 2, "iterations": 20},
        {"evaluate_every": None},
        {"workers": 1, "sample_s": 0.0005, "step_s": 0.03, "iterations": 120},  # the first of them wait for its start
        {"evaluate_every": 40, "log_every": 1},
        {"leak_mib": 4, "leaks": "in the first epoch", "iterations": 60},
        {"leak_mib": 4, "leaks": "for a moment", "iterations": 60},
    ],
    ids=[
        *("saving in the background", "accumulating", "training only", "workers", "logging each step"),
        *("cache that fills", "garbage"),
    ],
)
def test_healthy_run_is_silent(tmp_path: Path, plant: dict[str, Any]) -> None:
    times = trained(tmp_path, **plant)
    assert times.verdict is None, times.verdict
    assert times._clock.steps >= VERDICTS.FEWEST_STEPS  # it was judged
    assert sum(times._clock.seconds.values()) > VERDICTS.SHORTEST_S


def test_run_that_loses_most_to_kills_is_told_to_save_more_often(tmp_path: Path) -> None:
    trained(tmp_path, iterations=ITERATIONS * 2)
    path = tmp_path / "goodput.jsonl"
    path.write_text(path.read_text().replace('"status": "completed"', '"status": "running"  '))  # as after a kill
    found = trained(tmp_path).verdict
    assert found is not None and found.cause == "saving too seldom"


@pytest.mark.distributed
@pytest.mark.parametrize("part", ["data", "forward"])
def test_slow_rank_is_named_with_the_part_in_which_it_is_slow(tmp_path: Path, part: str) -> None:
    on_ranks(2, _rank, tmp_path, part)
    said = (tmp_path / "verdict").read_text()
    assert "limited by rank 1" in said
    assert ("waiting for data" if part == "data" else "the forward") in said


def _rank(rank: int, folder: str, part: str) -> None:
    VERDICTS.SHORTEST_S, VERDICTS.CROWDED, VERDICTS.ASLEEP = 0.3, 2.0, 2.0  # type: ignore[attr-defined]
    model = DistributedDataParallel(linear())

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        time.sleep(0.01 + 0.02 * rank * (part == "forward"))
        return mse(model, batch)

    trainer = Trainer(Update(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn))
    times = StepTimes()
    times.attach(trainer, Events.ITERATION_COMPLETED(every=10))
    trainer.run(loader(Samples(320, 0.005 * rank * (part == "data")), batch_size=4), max_epochs=1)
    if rank == 0:
        Path(folder, "verdict").write_text(str(times.verdict))
    dist.barrier()
