"""Configs: what is accepted, and the one line that is said about everything else."""

import pickle
import warnings
from pathlib import Path

import pytest

from ignite_engine.config import ConfigError, ConfigWarning, config_from_dict, load_config
from tests.kit.refusals import refusals, refuses

MINIMAL = "task: tasks.py:build\nrun:\n  max_iterations: 10\n"


def written(folder, text=MINIMAL):
    path = folder / "run.yaml"
    path.write_text(text)
    return path


def values(folder, *overrides, text=MINIMAL):
    """The settings in force, as they are written into a run's folder."""
    return load_config(written(folder, text), overrides).to_dict()


def test_defaults_fill_what_is_not_said(tmp_path):
    found = values(tmp_path)
    assert (found["run"]["name"], found["run"]["directory"], found["run"]["seed"]) == ("run", "runs/run", 0)
    assert (found["optimizer"]["name"], found["optimizer"]["lr"]) == ("AdamW", 1e-3)
    assert found["checkpoint"]["every"] == found["evaluation"]["every"] == {"epochs": 1}


ACCEPTED = {  # what is given, and what is in force
    "numbers without a dot": ("optimizer.lr=1e-3", ("optimizer", "lr"), 1e-3),
    "free options": ("task_options.rate=5E+2", ("task_options", "rate"), 500.0),
    "any case": ("optimizer={name: sgd, momentum: 0.9}", ("optimizer", "name"), "sgd"),
    "an optimizer's flags": ("optimizer={name: sgd, nesterov: true, momentum: 0.9}", ("optimizer", "nesterov"), True),
    "iterations": ("evaluation.every=7", ("evaluation", "every"), 7),
    "epochs": ("evaluation.every={epochs: 0.5}", ("evaluation", "every"), {"epochs": 0.5}),
    "samples": ("logging.every={samples: 1e3}", ("logging", "every"), {"samples": 1000}),
    "tokens": ("checkpoint.every={tokens: 1e9}", ("checkpoint", "every"), {"tokens": 10**9}),
    "the clock": ("checkpoint.every={minutes: 2.5}", ("checkpoint", "every"), {"minutes": 2.5}),
    "a limit in hours": ("run.time_limit={hours: 1.5}", ("run", "time_limit"), {"hours": 1.5}),
    "a limit in seconds": ("run.time_limit=90", ("run", "time_limit"), 90),
    "a name that tells better": ("checkpoint.best=val/accuracy", ("checkpoint", "mode"), "max"),
    "a name that tells less": ("early_stopping.metric=val/loss", ("early_stopping", "mode"), "min"),
    "a name that does not": ("checkpoint={best: val/score, mode: max}", ("checkpoint", "mode"), "max"),
    "a warm-up in steps": ("schedule={name: cosine, warmup: 100}", ("schedule", "warmup"), 100),
}


@pytest.mark.row("J2")
@pytest.mark.parametrize("name", ACCEPTED)
def test_a_setting_is_in_force_and_reads_back_as_itself(name, tmp_path):
    override, (section, key), expected = ACCEPTED[name]
    config = load_config(written(tmp_path), [override])
    assert config.to_dict()[section][key] == expected
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert config_from_dict(config.to_dict()).to_dict() == config.to_dict()
    assert pickle.loads(pickle.dumps(config)).to_dict() == config.to_dict()  # ranks are handed it


def test_overrides_go_before_the_file_and_the_last_one_first(tmp_path):
    text = MINIMAL + "evaluation: {every: 500}\n"
    overrides = ["run.seed=1", "run.seed=2", "task_options.width=8", "evaluation.every={epochs: 2}", "run.name=x"]
    found = values(tmp_path, *overrides, text=text)
    assert (found["run"]["seed"], found["task_options"], found["run"]["directory"]) == (2, {"width": 8}, "runs/x")
    assert found["evaluation"]["every"] == {"epochs": 2}


