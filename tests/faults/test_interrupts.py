"""A real run that is broken off at the worst places, and started again by the same command: the same bits and log."""

import os
import shutil
import signal
import time

import pytest

from tests.kit.processes import wait_until
from tests.kit.runs import group_is_gone, interrupt, lines, summary, train, trained, write_config
from tests.kit.tiers import tiered

# far below the 20 s that the blocked loader takes, and far above what a loaded machine needs to exit
WAITS_S = 12.0
END = 14
EVALUATIONS, BATCHES = 2, 13
"""Of a run, and of each of them."""


def config_of(folder, *, slow=None, **sections):
    """Two epochs of 7 iterations, each with an evaluation."""
    options = {"count_batches": True, **(slow or {}), **sections.pop("task_options", {})}
    return write_config(folder, task_options=options, run={"max_epochs": 2, **sections.pop("run", {})}, **sections)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    trained(config_of(folder))
    return folder


def saved(folder):
    return sorted(int(path.name[-8:]) for path in (folder / "run" / "checkpoints").glob("iteration_*"))


def evaluated(folder):
    """Batches that were evaluated so far."""
    path = folder / "evaluated_0"
    return len(path.read_text()) if path.exists() else 0


def assert_same_end(folder, whole):
    assert summary(folder)["status"] == "completed"
    assert summary(folder)["weights_sha256"] == summary(whole)["weights_sha256"]
    assert lines(folder) == lines(whole)


def finish(config, whole):
    """Start it again, to the same end; the batches that this last start evaluated."""
    folder = config.parent
    (folder / "fast").touch()
    before = evaluated(folder)
    trained(config)
    assert_same_end(folder, whole)
    return evaluated(folder) - before


def in_training(folder):
    return len(lines(folder)) >= 2


def in_an_evaluation(folder):
    return evaluated(folder) >= 3


def in_a_wait(folder):
    """One sample is waited for, and what other workers have read is used up."""
    log = folder / "run" / "metrics.jsonl"
    return (folder / "blocked").exists() and log.exists() and time.time() - log.stat().st_mtime > 0.3


STEPS, EVALUATION, BLOCKS = {"slow_step_s": 0.03}, {"slow_evaluation_s": 0.2}, {"block_at": 77}
CASES = {  # options of the task, workers, where it is interrupted, by what
    "training, SIGINT": (STEPS, 0, in_training, signal.SIGINT),
    "training, SIGTERM": (STEPS, 2, in_training, signal.SIGTERM),
    "training, SIGKILL": (STEPS, 0, in_training, signal.SIGKILL),
    "evaluation, SIGINT": (EVALUATION, 0, in_an_evaluation, signal.SIGINT),
    "evaluation, SIGKILL": (EVALUATION, 0, in_an_evaluation, signal.SIGKILL),
}


@pytest.mark.row("D2", "D15", "G1", "G3", "C4")
@pytest.mark.parametrize("case", tiered(CASES, "training, SIGINT", "training, SIGKILL", "evaluation, SIGKILL"))
def test_interrupted_run_goes_on_to_the_same_end(case, tmp_path, whole):
    """The signal goes to the whole group, loader workers too."""
    slow, workers, there, number = CASES[case]
    config = config_of(tmp_path, slow=slow, data={"num_workers": workers})
    process = train(config)
    wait_until(lambda: there(tmp_path), process)
    code, seconds = interrupt(process, number)

    killed = number == signal.SIGKILL
    assert code == (-number if killed else 128 + number) and seconds < WAITS_S and group_is_gone(process)
    assert killed or summary(tmp_path)["status"] == "interrupted"
    assert killed or saved(tmp_path)[-1] == summary(tmp_path)["iteration"] < END
    if there is in_an_evaluation:
        assert not any("val/accuracy" in line for line in lines(tmp_path)), "the evaluation was not broken off"
        assert lines(tmp_path)[-1]["iteration"] == 6  # it evaluates after 7
        assert finish(config, whole) == EVALUATIONS * BATCHES, "it is not run again, before anything is trained"
    else:
        finish(config, whole)


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("number", [pytest.param(signal.SIGINT, marks=pytest.mark.nightly), signal.SIGTERM])
def test_interrupted_while_the_loader_waits(number, workers, tmp_path, whole):
    config = config_of(tmp_path, slow=BLOCKS, data={"num_workers": workers}, MetricLogger={"every": 1})
    process = train(config)
    wait_until(lambda: in_a_wait(tmp_path), process)
    code, seconds = interrupt(process, number)
    assert code == 128 + number and seconds < WAITS_S and group_is_gone(process)
    assert saved(tmp_path)[-1] == summary(tmp_path)["iteration"] < END
    (tmp_path / "fast").touch()
    trained(config)
    assert summary(tmp_path)["weights_sha256"] == summary(whole)["weights_sha256"]


