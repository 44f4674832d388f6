"""Ctrl-C at the worst places: saved at a step boundary, resumed by the same command, ending with the same bits."""

import os
import signal
import time

import pytest

from ignite_engine.checkpointing import CheckpointStore
from tests.faults.processes import group_is_gone, interrupt, lines, start, summary, train, wait_until, write_config

pytestmark = [pytest.mark.faults, pytest.mark.slow]

# far below the 20 s that the blocked loader takes, and far above what a loaded machine needs to exit
WAITS_S = 12.0


def assert_goes_on_to_the_same_end(config, uninterrupted):
    folder = config.parent
    stopped_at = summary(folder)["iteration"]
    assert summary(folder)["status"] == "interrupted"
    newest = CheckpointStore(folder / "run" / "checkpoints").latest()
    assert newest.checkpoint is not None and newest.skipped == []
    assert newest.checkpoint.iteration == stopped_at < uninterrupted["lines"][-1]["iteration"]
    (folder / "fast").touch()
    train(config)
    assert summary(folder)["status"] == "completed"
    assert summary(folder)["weights_sha256"] == uninterrupted["digest"]
    assert lines(folder) == uninterrupted["lines"]


@pytest.mark.row("D2", "G1", "G3")
@pytest.mark.parametrize(("number", "workers"), [(signal.SIGINT, 0), (signal.SIGTERM, 2)])
def test_interrupted_while_training(tmp_path, uninterrupted, number, workers):
    """The signal goes to the whole group, loader workers too."""
    config = write_config(tmp_path, task_options={"slow_step_s": 0.03}, data={"num_workers": workers})
    process = start(config)
    wait_until(lambda: len(lines(tmp_path)) >= 2, process)
    code, seconds = interrupt(process, number)
    assert code == 128 + number and seconds < WAITS_S
    assert_goes_on_to_the_same_end(config, uninterrupted)


def test_interrupted_while_evaluating(tmp_path, uninterrupted):
    config = write_config(tmp_path, task_options={"slow_evaluation_s": 1.0})
    process = start(config)
    wait_until((tmp_path / "evaluating").exists, process)
    code, seconds = interrupt(process)
    assert code == 130 and seconds < WAITS_S
    assert not any("val/accuracy" in line for line in lines(tmp_path)), "the evaluation was not broken off"
    assert_goes_on_to_the_same_end(config, uninterrupted)


@pytest.mark.parametrize(("number", "workers"), [(signal.SIGINT, 0), (signal.SIGINT, 2), (signal.SIGTERM, 2)])
def test_interrupted_while_the_loader_waits(tmp_path, uninterrupted, number, workers):
    config = write_config(tmp_path, task_options={"block_at": 77}, data={"num_workers": workers})
    process = start(config)
    wait_until((tmp_path / "blocked").exists, process)
    time.sleep(1.0)  # the other worker's batches are used up meanwhile
    code, seconds = interrupt(process, number)
    assert code == 128 + number and seconds < WAITS_S
    assert group_is_gone(process.pid)
    assert_goes_on_to_the_same_end(config, uninterrupted)


def test_second_signal_forces_the_end(tmp_path):
    config = write_config(tmp_path, task_options={"slow_step_s": 15.0})
    process = start(config)
    wait_until((tmp_path / "stepping").exists, process)
    os.killpg(process.pid, signal.SIGINT)
    time.sleep(2.0)  # half a second is what counts; a busy machine may receive the first one late
    code, seconds = interrupt(process)
    assert code == 130 and seconds < WAITS_S


@pytest.mark.row("D15")
def test_killed_run_resumes_from_its_newest_checkpoint(tmp_path, uninterrupted):
    config = write_config(tmp_path, task_options={"slow_step_s": 0.03})
    process = start(config)
    wait_until(lambda: len(lines(tmp_path)) >= 5, process)
    assert interrupt(process, signal.SIGKILL)[0] == -signal.SIGKILL
    (tmp_path / "fast").touch()
    train(config)
    assert summary(tmp_path)["weights_sha256"] == uninterrupted["digest"]
    assert lines(tmp_path) == uninterrupted["lines"]


@pytest.mark.row("A9")
def test_finished_run_started_again_only_evaluates(tmp_path, uninterrupted):
    config = write_config(tmp_path)
    train(config)
    train(config)
    assert summary(tmp_path)["status"] == "completed"
    assert summary(tmp_path)["weights_sha256"] == uninterrupted["digest"]
    assert [line["iteration"] for line in lines(tmp_path)] == [line["iteration"] for line in uninterrupted["lines"]]
    assert "val/accuracy" in summary(tmp_path)["metrics"]


@pytest.mark.row("H6")
def test_seed_decides_the_digest_and_workers_do_not(tmp_path, uninterrupted):
    other_seed = write_config(tmp_path / "seed", run={"seed": 4})
    train(other_seed)
    assert summary(tmp_path / "seed")["weights_sha256"] != uninterrupted["digest"]
    workers = write_config(tmp_path / "workers", data={"num_workers": 2})
    train(workers)
    assert summary(tmp_path / "workers")["weights_sha256"] == uninterrupted["digest"]
