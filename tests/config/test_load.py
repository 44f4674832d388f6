"""Configs: what is accepted, and the one line that is said about everything else."""

import pickle
import re
import warnings
from pathlib import Path

import pytest
import torch

from ignite_engine.config import ConfigError, ConfigWarning, config_from_dict, load_config
from ignite_engine.ext.sparse import RowwiseAdagrad

MINIMAL = "task: tasks.py:build\nrun:\n  max_iterations: 10\n"


def written(tmp_path, text=MINIMAL):
    path = tmp_path / "run.yaml"
    path.write_text(text)
    return path


def complaint(tmp_path, *overrides, text=MINIMAL):
    with pytest.raises(ConfigError) as caught:
        load_config(written(tmp_path, text), overrides)
    line = str(caught.value)
    assert "\n" not in line
    return line.replace(str(tmp_path), "DIR")


def test_defaults_fill_what_is_not_said(tmp_path):
    config = load_config(written(tmp_path))

    assert (config.name, config.directory, config.folder) == ("run", Path("runs/run"), tmp_path)
    assert config.optimizer.type is torch.optim.AdamW
    assert config.optimizer.options == {"lr": 1e-3}
    assert config.checkpoint.every is not None and config.checkpoint.every.epochs == 1


def test_mode_of_a_followed_metric_is_what_its_name_says(tmp_path):
    text = MINIMAL + "checkpoint: {best: val/accuracy}\nearly_stopping: {metric: val/loss}\n"
    config = load_config(written(tmp_path, text))
    assert (config.checkpoint.mode, config.early_stopping.mode) == ("max", "min")
    assert load_config(written(tmp_path, text), ["checkpoint.mode=min"]).checkpoint.mode == "min"
    assert load_config(written(tmp_path, text), ["checkpoint.best=val/score"]).checkpoint.mode == "min"


def test_numbers_without_a_dot_are_numbers(tmp_path):
    text = MINIMAL + 'optimizer: {lr: 1e-3, eps: 1e-9, weight_decay: "1e-2"}\ntask_options: {rate: 5E+2}\n'
    config = load_config(written(tmp_path, text), ["update.clip_norm=1e0"])

    assert config.optimizer.options == {"lr": 1e-3, "eps": 1e-9, "weight_decay": 1e-2}
    assert config.task_options == {"rate": 500.0}
    assert config.update.clip_norm == 1.0


def test_overrides_go_before_the_file_and_the_last_one_first(tmp_path):
    overrides = ["run.seed=1", "run.seed=2", "task_options.width=8", "evaluation.every={epochs: 2}", "run.name=x"]
    config = load_config(written(tmp_path, MINIMAL + "evaluation: {every: 500}\n"), overrides)

    assert (config.run.seed, config.task_options, config.directory) == (2, {"width": 8}, Path("runs/x"))
    assert config.evaluation.every is not None and config.evaluation.every.epochs == 2


@pytest.mark.row("J2")
def test_optimizers_go_by_name_in_any_case_with_their_own_options(tmp_path):
    config = load_config(
        written(tmp_path), ["optimizer={name: sgd, lr: 0.1, momentum: 0.9, nesterov: true, fused: true}"]
    )
    options = config.optimizer.options

    assert config.optimizer.type is torch.optim.SGD
    assert options == {"lr": 0.1, "momentum": 0.9, "nesterov": True, "fused": True}
    assert load_config(written(tmp_path), ["optimizer.betas=[0.8, 0.9]"]).optimizer.options["betas"] == (0.8, 0.9)


def test_resolved_config_reads_back_as_itself(tmp_path):
    config = load_config(written(tmp_path), ["evaluation.every=7", "optimizer.betas=[0.8, 0.9]", "schedule.warmup=0.1"])
    values = config.to_dict()

    assert values["evaluation"]["every"] == 7 and values["checkpoint"]["every"] == {"epochs": 1}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert config_from_dict(values).to_dict() == values
    assert pickle.loads(pickle.dumps(config)).to_dict() == values  # ranks are handed it


