"""The command line: each ending's exit code, one line for what a user can fix, and the same command resuming."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import ignite_engine
from ignite_engine.checkpointing import CheckpointStore
from ignite_engine.cli import main
from tests.faults.commands import Command, fork_the_runs_of_verify_resume
from tests.kit.fitting import fitted

ROOT = Path(__file__).resolve().parents[2]

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
        time.sleep(options.get("wait_s", 0))
        while os.path.exists(options.get("held_by", "")):
            time.sleep(0.05)
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
evaluation: {every: 6}
checkpoint: {every: 6, best: val/loss}
logging: {every: 3, clearml: false}
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The working directory, with a task and its config; ``sys.path`` is put back after."""
    (tmp_path / "my_task.py").write_text(TASK)
    (tmp_path / "my_config.yaml").write_text(CONFIG)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in ("RANK", "WORLD_SIZE", "SLURM_NTASKS"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def summary(folder, run="run"):
    values = json.loads((folder / run / "summary.json").read_text())
    assert isinstance(values, dict)
    return values


def wait_for(path, process, timeout_s=120):
    until = time.monotonic() + timeout_s
    while not path.exists():
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < until, f"{path} did not appear."
        time.sleep(0.02)


WRONG = [
    (["train", "my_config.yaml", "task=my_tsk.py:build"], "there is no such file in .*; did you mean 'my_task.py'?"),
    (["train", "my_config.yaml", "task=my_task.py:bild"], "my_task.py has no function 'bild'; did you mean 'build'?"),
    (["train", "my_config.yaml", "task=my_task.py:not_a_function"], "is a int, expected a function"),
    (["train", "my_config.yaml", "task=broken.py:build"], r"SyntaxError: .* \(at .*broken.py:1\)"),
    (["train", "my_config.yaml", "task=raising.py:build"], r"KeyError: 'gone' \(at .*raising.py:2\)"),
    (["train", "my_config.yaml", "task=no.such:build"], "there is no module 'no'; a file's name ends in .py"),
    (
        ["train", "my_config.yaml", "task_options.broken=true"],
        r"build\(\) raised ValueError: no such corpus \(at .*:10\)",
    ),
    (["train", "my_config.yaml", "task=raising.py:none"], "KeyError"),
    (["train", "my_config.yml"], "my_config.yml: there is no such file; did you mean 'my_config.yaml'?"),
    (["train", "my_config.yaml", "run.sed=1"], "command line: run.sed: .*; did you mean 'seed'?"),
    (
        ["train", "my_config.yaml", "checkpoint.best=val/los"],
        "checkpoint.best: got 'val/los', .*did you mean 'val/loss'?",
    ),
    (
        ["train", "my_config.yaml", "run.directory=my_task.py"],
        "run.directory: got 'my_task.py', but .* is not a folder",
    ),
    (
        ["train", "my_config.yaml", "--nproc-per-nod", "2"],
        "is not an option of train; did you mean '--nproc-per-node'?",
    ),
    (["train", "my_config.yaml", "--nproc-per-node", "0"], "got '0', expected a whole number of at least 1"),
    (
        [],
        "expected a command: train, evaluate, describe, .*, checkpoints, replay, compare-runs, audit; --help says what "
        "each does",
    ),
    (["train"], "the following arguments are required: CONFIG"),
    (["trian", "my_config.yaml"], "got 'trian', which is not a command; did you mean 'train'?"),
    (["evaluate", "my_config.yaml"], "run/checkpoints holds no valid checkpoint; train first"),
    (
        ["evaluate", "my_config.yaml", "--checkpoint", "best"],
        "run/checkpoints holds no valid checkpoint with val/loss;",
    ),
    (
        ["evaluate", "my_config.yaml", "--checkpoint", "best", "checkpoint.best=null"],
        "checkpoint.best: got nothing, so no checkpoint is the best; name a metric, such as val/loss.",
    ),
    (["verify-resume", "nowhere.py"], "nowhere.py: there is no such file; give a config, or a script that calls fit"),
    (["verify-resume", "my_task.py", "run.seed=1"], "my_task.py: got 'run.seed=1', and a script has its settings in"),
    (
        ["verify-resume", "starting.py"],
        r"starting.py: it starts its ranks itself, by Parallel\(\): call fit\(\) without",
    ),
    (["report", "nowhere"], "nowhere is not a directory: give that of a run"),
    (["report", "."], ". is not the directory of a run: it has neither metrics.jsonl nor summary.json; give"),
    (["report", "a", "b"], "got 'b', which report does not take; it takes a directory, --watch and --output"),
    (["report", "run", "--outptu", "x"], "got '--outptu', which report does not take"),
    (["compare"], "the following arguments are required: RUN"),
    (["compare", "nowhere"], "nowhere is not a directory"),
    (
        ["compare", ".", "--output", "nowhere/x.html"],
        "--output: got 'nowhere/x.html', but there is no directory nowhere",
    ),
    (
        ["evaluate", "my_config.yaml", "--checkpoint", "x"],
        "x does not exist; expected a run's folder or",
    ),
]


@pytest.mark.parametrize(("arguments", "line"), WRONG, ids=[" ".join(arguments) for arguments, _ in WRONG])
def test_user_error_is_one_line_and_code_2(folder, capsys, arguments, line):
    (folder / "broken.py").write_text("def build(:\n")
    (folder / "starting.py").write_text("with Parallel('gloo') as parallel: ...")
    (folder / "raising.py").write_text("values = {}\nvalues['gone']\n")
    try:
        code = main(arguments)
    except SystemExit as end:
        code = end.code
    said = capsys.readouterr().err

    assert code == 2
    assert said.startswith("error: ") and said.count("\n") == 1
    assert _matches(line, said), said
    assert not (folder / "run").exists()


def _matches(pattern, text):
    return re.search(pattern.replace("'?", r"'\?"), text) is not None


def test_config_of_a_run_of_fit_is_not_verified_without_its_script(folder, capsys):
    fitted(folder / "one")
    code = main(["verify-resume", str(folder / "one" / "config.yaml")])
    said = capsys.readouterr().err
    assert code == 2 and "only its program has the model and the data: give that" in said and said.count("\n") == 1


def test_traceback_of_the_task_on_request(folder):
    with pytest.raises(ValueError, match="no such corpus") as caught:
        main(["train", "my_config.yaml", "--traceback", "task_options.broken=true"])

    assert isinstance(caught.value.__cause__, ValueError)


def test_version_is_printed(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out == f"ignite-engine {ignite_engine.__version__}\n"


# slow: two ranks and a full disk
@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=[pytest.mark.distributed, pytest.mark.slow])])
@pytest.mark.faults
def test_last_checkpoint_that_cannot_be_saved_is_one_line_and_code_1(folder, ranks):
    """No file may grow above 8 KiB; the log and the summary are smaller."""
    several = ["--nproc-per-node", "2", "--backend", "gloo"] if ranks == 2 else []
    command = Command(folder, "train", "my_config.yaml", *several, function="main_on_a_full_disk")
    _, errors = command.communicate()

    logged = [line for line in errors.splitlines() if line.startswith("error: ")]
    assert command.returncode == 1 and len(logged) == 1 and "Traceback" not in errors, errors
    assert "The checkpoint of iteration 12 was not saved" in logged[0] and "there is no earlier one." in logged[0]
    left = summary(folder)
    assert left["status"] == "failed"
    assert left["reason"].startswith("CheckpointError: The checkpoint of iteration 12 was not saved"), "no rank's fault"


