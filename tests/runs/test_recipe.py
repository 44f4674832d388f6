"""Runs built from configs: what is attached, what the folder holds, and that a run resumes where it was."""

import errno
import hashlib
import json
import logging
import os
import re
import shutil
import signal
import zipfile
from typing import Annotated

import pydantic
import pytest
import torch
import yaml
from ignite.engine import Events
from ignite.metrics import MeanAbsoluteError

from ignite_engine import Task, TrainingEvents, create_evaluator, seed_everything
from ignite_engine.checkpointing import StateMismatch
from ignite_engine.config import ConfigError, config_from_dict
from ignite_engine.engine.bus import name_of
from ignite_engine.errors import Interrupted
from ignite_engine.ranks import signals, watch, watching
from ignite_engine.ranks.heartbeats import Failure
from ignite_engine.run_directory import RunDirectory, config_differences, weights_sha256
from ignite_engine.runs import recipe
from ignite_engine.runs.mean_loss import mean_loss

LOGGING = {"progress": False, "clearml": False}
SAMPLES = torch.utils.data.TensorDataset(torch.arange(48.0).reshape(24, 2) / 48)


def loss_fn(model, batch):
    return (model(batch[0]) - 1).square().mean()


def make_task(**parts):
    model = torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.Dropout(0.5), torch.nn.Linear(4, 1))
    return Task(**{"model": model, "loss_fn": loss_fn, "train_set": SAMPLES, "val_sets": {"val": SAMPLES}, **parts})


@pytest.fixture
def build(tmp_path):
    """A run over ``make_task``, made under the run's seed as the recipe makes a config's task."""

    def make(sections=None, folder="run", **parts):
        values = {"task": "unused.py:build", "data": {"batch_size": 4}, "logging": LOGGING}
        values["run"] = {"directory": str(tmp_path / folder), "max_iterations": 8}
        for name, section in (sections or {}).items():
            values[name] = {**values.get(name, {}), **section}
        config = config_from_dict(values)
        seed_everything(config.run.seed)
        return recipe.build_run(config, make_task(**parts))

    return make


def lines_of(run):
    return [json.loads(line) for line in run.directory.metrics.read_text().splitlines()]


def test_building_writes_nothing(build):
    run = build()
    run.describe()

    assert not run.directory.path.exists()


def recipe_config(run):
    values = yaml.safe_load(run.directory.config.read_text())
    assert isinstance(values, dict)
    return values


@pytest.mark.row("A11", "F10")
def test_run_folder_tells_the_run(build, caplog):
    run = build({"logging": {"every": 2}, "evaluation": {"every": 4}})
    with caplog.at_level(logging.INFO):
        summary = run.train()

    assert json.loads(run.directory.summary.read_text()) == summary
    assert (summary["status"], summary["reason"], summary["iteration"], summary["epoch"]) == (
        "completed",
        "max_iters",
        8,
        2,
    )
    assert summary["parameters"] == 17 and summary["world_size"] == 1 and summary["resumed_from"] is None
    assert summary["checkpoints"]["saves"] and summary["checkpoints"]["save_bytes_per_s"] > 0
    assert set(summary["startup_s"]) >= {"task", "model", "data", "trainer", "resume"}
    assert re.search(r"Start-up took \S+ s", caplog.text)
    assert summary["weights_sha256"] == weights_sha256(run.trainer.update.model)
    assert [line["iteration"] for line in lines_of(run)] == [2, 4, 6, 8]
    assert [line["iteration"] for line in lines_of(run) if "val/loss" in line] == [4, 8]
    assert summary["metrics"]["val/loss"] == lines_of(run)[-1]["val/loss"]
    environment = json.loads(run.directory.environment.read_text())
    assert environment["packages"]["torch"] == torch.__version__
    assert config_from_dict(recipe_config(run)).to_dict() == run.config