def test_paces_and_limits_may_be_of_the_clock(tmp_path):
    config = load_config(written(tmp_path), ["checkpoint.every={minutes: 2.5}", "run.time_limit={hours: 1.5}"])
    assert config.checkpoint.every is not None and config.checkpoint.every.minutes == 2.5
    assert config.run.time_limit is not None and config.run.time_limit.total_s == 5400.0
    values = config.to_dict()
    assert (values["checkpoint"]["every"], values["run"]["time_limit"]) == ({"minutes": 2.5}, {"hours": 1.5})
    assert config_from_dict(values).to_dict() == values
    in_seconds = load_config(written(tmp_path), ["run.time_limit=90"])
    assert in_seconds.to_dict()["run"]["time_limit"] == 90
    assert in_seconds.run.time_limit is not None and in_seconds.run.time_limit.total_s == 90.0


UNKNOWN = "for a key that is not known; did you mean"
WRONG = [
    ("optimizer.lrr=1", "optimizer.lrr: got 1, but AdamW has no option 'lrr'; did you mean 'lr'?"),
    ("optimizer.lr=fast", "optimizer.lr: got 'fast', expected a number."),
    ("optimizer.lr=-1", "optimizer.lr: got -1, expected at least 0."),
    ("optimizer.weight_decay=x", "optimizer.weight_decay: got 'x', expected a number."),
    ("optimizer.amsgrad=1", "optimizer.amsgrad: got 1, expected true or false."),
    (
        "optimizer.betas=[0.9, 2]",
        "optimizer.betas: got (0.9, 2), but AdamW says: Invalid beta parameter at index 1: 2.",
    ),
    (
        "optimizer.name=adamm",
        "optimizer.name: got 'adamm', expected an optimizer of torch.optim or RowwiseAdagrad; did you mean 'Adam'?",
    ),
    (
        "optimizer.name=LBFGS",
        "optimizer.name: got 'LBFGS', which needs a closure; expected an optimizer that steps wi...",
    ),
    ("optimizer=adam", "optimizer: got 'adam', expected a mapping of settings."),
    ("run.seed=1.5", "run.seed: got 1.5, expected a whole number."),
    ("run.seed.x=1", "run.seed: got the mapping {'x': 1}, expected a whole number."),
    (
        "run.max_iterations.x=1",
        "run.max_iterations.x: run.max_iterations is 10 and has no keys of its own; give run.m...",
    ),
    ("data.shuffle=1", "data.shuffle: got 1, expected true or false."),
    ("data.batch_size=0", "data.batch_size: got 0, expected at least 1."),
    ("evaluation.evry=2", f"evaluation.evry: got 2 {UNKNOWN} 'every'?"),
    ("data.lr=1", f"data.lr: got 1 {UNKNOWN} 'optimizer.lr'?"),
    ("precision=bf16", f"precision: got 'bf16' {UNKNOWN} 'update.precision' or 'evaluation.precision'?"),
    ("tsak=x", f"tsak: got 'x' {UNKNOWN} 'task'?"),
    ("task=build", "task: got 'build', expected file.py:function or package.module:function."),
    (
        "evaluation.every={minutes: 3}",
        "evaluation.every: got the unit 'minutes', expected a number of iterations, such...",
    ),
    (
        "evaluation.every={epoch: 3}",
        "evaluation.every: got the unit 'epoch', expected a number of iterations, such ...",
    ),
    (
        "evaluation.every=0",
        "evaluation.every: got 0 iterations, expected a number of iterations, such as 500, {epo...",
    ),
    (
        "evaluation.every=[1]",
        "evaluation.every: got [1], expected a number of iterations, such as 500, {epochs: 1}, {windows: 1}, "
        "{samples: 50000} or {tokens: 1e6}.",
    ),
    (
        "checkpoint.every={minutes: 0}",
        "checkpoint.every: got 0 minutes, expected a number of iterations, such as 500, {epochs: 1}, {windows:...",
    ),
    (
        "checkpoint.every={minute: 5}",
        "checkpoint.every: got the unit 'minute', expected a number of iterations, such as 500, {epochs: 1}, "
        "{windows: 1}, {samples: 50000}, {tokens: 1e6}, {seconds: 30} or {minutes: 10}; did you mean 'minutes'?",
    ),
    (
        "run.time_limit={days: 1}",
        "run.time_limit: got the unit 'days', expected seconds, such as 3600, {minutes: 90} or {hours: 23.5}",
    ),
    ("run.time_limit=-5", "run.time_limit: got -5 seconds, expected seconds, such as 3600"),
    ("run.time_limit=2h", "run.time_limit: got '2h', expected seconds, such as 3600"),
    ("update.precision=fp61", "update.precision: got 'fp61', expected 'fp32', 'bf16' or 'fp16'; did you mean 'fp16'?"),
    (
        "update={accumulation_steps: 2, global_micro_batches: 8}",
        "update.global_micro_batches: got 8 with update.accumulation_steps 2; set one of them, for all ranks or for ",
    ),
    ("update.rank_invariant=true", "update.rank_invariant: got true without update.global_micro_batches; set how many"),
    ("update.grad_scaler={init_scal: 3}", f"update.grad_scaler.init_scal: got 3 {UNKNOWN} 'init_scale'?"),
    (
        "schedule.warmup=1.5",
        "schedule.warmup: got 1.5, expected a fraction from 0.0 to 1.0; write steps as a whole nu...",
    ),
    ("schedule.name=plateau", "schedule.name: got 'plateau', but no schedule.metric; expected a metric's key"),
    ("schedule={name: plateau, metric: loss, factor: 1.0}", "schedule.factor: got 1.0, expected less than 1."),
    ("early_stopping.patience=0", "early_stopping.patience: got 0, expected at least 1."),
    ("early_stopping.metrik=val/loss", f"early_stopping.metrik: got 'val/loss' {UNKNOWN} 'metric'?"),
    ("ema.decay=1.0", "ema.decay: got 1.0, expected less than 1."),
    ("ema.evaluate=val", "ema.evaluate: got 'val', expected a list."),
    ("seed", "seed: got 'seed', expected section.key=value, such as run.seed=1."),
    (
        "run.seed={a: 1",
        "run.seed:1: this is not YAML: while parsing a flow mapping expected ',' or '}', but got '<str...",
    ),
]


