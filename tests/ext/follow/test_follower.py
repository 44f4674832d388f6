"""Which checkpoint is evaluated when, what is written where, and who reads it."""

import json
import logging
import shutil
from pathlib import Path

import pytest
import torch
from ignite.engine import Events
from ignite.metrics import Average

from ignite_engine import create_evaluator, follow, rng
from ignite_engine.checkpointing import CheckpointInfo, CheckpointStore, Retention, read_manifest
from ignite_engine.checkpointing.in_use import in_use
from ignite_engine.ext.follow.follow import Follower
from ignite_engine.ext.follow.log import FollowedLog, identity_of
from ignite_engine.ext.report import read_run
from ignite_engine.handlers import EMA, Checkpoint, Evaluation, MetricLogger
from ignite_engine.run_directory import RunDirectory
from ignite_engine.runs.history import read_records
from tests.checkpointing.states import save
from tests.kit.tiny import linear, numbers_loader, trainer_of

KEPT = Retention(keep_last=1, best="val/loss")


def noisy(model, batch):
    """A prediction that draws random numbers of its own, and depends on the mode of the model."""
    return ((model(batch[0]) + torch.rand(())) - batch[1]).square().mean()


def build():
    """The trainer of the run, and of its follower."""
    rng.seed_everything(4)
    trainer = trainer_of(linear(dropout=True))
    EMA(0.5).attach(trainer)
    evaluator = create_evaluator(trainer.update.model, noisy, {"loss": Average()})
    Evaluation(evaluator, numbers_loader(8)).attach(trainer, Events.ITERATION_COMPLETED(every=2))
    return trainer


def train(folder):
    """A run of 6 iterations that saves each second one; its own values by iteration."""
    trainer = build()
    MetricLogger(folder, console=False).attach(trainer)
    Checkpoint(folder / "checkpoints", keep_last=9).attach(trainer, Events.ITERATION_COMPLETED(every=2))
    trainer.run(numbers_loader(), max_epochs=1)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {row["iteration"]: row["val/loss"] for row in rows if "val/loss" in row}


def followed(folder, **options):
    """What a follower announces, in its order."""
    found = {}

    def announce(values):
        assert Path(values["checkpoint"]).is_dir()
        found[values["iteration"]] = values["val/loss"]

    assert follow(folder, build, announce=announce, wait_s=1, **options) == len(found)
    return found


def infos(folder):
    return CheckpointStore(folder / "checkpoints").checkpoints()


def saved_by_hand(folder, *iterations):
    """Checkpoints of a run that evaluates nothing, in the order in which they were saved."""
    store = CheckpointStore(folder / "checkpoints")
    best = {"metric": "val/loss", "mode": "min"}
    paths = [save(store, iteration, run_id="a", best=best) for iteration in iterations]
    return [CheckpointInfo(path, read_manifest(path)) for path in paths]


@pytest.mark.row("M2")
def test_with_random_numbers_dropout_and_an_average_the_values_have_the_bits_of_the_run(tmp_path):
    its_own = train(tmp_path)
    torch.manual_seed(99)
    state = torch.get_rng_state()
    assert followed(tmp_path, every_checkpoint=True) == its_own and list(its_own) == [2, 4, 6]
    rng.seed_everything(4)
    assert followed(tmp_path) == {}, "none is evaluated twice"
    torch.set_rng_state(state)


@pytest.mark.row("M2")
def test_without_waiting_what_is_there_is_evaluated(tmp_path):
    train(tmp_path)
    assert follow(tmp_path, build, wait_s=0) == 3


def test_the_newest_comes_first_and_what_is_pruned_meanwhile_is_left_out(tmp_path):
    train(tmp_path)
    assert list(followed(tmp_path)) == [6, 4, 2]
    train(tmp_path / "other")
    order = []

    def announce(values):
        order.append(values["iteration"])
        CheckpointStore(tmp_path / "other" / "checkpoints").prune(Retention(keep_last=1))

    follow(tmp_path / "other", build, announce=announce, wait_s=1)
    assert order == [6]


def test_of_all_the_oldest_comes_first_and_none_is_pruned_before_it_was_evaluated(tmp_path):
    train(tmp_path)
    order, there = [], []

    def announce(values):
        order.append(values["iteration"])
        CheckpointStore(tmp_path / "checkpoints").prune(Retention(keep_last=1))
        there.append([info.iteration for info in infos(tmp_path)])

    follow(tmp_path, build, every_checkpoint=True, announce=announce, wait_s=1)
    assert order == [2, 4, 6] and there == [[4, 6], [6], [6]]


def test_what_was_measured_is_in_the_log_the_manifest_and_whatever_reads_them(tmp_path):
    its_own = train(tmp_path)
    run = RunDirectory(tmp_path)
    whole = run.metrics.read_text()
    for info in infos(tmp_path):  # as if the run had not evaluated
        CheckpointStore(tmp_path / "checkpoints").annotate(info.path, metrics={"val/loss": float("nan")})
    rows = [json.loads(line) for line in whole.splitlines()]
    kept = [{name: value for name, value in row.items() if name != "val/loss"} for row in rows if row["iteration"] != 4]
    run.metrics.write_text("".join(json.dumps(row) + "\n" for row in kept))
    (tmp_path / "report.html").write_text("before")

    followed(tmp_path)
    assert {info.iteration: info.manifest.metrics["val/loss"] for info in infos(tmp_path)} == its_own
    records = read_records(run)
    assert [row["iteration"] for row in records] == [1, 2, 3, 4, 5, 6]
    assert {row["iteration"]: row["val/loss"] for row in records if "val/loss" in row} == its_own
    assert "checkpoint" not in records[3] and records[1]["loss"] == rows[1]["loss"]
    assert list(read_run(tmp_path).series["val/loss"]) == list(its_own.items())
    assert "val/loss" in (tmp_path / "report.html").read_text()
    best = CheckpointStore(tmp_path / "checkpoints").best("val/loss", "min")
    assert best is not None and best.manifest.metrics["val/loss"] == min(its_own.values())