def test_intervals_of_all_units(build, tmp_path):
    """24 samples in batches of 4: an epoch has 6 iterations; the end is logged, evaluated and saved too."""
    sections = {
        "run": {"max_iterations": None, "max_epochs": 2},
        "logging": {"every": {"samples": 20}},
        "evaluation": {"every": {"epochs": 0.5}},
        "checkpoint": {"every": {"tokens": 12.0}, "keep_last": 9},
    }
    run = build(sections, tokens_fn=lambda batch: len(batch[0]))
    run.train()
    assert [line["iteration"] for line in lines_of(run) if "loss" in line] == [5, 10, 12]
    assert [line["iteration"] for line in lines_of(run) if "val/loss" in line] == [3, 6, 9, 12]
    assert run.checkpoint is not None
    assert [each.iteration for each in run.checkpoint.store.checkpoints()] == [3, 6, 9, 12]
    assert (run.trainer.state.samples, run.trainer.state.tokens) == (48, 48)
    assert config_from_dict(recipe_config(run)).to_dict() == run.config

    by_clock = build(
        {"logging": {"every": {"seconds": 0.001}, "memory": True}, "checkpoint": {"every": {"seconds": 0.001}}}, "b"
    )
    by_clock.train()
    before_the_end = [line for line in lines_of(by_clock) if line["iteration"] < 8]
    assert before_the_end and all(
        {"loss", "memory/host_rss_mib"} <= set(line) for line in before_the_end
    )  # at one point
    assert lines_of(by_clock)[-1]["iteration"] == 8

    with pytest.raises(
        ConfigError, match=r"checkpoint.every: got 12 tokens, but the task has no tokens_fn to count them"
    ):
        build(sections)


def test_what_a_run_costs_is_in_its_folder_and_changes_no_weight(build):
    sections = {
        "logging": {"every": 2, "flops": True, "peak_flops": 1e12, "memory": True, "throughput": True},
        "profiler": {"active": 2, "wait": 3, "warmup": 1},
    }
    bare = build({}, "bare").train()
    run = build(sections)
    assert run.train()["weights_sha256"] == bare["weights_sha256"]
    last = lines_of(run)[-1]
    assert {"throughput/mfu", "throughput/tflops_per_s"} <= set(last)
    assert [each.name for each in sorted((run.directory.path / "profiles").glob("*"))] == [
        "rank_0_iterations_5_to_6.json.gz",
        "rank_0_iterations_5_to_6.txt",
    ]


def test_short_run_is_logged_ten_times_unless_it_says_how_often(build):
    short, own = build({"run": {"max_iterations": 20}}), build({"logging": {"every": 5}}, folder="own")
    short.train(), own.train()

    assert [line["iteration"] for line in lines_of(short) if "loss" in line] == list(range(2, 21, 2))
    assert [line["iteration"] for line in lines_of(own) if "loss" in line] == [5, 8]


def test_digest_is_of_sorted_names_and_bytes_whatever_the_wrapping():
    model = torch.nn.BatchNorm1d(3)
    expected = hashlib.sha256()
    for name in sorted(model.state_dict()):
        expected.update(name.encode() + b"\0" + model.state_dict()[name].numpy().tobytes())

    assert weights_sha256(model) == expected.hexdigest()
    assert weights_sha256(torch.compile(model)) == expected.hexdigest()


def test_same_seed_same_digest_and_another_seed_another(build):
    digests = [build({"run": {"seed": seed}}, f"run{n}").train()["weights_sha256"] for n, seed in enumerate((0, 0, 1))]

    assert digests[0] == digests[1] != digests[2]


def test_interrupted_run_resumes_to_the_same_end(build):
    sections = {"logging": {"every": 2}, "evaluation": {"every": 3}, "schedule": {"name": "cosine", "warmup": 2}}
    whole = build(sections, "whole")
    expected = whole.train()
    cut = build(sections, "cut")

    def stop(trainer):
        trainer.request_stop("enough")

    cut.trainer.add_event_handler(Events.ITERATION_COMPLETED(once=5), stop)
    interrupted = cut.train()
    on = build(sections, "cut")
    resumed = on.train()

    assert (interrupted["status"], interrupted["reason"], interrupted["iteration"]) == ("interrupted", "enough", 5)
    assert (resumed["status"], resumed["resumed_from"]) == ("completed", "iteration_00000005")
    assert resumed["weights_sha256"] == expected["weights_sha256"] != interrupted["weights_sha256"]
    timed = ("memory/", "time/", "throughput/")

    def exact(run):
        return [{key: value for key, value in line.items() if not key.startswith(timed)} for line in lines_of(run)]

    assert exact(on) == exact(whole)


