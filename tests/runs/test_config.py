"""Configs: what is accepted, and the one line that is said about everything else."""

import pickle
import warnings
from pathlib import Path

import pytest

from ignite_engine.runs.config import ConfigError, ConfigWarning, config_from_dict, load_config
from tests.kit.floors import has
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
    usual = {"Checkpoint", "Evaluation", "GracefulStop", "MetricLogger", "Progress", "StopFile"}
    assert set(found["handlers"]) == (usual | {"Report"} if has("report") else usual)
    assert found["handlers"]["Checkpoint"] == found["handlers"]["Evaluation"] == {"every": {"epochs": 1}}


OF_A_KIND = "handlers.x={use: Evaluation, data: test, every: {epochs: 5}}"
ACCEPTED = {  # what is given, and what is in force
    "numbers without a dot": ("optimizer.lr=1e-3", ("optimizer", "lr"), 1e-3),
    "free options": ("task_options.rate=5E+2", ("task_options", "rate"), 500.0),
    "an optimizer's flags": ("optimizer={name: SGD, nesterov: true, momentum: 0.9}", ("optimizer", "nesterov"), True),
    "a list for a tuple": ("optimizer.betas=[0.9, 0.95]", ("optimizer", "betas"), [0.9, 0.95]),
    "a warm-up in steps": ("schedule={name: cosine, warmup: 100}", ("schedule", "warmup"), 100),
    "no schedule": ("schedule.name=none", ("schedule", "name"), "none"),
    "a handler by label": ("handlers.Checkpoint.keep_last=3", ("handlers", "Checkpoint", "keep_last"), 3),
    "one more": ("handlers.EMA={decay: 0.9}", ("handlers", "EMA"), {"decay": 0.9}),
    "one less": ("handlers.Progress=null", ("handlers", "Progress"), None),
    "a second of a kind": (OF_A_KIND, ("handlers", "x", "data"), "test"),
    "one's own": ("handlers.noise={use: my.py:Noise, scale: 0.1}", ("handlers", "noise", "scale"), 0.1),
    "iterations": ("handlers.Evaluation.every=7", ("handlers", "Evaluation", "every"), 7),
    "epochs": ("handlers.Evaluation.every={epochs: 0.5}", ("handlers", "Evaluation", "every"), {"epochs": 0.5}),
    "samples": ("handlers.MetricLogger.every={samples: 1e3}", ("handlers", "MetricLogger", "every"), {"samples": 1e3}),
    "the clock": ("handlers.Checkpoint.every={minutes: 2.5}", ("handlers", "Checkpoint", "every"), {"minutes": 2.5}),
    "any of them": ("handlers.EMA={every: [9, {epochs: 1}]}", ("handlers", "EMA", "every"), [9, {"epochs": 1}]),
    "an event": ("handlers.EMA={at: EPOCH_COMPLETED}", ("handlers", "EMA", "at"), "EPOCH_COMPLETED"),
    "never": ("handlers.Evaluation.every=null", ("handlers", "Evaluation", "every"), None),
    "of a resume": ("handlers.Checkpoint.resume={lr: 1e-4}", ("handlers", "Checkpoint", "resume"), {"lr": 1e-4}),
    "sources": ("load=[{path: runs/x/best, rename: {a.: b.}}]", ("load", 0, "path"), "runs/x/best"),
}


@pytest.mark.row("J2")
@pytest.mark.parametrize("name", ACCEPTED)
def test_a_setting_is_in_force_and_reads_back_as_itself(name, tmp_path):
    override, keys, expected = ACCEPTED[name]
    config = load_config(written(tmp_path), [override])
    found = config.to_dict()
    for key in keys:
        found = found[key]
    assert found == expected
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert config_from_dict(config.to_dict()) == config
    assert pickle.loads(pickle.dumps(config)) == config  # ranks are handed it


