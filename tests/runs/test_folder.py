"""The folder of a run tells the run: its record, its end however it ends, and what a second start adds to it."""

import errno
import json
import logging
import os
import subprocess
from pathlib import Path

import pytest
import torch
import yaml
from ignite.engine import Events

from ignite_engine import TrainingEvents
from ignite_engine.errors import StateMismatch
from ignite_engine.runs.config import ConfigError
from tests.kit import runs
from tests.kit.fitting import VAL, at, digest, fitted, log, loss_fn, manifest, points, read, saved, stop
from tests.kit.floors import needs
from tests.kit.processes import ranks

FULL = {"Progress": None, "Report": {}, "MemoryLogger": {}, "Throughput": {}, "StepTimes": {}}


def fail(trainer):
    raise KeyError("lost")


@pytest.mark.row("A11", "F10")
def test_a_run_is_recorded(tmp_path, caplog):
    with caplog.at_level(logging.INFO):
        run = fitted(tmp_path, Evaluation={"every": 9}, MetricLogger={"every": 6})
    summary, environment = read(tmp_path), read(tmp_path, "environment")

    assert summary == json.loads(json.dumps(run.summary))
    ended = ("status", "reason", "iteration", "epoch", "world_size", "resumed_from")
    assert [summary[key] for key in ended] == ["completed", "max_epochs", 18, 3, 1, None]
    assert summary["parameters"] == 4 * 8 + 8 + 8 * 3 + 3 and summary["checkpoints"]["save_bytes"] > 0
    assert {"task", "model", "data", "trainer", "resume"} <= summary["startup_s"].keys()
    assert all(seconds >= 0 for seconds in summary["startup_s"].values()) and "Start-up took" in caplog.text
    assert points(tmp_path) == [6, 12, 18] and points(tmp_path, "val/loss") == [9, 18]
    assert summary["metrics"]["val/loss"] == log(tmp_path)[-1]["val/loss"]
    assert environment["packages"]["torch"] == torch.__version__
    assert yaml.safe_load((tmp_path / "config.yaml").read_text()) == run.config


def test_intervals_are_of_all_units(tmp_path, clock):
    """48 samples in batches of 8: an epoch has 6 iterations; the end is logged, evaluated and saved, too."""
    clock.tick_s = 1e-6
    run = fitted(
        tmp_path,
        max_epochs=2,
        MetricLogger={"every": {"samples": 40}},
        Evaluation={"every": {"epochs": 0.5}},
        Checkpoint={"every": {"tokens": 24.0}, "keep_last": 9},
        tokens_fn=lambda batch: len(batch[0]),
    )
    assert points(tmp_path) == [5, 10, 12] and points(tmp_path, "val/loss") == [3, 6, 9, 12]
    assert saved(tmp_path) == [3, 6, 9, 12] and run.trainer.state.samples == run.trainer.state.tokens == 96

    tick = (lambda trainer: clock.move(30), Events.ITERATION_STARTED)
    by_clock = {"MetricLogger": {"every": {"seconds": 90}}, "Checkpoint": {"every": {"minutes": 2}}}
    fitted(tmp_path / "clock", max_epochs=2, handlers=[tick], **by_clock)
    assert points(tmp_path / "clock") == [3, 6, 9, 12]


@pytest.mark.parametrize(("given", "expected"), [({}, list(range(2, 21, 2))), ({"every": 7}, [7, 14, 20])])
def test_a_short_run_is_logged_ten_times_unless_it_says_how_often(given, expected, tmp_path):
    fitted(tmp_path, max_epochs=..., max_iters=20, MetricLogger=given)
    assert points(tmp_path) == expected


def test_what_is_measured_changes_no_weight(tmp_path):
    measured = {"MemoryLogger": {}, "Throughput": {"flops": 6.0, "peak_flops": 1e12}, "StepTimes": {}}
    bare = fitted(tmp_path / "bare", max_epochs=1)
    run = fitted(
        tmp_path / "run",
        max_epochs=1,
        MetricLogger={"every": 2},
        **measured,
        Profiler={"active": 2, "wait": 2, "warmup": 1},
    )
    assert digest(run) == digest(bare) and {"throughput/mfu", "memory/host_rss_mib"} <= set(run.metrics)
    assert any((tmp_path / "run" / "profiles").iterdir())


def test_the_seed_decides_the_weights(tmp_path):
    digests = [digest(fitted(tmp_path / str(number), seed=seed)) for number, seed in enumerate((0, 0, 1))]
    assert digests[0] == digests[1] != digests[2]


