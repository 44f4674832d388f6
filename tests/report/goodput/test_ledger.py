"""The ledger of a run over all its starts: planted truths, real kills, and files that are not whole."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from ignite.engine import Events
from torch import Tensor, nn

from ignite_engine import Trainer, TrainingEvents, Update, create_evaluator, loader
from ignite_engine.handlers import Checkpoint, Evaluation, StepTimes
from ignite_engine.report.goodput import PARTS, LedgerFile, goodput_line, read_ledger
from ignite_engine.report.goodput.ledger import COUNTED
from tests.builders import Numbers, linear, mse, numbers_loader, trainer_of

RECORDS = "slept.jsonl"
SAVED_EVERY, EVALUATED_EVERY = 10, 8


def line(elapsed: float, iteration: int, first: int = 0, began: float = 1000.0, **values: Any) -> dict[str, Any]:
    own = {"began": began, "elapsed": elapsed, "first": first, "iteration": iteration}
    return own | {**dict.fromkeys(COUNTED, 0.0), **values}


def ledger_of(path: Path, *lines: dict[str, Any]) -> dict[str, float]:
    path.write_text("".join(json.dumps(each) + "\n" for each in lines))
    found = read_ledger(path)
    assert found is not None
    return {part: seconds for part, seconds in found.seconds.items() if seconds}


def test_one_start(tmp_path: Path) -> None:
    found = ledger_of(tmp_path / "l", line(10.0, 5, startup=1.0, data_wait=2.0, evaluation=0.5, status="completed"))
    assert found == pytest.approx({"productive": 6.5, "startup": 1.0, "data_wait": 2.0, "evaluation": 0.5})


def test_what_follows_the_checkpoint_is_wasted_and_the_gap_is_downtime(tmp_path: Path) -> None:
    lines = (
        line(11.0, 10, startup=1.0, data_wait=2.0),  # saved here
        line(16.0, 13, startup=1.0, data_wait=3.0),  # killed
        line(7.0, 15, 10, 1020.0, startup=2.0, checkpoint=1.0, status="completed"),
    )
    assert ledger_of(tmp_path / "l", *lines) == pytest.approx(
        {"startup": 1.0, "data_wait": 2.0, "productive": 8.0 + 4.0, "wasted": 5.0, "downtime": 4.0, "restart": 2.0}
        | {"checkpoint": 1.0}
    )


def test_between_two_lines_time_is_shared_by_iterations(tmp_path: Path) -> None:
    lines = (line(12.0, 10, startup=2.0), line(22.0, 20, startup=2.0), line(1.0, 15, 15, 1022.0, startup=1.0))
    assert ledger_of(tmp_path / "l", *lines) == pytest.approx(
        {"startup": 2.0, "productive": 15.0, "wasted": 5.0, "restart": 1.0}
    )
    # an older checkpoint, since the newest was damaged, also takes from the start before
    lines = (*lines[:2], line(11.0, 25, 20, 1022.0, startup=1.0), line(2.0, 10, 10, 1033.0, startup=2.0))
    assert ledger_of(tmp_path / "l", *lines) == pytest.approx(
        {"startup": 2.0, "productive": 10.0, "wasted": 20.0, "restart": 3.0}
    )


def test_failures_and_what_theory_gives_for_them(tmp_path: Path) -> None:
    path = tmp_path / "l"
    lines = (
        line(30.0, 10, startup=1.0, checkpoint=0.5),  # saved here, and killed later
        line(45.0, 20, startup=1.0, checkpoint=0.5),
        line(40.0, 30, 10, 1049.0, startup=2.0, status="interrupted"),
        line(10.0, 40, 30, 2000.0, startup=1.0, status="failed"),
        line(96.0, 90, 40, 2013.0, startup=1.0, status="completed"),
    )
    ledger_of(path, *lines)
    found = read_ledger(path)
    assert found is not None
    # 4 s and 3 s without a process, and start-ups of 2 s and 1 s; a user's pause is none
    assert (found.failures, found.recovery_s, found.saves) == (2, 4.0 + 2.0 + 3.0 + 1.0, 1)
    between_s = found.wall_s / 2
    assert found.bound == pytest.approx(1 - math.sqrt(2 * 0.5 / between_s) - 5.0 / between_s)
    assert "2 failures, one every 554 s, each 5 s until it trained again: at most 95 % by Young and Daly." in (
        goodput_line(found.as_values())
    )
    ledger_of(path, line(10.0, 5, status="completed"))
    found = read_ledger(path)
    assert found is not None and found.bound is None and "failure" not in goodput_line(found.as_values())


def test_clock_that_is_set_back_and_a_run_that_was_complete(tmp_path: Path) -> None:
    back = (line(10.0, 5), line(5.0, 9, 5, 900.0))
    assert ledger_of(tmp_path / "l", *back) == pytest.approx({"productive": 15.0})
    later = (line(10.0, 5, status="completed"), line(5.0, 9, 5, 90000.0))
    assert ledger_of(tmp_path / "l", *later) == pytest.approx({"productive": 15.0})


def test_torn_foreign_and_missing_files(tmp_path: Path) -> None:
    path = tmp_path / "goodput.jsonl"
    assert read_ledger(path) is None
    path.write_text('{"began": 1, "elap')
    assert read_ledger(path) is None
    path.write_text(json.dumps(line(10.0, 5)) + '\n[1]\n{"began": 1000.0}\n\x00\x00\n{"bega')
    found = read_ledger(path)
    assert found is not None and found.wall_s == 10.0 and found.goodput == 1.0

    file = LedgerFile(path, fresh=False)
    file.write(line(1.0, 6, 5, 1010.0))
    file.close()
    assert (found := read_ledger(path)) is not None and found.starts == 2


def test_newest_line_is_written_over_and_those_before_stay(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "goodput.jsonl"
    file = LedgerFile(path, fresh=True)
    for elapsed in (1.0, 2.0):
        file.write(line(elapsed, 1))
    file.next_line()
    file.write(line(3.0, 2, verdict="long " * 100))
    file.write(line(4.0, 3))
    file.close()
    assert [json.loads(each)["elapsed"] for each in path.read_text().splitlines()] == [2.0, 4.0]


HOLDER = "import fcntl, sys; file = open(sys.argv[1], 'r+b'); fcntl.lockf(file, fcntl.LOCK_EX); print(); input()"


def test_ledger_that_another_process_writes_is_left_alone_with_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "goodput.jsonl"
    path.write_text(json.dumps(line(3.0, 2, status="completed")) + "\n")
    command = [sys.executable, "-c", HOLDER, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None and holder.stdout.readline()
        before, trainer = path.read_bytes(), trainer_of()
        StepTimes(tmp_path).attach(trainer)
        assert trainer.run(numbers_loader()).status == "completed"
        holder.kill()
    assert path.read_bytes() == before
    (said,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert said.startswith("The ledger of the run's time cannot be written: ") and "another process" in said


@pytest.mark.parametrize(("status", "starts"), [("completed", 1), ("failed", 1), ("interrupted", 1), ("running", 2)])
def test_run_that_starts_over_is_the_same_one_only_if_it_was_killed(tmp_path: Path, status: str, starts: int) -> None:
    path = tmp_path / "goodput.jsonl"
    path.write_text(json.dumps(line(10.0, 5, status=status)) + "\n")
    file = LedgerFile(path, fresh=True)
    file.write(line(1.0, 1, 0, 2000.0))
    file.close()
    found = read_ledger(path)
    assert found is not None and found.starts == starts
    assert found.seconds["wasted"] == (10.0 if starts == 2 else 0.0)


# -- real processes that are killed -------------------------------------------------------------------------------


class Slept:
    """Sleeps, and writes down for what, in which iteration, and how long it really took, which may be longer."""

    def __init__(self, folder: Path) -> None:
        self.file = (folder / RECORDS).open("a", buffering=1)
        self.iteration = 0
        self.began: dict[str, float] = {}

    def __call__(self, part: str, seconds: float) -> None:
        began = time.perf_counter()
        time.sleep(seconds)
        self.note(part, time.perf_counter() - began)

    def between(self, trainer: Trainer, part: str, begin: Any, end: Any) -> None:
        """Write down what passes between two events."""
        trainer.add_event_handler(begin, lambda: self.began.__setitem__(part, time.perf_counter()))
        trainer.add_event_handler(end, lambda: self.note(part, time.perf_counter() - self.began[part]))

    def note(self, part: str, seconds: float) -> None:
        record = {"part": part, "iteration": self.iteration, "s": seconds, "pid": os.getpid(), "at": time.time()}
        self.file.write(json.dumps(record) + "\n")


class SlowState:
    def __init__(self, slept: Slept) -> None:
        self.slept = slept

    def state_dict(self) -> dict[str, Any]:
        if self.slept.iteration:
            time.sleep(0.05)
        return {}

    def load_state_dict(self, state: Any) -> None: ...


class SlowSamples(Numbers):
    def __getitem__(self, index: int) -> Any:
        time.sleep(0.004)
        return super().__getitem__(index)


def train(folder: Path, *, kill_at: int, iterations: int = 60) -> None:
    """A start of the run; it ends itself by SIGKILL in the forward of an iteration, or within an evaluation."""
    slept, began = Slept(folder), time.perf_counter()
    slept.note("start", 0.0)
    model = linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        time.sleep(0.015)
        if trainer.state.iteration == kill_at:
            die()
        return mse(model, batch)

    def predict(model: nn.Module, batch: Any) -> Any:
        time.sleep(0.02)
        if -trainer.state.iteration == kill_at and len(batch[0]) == 1:
            die()
        return model(batch[0])

    def die() -> None:
        slept.note("killed", 0.0)
        os.kill(os.getpid(), signal.SIGKILL)

    trainer = Trainer(Update(model, optimizer, loss_fn))
    times = StepTimes(folder, since=began)
    times.attach(trainer, Events.ITERATION_COMPLETED(every=5))
    data, held = SlowSamples(600), loader(Numbers(11), batch_size=2)
    Evaluation(create_evaluator(model, predict), held).attach(
        trainer, Events.ITERATION_COMPLETED(every=EVALUATED_EVERY)
    )
    trainer.register("slow", SlowState(slept))

    trainer.add_event_handler(Events.ITERATION_STARTED, lambda: setattr(slept, "iteration", trainer.state.iteration))
    trainer.add_event_handler(Events.EPOCH_STARTED, lambda: slept.note("trains", 0.0))
    for part, begin, end in (
        ("data_wait", Events.GET_BATCH_STARTED, Events.GET_BATCH_COMPLETED),
        ("productive", Events.ITERATION_STARTED, TrainingEvents.OPTIMIZER_STEP_COMPLETED),
        ("evaluation", TrainingEvents.EVALUATION_STARTED, TrainingEvents.EVALUATION_COMPLETED),
    ):
        slept.between(trainer, part, begin, end)
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: slept("handlers", 0.002))
    checkpoint = Checkpoint(folder / "checkpoints")
    checkpoint.attach(trainer, Events.ITERATION_COMPLETED(every=SAVED_EVERY))
    trainer.add_event_handler(
        TrainingEvents.CHECKPOINT_SAVED, lambda: slept.note("checkpoint", trainer.state.save_seconds)
    )
    slept("startup", 0.2)
    checkpoint.resume()
    trainer.run(loader(data, batch_size=2), max_iters=iterations)
    slept.note("end", 0.0)


@pytest.mark.slow
def test_three_kills_and_each_entry_is_the_planted_truth(tmp_path: Path) -> None:
    # before the first checkpoint, between two, and within an evaluation
    for kill_at, pause in ((7, 0.3), (27, 0.5), (-48, 0.4), (0, 0.0)):
        process = os.fork()
        if not process:
            try:
                torch.set_num_threads(1)
                train(tmp_path, kill_at=kill_at)
            finally:
                os._exit(0)
        _, status = os.waitpid(process, 0)
        assert os.WIFSIGNALED(status) == bool(kill_at)
        time.sleep(pause)

    records = [json.loads(each) for each in (tmp_path / RECORDS).read_text().splitlines()]
    truth = planted_truth(records)
    found = read_ledger(tmp_path / "goodput.jsonl")
    assert found is not None and found.starts == 4
    wall = records[-1]["at"] - records[0]["at"]
    assert found.wall_s == pytest.approx(wall, rel=0.02)
    assert sum(truth.values()) == pytest.approx(wall, rel=0.05)  # the rest is between sleeps: each is within 2 % anyway
    off = {part: found.seconds[part] - truth[part] for part in PARTS}
    assert {part: seconds for part, seconds in off.items() if abs(seconds) > 0.02 * wall} == {}
    assert found.seconds["wasted"] > 0


def planted_truth(records: list[dict[str, Any]]) -> dict[str, float]:
    """What was slept and kept; what a start had begun to train ends where it was killed, or saved for the next one."""
    pids = list(dict.fromkeys(each["pid"] for each in records))
    starts = [[each for each in records if each["pid"] == pid] for pid in pids]
    cuts = [0, 20, 40, 1000]  # iterations that the starts after them resumed from
    truth: dict[str, float] = defaultdict(float)
    for number, (own, cut) in enumerate(zip(starts, cuts, strict=True)):
        begin_of_training = next(each["at"] for each in own if each["part"] == "trains")
        truth["restart" if number else "startup"] += begin_of_training - own[0]["at"]
        saves = [each["at"] for each in own if each["part"] == "checkpoint" and each["iteration"] == cut]
        kept_until = own[-1]["at"] if number == 3 else (saves or [begin_of_training])[0]
        truth["wasted"] += own[-1]["at"] - kept_until
        for each in own:
            if begin_of_training < each["at"] <= kept_until and each["s"]:
                truth[each["part"]] += each["s"]
        if number:
            truth["downtime"] += own[0]["at"] - starts[number - 1][-1]["at"]
    return truth