@pytest.mark.row("J1")
@pytest.mark.parametrize(("override", "line"), WRONG, ids=[override for override, _ in WRONG])
def test_wrong_override_is_one_line(tmp_path, override, line):
    said = complaint(tmp_path, override)

    assert said.startswith("command line: ")
    assert said.removeprefix("command line: ").startswith(line.removesuffix("...")) and len(said) < 240


def test_run_without_a_length_is_refused(tmp_path):
    line = "DIR/run.yaml:2: run: expected one of max_iterations and max_epochs, or both, got neither."

    assert complaint(tmp_path, "run.max_iterations=null") == line
    assert load_config(written(tmp_path), ["run.max_epochs=3", "run.max_iterations=null"]).run.max_epochs == 3


@pytest.mark.row("J1")
@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("", "DIR/run.yaml: the file is empty, expected sections such as 'run:' and 'task:'."),
        ("- a\n", "DIR/run.yaml: got ['a'], expected a mapping of sections such as 'run:' and 'task:'."),
        ("a: [1\nb: 2\n", "DIR/run.yaml:2: this is not YAML"),
        ("a: 1\n\tb: 2\n", "DIR/run.yaml:2: this is not YAML"),
        (MINIMAL + "  seed: 1\n  seed: 2\n", "DIR/run.yaml:5: run.seed: the key is given twice, first on line 4"),
        (MINIMAL + "run: {}\n", "DIR/run.yaml:4: run: the key is given twice, first on line 2; remove one."),
        (MINIMAL + "  on: 3\n", "DIR/run.yaml:4: got 'on' as a key, expected text; quote it"),
        (MINIMAL + "  sede: 3\n", "DIR/run.yaml:4: run.sede: got 3 for a key that is not known; did you mean 'seed'?"),
        ("run: {max_epochs: 1}\n", "DIR/run.yaml: task: this is missing, expected file.py:function"),
        ("task: a.py:b\n", "DIR/run.yaml: run: this is missing, expected a section with max_iterations or max_epochs."),
    ],
)
def test_wrong_file_is_one_line_with_its_place(tmp_path, text, line):
    assert complaint(tmp_path, text=text).startswith(line)


