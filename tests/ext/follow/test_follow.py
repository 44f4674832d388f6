"""Each checkpoint of a run is evaluated beside its training: which, when, what is written where, and who reads it."""

import json
import logging
import shutil
import signal

import pytest
import torch
from ignite.engine import Events
from ignite.metrics import Average

from ignite_engine import create_evaluator, seed_everything
from ignite_engine.ext.follow import follow
from ignite_engine.ext.report import read_run
from ignite_engine.handlers import EMA, Checkpoint, Evaluation, MetricLogger
from tests.kit import runs
from tests.kit.processes import wait_until
from tests.kit.refusals import CommandRefused, command, refusals
from tests.kit.runs import interrupt, lines, summary, train, write_config
from tests.kit.tiny import linear, numbers_loader, trainer_of

NOT_BY_ITSELF = ["handlers.Evaluation.every=null", "handlers.Evaluation.at_end=false"]
"""The run evaluates nothing."""
BY_LOSS = [
    "handlers.Checkpoint.best=val/accuracy",
    "handlers.Checkpoint.mode=max",
    "handlers.Checkpoint.keep_last=1",
    "handlers.Checkpoint.every=1",
]


def noisy(model, batch):
    """A prediction that draws random numbers of its own, and depends on the mode of the model."""
    return ((model(batch[0]) + torch.rand(())) - batch[1]).square().mean()


def build():
    """The trainer of the run, and of its follower."""
    seed_everything(4)
    trainer = trainer_of(linear(dropout=True))
    EMA(0.5).attach(trainer)
    evaluator = create_evaluator(trainer.update.model, noisy, {"loss": Average()})
    Evaluation(evaluator, numbers_loader(8)).attach(trainer, Events.ITERATION_COMPLETED(every=2))
    return trainer


def trained(folder, iterations=6, **options):
    """A run that saves each second iteration, from where it was; its own values by iteration."""
    trainer = build()
    MetricLogger(folder, console=False).attach(trainer)
    checkpoint = Checkpoint(folder / "checkpoints", keep_last=9, **options)
    checkpoint.attach(trainer, Events.ITERATION_COMPLETED(every=2))
    checkpoint.resume()
    trainer.run(numbers_loader(), max_iters=iterations)
    return dict(read_run(folder).series["val/loss"])


def followed(folder, act=lambda: None, **options):
    """What a follower announces, in its order."""
    found = {}

    def announce(values):
        found[values["iteration"]] = values["val/loss"]
        act()

    assert follow(folder, build, announce=announce, **{"wait_s": 1, **options}) == len(found)
    return found


def in_log(folder):
    """What a follower has written into the run's folder, by iteration."""
    path = folder / "follow" / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    values = {row["iteration"]: {name: row[name] for name in row if name.startswith("val/")} for row in rows}
    assert len(values) == len(rows)
    return values


def names(folder):
    return sorted(int(path.name.removeprefix("iteration_")) for path in (folder / "checkpoints").glob("iteration_*"))


def manifests(folder):
    texts = [path.read_text() for path in sorted((folder / "checkpoints").glob("*/manifest.json"))]
    return {each["iteration"]: each for each in map(json.loads, texts)}


@pytest.mark.row("M2")
def test_with_random_numbers_dropout_and_an_average_the_values_have_the_bits_of_the_run(tmp_path):
    its_own = trained(tmp_path)
    torch.manual_seed(99)
    assert followed(tmp_path, every_checkpoint=True) == its_own and list(its_own) == [2, 4, 6]
    assert followed(tmp_path, wait_s=0) == {}, "none is evaluated twice"


def test_the_newest_comes_first_and_what_is_gone_meanwhile_is_left_out(tmp_path):
    trained(tmp_path)
    gone = tmp_path / "checkpoints" / "iteration_00000004"
    assert list(followed(tmp_path, lambda: shutil.rmtree(gone, ignore_errors=True))) == [6, 2]


@pytest.mark.row("M2")
def test_of_all_the_oldest_comes_first_and_none_is_pruned_before_it_was_evaluated(tmp_path):
    trained(tmp_path)
    there = []

    def prune():
        command("checkpoints", "prune", tmp_path, "--keep-last", 1)
        there.append(names(tmp_path))

    assert list(followed(tmp_path, prune, every_checkpoint=True)) == [2, 4, 6]
    assert there == [[4, 6], [6], [6]]


