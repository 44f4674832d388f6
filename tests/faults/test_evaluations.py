"""Killed or stopped in an evaluation: evaluated again before it trains on, from where it was if progress is kept."""

import signal

import pytest

from tests.faults.processes import evaluated, interrupt, lines, start, summary, train, wait_until, write_config

pytestmark = [pytest.mark.faults, pytest.mark.long]


def start_slow(folder, **evaluation):
    """A run whose evaluations take 4 s; the config, and the process."""
    options = {"slow_evaluation_s": 0.3, "count_batches": True}
    config = write_config(folder, task_options=options, evaluation=evaluation)
    return config, start(config)


def finish(config, uninterrupted):
    """Start it again, to the same end; batches that this last start evaluated."""
    folder = config.parent
    (folder / "fast").touch()
    before = evaluated(folder)
    train(config)
    assert summary(folder)["status"] == "completed"
    assert summary(folder)["weights_sha256"] == uninterrupted["digest"]
    assert lines(folder) == uninterrupted["lines"]
    return evaluated(folder) - before


def assert_cut_off(folder):
    """The fault was in the first evaluation: nothing of it was logged, and its iteration was trained."""
    assert not any("val/accuracy" in line for line in lines(folder))
    assert lines(folder)[-1]["iteration"] == 6  # it evaluates after 7


@pytest.mark.row("C4")
def test_killed_while_evaluating_it_evaluates_again(tmp_path, uninterrupted):
    config, process = start_slow(tmp_path)
    wait_until(lambda: evaluated(tmp_path) >= 4, process)
    assert interrupt(process, signal.SIGKILL)[0] == -signal.SIGKILL
    assert_cut_off(tmp_path)
    assert finish(config, uninterrupted) == uninterrupted["evaluated"] == 6 * 13


@pytest.mark.row("C4")
def test_stopped_twice_in_one_evaluation(tmp_path, uninterrupted):
    """The second time while it is made up, before anything is trained."""
    config, process = start_slow(tmp_path)
    for number in (signal.SIGINT, signal.SIGTERM):
        before = evaluated(tmp_path)
        wait_until(lambda before=before: evaluated(tmp_path) >= before + 4, process)
        assert interrupt(process, number)[0] == 128 + number
        assert_cut_off(tmp_path)
        ended = summary(tmp_path)
        assert (ended["status"], ended["reason"], ended["iteration"]) == ("interrupted", number.name, 7)
        if number == signal.SIGINT:
            process = start(config)
    assert finish(config, uninterrupted) == uninterrupted["evaluated"]


def test_interrupted_while_a_finished_run_is_evaluated(tmp_path, uninterrupted):
    config = write_config(tmp_path, task_options={"slow_evaluation_s": 0.3, "count_batches": True})
    (tmp_path / "fast").touch()
    train(config)
    (tmp_path / "fast").unlink()
    before = evaluated(tmp_path)
    process = start(config)
    wait_until(lambda: evaluated(tmp_path) >= before + 4, process)
    assert interrupt(process, signal.SIGINT)[0] == 130
    assert summary(tmp_path)["status"] == "interrupted"
    assert finish(config, uninterrupted) == 13


def test_stopped_evaluation_goes_on_where_it_was(tmp_path, uninterrupted):
    config, process = start_slow(tmp_path, resumes=True)
    wait_until(lambda: evaluated(tmp_path) >= 4, process)
    assert interrupt(process, signal.SIGTERM)[0] == 143
    assert_cut_off(tmp_path)
    done = evaluated(tmp_path)
    assert finish(config, uninterrupted) == uninterrupted["evaluated"] - done