def test_options_and_overrides_stand_in_any_order(folder):
    assert main(["train", "my_config.yaml", "run.seed=3", "--backend", "gloo", "run.max_iterations=2"]) == 0
    assert summary(folder)["iteration"] == 2


def test_setting_without_effect_is_one_line(folder, capsys):
    assert main(["describe", "my_config.yaml", "schedule.power=2.0"]) == 0

    line = "warning: command line: schedule.power has no effect without schedule.name=polynomial.\n"
    assert capsys.readouterr().err == line


@pytest.mark.row("E4")
def test_describe_shows_the_curve_and_the_bus_and_runs_nothing(folder, capsys):
    assert main(["describe", "my_config.yaml", "schedule={name: cosine, warmup: 4}", "optimizer.lr=0.5"]) == 0
    said = capsys.readouterr().out

    assert "17 parameters" in said and "Runs for 12 updates (max_iters 12)" in said
    points = {
        int(line.split()[0]): float(line.split()[1]) for line in said.splitlines() if "e-0" in line and "|" not in line
    }
    assert (points[1], points[12]) == (pytest.approx(0.125), pytest.approx(0.5 * 0.0380602, rel=1e-4))
    assert "|" in said and "#" in said
    assert "RESUME_POINT" in said and "lr_schedule: LRSchedule" in said
    assert not (folder / "run").exists()