def test_what_was_measured_is_in_the_log_the_manifests_the_mirror_and_the_report(tmp_path):
    run, log, mirror = tmp_path / "run", tmp_path / "run" / "metrics.jsonl", tmp_path / "mirror"
    its_own = trained(run)
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    rows = [{name: row[name] for name in row if name != "val/loss"} for row in rows if row["iteration"] != 4]
    log.write_text("".join(json.dumps(row) + "\n" for row in rows))  # as if the run had not evaluated
    (run / "report.html").write_text("before")
    followed(run)

    assert dict(read_run(run).series["val/loss"]) == its_own
    assert [at for at, _ in read_run(run).series["loss"]] == [1, 2, 3, 5, 6]
    assert {at: each["metrics"]["val/loss"] for at, each in manifests(run).items()} == its_own
    assert "val/loss" in (run / "report.html").read_text()
    trained(run, 8, mirror=str(mirror))
    there = json.loads((mirror / "iteration_00000008" / "manifest.json").read_text())
    assert there["metrics"]["val/loss"] == read_run(run).series["val/loss"][-1][1]


def test_iterations_that_the_run_has_left_are_neither_evaluated_nor_logged(tmp_path):
    trained(tmp_path)
    assert list(followed(tmp_path, every_checkpoint=True)) == [2, 4, 6]
    for iteration in (4, 6):
        shutil.rmtree(tmp_path / "checkpoints" / f"iteration_{iteration:08d}")
    trained(tmp_path, 4)
    assert list(followed(tmp_path)) == [4]
    assert list(in_log(tmp_path)) == [2, 4]


def test_what_somebody_has_written_into_its_file_is_left_out_and_a_damaged_checkpoint_is_one_warning(tmp_path, caplog):
    its_own, log = trained(tmp_path), tmp_path / "follow" / "metrics.jsonl"
    log.parent.mkdir()
    log.write_text('[1]\n{"iteration": [2], "checkpoint": {}}\n{"iteration": 4, "checkpoint": {}}\n{"iterat')
    (tmp_path / "checkpoints" / "iteration_00000004" / "shared.safetensors").write_bytes(b"nothing")
    assert dict(read_run(tmp_path).series["val/loss"]) == its_own
    with caplog.at_level(logging.WARNING):
        assert list(followed(tmp_path)) == [6, 2] == list(in_log(tmp_path))[::-1]
    (line,) = [record.getMessage() for record in caplog.records if "is not evaluated" in record.getMessage()]
    assert "iteration_00000004" in line and "shared.safetensors" in line


# -------------------------------------------------------------------------------------------- beside a real run


def follower(config, *words):
    return runs.command(config.parent, "evaluate", config, "--follow", *words)


def announced(process):
    """The iterations that a follower has said to have evaluated."""
    return [json.loads(row)["iteration"] for row in process.said().splitlines() if row.startswith("{")]


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.nightly), 2])
def test_the_command_measures_what_the_run_does_on_as_many_ranks(tmp_path, ranks):
    every_second = {"Checkpoint": {"every": 2, "keep_last": 9}, "Evaluation": {"every": 2}}
    config = write_config(tmp_path, run={"max_epochs": 1}, EMA={"decay": 0.9}, **every_second)
    several = ["--nproc-per-node", "2"] if ranks == 2 else []
    run, beside = train(config, *several), follower(config, "--all", *several)
    assert (run.wait(), beside.wait()) == (0, 0), run.said() + beside.said()

    its_own = {row["iteration"]: {key: row[key] for key in row if key.startswith("val/")} for row in lines(tmp_path)}
    values = in_log(tmp_path / "run")
    assert values and all(its_own[iteration] == row for iteration, row in values.items() if its_own.get(iteration))
    assert announced(beside) == list(values)