def test_a_stopped_run_resumes_to_the_same_end_and_log(tmp_path):
    def run(folder, *handlers):
        schedule = {"name": "cosine", "warmup": 2}
        return fitted(
            tmp_path / folder, handlers=handlers, MetricLogger={"every": 2}, Evaluation={"every": 3}, schedule=schedule
        )

    whole, stopped = run("whole"), run("run", at(5, stop))
    assert [stopped.summary[key] for key in ("status", "reason", "iteration")] == ["interrupted", "enough", 5]
    assert read(tmp_path / "run")["status"] == "interrupted"
    resumed = run("run")
    assert digest(resumed) == digest(whole) != digest(stopped) and log(tmp_path / "run") == log(tmp_path / "whole")


@pytest.mark.row("A9")
def test_a_finished_run_is_only_evaluated_and_its_record_stays(tmp_path, caplog):
    first = fitted(tmp_path)
    lines, files = log(tmp_path), [tmp_path / "config.yaml", tmp_path / "environment.json"]
    before = [path.read_bytes() for path in files]
    updates = []
    handlers = [(lambda trainer: updates.append(1), Events.ITERATION_COMPLETED)]
    again = fitted(tmp_path, handlers=handlers, clip_norm=0.5)

    assert updates == [] and again.trainer.state.evaluations > first.trainer.state.evaluations
    assert digest(again) == digest(first) and again.metrics == first.metrics and log(tmp_path) == lines
    assert [path.read_bytes() for path in files] == before and "update.clip_norm: None -> 0.5" in caplog.text
    longer = fitted(tmp_path, max_epochs=4, clip_norm=0.5)
    assert longer.summary["iteration"] == 24
    assert yaml.safe_load((tmp_path / "config.yaml").read_text())["update"]["clip_norm"] == 0.5


@pytest.mark.row("J3")
def test_what_a_second_start_changes_is_said_and_is_in_each_record(tmp_path, caplog):
    ema = {"EMA": {"decay": 0.9}, "Evaluation": {"every": None}}
    fitted(tmp_path, handlers=[at(4, stop)], **ema)
    caplog.clear()
    changed = {"clip_norm": 0.5, "EMA": {"decay": 0.5}, "accumulation_steps": 2, "Evaluation": {"every": 2}}
    run = fitted(tmp_path, schedule={"name": "cosine", "warmup": 2}, handlers=[at(7, stop)], **changed)

    assert "update.clip_norm: None -> 0.5" in caplog.text
    history = [json.loads(line) for line in (tmp_path / "starts.jsonl").read_text().splitlines()]
    records = {
        "config.yaml": yaml.safe_load((tmp_path / "config.yaml").read_text()),
        "history": [line["config"] for line in history if "config" in line][-1],
        "manifest": manifest(tmp_path, 7)["config"],
    }
    for name, config in records.items():
        found = [
            config["update"]["clip_norm"],
            config["handlers"]["EMA"]["decay"],
            config["update"]["accumulation_steps"],
        ]
        assert (found, config["schedule"]["name"]) == ([0.5, 0.5, 2], "cosine"), name
    assert run.trainer.update.clip_norm == 0.5 and run.trainer.accumulation_steps == 2


def test_a_section_that_went_is_left_out_of_what_is_resumed(tmp_path):
    fitted(tmp_path, EMA={"decay": 0.9}, max_epochs=1)
    with pytest.raises(StateMismatch):
        fitted(tmp_path)
    assert fitted(tmp_path, resume={"ignore": ["ema"]}).summary["iteration"] == 18


# ------------------------------------------------------------------------------------------------------- how it ends


def test_a_failure_is_summed_up_and_raised_as_it_was(tmp_path):
    with pytest.raises(KeyError, match="lost"):
        fitted(tmp_path, handlers=[at(3, fail)])
    assert [read(tmp_path)[key] for key in ("status", "reason", "iteration")] == ["failed", "KeyError: 'lost'", 3]