def test_second_signal_forces_the_end(tmp_path):
    process = train(config_of(tmp_path, slow={"slow_step_s": 30.0}))
    wait_until((tmp_path / "stepping").exists, process)
    began = time.monotonic()
    wait_until(lambda: process.signal(signal.SIGINT) or process.poll() is not None)  # of half a second they are one
    assert process.wait() == 130 and time.monotonic() - began < WAITS_S and saved(tmp_path) == []


@pytest.mark.nightly
def test_stopped_twice_in_one_evaluation(tmp_path, whole):
    """The second time while it is made up, before anything is trained."""
    config = config_of(tmp_path, slow=EVALUATION)
    for number in (signal.SIGINT, signal.SIGTERM):
        process, before = train(config), evaluated(tmp_path)
        wait_until(lambda before=before: evaluated(tmp_path) >= before + 3, process)
        assert interrupt(process, number)[0] == 128 + number
        ended = summary(tmp_path)
        assert (ended["status"], ended["reason"], ended["iteration"]) == ("interrupted", number.name, 7)
    assert finish(config, whole) == EVALUATIONS * BATCHES


@pytest.mark.row("A9")
def test_finished_run_started_again_only_evaluates_also_where_that_was_interrupted(tmp_path, whole):
    shutil.copytree(whole / "run", tmp_path / "run")
    config = config_of(tmp_path, slow=EVALUATION)
    process = train(config)
    wait_until(lambda: evaluated(tmp_path) >= 2, process)
    assert interrupt(process, signal.SIGINT)[0] == 130 and summary(tmp_path)["status"] == "interrupted"
    assert finish(config, whole) == BATCHES and "val/accuracy" in summary(tmp_path)["metrics"]


@pytest.mark.nightly  # tests/ranks/test_two_ranks.py has one of two ranks
def test_stopped_evaluation_goes_on_where_it_was(tmp_path, whole):
    config = config_of(tmp_path, slow=EVALUATION, Evaluation={"resumes": True})
    process = train(config)
    wait_until(lambda: in_an_evaluation(tmp_path), process)
    assert interrupt(process, signal.SIGTERM)[0] == 143
    assert evaluated(tmp_path) + finish(config, whole) == EVALUATIONS * BATCHES


# ------------------------------------------------------------------------------------------------------------- limits


@pytest.mark.nightly  # tests/ranks/test_two_ranks.py has one, and tests/runs one in a run's folder
def test_stop_file_stops_a_run_once(tmp_path, whole):
    config, path = config_of(tmp_path, slow=STEPS, StopFile={"path": "stop"}), tmp_path / "run" / "stop"
    process = train(config)
    wait_until(lambda: in_training(tmp_path), process)
    path.touch()
    assert process.wait() == 0
    ended = summary(tmp_path)
    assert ended["status"] == "interrupted" and str(path) in ended["reason"]
    assert saved(tmp_path)[-1] == ended["iteration"] < END and path.exists()
    finish(config, whole)


@pytest.mark.parametrize("where", ["training", pytest.param("evaluation", marks=pytest.mark.nightly)])
def test_run_is_saved_before_its_time_limit(where, tmp_path, whole):
    # each alone would take longer: a run of 52 * 0.2 s, an evaluation of 13 * 2 s
    slow = {"slow_step_s": 0.2} if where == "training" else {"slow_evaluation_s": 2.0}
    limit_s = 1.5 if where == "training" else 6.0
    config = config_of(tmp_path, slow=slow, WallClockLimit={"seconds": limit_s}, Checkpoint={"every": None})
    process = train(config)
    assert process.wait() == 0
    ended = summary(tmp_path)
    assert ended["status"] == "interrupted" and "time limit" in ended["reason"]
    assert saved(tmp_path) == [ended["iteration"]] and 1 <= ended["iteration"] < END
    if where == "evaluation":
        assert ended["iteration"] == 7 and 1 <= evaluated(tmp_path) < BATCHES
        (tmp_path / "fast").touch()
        trained(config, "handlers.WallClockLimit=null")
        assert_same_end(tmp_path, whole)


def test_sigusr1_saves_and_the_run_continues(tmp_path, whole):
    process = train(config_of(tmp_path, slow=STEPS, Checkpoint={"every": None}))
    wait_until(lambda: in_training(tmp_path), process)
    assert saved(tmp_path) == []
    os.kill(process.pid, signal.SIGUSR1)
    wait_until(lambda: saved(tmp_path), process)
    (tmp_path / "fast").touch()
    assert process.wait() == 0
    first, last = saved(tmp_path)
    assert 4 <= first < last == END
    assert_same_end(tmp_path, whole)


@pytest.mark.row("H6")
@pytest.mark.nightly
def test_seed_decides_the_digest_and_workers_do_not(tmp_path, whole):
    trained(config_of(tmp_path / "seed", run={"seed": 4}))
    trained(config_of(tmp_path / "workers", data={"num_workers": 2}))
    other, workers, expected = (
        summary(each)["weights_sha256"] for each in (tmp_path / "seed", tmp_path / "workers", whole)
    )
    assert other != expected == workers