def test_a_run_keeps_its_best_by_a_follower_that_is_killed_and_started_again(tmp_path):
    """At one save an iteration, of which one is kept."""
    config = write_config(tmp_path, task_options={"slow_step_s": 0.02}, run={"max_epochs": 3})
    run, said = train(config, *BY_LOSS, *NOT_BY_ITSELF), []
    for _ in range(2):
        beside, known = follower(config), len(in_log(tmp_path / "run"))
        wait_until(lambda known=known: len(in_log(tmp_path / "run")) > known, beside)
        beside.signal(signal.SIGKILL)
        beside.wait()
        said += announced(beside)
    assert run.poll() is None, "all of this was beside the run"
    beside = follower(config)
    (tmp_path / "fast").touch()
    assert (run.wait(), beside.wait()) == (0, 0), run.said() + beside.said()

    said += announced(beside)
    values = {iteration: row["val/accuracy"] for iteration, row in in_log(tmp_path / "run").items()}
    assert len(said) == len(set(said)) and set(said) <= values.keys()
    assert max(values) == summary(tmp_path)["iteration"]
    kept = manifests(tmp_path / "run")
    best = max(kept.values(), key=lambda each: each["metrics"].get("val/accuracy", -1.0))
    assert best["metrics"]["val/accuracy"] == max(values.values()) == values[best["iteration"]]
    found = command("checkpoints", "push", tmp_path / "run" / "best", tmp_path / "pushed")
    assert f"iteration_{best['iteration']:08d}" in found


@pytest.mark.parametrize(
    ("number", "code", "where"),
    [(signal.SIGINT, 130, "evaluating"), pytest.param(signal.SIGTERM, 143, "waiting", marks=pytest.mark.nightly)],
)
def test_a_signal_ends_it_cleanly_and_the_run_does_not_notice(tmp_path, number, code, where):
    slow = {"slow_evaluation_s": 20.0} if where == "evaluating" else {}
    config = write_config(tmp_path, task_options={"slow_step_s": 0.05, **slow}, run={"max_epochs": 2})
    run, beside = train(config, *NOT_BY_ITSELF), follower(config)
    sign = tmp_path / ("evaluating" if where == "evaluating" else "run/follow/metrics.jsonl")
    wait_until(sign.exists, beside)
    assert interrupt(beside, number)[0] == code
    assert "Traceback" not in beside.said()
    (tmp_path / "fast").touch()
    assert run.wait() == 0
    assert follower(config).wait() == 0 and max(in_log(tmp_path / "run")) == summary(tmp_path)["iteration"]


@pytest.mark.nightly
def test_of_a_killed_run_it_waits_so_long_and_continues_with_it(tmp_path):
    config = write_config(tmp_path, task_options={"slow_step_s": 0.05}, run={"max_epochs": 6})
    beside = follower(config, "--wait", "0.1")
    assert beside.wait() == 0 and "shows no sign of a run" in beside.said()
    run, beside = train(config, *NOT_BY_ITSELF), follower(config, "--wait", "0.5")
    wait_until(lambda: in_log(tmp_path / "run"), beside)
    second = follower(config)
    assert second.wait() == 2 and f"is followed by process {beside.pid} on " in second.said()
    assert beside.poll() is None, "the run lives"
    run.signal(signal.SIGKILL)
    run.wait()
    assert beside.wait() == 0 and "was killed" in beside.said()
    (tmp_path / "fast").touch()
    run, beside = train(config, *NOT_BY_ITSELF), follower(config)
    assert (run.wait(), beside.wait()) == (0, 0)
    assert max(in_log(tmp_path / "run")) == summary(tmp_path)["iteration"]


def evaluate(*words):
    return lambda folder: command("evaluate", write_config(folder), *words)


test_refusals = refusals(
    [
        ("a checkpoint", evaluate("--follow", "--checkpoint", "best"), CommandRefused, "--checkpoint --follow"),
        ("all, without", evaluate("--all"), CommandRefused, "--all belongs --follow"),
        ("wait, without", evaluate("--wait", "3"), CommandRefused, "--wait belongs --follow"),
        ("a negative wait", lambda folder: follow(folder, build, wait_s=-1), ValueError, "wait_s at least 0"),
        ("a word to wait", lambda folder: follow(folder, build, wait_s="long"), TypeError, "wait_s seconds"),
        ("no function", lambda folder: follow(folder, 3), TypeError, "build function trainer"),
        ("no trainer", lambda folder: follow(folder, dict), TypeError, "build() Trainer"),
        ("no evaluation", lambda folder: follow(folder, trainer_of), ValueError, "nothing attach Evaluation"),
    ]
)