def test_report_and_compare_write_a_page_and_print_its_path(folder, capsys):
    assert main(["train", "my_config.yaml", "logging.report=false"]) == 0
    assert main(["train", "my_config.yaml", "run.directory=other", "optimizer.lr=0.5"]) == 0
    capsys.readouterr()
    assert main(["report", "run"]) == 0
    assert main(["report", "run", "--output", "page.html"]) == 0
    assert main(["report", "run", "-o", "page.html"]) == 0
    assert main(["compare", "run", "other"]) == 0

    assert capsys.readouterr().out.splitlines() == ["run/report.html", "page.html", "page.html", "compare.html"]
    assert "<h3>Loss</h3>" in (folder / "run" / "report.html").read_text()
    assert (folder / "page.html").read_bytes() == (folder / "run" / "report.html").read_bytes()
    assert "optimizer.lr</td><td>0.001</td><td>0.5" in (folder / "compare.html").read_text()


def test_train_then_the_same_command_then_evaluate(folder, capsys):
    assert main(["train", "my_config.yaml"]) == 0
    first, logged = summary(folder), (folder / "run" / "logs" / "rank_0.log").read_text()
    metrics = (folder / "run" / "metrics.jsonl").read_text()
    assert main(["train", "my_config.yaml"]) == 0
    again = summary(folder)
    capsys.readouterr()
    assert main(["evaluate", "my_config.yaml"]) == 0
    evaluated = json.loads(capsys.readouterr().out)

    assert (first["status"], first["iteration"]) == (again["status"], again["iteration"]) == ("completed", 12)
    assert first["weights_sha256"] == again["weights_sha256"]
    assert (folder / "run" / "metrics.jsonl").read_text() == metrics
    assert "Start-up took" in logged
    assert re.search(r"Completed at iteration 12 in \d+\.\d s, weights [0-9a-f]{12}; results are in run\.\n", logged)
    assert set(evaluated) == {"checkpoint", "iteration", "val/loss"}
    scores = [json.loads(line)["val/loss"] for line in metrics.splitlines() if "val/loss" in line]
    assert evaluated["val/loss"] == min(scores)
    best, at = first["best"], evaluated["iteration"]
    path = f"run/checkpoints/iteration_{at:08d}"
    assert (best["metric"], best["value"], best["iteration"]) == ("val/loss", min(scores), at) and again["best"] == best
    last = logged.splitlines()[-1]
    assert last.endswith(f": Best val/loss {best['value']:.5g} at iteration {at}, {path}; report: run/report.html.")
    for asked, iteration in (("best", at), ("run/best", at), ("last", 12), ("newest", 12), ("run", 12), (path, at)):
        assert main(["evaluate", "my_config.yaml", "--checkpoint", asked, "checkpoint.best=null"]) == 0
        assert json.loads(capsys.readouterr().out)["iteration"] == iteration


@pytest.mark.row("G3")
def test_any_other_failure_is_code_1_with_its_traceback(folder):
    process = Command(folder, "train", "my_config.yaml", "task_options.fails=true")
    error = process.communicate(timeout=120)[1]

    assert process.returncode == 1
    assert error.count("RuntimeError: the loss is lost") == 1 and "my_task.py" in error
    assert (summary(folder)["status"], summary(folder)["reason"]) == ("failed", "RuntimeError: the loss is lost")
    assert "the loss is lost" in (folder / "run" / "logs" / "rank_0.log").read_text()


def test_loss_that_is_not_finite_ends_the_run_as_asked_in_one_line_and_code_1(folder, capsys):
    settings = ("update.non_finite=stop", "checkpoint.every=1", "data.shuffle=false", "evaluation.every=null")
    overrides = (*settings, "task_options.diverges=true", "logging.progress=false")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert main(["train", "my_config.yaml", *overrides]) == 1
    (line,) = [each for each in capsys.readouterr().err.splitlines() if each.startswith("error: ")]

    assert line.startswith("error: The loss of iteration 8 is ") and "the run ends before the weights change" in line
    assert (summary(folder)["status"], summary(folder)["iteration"]) == ("failed", 8)
    newest = CheckpointStore(folder / "run" / "checkpoints").latest(healthy_only=True).checkpoint
    assert newest is not None and newest.iteration == 7


@pytest.mark.slow
@pytest.mark.faults
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signal_ends_with_its_code_and_the_same_command_resumes(folder, number, code):
    assert main(["train", "my_config.yaml", "run.directory=whole"]) == 0
    process = Command(folder, "train", "my_config.yaml", "task_options.wait_s=0.2")
    wait_for(folder / "run" / "checkpoints" / "iteration_00000006", process)
    process.send_signal(number)
    error = process.communicate(timeout=60)[1]
    stopped = summary(folder)
    assert main(["train", "my_config.yaml"]) == 0

    assert process.returncode == code
    assert (stopped["status"], stopped["reason"]) == ("interrupted", signal.Signals(number).name)
    assert 6 <= stopped["iteration"] < 12
    where = f"at iteration {stopped['iteration']}; the same command resumes from iteration_{stopped['iteration']:08d}."
    assert f"Stopped by {stopped['reason']} {where}" in error.splitlines()
    assert summary(folder)["status"] == "completed"
    assert summary(folder)["weights_sha256"] == summary(folder, "whole")["weights_sha256"]
    assert "task_options.wait_s: 0.2 -> not set" in (folder / "run" / "logs" / "rank_0.log").read_text()