def test_missing_file_names_a_near_one(tmp_path):
    written(tmp_path)

    with pytest.raises(ConfigError, match=r"run\.yml: there is no such file; did you mean '.*run\.yaml'\?$"):
        load_config(tmp_path / "run.yml")
    with pytest.raises(ConfigError, match=r"there is no such file, nor its folder"):
        load_config(tmp_path / "nowhere" / "run.yaml")
    with pytest.raises(ConfigError, match="this is a folder"):
        load_config(tmp_path)
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="not UTF-8 text"):
        load_config(tmp_path / "binary.yaml")


def test_misspelt_required_key_is_reported_and_not_the_missing_one(tmp_path):
    line = complaint(tmp_path, text="tsk: a.py:b\nrun: {max_epochs: 1}\n")

    assert line == "DIR/run.yaml:1: tsk: got 'a.py:b' for a key that is not known; did you mean 'task'?"


def test_all_mistakes_of_a_file_are_told_at_once_in_their_order(tmp_path):
    mistakes = "update:\n  precision: bf61\n  clip_nrm: 1.0\noptimizer:\n  lr: fast\ndata:\n  batch_size: 0\n"

    with pytest.raises(ConfigError) as caught:
        load_config(written(tmp_path, MINIMAL + mistakes), ["run.seed=-1"])
    assert [line.partition(": got")[0] for line in str(caught.value).splitlines()] == [
        "command line: run.seed",
        *(f"{tmp_path}/run.yaml:{place}" for place in ("5: update.precision", "6: update.clip_nrm", "8: optimizer.lr")),
        f"{tmp_path}/run.yaml:10: data.batch_size",
    ]


def test_several_optimizers_go_by_name_with_a_schedule_each(tmp_path):
    text = MINIMAL + (
        "schedule: {name: cosine}\n"
        "optimizers:\n"
        "  tables: {name: RowwiseAdagrad, lr: 2e-2, schedule: {name: constant, warmup: 5}}\n"
        "  dense: {name: AdamW, weight_decay: 0.1}\n"
    )
    config = load_config(written(tmp_path, text), ["optimizers.dense.lr=0.5"])

    assert config.optimizers["tables"].type is RowwiseAdagrad
    assert config.optimizers["tables"].options == {"lr": 2e-2}
    assert config.optimizers["dense"].options == {"lr": 0.5, "weight_decay": 0.1}
    assert {name: (key, section.name) for name, (key, section) in config.schedules.items()} == {
        "tables": ("optimizers.tables.schedule", "constant"),
        "dense": ("schedule", "cosine"),
    }
    assert config_from_dict(config.to_dict()).to_dict() == config.to_dict()


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("schedule.decay=3", "schedule.decay has no effect without schedule.name=wsd"),
        ("early_stopping.patience=3", "early_stopping.patience has no effect without a metric"),
        ("data.prefetch_factor=2", "data.prefetch_factor has no effect without data.num_workers"),
        ("update.grad_scaler={init_scale: 8}", "update.grad_scaler has no effect without update.precision=fp16"),
        ("checkpoint.keep_best=2", "checkpoint.keep_best has no effect without checkpoint.best"),
        ("distributed.param_dtype=bf16", "distributed.param_dtype has no effect without strategy=fsdp or hsdp"),
        ("optimizers={x: {schedule: {power: 3}}}", "optimizers.x.schedule.power has no effect without"),
    ],
)
def test_setting_without_effect_is_a_warning(tmp_path, override, line):
    with pytest.warns(ConfigWarning, match=re.escape(line)):
        load_config(written(tmp_path), [override])


def test_settings_with_effect_are_silent(tmp_path):
    overrides = ["schedule={name: wsd, decay: 0.2, total: 5}", "data.num_workers=2", "data.prefetch_factor=2"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_config(written(tmp_path), overrides)
