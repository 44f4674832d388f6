"""A run and its follower, each in a process of its own: signals, kills, and a retention that keeps one checkpoint."""

import json
import os
import signal
import time
from pathlib import Path

import pytest

from ignite_engine.checkpointing import CheckpointStore
from ignite_engine.run_directory import RunDirectory
from tests.faults.fork_server import shared
from tests.faults.processes import Run, interrupt, lines, start, summary, wait_until, write_config

ROOT = Path(__file__).resolve().parents[3]
QUIET = [f"logging.{name}=false" for name in ("console", "progress", "memory", "throughput", "clearml", "report")]
SHIPPED = {
    "digits": ["run.max_epochs=null", "task_options.width=8", "early_stopping.metric=null"],
    "byte_gpt": ["task_options={context: 32, width: 16, layers: 1, heads: 2, dropout: 0.05, ngram_slots: 64}"],
}
NOT_BY_ITSELF = ["evaluation.every=null", "evaluation.at_end=false"]
"""The run evaluates nothing."""
BY_LOSS = ["checkpoint.best=val/accuracy", "checkpoint.mode=max", "checkpoint.keep_last=1", "checkpoint.every=1"]


def command(folder, *arguments, output):
    return Run(shared().start("tests.faults.commands:main", list(arguments), output=folder / output, folder=ROOT))


def follower(config, *arguments, output="follower.txt"):
    return command(config.parent, "evaluate", str(config), "--follow", *arguments, output=output)


def followed(folder):
    """What the follower has written to the run's log, by iteration."""
    path = RunDirectory(folder / "run").followed
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    values = {row["iteration"]: {name: row[name] for name in row if name.startswith("val/")} for row in rows}
    assert len(values) == len(rows)
    return values


def its_own(folder):
    """What the run itself has measured, by iteration."""
    rows = {line["iteration"]: {key: line[key] for key in line if key.startswith("val/")} for line in lines(folder)}
    return {iteration: row for iteration, row in rows.items() if row}


def printed(folder, output="follower.txt"):
    """The iterations that a follower has said to have evaluated."""
    rows = [line for line in (folder / output).read_text().splitlines() if line.startswith("{")]
    return [json.loads(row)["iteration"] for row in rows]


def best_is_kept(folder, metric="val/accuracy"):
    """Of all that was evaluated the best is on disk, and is found as such: whichever was saved meanwhile."""
    values = {iteration: row[metric] for iteration, row in followed(folder).items()}
    best = CheckpointStore(folder / "run" / "checkpoints").best(metric, "max")
    assert best is not None and best.manifest.metrics[metric] == max(values.values()) == values[best.iteration]


@pytest.mark.slow
@pytest.mark.faults
@pytest.mark.parametrize("name", SHIPPED)
def test_values_have_the_bits_of_the_runs_own_evaluation(tmp_path, name):
    config = str(ROOT / "configs" / f"{name}.yaml")
    settings = [*SHIPPED[name], f"run.directory={tmp_path / 'run'}", "run.max_iterations=8", "run.threads=1", *QUIET]
    settings += ["evaluation={every: 2, sanity_batches: 0, limit: 2}", "checkpoint.every=2", "checkpoint.keep_last=9"]
    beside = command(tmp_path, "evaluate", config, "--follow", "--all", *settings, output="follower.txt")
    run = command(tmp_path, "train", config, *settings, output="output.txt")
    assert run.wait(timeout=120) == 0, (tmp_path / "output.txt").read_text()
    assert beside.wait(timeout=120) == 0, (tmp_path / "follower.txt").read_text()
    its_own = {
        line["iteration"]: {key: line[key] for key in line if key.startswith("val/")} for line in lines(tmp_path)
    }
    values = followed(tmp_path)
    assert values == {iteration: row for iteration, row in its_own.items() if row}
    assert list(values) == [2, 4, 6, 8] == printed(tmp_path)
    assert len({row["val/loss"] for row in values.values()}) == 4