def test_start_that_is_refused_leaves_a_finished_run_as_it_was(folder, capsys):
    assert main(["train", "my_config.yaml"]) == 0
    names = ("config.yaml", "environment.json", "summary.json", "report.html", "history.jsonl")
    before = {name: (folder / "run" / name).read_bytes() for name in names}

    assert main(["train", "my_config.yaml", "run.seed=7"]) == 2
    assert "was made with seed 0" in capsys.readouterr().err
    assert {name: (folder / "run" / name).read_bytes() for name in names} == before
    assert "The run failed: StateMismatch" in (folder / "run" / "logs" / "rank_0.log").read_text()


@pytest.mark.slow
@pytest.mark.faults
@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.distributed)])
def test_second_start_in_the_folder_of_a_run_is_refused_in_one_line(folder, ranks):
    assert main(["train", "my_config.yaml", "run.directory=alone"]) == 0
    held = folder / "held"
    held.touch()
    first = Command(folder, "train", "my_config.yaml", f"task_options.held_by={held}")
    wait_for(folder / "run" / "summary.json", first)
    several = ["--nproc-per-node", "2", "--backend", "gloo"] if ranks == 2 else []
    second = Command(folder, "train", "my_config.yaml", *several)
    error = second.communicate(timeout=300)[1]
    assert first.poll() is None  # the second one was refused while the first one trained
    held.unlink()
    first.communicate(timeout=120)

    logged = [line for line in error.splitlines() if line.startswith("error: ")]
    assert second.returncode == 2 and len(logged) == 1 and "Traceback" not in error
    assert f"process {first.pid} on " in logged[0] and "run.directory" in logged[0]
    assert (first.returncode, summary(folder)["start"], summary(folder)["status"]) == (0, "fresh", "completed")
    assert summary(folder)["weights_sha256"] == summary(folder, "alone")["weights_sha256"]
    lines = [json.loads(line)["iteration"] for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    assert lines == [3, 6, 9, 12]


@pytest.mark.slow
@pytest.mark.faults
def test_resume_is_verified_where_a_slow_disk_is_written_in_the_background(folder, capsys, monkeypatch):
    fork_the_runs_of_verify_resume(monkeypatch)
    slow = "import os\nfsync = os.fsync\nos.fsync = lambda descriptor: (time.sleep(0.1), fsync(descriptor))[1]\n"
    (folder / "slow_disk.py").write_text(TASK + slow)
    command = ["verify-resume", "my_config.yaml", "--iterations", "6", "checkpoint.background=true"]
    code = main([*command, f"task={folder / 'slow_disk.py'}:build"])

    assert capsys.readouterr().out.startswith("Resume is exact: killed at iteration 4, resumed from 3, ")
    assert code == 0


@pytest.mark.slow
@pytest.mark.distributed
def test_two_ranks_share_one_run(folder, capsys):
    """A spawn as a user's: summary and metrics once, a log per rank, evaluation over uneven shards."""
    command = ["my_config.yaml", "--nproc-per-node", "2", "--backend", "gloo"]
    program = [sys.executable, "-m", "ignite_engine", "train", *command, "logging.console=false"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    train = subprocess.run(program, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    assert train.returncode == 0, train.stderr
    ours = ("Start-up took", "epoch ", "Completed at ", "Best ")
    assert [line for line in train.stderr.splitlines() if not line.startswith(ours)] == [], "no line of a library"
    evaluate = Command(folder, "evaluate", *command, "data.eval_batch_size=3")
    out, error = evaluate.communicate(timeout=300)
    assert evaluate.returncode == 0, error

    assert (summary(folder)["status"], summary(folder)["world_size"], summary(folder)["epoch"]) == ("completed", 2, 3)
    lines = [json.loads(line)["iteration"] for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    assert lines == [3, 6, 9, 12]
    logs = sorted(path.name for path in (folder / "run" / "logs").iterdir())
    assert logs == ["rank_0.log", "rank_1.log"]
    found = json.loads([line for line in out.splitlines() if line.startswith("{")][-1])
    assert main(["evaluate", "my_config.yaml"]) == 0
    assert found["val/loss"] == pytest.approx(json.loads(capsys.readouterr().out)["val/loss"], rel=1e-6)
