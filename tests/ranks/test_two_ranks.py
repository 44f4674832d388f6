"""Two gloo ranks from the command line: stopped together, resumed to the same bits, one reduction per step."""

import json
import os
import signal

import pytest

from ignite_engine.checkpointing import CheckpointStore
from tests.faults.processes import (
    evaluated,
    group_is_gone,
    interrupt,
    lines,
    start,
    summary,
    train,
    wait_until,
    write_config,
)

pytestmark = [pytest.mark.distributed, pytest.mark.long]

TWO_RANKS = ("--nproc-per-node", "2", "--backend", "gloo")


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("uninterrupted")
    config = write_config(folder, task_options={"count_reductions": True})
    train(config, *TWO_RANKS)
    counts = [json.loads((folder / f"reductions_{rank}.json").read_text()) for rank in range(2)]
    return {"digest": summary(folder)["weights_sha256"], "lines": lines(folder), "counts": counts}


@pytest.mark.row("B2")
def test_one_reduction_per_step(uninterrupted):
    # 103 samples on two ranks: 52 and 51, 13 batches of 4 each, 4 groups an epoch (the last of one batch), 6 epochs
    for counts in uninterrupted["counts"]:
        assert {name: counts[name] for name in ("reductions", "optimizer_steps", "micro_batches")} == {
            "reductions": 24,
            "optimizer_steps": 24,
            "micro_batches": 78,
        }
    assert uninterrupted["lines"][-1]["iteration"] == 24


def rank_pids(folder):
    found = {int(path.stem.split("_")[1]): int(path.read_text() or 0) for path in folder.glob("pid_*")}
    return found if len(found) == 2 and all(found.values()) else {}


@pytest.mark.row("G2")
@pytest.mark.parametrize(
    "how", ["ctrl-c to the group", "SIGHUP to the group", "SIGTERM to rank 1", "SIGTERM to the parent"]
)
def test_both_ranks_stop_at_one_iteration(tmp_path, uninterrupted, how):
    """In one case checkpoints are written in the background: their events too come at one iteration on both ranks."""
    background = how == "SIGTERM to rank 1"
    checkpoint = {"every": 2, "background": True} if background else {}
    config = write_config(tmp_path, task_options={"slow_step_s": 0.1, "count_reductions": True}, checkpoint=checkpoint)
    process = start(config, *TWO_RANKS)
    wait_until(lambda: len(lines(tmp_path)) >= 2 and rank_pids(tmp_path), process)
    if how == "ctrl-c to the group":
        code, expected = interrupt(process)[0], 130
    elif how == "SIGHUP to the group":  # its terminal was closed
        os.killpg(process.pid, signal.SIGHUP)
        code, expected = process.wait(timeout=60), 143
    else:
        os.kill(rank_pids(tmp_path)[1] if how == "SIGTERM to rank 1" else process.pid, signal.SIGTERM)
        code, expected = process.wait(timeout=60), 143
    assert code == expected, (tmp_path / "output.txt").read_text()
    assert group_is_gone(process.pid), "an orphan is left"
    stopped_at = summary(tmp_path)["iteration"]
    counts = [json.loads((tmp_path / f"reductions_{rank}.json").read_text()) for rank in range(2)]
    assert counts[0] == counts[1] and counts[0]["optimizer_steps"] == stopped_at < 24
    assert counts[0]["saved"][-1] == [stopped_at, stopped_at]
    assert not background or any(notified > saved for notified, saved in counts[0]["saved"])
    newest = CheckpointStore(tmp_path / "run" / "checkpoints").latest()
    assert newest.checkpoint is not None and newest.checkpoint.iteration == stopped_at and not newest.skipped
    (tmp_path / "fast").touch()
    train(config, *TWO_RANKS)
    assert summary(tmp_path)["status"] == "completed"
    assert summary(tmp_path)["weights_sha256"] == uninterrupted["digest"]
    assert lines(tmp_path) == uninterrupted["lines"]


def saved(folder):
    return [each.iteration for each in CheckpointStore(folder / "run" / "checkpoints").checkpoints()]


@pytest.mark.row("G2")
def test_sigusr1_saves_on_all_ranks_and_a_stop_file_stops_them(tmp_path, uninterrupted):
    options = {"slow_step_s": 0.1, "count_reductions": True}
    config = write_config(tmp_path, task_options=options, checkpoint={"every": None}, run={"stop_file": "stop"})
    process = start(config, *TWO_RANKS)
    wait_until(lambda: lines(tmp_path) and rank_pids(tmp_path), process)
    assert saved(tmp_path) == []
    os.kill(rank_pids(tmp_path)[1], signal.SIGUSR1)
    first = wait_until(lambda: saved(tmp_path), process)[0]
    os.kill(process.pid, signal.SIGUSR1)  # as `scancel --signal=USR1` would, which knows the parent alone
    wait_until(lambda: saved(tmp_path)[-1] > first, process)
    (tmp_path / "run" / "stop").touch()
    assert process.wait(timeout=60) == 0
    ended = summary(tmp_path)
    assert (ended["status"], ended["reason"]) == ("interrupted", f"stop file {tmp_path}/run/stop")
    assert saved(tmp_path)[-1] == ended["iteration"] < 24
    (tmp_path / "fast").touch()
    train(config, *TWO_RANKS)
    assert summary(tmp_path)["weights_sha256"] == uninterrupted["digest"]
    assert lines(tmp_path) == uninterrupted["lines"]


@pytest.mark.row("C5")
def test_long_evaluation_continues_where_both_ranks_were(tmp_path, uninterrupted):
    """25 samples on each rank, 7 batches: stopped in the first evaluation, then completed."""
    options = {"slow_evaluation_s": 1.0, "count_batches": True, "count_reductions": True}
    config = write_config(tmp_path, task_options=options, evaluation={"resumes": True, "sanity_batches": 0})

    def both():
        return min(evaluated(tmp_path, rank) for rank in range(2))

    process = start(config, *TWO_RANKS)
    wait_until(lambda: both() >= 1, process)
    os.kill(rank_pids(tmp_path)[1], signal.SIGTERM)
    assert process.wait(timeout=60) == 143
    assert (summary(tmp_path)["status"], summary(tmp_path)["iteration"]) == ("interrupted", 4)
    stopped = [evaluated(tmp_path, rank) for rank in range(2)]
    assert stopped[0] == stopped[1] < 4, "they broke off at different batches, or late"

    (tmp_path / "fast").touch()
    train(config, *TWO_RANKS)
    assert summary(tmp_path)["weights_sha256"] == uninterrupted["digest"]
    assert lines(tmp_path) == uninterrupted["lines"]
    assert [evaluated(tmp_path, rank) for rank in range(2)] == [6 * 7] * 2  # of six evaluations each batch once