@pytest.mark.row("A9")
def test_finished_run_is_only_evaluated(build):
    first = build({"logging": {"every": 4}})
    before = first.train()
    lines = lines_of(first)
    again = build({"logging": {"every": 4}})
    updates = []
    again.trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda engine: updates.append(engine.state.iteration))
    after = again.train()

    assert updates == [] and again.trainer.state.evaluations > first.trainer.state.evaluations
    assert (after["status"], after["iteration"]) == ("completed", 8)
    assert after["weights_sha256"] == before["weights_sha256"]
    assert after["metrics"] == before["metrics"]
    assert lines_of(again) == lines


def test_finished_run_that_trains_nothing_keeps_the_record_of_what_was_trained(build, caplog):
    """Its settings were never in force; the history has those of each start."""
    first = build()
    first.train()
    files = [first.directory.config, first.directory.environment]
    before = [path.read_text() for path in files]
    caplog.set_level(logging.INFO)
    again = build({"update": {"clip_norm": 0.123457}, "optimizer": {"lr": 0.5}})
    again.train()

    assert [path.read_text() for path in files] == before
    assert "nothing was trained with the settings that differ: config.yaml stays as it was" in caplog.text
    starts = [line["config"] for line in again.directory.read_history() if line["what"] in ("started", "resumed")]
    assert [config["update"]["clip_norm"] for config in starts] == [first.config["update"]["clip_norm"], 0.123457]
    page = (again.directory.path / "report.html").read_text()
    assert "0.123457" not in page

    longer = build({"update": {"clip_norm": 0.123457}, "run": {"max_iterations": 11}})
    longer.train()
    assert yaml.safe_load(longer.directory.config.read_text())["update"]["clip_norm"] == 0.123457


@pytest.mark.row("J3")
def test_finished_run_continues_when_it_is_made_longer(build, caplog):
    build().train()
    caplog.set_level(logging.INFO)
    summary = build({"run": {"max_iterations": 11}}).train()

    assert (summary["status"], summary["iteration"]) == ("completed", 11)
    assert "Config differs from the run's last start: run.max_iterations: 8 -> 11" in caplog.messages


def test_resume_with_other_groups_ends_with_the_last_epoch(build, caplog, capsys):
    sections = {"schedule": {"name": "cosine", "min_ratio": 0.1}, "evaluation": {"every": None}}
    build({**sections, "run": {"max_iterations": None, "max_epochs": 1}}).train()
    caplog.set_level(logging.INFO)
    caplog.clear()
    longer = {"run": {"max_iterations": None, "max_epochs": 3}, "update": {"accumulation_steps": 3}}
    run = build({**sections, **longer, "logging": {"progress": True}})
    assert (run.train()["iteration"], run.total) == (10, 6)
    assert "epoch 3/3  iter 10/10 100%" in capsys.readouterr().err
    assert not [each for each in caplog.messages if "at its end" in each]
    assert [each["iteration"] for each in lines_of(run) if "val/loss" in each] == [6, 10]

    caplog.clear()
    build({**sections, **longer}).train()
    assert "The run is at its end (epoch 3 of 3): it is only evaluated. A larger limit trains it further" in caplog.text


def test_folder_that_is_deleted_under_the_run_is_whole_at_its_end(build, caplog):
    run = build({"logging": {"every": 8}})
    run.trainer.add_event_handler(Events.ITERATION_COMPLETED(once=3), lambda: shutil.rmtree(run.directory.path))
    assert run.train()["status"] == "completed"
    names = {each.name for each in run.directory.path.iterdir()}

    assert names >= {"config.yaml", "environment.json", "summary.json", "report.html", "checkpoints"}
    assert run.checkpoint is not None and run.checkpoint.store.latest().checkpoint is not None
    expected = f"{run.directory.path} was deleted during the run; what was written before is lost."
    assert [each for each in caplog.messages if each.startswith(str(run.directory.path))] == [expected]