@pytest.mark.parametrize(("value", "stays"), [(0.5, True), (2.0, False)])
def test_the_best_stays_though_its_value_comes_after_the_next_save(tmp_path, value, stays):
    (first,) = saved_by_hand(tmp_path, 1)
    store = CheckpointStore(tmp_path / "checkpoints")
    with in_use(first.path):  # it is evaluated
        (second,) = saved_by_hand(tmp_path, 2)
        store.annotate(second.path, metrics={"val/loss": 1.0})
        assert store.prune(KEPT) == []
        store.annotate(first.path, metrics={"val/loss": value})
    best = store.best("val/loss", "min")
    assert best is not None and best.iteration == (1 if stays else 2)
    assert store.prune(KEPT) == ([] if stays else [first.path])


@pytest.mark.parametrize(("value", "best"), [(0.5, 2), (2.0, 1)])
def test_the_best_stays_where_its_value_comes_before_the_next_save(tmp_path, value, best):
    (first,) = saved_by_hand(tmp_path, 1)
    store = CheckpointStore(tmp_path / "checkpoints")
    store.annotate(first.path, metrics={"val/loss": 1.0})
    (second,) = saved_by_hand(tmp_path, 2)
    assert store.prune(KEPT) == []
    store.annotate(second.path, metrics={"val/loss": value})
    assert store.prune(KEPT) == ([first.path] if best == 2 else [])
    found = store.best("val/loss", "min")
    assert found is not None and found.iteration == best


def test_iterations_that_the_run_has_left_are_neither_evaluated_nor_logged(tmp_path):
    train(tmp_path)
    log = FollowedLog(RunDirectory(tmp_path).followed)
    assert list(followed(tmp_path, every_checkpoint=True)) == [2, 4, 6]
    for info in infos(tmp_path)[1:]:
        shutil.rmtree(info.path)
    trainer = build()
    MetricLogger(tmp_path, console=False).attach(trainer)
    checkpoint = Checkpoint(tmp_path / "checkpoints", keep_last=9)
    checkpoint.attach(trainer, Events.ITERATION_COMPLETED(every=2))
    checkpoint.resume()
    trainer.run(numbers_loader(), max_iters=4)
    assert list(followed(tmp_path)) == [4]
    assert [line["iteration"] for line in log.lines()] == [2, 4]

    saved_by_hand(tmp_path / "other", 1, 2, 3, 2)  # resumed from 1, beside 2 and 3
    follower = Follower(RunDirectory(tmp_path / "other"), trainer, [], every_checkpoint=False, announce=None)
    assert [info.iteration for info in follower._waiting()] == [1, 2]


def test_lines_of_another_run_and_of_a_branch_that_was_left_go(tmp_path):
    log = FollowedLog(RunDirectory(tmp_path).followed)
    first, second, third = saved_by_hand(tmp_path, 1, 2, 3)
    for info in (third, first, second):  # the newest first
        log.add(info, {"val/loss": float(info.iteration)})
    assert [line["iteration"] for line in log.lines()] == [1, 2, 3]
    again = saved_by_hand(tmp_path, 2)[0]  # the run was resumed from 1
    log.add(again, {"val/loss": float("inf")})
    assert [(line["iteration"], line["val/loss"]) for line in log.lines()] == [(1, 1.0), (2, "inf")]
    assert log.lines()[1]["checkpoint"] == identity_of(again)
    other = CheckpointInfo(again.path, read_manifest(save(CheckpointStore(tmp_path / "checkpoints"), 9, run_id="b")))
    log.add(other, {"val/loss": 0.0})
    assert [line["iteration"] for line in log.lines()] == [9]


def test_what_somebody_has_written_into_its_file_is_left_out(tmp_path):
    its_own, run = train(tmp_path), RunDirectory(tmp_path)
    run.followed.parent.mkdir()
    run.followed.write_text('[1]\n{"iteration": [2], "checkpoint": {}}\n{"iteration": 4, "checkpoint": {}}\n{"iterat')
    assert list(read_run(tmp_path).series["val/loss"]) == list(its_own.items()) and len(read_records(run)) == 6
    assert list(followed(tmp_path)) == [6, 4, 2] and len(FollowedLog(run.followed).lines()) == 3


def test_a_damaged_checkpoint_is_one_warning(tmp_path, caplog):
    train(tmp_path)
    (tmp_path / "checkpoints" / "iteration_00000004" / "shared.pt").write_bytes(b"nothing")
    with caplog.at_level(logging.WARNING):
        assert list(followed(tmp_path)) == [6, 2]
    (line,) = [record.getMessage() for record in caplog.records if "is not evaluated" in record.getMessage()]
    assert "iteration_00000004 is not evaluated: " in line and "shared.pt" in line
