"""The command line: each ending's exit code, one line for what a user can fix, and the same command resuming."""

import json
import os
import re
import signal
import sys

import pytest

import ignite_engine
from ignite_engine.cli import main
from tests.kit import runs
from tests.kit.fitting import fitted, manifest, points, read, saved
from tests.kit.floors import needs, of
from tests.kit.processes import wait_until
from tests.kit.refusals import CommandRefused, command, refusals

TASK = """
import os
import time
import torch
from ignite_engine import Task


def build(options):
    if options.get("broken"):
        raise ValueError("no such corpus")
    data = torch.utils.data.TensorDataset(torch.arange(64.0).reshape(32, 2) / 64)
    width = options.get("width", 4)
    model = torch.nn.Sequential(torch.nn.Linear(2, width), torch.nn.Dropout(0.5), torch.nn.Linear(width, 1))

    def loss(model, batch):
        while os.path.exists(options.get("held_by", "")):
            time.sleep(0.01)
        if options.get("fails"):
            raise RuntimeError("the loss is lost")
        if options.get("diverges") and batch[0].max() > 0.9:
            return (model(batch[0]) * float("inf")).sum()
        return (model(batch[0]) - 1).square().mean()

    return Task(model=model, loss_fn=loss, train_set=data, val_sets={"val": data})


not_a_function = 3
"""