def test_section_that_went_is_left_out_of_what_is_resumed(build):
    build({"ema": {"decay": 0.9}}).train()
    longer = {"run": {"max_iterations": 11}, "ema": {"decay": None}}
    with pytest.raises(StateMismatch, match=r"holds \['ema'\].*checkpoint.ignore in a config"):
        build(longer).train()
    assert build({**longer, "checkpoint": {"ignore": ["ema"]}}).train()["iteration"] == 11


def fail(engine):
    raise KeyError("lost")


def signal_this_process(*_):
    signal.raise_signal(signal.SIGTERM)


def test_failure_is_summed_up_and_raised_as_it_was(build):
    run = build()

    run.trainer.add_event_handler(Events.ITERATION_COMPLETED(once=3), fail)
    with pytest.raises(KeyError, match="lost"):
        run.train()

    summary = json.loads(run.directory.summary.read_text())
    assert (summary["status"], summary["reason"], summary["iteration"]) == ("failed", "KeyError: 'lost'", 3)


def test_signal_after_a_failure_does_not_make_it_an_interruption(build):
    run = build()
    run.trainer.add_event_handler(Events.STARTED, lambda: run.trainer.call_at_end(signal_this_process))
    run.trainer.add_event_handler(Events.ITERATION_COMPLETED(once=3), fail)

    with signals.ending_the_process(), pytest.raises(Interrupted):
        run.train()

    summary = run.directory.read_summary()
    assert (summary["status"], summary["reason"]) == ("failed", "KeyError: 'lost'")


def test_signal_within_compiled_code_is_an_interruption():
    """Pydantic makes another exception of what a serializer raises."""
    within = pydantic.TypeAdapter(Annotated[int, pydantic.PlainSerializer(lambda _: signal_this_process())])

    with pytest.raises(Interrupted), signals.ending_the_process():
        within.dump_python(1)


def test_launchers_signal_after_another_rank_failed_is_no_interruption(build, monkeypatch):
    run = build()
    known = watch.Watch()
    known.failure = Failure("rank 1 exited without reporting", (1,))
    monkeypatch.setattr(watching, "current", known)
    monkeypatch.setattr(run.checkpoint, "resume", lambda **options: signal_this_process())

    with signals.ending_the_process(), pytest.raises(Interrupted):
        run.train()

    summary = run.directory.read_summary()
    assert (summary["status"], summary["reason"]) == ("failed", "rank 1 exited without reporting")