def test_several_optimizers_go_by_name_with_a_schedule_each(tmp_path):
    text = MINIMAL + (
        "schedule: {name: cosine}\n"
        "optimizers:\n"
        "  tables: {name: RowwiseAdagrad, lr: 2e-2, schedule: {name: constant, warmup: 5}}\n"
        "  dense: {name: AdamW, weight_decay: 0.1}\n"
    )
    config = load_config(written(tmp_path, text), ["optimizers.dense.lr=0.5"])
    found = config.to_dict()["optimizers"]
    assert (found["tables"]["name"], found["tables"]["lr"], found["dense"]["lr"]) == ("RowwiseAdagrad", 2e-2, 0.5)
    assert found["tables"]["schedule"]["warmup"] == 5
    assert config_from_dict(config.to_dict()).to_dict() == config.to_dict()


def of(override):
    return lambda folder: load_config(written(folder), [override])


WRONG = {
    "optimizer.lrr=1": "optimizer.lrr got 1 AdamW 'lr'?",
    "optimizer.lr=fast": "optimizer.lr got 'fast' number",
    "optimizer.lr=-1": "optimizer.lr got -1 at least 0",
    "optimizer.amsgrad=1": "optimizer.amsgrad got 1 true or false",
    "optimizer.betas=[0.9, 2]": "optimizer.betas (0.9, 2) AdamW",
    "optimizer.name=adamm": "optimizer.name 'adamm' RowwiseAdagrad 'Adam'?",
    "optimizer.name=LBFGS": "optimizer.name 'LBFGS' closure",
    "optimizer=adam": "optimizer got 'adam' mapping",
    "run.seed=1.5": "run.seed got 1.5 whole number",
    "run.seed.x=1": "run.seed mapping whole number",
    "run.max_iterations.x=1": "run.max_iterations.x no keys of its own",
    "data.shuffle=1": "data.shuffle got 1 true or false",
    "data.batch_size=0": "data.batch_size got 0 at least 1",
    "evaluation.evry=2": "evaluation.evry got 2 'every'?",
    "data.lr=1": "data.lr 'optimizer.lr'?",
    "precision=bf16": "precision 'update.precision'",
    "tsak=x": "tsak 'task'?",
    "task=build": "task 'build' file.py:function",
    "evaluation.every={minutes: 3}": "evaluation.every 'minutes' iterations",
    "checkpoint.every={minute: 5}": "checkpoint.every 'minute' 'minutes'?",
    "evaluation.every=0": "evaluation.every got 0",
    "evaluation.every=[1]": "evaluation.every [1] {epochs: 1}",
    "checkpoint.every={minutes: 0}": "checkpoint.every 0 minutes",
    "run.time_limit={days: 1}": "run.time_limit 'days' hours",
    "run.time_limit=-5": "run.time_limit -5 seconds",
    "run.time_limit=2h": "run.time_limit '2h' {hours:",
    "update.precision=fp61": "update.precision 'fp61' 'fp16'?",
    "update={accumulation_steps: 2, global_micro_batches: 8}": "global_micro_batches accumulation_steps one",
    "update.accumulate=rank_invariant": "update.accumulate update.global_micro_batches",
    "update.grad_scaler={init_scal: 3}": "update.grad_scaler.init_scal 'init_scale'?",
    "schedule.warmup=1.5": "schedule.warmup 1.5 fraction",
    "schedule.name=plateau": "schedule.name 'plateau' schedule.metric",
    "schedule={name: plateau, metric: loss, factor: 1.0}": "schedule.factor 1.0 less than 1",
    "early_stopping.metrik=val/loss": "early_stopping.metrik 'metric'?",
    "ema.decay=1.0": "ema.decay 1.0 less than 1",
    "ema.evaluate=val": "ema.evaluate 'val' list",
    "seed": "'seed' section.key=value",
    "run.seed={a: 1": "run.seed YAML",
    "run.max_iterations=null": "max_iterations max_epochs neither",
}
test_overrides_are_refused = pytest.mark.row("J1")(
    refusals([(override, of(override), ConfigError, words) for override, words in WRONG.items()])
)