CONFIG = """
task: my_task.py:build
run: {directory: run, max_iterations: 12}
data: {batch_size: 4}
handlers:
  Evaluation: {every: 6}
  Checkpoint: {every: 6, best: val/loss}
  MetricLogger: {every: 3}
"""
TWO = ("--nproc-per-node", "2", "--backend", "gloo")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The working directory, with a task and its config; ``sys.path`` is put back after."""
    return prepared(tmp_path, monkeypatch)


def prepared(folder, patch):
    (folder / "my_task.py").write_text(TASK)
    (folder / "my_config.yaml").write_text(CONFIG)
    patch.chdir(folder)
    patch.setattr(sys, "path", list(sys.path))
    for name in ("RANK", "WORLD_SIZE", "SLURM_NTASKS"):
        patch.delenv(name, raising=False)
    return folder


def in_folder(*words):
    """The command in a prepared folder, where a refusal writes nothing."""

    def call(folder):
        with pytest.MonkeyPatch.context() as patch:
            prepared(folder, patch)
            (folder / "broken.py").write_text("def build(:\n")
            (folder / "raising.py").write_text("values = {}\nvalues['gone']\n")
            try:
                command(*words)
            finally:
                assert not (folder / "run").exists()

    return call


def train(*words):
    return in_folder("train", "my_config.yaml", *words)


def of_fit(folder):
    fitted(folder / "one")
    command("verify-resume", folder / "one" / "config.yaml")


CALLS = [
    ("task's file", train("task=my_tsk.py:build"), "no such file 'my_task.py'?"),
    ("task's function", train("task=my_task.py:bild"), "my_task.py 'bild' 'build'?"),
    ("not a function", train("task=my_task.py:not_a_function"), "int function"),
    ("syntax error", train("task=broken.py:build"), "SyntaxError broken.py:1"),
    ("module that raises", train("task=raising.py:build"), "KeyError: 'gone' raising.py:2"),
    ("module", train("task=no.such:build"), "module 'no' .py"),
    ("task that raises", train("task_options.broken=true"), "build() ValueError corpus my_task.py:10"),
    ("config's file", in_folder("train", "my_config.yml"), "my_config.yml 'my_config.yaml'?"),
    ("key", train("run.sed=1"), "run.sed 'seed'?"),
    ("best", train("handlers.Checkpoint.best=val/los"), "handlers.Checkpoint.best 'val/los' 'val/loss'?"),
    ("directory", train("run.directory=my_task.py"), "run.directory 'my_task.py' not a folder"),
    ("option", train("--nproc-per-nod", "2"), "--nproc-per-nod train '--nproc-per-node'?"),
    ("ranks", train("--nproc-per-node", "0"), "'0' whole number at least 1"),
    ("no command", in_folder(), "command train --help"),
    ("no config", in_folder("train"), "required CONFIG"),
    ("command", in_folder("trian", "my_config.yaml"), "'trian' 'train'?"),
    ("nothing to evaluate", in_folder("evaluate", "my_config.yaml"), "checkpoints does not exist"),
    ("no best", in_folder("evaluate", "my_config.yaml", "--checkpoint", "best"), "checkpoints does not exist"),
    ("no such checkpoint", in_folder("evaluate", "my_config.yaml", "--checkpoint", "x"), "x does not exist"),
    *of(
        "replay",
        [
            ("no function", in_folder("verify-resume", "my_task.py"), "my_task.py FILE:FUNCTION"),
            (
                "function's settings",
                in_folder("verify-resume", "my_task.py:build", "run.seed=1"),
                "'run.seed=1' function",
            ),
            ("config of fit", of_fit, "program model data"),
        ],
    ),
    *of(
        "report",
        [
            ("report of nothing", in_folder("report", "nowhere"), "nowhere not a directory"),
            ("report of no run", in_folder("report", "."), "not the directory of a run metrics.jsonl"),
            ("report of two", in_folder("report", "a", "b"), "'b' report --output"),
            ("report's option", in_folder("report", "run", "--outptu", "x"), "'--outptu' report"),
            ("compare nothing", in_folder("compare"), "required RUN"),
            ("compare no run", in_folder("compare", "nowhere"), "nowhere not a directory"),
            ("output", in_folder("compare", ".", "--output", "nowhere/x.html"), "--output 'nowhere/x.html' directory"),
        ],
    ),
    ("doctor's argument", in_folder("doctor", "config.yaml"), "config.yaml"),
]
test_user_error_is_one_line_and_code_2 = refusals([(name, call, CommandRefused, words) for name, call, words in CALLS])


def test_the_traceback_of_the_task_is_there_on_request(folder):
    with pytest.raises(ValueError, match="no such corpus") as caught:
        main(["train", "my_config.yaml", "--traceback", "task_options.broken=true"])
    assert isinstance(caught.value.__cause__, ValueError)


def test_the_version_is_printed():
    assert command("--version").split() == ["ignite-engine", ignite_engine.__version__]


def test_doctor_names_versions_and_what_a_run_uses():
    text = command("doctor")
    assert {"torch", "pytorch-ignite", "cores", "models go to", "several ranks"} <= {
        line.partition("  ")[0].strip() for line in text.splitlines()
    }


@pytest.mark.row("N2")
@pytest.mark.accelerator
def test_doctor_says_of_a_device_what_a_run_uses(tmp_path):
    lines = command("doctor").splitlines()
    said = {name.strip(): value.strip() for name, _, value in (line.partition("  ") for line in lines)}
    run = fitted(tmp_path, max_epochs=1)
    device = str(next(run.trainer.update.model.parameters()).device)
    assert said["models go to"].startswith(device) and said["accelerators"].startswith("0: ")


def test_options_and_overrides_stand_in_any_order(folder):
    command("train", "my_config.yaml", "run.seed=3", "--backend", "gloo", "run.max_iterations=2")
    assert read(folder / "run")["iteration"] == 2


def test_a_setting_without_effect_is_one_line(folder, capsys):
    assert main(["describe", "my_config.yaml", "data.prefetch_factor=2"]) == 0
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("warning: ") and "data.prefetch_factor" in line and "data.num_workers" in line


@pytest.mark.row("E4")
def test_describe_shows_the_curve_and_the_bus_and_runs_nothing(folder):
    said = command("describe", "my_config.yaml", "schedule={name: cosine, warmup: 4}", "optimizer.lr=0.5")
    assert "Trains for 12 iterations" in said and "RESUME_POINT" in said and "LRSchedule" in said
    curve = [line.split() for line in said.splitlines() if "e-0" in line and "|" not in line]
    rates = {int(cells[0]): float(cells[1]) for cells in curve}
    assert (rates[1], rates[12]) == (pytest.approx(0.125), pytest.approx(0.5 * 0.0380602, rel=1e-4))
    assert not (folder / "run").exists()


@needs("report")
def test_report_and_compare_write_a_page_and_print_its_path(folder):
    command("train", "my_config.yaml", "handlers.Report=null")
    command("train", "my_config.yaml", "run.directory=other", "optimizer.lr=0.5")
    pages = [("report", "run"), ("report", "run", "-o", "page.html"), ("compare", "run", "other")]
    assert [command(*words).strip() for words in pages] == ["run/report.html", "page.html", "compare.html"]
    assert (folder / "page.html").read_bytes() == (folder / "run" / "report.html").read_bytes()
    assert "optimizer.lr</td><td>0.001</td><td>0.5" in (folder / "compare.html").read_text()


def test_train_then_the_same_command_then_evaluate(folder):
    command("train", "my_config.yaml")
    first, metrics = read(folder / "run"), (folder / "run" / "metrics.jsonl").read_text()
    command("train", "my_config.yaml")
    assert read(folder / "run")["weights_sha256"] == first["weights_sha256"]
    assert (folder / "run" / "metrics.jsonl").read_text() == metrics
    log = (folder / "run" / "logs" / "rank_0.log").read_text()
    assert re.search(r"Completed at iteration 12 .* weights [0-9a-f]{12}", log)

    losses = {iteration: manifest(folder / "run", iteration)["metrics"]["val/loss"] for iteration in (6, 12)}
    best = min(losses, key=losses.get)
    assert (first["best"]["metric"], first["best"]["iteration"]) == ("val/loss", best)
    path = f"run/checkpoints/iteration_{best:08d}"
    asked = {None: best, "best": best, "run/best": best, "last": 12, "run": 12, path: best}
    for checkpoint, iteration in asked.items():
        words = ["--checkpoint", checkpoint] if checkpoint else []
        found = json.loads(command("evaluate", "my_config.yaml", *words))
        assert (found["iteration"], found["val/loss"]) == (iteration, losses[iteration])


@pytest.mark.row("G3")
def test_any_other_failure_is_code_1_with_its_traceback(folder):
    process = runs.command(folder, "train", "my_config.yaml", "task_options.fails=true")
    assert process.wait() == 1
    error = process.errors.read_text()
    assert error.count("RuntimeError: the loss is lost") == 1 and "my_task.py" in error
    assert (read(folder / "run")["status"], read(folder / "run")["reason"]) == (
        "failed",
        "RuntimeError: the loss is lost",
    )


@pytest.mark.parametrize("several", [(), pytest.param(TWO, marks=pytest.mark.nightly)])
def test_a_last_checkpoint_that_cannot_be_saved_is_one_line_and_code_1(several, folder):
    """No file may grow above 8 KiB; the log and the summary are smaller."""
    process = runs.command(folder, "train", "my_config.yaml", *several, file_limit=8192)
    assert process.wait() == 1
    errors = process.errors.read_text()
    (line,) = [line for line in errors.splitlines() if line.startswith("error: ")]
    assert "iteration 12 was not saved" in line and "Traceback" not in errors
    summary = read(folder / "run")
    assert summary["status"] == "failed" and summary["reason"].startswith("CheckpointError"), "no rank's fault"


def test_a_loss_that_is_not_finite_ends_the_run_as_asked_in_one_line_and_code_1(folder, capsys):
    settings = (
        "update.non_finite=stop",
        "handlers.Checkpoint.every=1",
        "data.shuffle=false",
        "handlers.Evaluation.every=null",
    )
    assert main(["train", "my_config.yaml", *settings, "task_options.diverges=true", "handlers.Progress=null"]) == 1
    (line,) = [each for each in capsys.readouterr().err.splitlines() if each.startswith("error: ")]
    assert "loss of iteration 8" in line
    assert (read(folder / "run")["status"], read(folder / "run")["iteration"]) == ("failed", 8)
    assert [iteration for iteration in saved(folder / "run") if manifest(folder / "run", iteration)["healthy"]][-1] == 7


@pytest.mark.parametrize(
    ("number", "code"), [pytest.param(signal.SIGINT, 130, marks=pytest.mark.nightly), (signal.SIGTERM, 143)]
)
def test_a_signal_ends_with_its_code_and_the_same_command_resumes(number, code, folder):
    command("train", "my_config.yaml", "run.directory=whole")
    held = folder / "held"
    first = runs.command(
        folder, "train", "my_config.yaml", f"task_options.held_by={held}", "handlers.Checkpoint.every=1"
    )
    wait_until(lambda: (folder / "run" / "checkpoints" / "iteration_00000002").exists(), first)
    held.touch()
    os.kill(first.pid, number)
    held.unlink()
    assert first.wait() == code
    stopped = read(folder / "run")
    assert (stopped["status"], stopped["reason"]) == ("interrupted", signal.Signals(number).name)
    assert f"resumes from iteration_{stopped['iteration']:08d}" in first.errors.read_text()

    command("train", "my_config.yaml")
    assert read(folder / "run")["status"] == "completed"
    assert read(folder / "run")["weights_sha256"] == read(folder / "whole")["weights_sha256"]


@pytest.mark.parametrize("several", [(), pytest.param(TWO, marks=pytest.mark.nightly)])
def test_a_second_start_in_the_folder_of_a_run_is_refused_in_one_line(several, folder):
    command("train", "my_config.yaml", "run.directory=alone")
    held = folder / "held"
    held.touch()
    first = runs.command(folder, "train", "my_config.yaml", f"task_options.held_by={held}")
    wait_until(lambda: (folder / "run" / "summary.json").exists(), first)
    second = runs.command(folder, "train", "my_config.yaml", *several)
    assert second.wait() == 2 and first.poll() is None
    held.unlink()
    assert first.wait() == 0

    errors = second.errors.read_text()
    (line,) = [line for line in errors.splitlines() if line.startswith("error: ")]
    assert f"process {first.pid} on " in line and "run.directory" in line and "Traceback" not in errors
    assert read(folder / "run")["weights_sha256"] == read(folder / "alone")["weights_sha256"]
    assert points(folder / "run") == [3, 6, 9, 12]


def test_two_ranks_share_one_run(folder):
    """Summary and metrics once, a log per rank, no line of a library, evaluation over uneven shards."""
    ranks = ("my_config.yaml", *TWO)
    train = runs.command(folder, "train", *ranks, "handlers.MetricLogger.console=false")
    assert train.wait() == 0
    ours = ("Start-up took", "epoch ", "Completed at ", "Best ")
    assert [line for line in train.errors.read_text().splitlines() if not line.startswith(ours)] == []
    evaluate = runs.command(folder, "evaluate", *ranks, "data.eval_batch_size=3")
    assert evaluate.wait() == 0
    found = json.loads([line for line in evaluate.output.read_text().splitlines() if line.startswith("{")][-1])

    summary = read(folder / "run")
    assert (summary["status"], summary["world_size"], summary["epoch"]) == ("completed", 2, 3)
    assert points(folder / "run") == [3, 6, 9, 12]
    assert sorted(path.name for path in (folder / "run" / "logs").iterdir()) == ["rank_0.log", "rank_1.log"]
    alone = json.loads(command("evaluate", "my_config.yaml"))
    assert found["val/loss"] == pytest.approx(alone["val/loss"], rel=1e-6)
