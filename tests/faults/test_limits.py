"""A time limit, a stop file and SIGUSR1 in real runs: saved, logged, and resumed to the same bits."""

import os
import signal
import time

import pytest

from ignite_engine.checkpointing import CheckpointStore
from tests.faults.processes import evaluated, lines, start, summary, train, wait_until, write_config

pytestmark = [pytest.mark.faults, pytest.mark.slow]


def saved(folder):
    return [each.iteration for each in CheckpointStore(folder / "run" / "checkpoints").checkpoints()]


def assert_same_end(folder, uninterrupted):
    assert summary(folder)["status"] == "completed"
    assert summary(folder)["weights_sha256"] == uninterrupted["digest"]
    assert lines(folder) == uninterrupted["lines"]


@pytest.mark.parametrize("where", ["training", "evaluation"])
def test_run_is_saved_before_its_time_limit(tmp_path, uninterrupted, where):
    # each alone would take longer: a run 26 * 6 * 0.2 s, its first evaluation 13 * 2 s
    slow = {"slow_step_s": 0.2} if where == "training" else {"slow_evaluation_s": 2.0, "count_batches": True}
    config = write_config(tmp_path, task_options=slow, run={"time_limit": 6}, checkpoint={"every": None})
    assert start(config).wait(timeout=60) == 0
    ended = summary(tmp_path)
    assert (ended["status"], ended["reason"]) == ("interrupted", "time limit of 6 s")
    assert saved(tmp_path) == [ended["iteration"]] and 1 <= ended["iteration"] < 42
    if where == "evaluation":
        assert ended["iteration"] == 7 and 1 <= evaluated(tmp_path) < 13
        (tmp_path / "fast").touch()
        train(config, "run.time_limit=null")
        assert_same_end(tmp_path, uninterrupted)
    else:
        assert 3.0 < ended["wall_s"] < 7.0, "a second more than the limit, for a machine that is busy"


def test_stop_file_stops_a_run_once(tmp_path, uninterrupted):
    config = write_config(tmp_path, task_options={"slow_step_s": 0.03}, run={"stop_file": "stop"})
    process, path = start(config), tmp_path / "run" / "stop"
    wait_until(lambda: len(lines(tmp_path)) >= 2, process)
    path.touch()
    began = time.monotonic()
    assert process.wait(timeout=60) == 0 and time.monotonic() - began < 10
    ended = summary(tmp_path)
    assert (ended["status"], ended["reason"]) == ("interrupted", f"stop file {path}")
    assert saved(tmp_path)[-1] == ended["iteration"] < 42 and path.exists()
    (tmp_path / "fast").touch()
    train(config)
    assert_same_end(tmp_path, uninterrupted)
    assert f"The stop file {path} existed before this run and does not stop it" in (tmp_path / "output.txt").read_text()


def test_sigusr1_saves_and_the_run_continues(tmp_path, uninterrupted):
    config = write_config(tmp_path, task_options={"slow_step_s": 0.03}, checkpoint={"every": None})
    process = start(config)
    wait_until(lambda: len(lines(tmp_path)) >= 2, process)
    assert saved(tmp_path) == []
    os.kill(process.pid, signal.SIGUSR1)
    wait_until(lambda: saved(tmp_path), process)
    (tmp_path / "fast").touch()
    assert process.wait(timeout=60) == 0
    first, last = saved(tmp_path)
    assert 4 <= first < last == 42
    assert_same_end(tmp_path, uninterrupted)