def test_overrides_go_before_the_file_and_the_last_one_first(tmp_path):
    text = MINIMAL + "handlers:\n  Evaluation: {every: 500, limit: 3}\n  Progress: null\n"
    of_handlers = ["handlers.Evaluation.every={epochs: 2}", "handlers.Progress.keys=[loss]"]
    overrides = ["run.seed=1", "run.seed=2", "task_options.width=8", "run.name=x", *of_handlers]
    found = values(tmp_path, *overrides, text=text)
    assert (found["run"]["seed"], found["task_options"], found["run"]["directory"]) == (2, {"width": 8}, "runs/x")
    assert found["handlers"]["Evaluation"] == {"every": {"epochs": 2}, "limit": 3}
    assert found["handlers"]["Progress"] == {"keys": ["loss"]}


def test_several_optimizers_go_by_name_with_a_schedule_each(tmp_path):
    text = MINIMAL + (
        "schedule: {name: cosine}\n"
        "optimizers:\n"
        "  tables: {name: SparseAdam, lr: 2e-2, schedule: {name: constant, warmup: 5}}\n"
        "  dense: {name: AdamW, weight_decay: 0.1}\n"
    )
    config = load_config(written(tmp_path, text), ["optimizers.dense.lr=0.5"])
    found = config.to_dict()["optimizers"]
    assert (found["tables"]["name"], found["tables"]["lr"], found["dense"]["lr"]) == ("SparseAdam", 2e-2, 0.5)
    assert found["tables"]["schedule"]["warmup"] == 5
    assert config_from_dict(config.to_dict()) == config


def of(override):
    return lambda folder: load_config(written(folder), [override])


WRONG = {
    "optimizer.lrr=1": "optimizer.lrr got 1 AdamW 'lr'?",
    "optimizer.lr=fast": "optimizer.lr got 'fast' number",
    "optimizer.amsgrad=1": "optimizer.amsgrad got 1 true or false",
    "optimizer.betas=[0.9]": "optimizer.betas [0.9] list of 2",
    "optimizer.name=adamm": "optimizer.name 'adamm' 'Adam'?",
    "optimizer.name=LBFGS": "optimizer.name 'LBFGS' not known",
    "optimizer=adam": "optimizer got 'adam' mapping",
    "optimizers={x: {schedule: {name: cosin}}}": "optimizers.x.schedule.name 'cosin' 'cosine'?",
    "run.seed=1.5": "run.seed got 1.5 whole number",
    "run.seed.x=1": "run.seed mapping whole number",
    "run.max_iterations.x=1": "run.max_iterations.x no keys of its own",
    "data.shuffle=1": "data.shuffle got 1 true or false",
    "data.batch_size=0": "data.batch_size got 0 at least 1",
    "data.lr=1": "data.lr got 1 batch_size",
    "precision=bf16": "precision 'update.precision'",
    "lr=1": "lr 'optimizer.lr'?",
    "checkpoint.every=5": "checkpoint 'handlers.Checkpoint'?",
    "tsak=x": "tsak 'task'?",
    "task=build": "task 'build' file.py:function",
    "update.precision=fp61": "update.precision 'fp61' 'fp16'?",
    "update.grad_scaler={init_scal: 3}": "update.grad_scaler.init_scal 'init_scale'?",
    "update.grad_scaler={init_scale: -3}": "update.grad_scaler.init_scale -3 more than 0",
    "schedule={name: cosine, decay: 3}": "schedule.decay got 3 cosine",
    "schedule.name=plateau": "schedule.metric missing plateau",
    "load={path: x}": "load list",
    "load=[{pth: x}]": "load.0.pth 'path'?",
    "load=[{path: x, parts: [model, data]}]": "load.0.parts 'data' 'counters'",
    "handlers.Chekpoint={}": "handlers.Chekpoint 'Checkpoint'?",
    "handlers.Checkpoint=5": "handlers.Checkpoint got 5 null",
    "handlers.Checkpoint.keep_lst=3": "handlers.Checkpoint.keep_lst got 3 'keep_last'?",
    "handlers.Checkpoint.keep_last=two": "handlers.Checkpoint.keep_last 'two' whole number",
    "handlers.Checkpoint.resume={lrr: 1}": "handlers.Checkpoint.resume.lrr 'lr'?",
    "handlers.Checkpoint.resume.lr=fast": "handlers.Checkpoint.resume.lr 'fast' number",
    "handlers.EarlyStopping={patience: 3}": "handlers.EarlyStopping.key missing",
    "handlers.EMA={evaluate: val}": "handlers.EMA.evaluate 'val' list",
    "handlers.noise={use: Noise}": "handlers.noise.use 'Noise' FILE.py:CLASS",
    "handlers.Evaluation.every={minute: 3}": "handlers.Evaluation.every.minute 'minutes'?",
    "handlers.Evaluation.every=0": "handlers.Evaluation.every got 0 {epochs: 1}",
    "handlers.Evaluation.every={epochs: 1, samples: 3}": "handlers.Evaluation.every 'samples' {epochs: 1}",
    "handlers.Evaluation.every=[1, often]": "handlers.Evaluation.every 'often' {minutes: 10}",
    "handlers.EMA={at: EPOCH_COMPLETE}": "handlers.EMA.at 'EPOCH_COMPLETE' 'EPOCH_COMPLETED'?",
    "handlers.EMA={at: EPOCH_COMPLETED, every: 3}": "handlers.EMA.at every one",
    "distributed.ddp_options={process_group: a}": "distributed.ddp_options.process_group 'a'",
    "distributed.timeout=5 min": "distributed.timeout '5 min' number",
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
    "no task": ("run: {max_epochs: 1}\n", "run.yaml task file.py:function"),
    "no run": ("task: a.py:b\n", "run.yaml run max_epochs"),
    "task misspelt": ("tsk: a.py:b\nrun: {max_epochs: 1}\n", "run.yaml:1 tsk 'task'?"),
    "handler": (MINIMAL + "handlers:\n  EMA:\n    decya: 0.9\n", "run.yaml:6 handlers.EMA.decya 'decay'?"),
    "old section": (MINIMAL + "logging: {every: 5}\n", "run.yaml:4 logging handlers"),
    "source": (MINIMAL + "load:\n- path: x\n  prats: [model]\n", "run.yaml:6 load.0.prats 'parts'?"),
}
test_files_are_refused_with_their_place = refusals(
    [(name, of_text(text), ConfigError, words) for name, (text, words) in FILES.items()]
)