def test_a_full_disk_does_not_hide_what_failed(tmp_path, monkeypatch, caplog):
    def full(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    def fill_and_fail(trainer):
        monkeypatch.setattr(os, "fsync", full)
        fail(trainer)

    with pytest.raises(KeyError, match="lost"):
        fitted(tmp_path, handlers=[at(3, fill_and_fail)])
    assert "summary.json could not be written" in caplog.text and read(tmp_path)["status"] == "running"
    assert not list(tmp_path.glob("*.tmp")) and not list(tmp_path.glob(".*.tmp"))


def test_points_of_a_run_without_a_checkpoint_do_not_stand_twice(tmp_path):
    tmp_path.joinpath("metrics.jsonl").write_text('{"iteration": 6, "loss": 1.0}\n')
    fitted(tmp_path, MetricLogger={"every": 6})
    assert points(tmp_path) == [6, 12, 18] and (tmp_path / "metrics.jsonl.old").exists()


@needs("report")
@pytest.mark.parametrize("end", ["completed", "interrupted", "failed"])
def test_the_report_is_made_however_the_run_ends(end, tmp_path):
    handlers = {"completed": [], "interrupted": [at(5, stop)], "failed": [at(3, fail)]}[end]
    try:
        fitted(tmp_path, handlers=handlers, max_epochs=1, **FULL)
    except KeyError:
        assert end == "failed"
    assert f"<b>{end}</b>" in (tmp_path / "report.html").read_text()


@needs("report")
def test_a_report_that_cannot_be_written_fails_no_run(tmp_path, caplog):
    (tmp_path / "report.html").mkdir()
    assert fitted(tmp_path, max_epochs=1, **FULL).summary["status"] == "completed"
    assert "No report could be written" in caplog.text


def test_a_time_limit_counts_from_the_start_of_the_program_and_the_run_resumes(tmp_path, clock):
    clock.tick_s = 1e-6
    tick = (lambda trainer: clock.move(100), Events.ITERATION_STARTED)
    stopped = fitted(tmp_path, WallClockLimit={"minutes": 10}, handlers=[tick])
    assert stopped.summary["status"] == "interrupted" and stopped.summary["iteration"] <= 6
    assert "time limit" in stopped.summary["reason"]
    assert fitted(tmp_path, WallClockLimit={"minutes": 10}).summary["status"] == "completed"


def test_the_stop_file_lies_in_the_runs_folder(tmp_path, clock):
    clock.tick_s = 1e-6
    tick = (lambda trainer: clock.move(100), Events.ITERATION_STARTED)
    touch = at(3, lambda trainer: (tmp_path / "stop").touch())
    stopped = fitted(tmp_path, StopFile={"path": "stop"}, handlers=[tick, touch])
    assert stopped.summary["status"] == "interrupted" and stopped.summary["iteration"] in (3, 4)
    assert str(tmp_path / "stop") in stopped.summary["reason"]
    (tmp_path / "stop").unlink()
    assert fitted(tmp_path, StopFile={"path": "stop"}).summary["status"] == "completed"


def test_a_run_that_gets_no_better_is_completed_and_started_again_only_evaluated(tmp_path):
    """A learning rate of 0 improves nothing."""
    same = {"Evaluation": {"every": 1}, "optimizer": "SGD", "lr": 0.0}
    stopping = {**same, "EarlyStopping": {"key": "val/loss", "patience": 3}}
    first = fitted(tmp_path, **stopping)
    evaluated = []
    handlers = [(lambda trainer: evaluated.append(1), TrainingEvents.EVALUATION_COMPLETED)]
    again = fitted(tmp_path, handlers=handlers, **stopping)
    for run in (first, again):
        assert (run.summary["status"], run.summary["iteration"]) == ("completed", 4)
        assert run.summary["reason"].startswith("early stopping: val/loss")
    assert evaluated == [1] and digest(again) == digest(first)
    patient = fitted(tmp_path, **same, EarlyStopping={"key": "val/loss", "patience": 9})
    assert patient.summary["iteration"] == 10


# --------------------------------------------------------------------------------------------------------- restarting


def smoothed(model, batch):
    return torch.nn.functional.cross_entropy(model(batch[0]), batch[1], label_smoothing=0.1)


def test_restart_moves_the_run_aside_and_begins_anew(tmp_path):
    folder = tmp_path / "run"
    first = fitted(folder, restart=True, max_epochs=1)
    assert not (tmp_path / "run.1").exists()
    second = fitted(folder, smoothed, restart=True, max_epochs=1)
    third = fitted(folder, smoothed, restart=True, max_epochs=1)

    assert digest(second) != digest(first) == read(tmp_path / "run.1")["weights_sha256"]
    assert read(tmp_path / "run.2")["weights_sha256"] == digest(second) == digest(third)
    assert all(run.summary["resumed_from"] is None for run in (first, second, third))
    assert fitted(folder, smoothed, max_epochs=1).summary["resumed_from"] == "iteration_00000006"


@pytest.mark.parametrize(
    "wrong", [{"optimizer": lambda model: 1 / 0}, {"batch_size": 10**9, "data": {"drop_last": True}}]
)
def test_the_run_stays_where_the_program_that_restarts_it_is_refused(wrong, tmp_path):
    folder = tmp_path / "run"
    fitted(folder, max_epochs=1)
    before = files_in(folder)
    with pytest.raises((ZeroDivisionError, ConfigError)):
        fitted(folder, restart=True, **wrong)
    assert files_in(folder) == before and not Path(f"{folder}.1").exists()


def files_in(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name != ".lock"}


@pytest.mark.parametrize(("counts", "start"), [((0, 0), "fresh"), ((0, 1), "resumed")])
def test_ranks_move_it_aside_once_and_go_on_where_one_of_them_was_started_again(counts, start, tmp_path):
    fitted(tmp_path / "run", max_epochs=1)

    def work(rank):
        os.environ["TORCHELASTIC_RESTART_COUNT"] = str(counts[rank])
        return fitted(tmp_path / "run", max_epochs=1, restart=True).trainer.state.start.value

    assert ranks(2, work) == [start, start]
    assert sorted(path.name for path in tmp_path.glob("run*")) == (["run", "run.1"] if start == "fresh" else ["run"])


# --------------------------------------------------------------------------------------------------------- evaluating


def test_evaluate_takes_the_best_or_what_is_asked_for_on_all_sets(tmp_path):
    saves = {"Checkpoint": {"every": 2, "keep_last": 9}, "Evaluation": {"every": 2}, "lr": 0.1}
    run = fitted(tmp_path, best="val/loss", test_set=VAL, **saves)
    losses = {iteration: manifest(tmp_path, iteration)["metrics"]["val/loss"] for iteration in saved(tmp_path)}
    best = min(losses, key=losses.get)

    found = run.evaluate()
    assert found["iteration"] == best and found["val/loss"] == found["test/loss"] == losses[best]
    for asked, iteration in (("best", best), ("last", 18), (tmp_path / "checkpoints" / "iteration_00000002", 2)):
        assert (run.evaluate(asked)["iteration"], run.evaluate(asked)["val/loss"]) == (iteration, losses[iteration])


def test_an_average_is_evaluated_in_training_and_from_a_checkpoint(tmp_path):
    averaged = fitted(tmp_path, EMA={"decay": 0.9}, max_epochs=1)
    live = fitted(tmp_path / "live", max_epochs=1)
    assert averaged.evaluate("last")["val/loss"] == averaged.metrics["val/loss"] != live.metrics["val/loss"]
    assert digest(averaged) == digest(live)
    without = fitted(tmp_path / "live", EMA={"decay": 0.9}, max_epochs=1, resume={"ignore": []})
    assert without.evaluate("last")["val/loss"] == live.metrics["val/loss"]


KINDS = {
    "pairs": (lambda x, y: (x, y), None),
    "weighed": (lambda x, y: (x, y), lambda batch: len(batch[0])),
    "mappings": (lambda x, y: {"x": x, "y": y}, None),
    "tensors": (lambda x, y: x, None),
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_loss_of_a_set_is_the_mean_over_its_samples(kind, tmp_path):
    """Batches of 5 leave one of 2: a mean of batch means would be another number."""
    make, weight_fn = KINDS[kind]

    def loss(model, batch):
        batch = (batch["x"], batch["y"]) if isinstance(batch, dict) else batch
        return model(batch).square().mean() if kind == "tensors" else loss_fn(model, batch)

    data = [make(x, y) for x, y in zip(*VAL, strict=True)]
    options = {"data": {"eval_batch_size": 5}, "weight_fn": weight_fn, "max_epochs": 1}
    run = fitted(tmp_path, loss, train=data, val=data, **options)
    model = run.trainer.update.model.eval()
    with torch.no_grad():
        expected = float(loss(model, VAL[0] if kind == "tensors" else VAL))
    assert run.metrics["val/loss"] == pytest.approx(expected, rel=1e-6)


def test_the_commit_of_the_code_is_recorded(tmp_path, monkeypatch):
    def git(*words):
        command = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-C", str(tmp_path), *words]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    git("init", "-q")
    script = tmp_path / "program.py"
    script.write_text("from tests.kit.fitting import *\nimport sys\nfitted(sys.argv[1], max_epochs=1)\n")
    git("add", "--all")
    git("-c", "commit.gpgsign=false", "commit", "-q", "-m", "first")
    commit = git("rev-parse", "HEAD")

    for text, dirty in (("", False), ("# changed\n", True)):
        script.write_text(script.read_text() + text)
        folder = tmp_path.parent / f"{tmp_path.name}_{dirty}"
        assert runs.script(tmp_path, script, str(folder)).wait() == 0
        environment = read(folder, "environment")
        assert (environment["commit"], environment["dirty"]) == (commit, dirty)