def test_full_disk_does_not_hide_what_failed(build, monkeypatch, caplog):
    run = build()

    def fill_the_disk(engine):
        monkeypatch.setattr("os.fsync", fail)
        raise KeyError("lost")

    def fail(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    run.trainer.add_event_handler(Events.ITERATION_COMPLETED(once=3), fill_the_disk)
    with pytest.raises(KeyError, match="lost"):
        run.train()

    assert any("summary.json could not be written: [Errno 28] No space left" in each for each in caplog.messages)
    assert json.loads(run.directory.summary.read_text())["status"] == "running"
    assert not list(run.directory.path.glob("*.tmp")) and not list(run.directory.path.glob(".*.tmp"))


def test_log_on_a_full_disk_is_reported_once_and_hides_nothing(tmp_path, capsys):
    directory = RunDirectory(tmp_path)
    directory.logs.mkdir()
    (directory.logs / "rank_0.log").symlink_to("/dev/full")
    with pytest.raises(KeyError, match="lost"), directory.logging_to(0):
        logging.getLogger("ignite_engine").info("one")
        logging.getLogger("ignite_engine").info("two")
        raise KeyError("lost")

    expected_line = f"{directory.logs / 'rank_0.log'} could not be written: [Errno 28] No space left on device."
    assert sorted(capsys.readouterr().err.splitlines()) == sorted(["one", "two", expected_line])


def test_points_of_a_run_without_a_checkpoint_do_not_stand_twice(build):
    run = build({"logging": {"every": 4}, "evaluation": {"every": 4}})
    run.directory.path.mkdir()
    run.directory.metrics.write_text('{"iteration": 4, "loss": 1.0}\n')
    run.train()

    assert [line["iteration"] for line in lines_of(run)] == [4, 8]
    assert run.directory.metrics.with_suffix(".jsonl.old").exists()


def test_last_update_is_evaluated_before_the_best_is_chosen(build):
    run = build({"evaluation": {"every": None, "at_start": True}, "checkpoint": {"every": None, "best": "val/loss"}})
    run.train()
    assert run.checkpoint is not None

    assert "val/loss" in run.checkpoint.store.checkpoints()[-1].manifest.metrics
    assert run.trainer.state.evaluations == 2


def test_evaluate_takes_the_best_checkpoint_or_the_one_asked_for(build):
    sections = {
        "evaluation": {"every": 2},
        "checkpoint": {"every": 2, "best": "val/loss", "keep_last": 9},
        "optimizer": {"name": "SGD", "lr": 0.5},
    }
    trained = build(sections)
    trained.train()
    assert trained.checkpoint is not None
    saved = {each.iteration: each for each in trained.checkpoint.store.checkpoints()}
    best = min(saved, key=lambda iteration: saved[iteration].manifest.metrics["val/loss"])

    chosen = build(sections, test_sets={"test": SAMPLES}).evaluate()
    asked = build(sections).evaluate(saved[2].path)

    assert chosen["iteration"] == best
    assert chosen["val/loss"] == chosen["test/loss"] == saved[best].manifest.metrics["val/loss"]
    assert (asked["iteration"], asked["val/loss"]) == (2, saved[2].manifest.metrics["val/loss"])
    assert build(sections).trainer.state.metrics == {}


def test_run_that_gets_no_better_is_completed_and_started_again_only_evaluated(build):
    """A learning rate of 0 improves nothing; the evaluations come in the middle of an epoch."""
    sections = {
        "evaluation": {"every": 1},
        "optimizer": {"name": "SGD", "lr": 0.0},
        "early_stopping": {"metric": "val/loss", "patience": 3},
        "checkpoint": {"every": None},
        "logging": {"every": 1},
    }
    first = build(sections)
    summary = first.train()
    lines = lines_of(first)
    again = build(sections)
    evaluated = []
    again.trainer.add_event_handler(TrainingEvents.EVALUATION_COMPLETED, lambda: evaluated.append(1))
    after = again.train()

    assert (summary["status"], summary["iteration"], summary["epoch"]) == ("completed", 4, 1)
    assert summary["reason"].startswith("early stopping: val/loss was not below ")
    assert [after[key] for key in ("status", "reason", "iteration", "epoch", "weights_sha256", "metrics")] == [
        summary[key] for key in ("status", "reason", "iteration", "epoch", "weights_sha256", "metrics")
    ]
    assert evaluated == [1] and lines_of(again) == lines
    assert len(first.checkpoint.store.checkpoints()) == 1
    assert build({**sections, "early_stopping": {"metric": "val/loss", "patience": 9}}).train()["iteration"] == 8


def test_plateau_lowers_the_rate_after_patience_evaluations(build):
    schedule = {"name": "plateau", "metric": "val/loss", "factor": 0.5, "patience": 2, "min_ratio": 0.3}
    sections = {
        "run": {"max_iterations": 10},
        "evaluation": {"every": 1},
        "logging": {"every": 1},
        "schedule": {**schedule, "min_delta": 1e9},
        "optimizer": {"name": "SGD", "lr": 1.0},
    }
    run = build(sections)
    run.train()
    # the first value sets the best; the second and third after it are not better, and the fourth update is slower
    assert [line["lr"] for line in lines_of(run)] == [1.0] * 3 + [0.5] * 2 + [0.3] * 5
    assert "plateau: as below, until val/loss stops improving" in run.describe()


def test_average_is_evaluated_in_training_and_from_a_checkpoint(build):
    sections = {
        "evaluation": {"every": 4},
        "checkpoint": {"best": "val/loss"},
        "ema": {"decay": 0.9},
    }
    run = build(sections)
    measured = run.train()["metrics"]["val/loss"]
    with_average = build(sections, test_sets={"test": SAMPLES}).evaluate("newest")
    live = build({**sections, "ema": {"decay": None}}).evaluate("newest")
    averaged = build({**sections, "ema": {"decay": 0.9, "evaluate": ["test"]}}, test_sets={"test": SAMPLES})
    found = averaged.evaluate("newest")

    assert with_average["val/loss"] == with_average["test/loss"] == measured != live["val/loss"]
    assert (found["test/loss"], found["val/loss"]) == (measured, live["val/loss"])
    assert weights_sha256(averaged.trainer.update.model) == run.directory.read_summary()["weights_sha256"]


def test_checkpoint_without_an_average_is_evaluated_with_its_weights(build, caplog):
    trained = build()
    trained.train()

    assert build({"ema": {"decay": 0.9}}).evaluate()["val/loss"] == build().evaluate()["val/loss"]
    assert "holds no ema: the model's own weights are evaluated" in caplog.text


def test_the_best_can_be_asked_for_where_the_newest_would_be_taken(build):
    sections = {"evaluation": {"every": 2}, "checkpoint": {"every": 2, "best": "val/loss", "keep_last": 9}}
    trained = build({**sections, "optimizer": {"name": "SGD", "lr": 0.5}})
    trained.train()
    assert trained.checkpoint is not None
    saved = {each.iteration: each.manifest.metrics["val/loss"] for each in trained.checkpoint.store.checkpoints()}
    best = min(saved, key=lambda iteration: saved[iteration])

    assert best != 8 and build(sections).evaluate("best")["iteration"] == best
    assert build(sections).evaluate("newest")["iteration"] == 8
    never = {"evaluation": {"every": None, "at_end": False}, "checkpoint": {"best": "val/loss"}}
    build(never, folder="unmeasured").train()
    assert build(never, folder="unmeasured").evaluate()["iteration"] == 8
    with pytest.raises(FileNotFoundError, match=r"holds no valid checkpoint with val/loss; train first, or"):
        build(never, folder="unmeasured").evaluate("best")


def test_mean_loss_counts_every_sample_once(build):
    """Batches of 5 leave one of 4: a mean of batch means would be another number."""
    run = build({"data": {"eval_batch_size": 5}})
    run.train()
    found = run.evaluate()["val/loss"]
    model = run.trainer.update.model.eval()
    with torch.no_grad():
        expected = loss_fn(model, [SAMPLES.tensors[0]])

    assert found == pytest.approx(float(expected), rel=1e-6)


def test_mean_loss_leaves_out_a_batch_without_weight():
    """Its loss is a mean over nothing, which is NaN."""
    predict, metrics = mean_loss(lambda model, batch: batch.sum() / len(batch), lambda batch: len(batch))
    evaluator = create_evaluator(torch.nn.Identity(), predict, metrics)
    state = evaluator.run([torch.tensor([1.0, 2.0]), torch.tensor([]), torch.tensor([6.0])])

    assert state.metrics["loss"] == 3.0


@pytest.mark.row("J2")
def test_settings_reach_what_they_are_for(build):
    model = torch.nn.Linear(2, 1)
    groups = [{"params": [model.weight], "name": "matrix"}, {"params": [model.bias], "weight_decay": 0.0}]
    run = build(
        {
            "run": {"max_iterations": None, "max_epochs": 3},
            "optimizer": {"name": "adamw", "lr": 0.1, "weight_decay": 0.5, "betas": [0.8, 0.9]},
            "schedule": {"name": "wsd", "warmup": 2, "decay": 3, "decay_shape": "cosine", "min_ratio": 0.1},
            "update": {
                "accumulation_steps": 4,
                "clip_norm": 2.0,
                "precision": "fp16",
                "grad_scaler": {"init_scale": 8},
                "non_finite": "skip",
                "max_skips": 3,
            },
            "logging": {"trail": 7},
        },
        model=model,
        parameter_groups=groups,
    )
    update = run.trainer.update
    optimizer = update.optimizers["optimizer"]

    assert run.total == 3 * 2  # 6 batches of 4 samples, in groups of 4 and 2
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.5, 0.0]
    assert optimizer.param_groups[0]["betas"] == (0.8, 0.9)
    assert (update.clip_norm, update.precision, update.scaler.get_scale()) == (2.0, "fp16", 8.0)
    assert (update.non_finite.action, update.non_finite.max_skips) == ("skip", 3)
    assert "DigestTrail" in run.describe()
    assert [run.schedules["optimizer"].lrs_at(step)[0] for step in (0, 1, 2)] == pytest.approx([0.05, 0.1, 0.1])
    assert run.train()["iteration"] == 6