def test_a_missing_file_names_a_near_one(tmp_path):
    written(tmp_path)
    refuses(lambda: load_config(tmp_path / "run.yml"), ConfigError, "no such file run.yaml")
    refuses(lambda: load_config(tmp_path / "nowhere" / "run.yaml"), ConfigError, "no such file")
    refuses(lambda: load_config(tmp_path), ConfigError, "YAML directory")
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    refuses(lambda: load_config(tmp_path / "binary.yaml"), ConfigError, "UTF-8")


def test_all_mistakes_of_a_file_are_told_at_once_in_their_order(tmp_path):
    mistakes = (
        "update:\n  precision: bf61\n  clip_nrm: 1.0\noptimizer:\n  lr: fast\ndata:\n  batch_size: 0\n"
        "handlers:\n  Checkpoint: {keep_last: two}\n  Chekpoint: {}\n"
    )
    with pytest.raises(ConfigError) as caught:
        load_config(written(tmp_path, MINIMAL + mistakes), ["run.seed=-1"])
    keys = [line.partition(": got")[0].split()[-1] for line in str(caught.value).splitlines()]
    of_sections = ["run.seed", "update.precision", "update.clip_nrm", "optimizer.lr", "data.batch_size"]
    assert keys == [*of_sections, "handlers.Checkpoint.keep_last", "handlers.Chekpoint"]


WITHOUT_EFFECT = {
    "data.prefetch_factor=2": "data.num_workers",
    "update.grad_scaler={init_scale: 8}": "update.precision=fp16",
    "handlers.Checkpoint.keep_best=2": "handlers.Checkpoint.best",
    "distributed.param_dtype=bf16": "fsdp",
    "distributed={strategy: fsdp, ddp_options: {static_graph: true}}": "ddp",
    "distributed={strategy: fsdp, shard_ranks: 2}": "hsdp",
    "distributed.loss_parallel=true": "tensor_parallel",
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