def of_text(text):
    return lambda folder: load_config(written(folder, text))


FILES = {
    "empty": ("", "run.yaml empty task:"),
    "list": ("- a\n", "run.yaml ['a'] mapping"),
    "syntax": ("a: [1\nb: 2\n", "run.yaml:2 YAML"),
    "tab": ("a: 1\n\tb: 2\n", "run.yaml:2 YAML"),
    "twice": (MINIMAL + "  seed: 1\n  seed: 2\n", "run.yaml:5 run.seed twice line 4"),
    "section twice": (MINIMAL + "run: {}\n", "run.yaml:4 run twice line 2"),
    "boolean key": (MINIMAL + "  on: 3\n", "run.yaml:4 'on' quote"),
    "unknown key": (MINIMAL + "  sede: 3\n", "run.yaml:4 run.sede 'seed'?"),
    "no task": ("run: {max_epochs: 1}\n", "run.yaml task missing"),
    "no run": ("task: a.py:b\n", "run.yaml run missing max_epochs"),
    "task misspelt": ("tsk: a.py:b\nrun: {max_epochs: 1}\n", "run.yaml:1 tsk 'task'?"),
}
test_files_are_refused_with_their_place = refusals(
    [(name, of_text(text), ConfigError, words) for name, (text, words) in FILES.items()]
)


def test_a_missing_file_names_a_near_one(tmp_path):
    written(tmp_path)
    refuses(lambda: load_config(tmp_path / "run.yml"), ConfigError, "no such file run.yaml")
    refuses(lambda: load_config(tmp_path / "nowhere" / "run.yaml"), ConfigError, "nor its folder")
    refuses(lambda: load_config(tmp_path), ConfigError, "folder")
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    refuses(lambda: load_config(tmp_path / "binary.yaml"), ConfigError, "UTF-8")


def test_all_mistakes_of_a_file_are_told_at_once_in_their_order(tmp_path):
    mistakes = "update:\n  precision: bf61\n  clip_nrm: 1.0\noptimizer:\n  lr: fast\ndata:\n  batch_size: 0\n"
    with pytest.raises(ConfigError) as caught:
        load_config(written(tmp_path, MINIMAL + mistakes), ["run.seed=-1"])
    keys = [line.partition(": got")[0].split()[-1] for line in str(caught.value).splitlines()]
    assert keys == ["run.seed", "update.precision", "update.clip_nrm", "optimizer.lr", "data.batch_size"]


WITHOUT_EFFECT = {
    "schedule.decay=3": "schedule.name=wsd",
    "early_stopping.patience=3": "metric",
    "data.prefetch_factor=2": "data.num_workers",
    "update.grad_scaler={init_scale: 8}": "update.precision=fp16",
    "checkpoint.keep_best=2": "checkpoint.best",
    "distributed.param_dtype=bf16": "fsdp",
    "distributed={strategy: fsdp, ddp_options: {static_graph: true}}": "ddp",
    "distributed={strategy: fsdp, shard_ranks: 2}": "hsdp",
    "distributed.loss_parallel=true": "tensor_parallel",
    "optimizers={x: {schedule: {power: 3}}}": "polynomial",
}


@pytest.mark.parametrize("override", WITHOUT_EFFECT)
def test_a_setting_without_effect_is_a_warning(override, tmp_path):
    with pytest.warns(ConfigWarning, match=f"no effect without .*{WITHOUT_EFFECT[override]}"):
        load_config(written(tmp_path), [override])


def test_settings_with_effect_are_silent(tmp_path):
    overrides = ["schedule={name: wsd, decay: 0.2, total: 5}", "data.num_workers=2", "data.prefetch_factor=2"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        config = load_config(written(tmp_path), overrides)
    assert config.directory == Path("runs/run")