@pytest.mark.slow
@pytest.mark.faults
def test_a_run_that_does_not_evaluate_keeps_its_best_by_a_follower_that_is_killed_again_and_again(
    tmp_path,
):
    """At one save an iteration, of which one is kept; in the end at full speed."""
    config = write_config(tmp_path, task_options={"slow_step_s": 0.1}, run={"max_epochs": 12})
    run = start(config, *BY_LOSS, *NOT_BY_ITSELF)
    for kill in range(3):
        beside, known = follower(config, output=f"follower_{kill}.txt"), len(followed(tmp_path))
        wait_until(lambda known=known: len(followed(tmp_path)) > known + 1, beside)
        os.kill(beside.pid, signal.SIGKILL)
        beside.wait()
    assert run.poll() is None, "all of this was beside the run"
    beside = follower(config, output="last.txt")
    wait_until(lambda: printed(tmp_path, "last.txt"), beside)
    (tmp_path / "fast").touch()
    assert run.wait(timeout=120) == 0, (tmp_path / "output.txt").read_text()
    assert beside.wait(timeout=60) == 0
    said = [iteration for file in tmp_path.glob("follower_*.txt") for iteration in printed(tmp_path, file.name)]
    said += printed(tmp_path, "last.txt")
    assert len(said) == len(set(said)) and set(said) <= followed(tmp_path).keys()
    assert 84 in followed(tmp_path) and summary(tmp_path)["iteration"] == 84
    best_is_kept(tmp_path)
    assert "has no effect, as nothing has written that metric" not in (tmp_path / "output.txt").read_text()
    assert follower(config, output="again.txt").wait(timeout=60) == 0 and printed(tmp_path, "again.txt") == []


@pytest.mark.long
@pytest.mark.faults
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.parametrize("where", ["waiting", "evaluating"])
def test_a_signal_ends_it_cleanly_and_the_run_does_not_notice(tmp_path, number, code, where):
    slow = {"slow_evaluation_s": 20.0} if where == "evaluating" else {}
    config = write_config(tmp_path, task_options={"slow_step_s": 0.1, **slow})
    run = start(config, *NOT_BY_ITSELF)
    beside = follower(config)
    sign = tmp_path / ("evaluating" if where == "evaluating" else "run/follow/metrics.jsonl")
    wait_until(sign.exists, beside)
    assert interrupt(beside, number)[0] == code
    assert "Traceback" not in (tmp_path / "follower.txt").read_text()
    (tmp_path / "fast").touch()
    assert run.wait() == 0
    assert follower(config).wait() == 0 and max(followed(tmp_path)) == summary(tmp_path)["iteration"]


@pytest.mark.slow
@pytest.mark.faults
def test_of_a_killed_run_it_waits_so_long_and_continues_with_it(tmp_path):
    config = write_config(tmp_path, task_options={"slow_step_s": 0.05})
    beside = follower(config, "--wait", "0.1")  # not begun
    assert beside.wait() == 0 and "shows no sign of a run for 0.1 s" in (tmp_path / "follower.txt").read_text()
    run = start(config, *NOT_BY_ITSELF)
    beside = follower(config, "--wait", "1")
    wait_until(lambda: followed(tmp_path), beside)
    second = follower(config, output="second.txt")
    assert second.wait() == 2
    assert f"error: {tmp_path / 'run'} is followed by process {beside.pid} on " in (tmp_path / "second.txt").read_text()
    time.sleep(1.5)
    assert beside.poll() is None, "the run lives"
    os.killpg(run.pid, signal.SIGKILL)
    run.wait()
    assert beside.wait(timeout=30) == 0
    assert "it has not begun, was killed, or has failed" in (tmp_path / "follower.txt").read_text()
    (tmp_path / "fast").touch()
    run, beside = start(config, *NOT_BY_ITSELF), follower(config, output="resumed.txt")
    assert run.wait() == 0 and beside.wait() == 0
    assert max(followed(tmp_path)) == summary(tmp_path)["iteration"]


@pytest.mark.slow
@pytest.mark.faults
@pytest.mark.distributed
def test_two_ranks_follow_two_ranks(tmp_path):
    config = write_config(
        tmp_path, run={"max_epochs": 2}, checkpoint={"every": 2, "keep_last": 9}, evaluation={"every": 2}
    )
    run = start(config, "--nproc-per-node", "2")
    beside = follower(config, "--nproc-per-node", "2", "--all")
    assert run.wait() == 0, (tmp_path / "output.txt").read_text()
    assert beside.wait() == 0, (tmp_path / "follower.txt").read_text()
    its_own = {
        line["iteration"]: {key: line[key] for key in line if key.startswith("val/")} for line in lines(tmp_path)
    }
    values = followed(tmp_path)
    assert values and all(its_own[iteration] == row for iteration, row in values.items() if its_own.get(iteration))
    assert printed(tmp_path) == list(values)


def test_options_that_belong_together(tmp_path, capsys):
    from ignite_engine.cli import main

    config = str(write_config(tmp_path))
    wrong = {
        "--checkpoint: --follow evaluates all that the run saves; leave one of them out.": (
            "--follow",
            "--checkpoint",
            "best",
        ),
        "--all: it belongs to --follow, which is not given.": ("--all",),
        "--wait: it belongs to --follow, which is not given.": ("--wait", "3"),
    }
    for message, options in wrong.items():
        assert main(["evaluate", config, *options]) == 2
        assert capsys.readouterr().err == f"error: {message}\n"