def test_each_nth_checkpoint_is_kept_beside_the_last(build):
    run = build({"run": {"max_iterations": 5}, "checkpoint": {"every": 1, "keep_last": 1, "keep_every": 2}})
    run.train()

    assert run.checkpoint is not None
    assert [each.iteration for each in run.checkpoint.store.checkpoints()] == [2, 4, 5]


def test_metrics_of_the_task_are_logged_under_their_set(build):
    run = build(
        predict=lambda model, batch: (model(batch[0])[:, 0], batch[0][:, 0]),
        metrics={"mae": MeanAbsoluteError()},
        val_sets={"val": SAMPLES, "other": SAMPLES},
    )
    metrics = run.train()["metrics"]

    assert metrics["val/mae"] == metrics["other/mae"] > 0


def test_users_handlers_are_attached_last_and_tokens_are_counted(build):
    class Counter:
        seen = 0

        def attach(self, trainer):
            trainer.add_event_handler(Events.ITERATION_COMPLETED, self)

        def __call__(self, trainer):
            Counter.seen += 1

    run = build({"logging": {"every": 4}}, handlers=[Counter()], tokens_fn=lambda batch: batch[0].numel())
    metrics = run.train()["metrics"]

    assert Counter.seen == 8
    assert metrics["throughput/tokens_per_s"] == pytest.approx(2 * metrics["throughput/samples_per_s"])


@pytest.mark.row("J3")
def test_differences_of_configs_are_named_by_key():
    before = {"optimizer": {"lr": 0.1, "betas": [1, 2]}, "task_options": {}}
    now = {"optimizer": {"lr": 0.2, "betas": [1, 2], "eps": 1}, "task_options": {}}

    assert config_differences(before, now) == ["optimizer.eps: not set -> 1", "optimizer.lr: 0.1 -> 0.2"]


@pytest.mark.slow
def test_logs_are_those_that_are_asked_for_and_a_resumed_run_does_without(build, monkeypatch, tmp_path):
    for name in [name for name in os.environ if name.startswith("CLEARML_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("CLEARML_CONFIG_FILE", str(tmp_path / "none.conf"))
    build({"logging": {"clearml": True, "project": "mine", "tensorboard": True}}).train()
    run = build({"run": {"max_iterations": 11}})
    summary = run.train()

    (session,) = run.directory.path.glob("clearml/offline/*.zip")
    with zipfile.ZipFile(session) as archive:
        task = json.loads(archive.read("task.json"))
    assert (task["project_name"], task["name"]) == ("mine", "run")
    assert task["hyperparams"]["run"]["max_iterations"]["value"] == "8"
    assert task["hyperparams"]["properties"]["status"]["value"] == "completed"
    assert len(list((run.directory.path / "tensorboard").iterdir())) == 1
    assert (summary["status"], summary["iteration"]) == ("completed", 11)


def test_report_is_made_however_the_run_ends(build):
    def stop(trainer):
        trainer.request_stop("enough")

    completed, interrupted, failed = build(folder="a"), build(folder="b"), build(folder="c")
    interrupted.trainer.add_event_handler(Events.ITERATION_COMPLETED(once=5), stop)
    failed.trainer.add_event_handler(Events.ITERATION_COMPLETED(once=3), lambda: 1 / 0)
    completed.train()
    interrupted.train()
    with pytest.raises(ZeroDivisionError):
        failed.train()

    for run, said in (
        (completed, "<b>completed</b> at iteration 8: max_iters."),
        (interrupted, "<b>interrupted</b> at iteration 5: enough."),
        (failed, "<b>failed</b> at iteration 3: ZeroDivisionError: division by zero."),
    ):
        assert said in (run.directory.path / "report.html").read_text()


def test_console_and_bar_show_what_the_config_lists(build, capsys):
    run = build({"logging": {"console": ["rate", "loss"], "progress": True, "every": 2}})
    run.train()
    bars = [each for each in run.trainer._event_handlers[Events.COMPLETED] if "Progress" in name_of(each[0])]

    assert capsys.readouterr().out.split()[:4] == ["iter", "epoch", "samples/s", "loss"]
    assert [each[0].__self__.columns.keys for each in bars] == [["rate", "loss"]]


def test_report_that_cannot_be_made_fails_no_run(build, monkeypatch, caplog):
    def fail(*_):
        raise ValueError("no pen")

    monkeypatch.setattr("ignite_engine.ext.report.write_report", fail)

    assert build().train()["status"] == "completed"
    assert "No report could be written: ValueError: no pen." in caplog.messages
    assert build({"logging": {"report": False}}, "quiet").train()["status"] == "completed"
    assert caplog.messages.count("No report could be written: ValueError: no pen.") == 1


def test_time_limit_counts_the_start_up_and_the_run_resumes(build, monkeypatch):
    class LongStartUp(recipe.PhaseTimes):
        def __init__(self):
            super().__init__()
            self.began -= 1000.0

    with monkeypatch.context() as patched:
        patched.setattr(recipe, "PhaseTimes", LongStartUp)
        run = build({"run": {"time_limit": {"minutes": 10}}})
    summary = run.train()
    assert (summary["status"], summary["reason"]) == ("interrupted", "time limit of 600 s")
    assert summary["iteration"] == 1
    resumed = build({"run": {"time_limit": {"minutes": 10}}}).train()
    assert (resumed["status"], resumed["iteration"]) == ("completed", 8)


def test_stop_file_lies_in_the_runs_folder(build):
    run = build({"run": {"stop_file": "stop"}})
    path = run.directory.path / "stop"
    run.trainer.add_event_handler(Events.ITERATION_STARTED(once=1), lambda: path.touch())
    summary = run.train()
    assert (summary["status"], summary["reason"]) == ("interrupted", f"stop file {path}")
    assert build({"run": {"stop_file": "stop"}}).train()["status"] == "completed"


def test_checkpoints_may_be_saved_by_the_clock(build):
    run, saved = build({"checkpoint": {"every": {"minutes": 1e-9}, "keep_last": 9}}), list[int]()
    run.trainer.add_event_handler(
        TrainingEvents.CHECKPOINT_SAVED, lambda: saved.append(run.trainer.state.saved_iteration or 0)
    )
    run.train()
    assert saved == list(range(1, 9))


def test_optimizers_by_name_have_schedules_of_their_own_and_resume_exactly(build):
    sections = {
        "optimizers": {
            "tables": {"name": "RowwiseAdagrad", "lr": 0.1, "schedule": {"name": "constant", "warmup": 4}},
            "dense": {"lr": 0.01},
        },
        "schedule": {"name": "linear"},
        "logging": {"every": 1},
    }

    def make(folder):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.Dropout(0.5), torch.nn.Linear(4, 1))
        groups = {"tables": [model[0].weight], "dense": [model[0].bias, *model[2].parameters()]}
        return build(sections, folder, model=model, parameter_groups=groups)

    whole = make("whole")
    described = whole.describe()
    digest = whole.train()["weights_sha256"]

    assert "Schedule of tables: warmup_constant" in described and "Schedule of dense: warmup_linear" in described
    assert [line["lr/tables"] for line in lines_of(whole)[:5]] == pytest.approx([0.025, 0.05, 0.075, 0.1, 0.1])
    assert [line["lr/dense"] for line in lines_of(whole)[:2]] == pytest.approx([0.01, 0.01 * 7 / 8])
    assert {"optimizer/tables", "optimizer/dense", "lr_schedule/tables", "lr_schedule/dense"} <= set(
        whole.trainer.registry.objects
    )
    stopped = make("parts")
    stopped.trainer.add_event_handler(Events.ITERATION_COMPLETED(once=3), stopped.trainer.terminate)
    stopped.train()
    assert make("parts").train()["weights_sha256"] == digest
