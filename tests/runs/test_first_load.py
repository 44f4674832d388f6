"""How a run of a config begins: fresh, as a restart, or with what another run has learnt."""

import json
from collections.abc import Callable

import pytest
import torch
import yaml
from ignite.engine import Events

from ignite_engine import Task, seed_everything
from ignite_engine.checkpointing import LoadSource
from ignite_engine.config import ConfigError, config_from_dict
from ignite_engine.handlers import ModelBank
from ignite_engine.runs import recipe
from ignite_engine.runs.run import Run

SAMPLES = torch.utils.data.TensorDataset(torch.arange(48.0).reshape(24, 2) / 48)


def loss_fn(model, batch):
    return (model(batch[0]) - 1).square().mean()


def make_task(width):
    model = torch.nn.Sequential()
    model.add_module("backbone", torch.nn.Linear(2, width).requires_grad_(False))
    model.add_module("head", torch.nn.Linear(width, 1))
    return Task(model, loss_fn, SAMPLES, val_sets={"val": SAMPLES})


Build = Callable[..., Run]


@pytest.fixture
def build(tmp_path):
    def make(folder, sections=None, width=4, seed=0):
        values = {
            "task": "unused.py:build",
            "run": {"directory": str(tmp_path / folder), "max_iterations": 8, "seed": seed},
            "data": {"batch_size": 4},
            "logging": {key: False for key in ("progress", "clearml", "report", "memory", "throughput")} | {"every": 2},
            "ema": {"decay": 0.5},
            "checkpoint": {"every": 4},
        }
        for name, section in (sections or {}).items():
            values[name] = {**values.get(name, {}), **section}
        config = config_from_dict(values)
        seed_everything(config.run.seed)
        return recipe.build_run(config, make_task(width))

    return make


@pytest.fixture
def pretrained(build, tmp_path):
    build("pretrained", seed=5).train()
    return tmp_path / "pretrained"


def state_of(run):
    update = run.trainer.update
    return {name: value.clone() for name, value in update.model.state_dict().items()}


def test_run_begins_fresh_then_restarts(build):
    assert build("run").train()["start"] == "fresh"
    assert build("run", {"run": {"max_iterations": 9}}).train()["start"] == "restart"


@pytest.mark.row("D9")
def test_run_begins_with_the_weights_of_another_and_restarts_from_its_own(build, pretrained, tmp_path):
    load = {"checkpoint": {"every": 4, "load": {"path": str(pretrained), "weights": "ema"}}}
    whole = build("whole", load)
    began = []
    whole.trainer.add_event_handler(Events.STARTED, lambda: began.append(state_of(whole)))
    summary = whole.train()
    source = whole.checkpoint.store.load(pretrained / "checkpoints" / "iteration_00000008")

    assert summary["start"] == "fine-tune" and summary["resumed_from"] is None and summary["iteration"] == 8
    assert all(torch.equal(began[0][name], value) for name, value in source.shared["ema"]["weights"].items())
    stopped = build("stopped", load)
    stopped.trainer.add_event_handler(
        Events.ITERATION_COMPLETED, lambda: stopped.trainer.state.iteration == 5 and stopped.trainer.request_stop("now")
    )
    assert stopped.train()["start"] == "fine-tune"
    for each in (pretrained / "checkpoints").iterdir():
        (each / "manifest.json").unlink()  # what it began with is not asked for again
    again = build("stopped", load).train()
    assert (again["start"], again["iteration"]) == ("restart", 8)
    assert again["weights_sha256"] == summary["weights_sha256"]
    assert (tmp_path / "stopped/metrics.jsonl").read_text() == (tmp_path / "whole/metrics.jsonl").read_text()


def test_logs_of_the_other_run_are_left_to_it(build, pretrained, tmp_path):
    """A branch of a run continues where that run was, and writes a log of its own."""
    lines = (pretrained / "metrics.jsonl").read_text()
    length = {"run": {"directory": str(tmp_path / "branch"), "max_iterations": 12}}
    length["run"]["seed"] = 5
    branch = build("branch", {**length, "checkpoint": {"load": {"path": str(pretrained), "parts": ["*"]}}}, seed=5)
    assert branch.train()["iteration"] == 12
    logged = [json.loads(line)["iteration"] for line in (tmp_path / "branch/metrics.jsonl").read_text().splitlines()]

    assert logged == [10, 12] and (pretrained / "metrics.jsonl").read_text() == lines


def test_frozen_backbone_is_left_out_and_comes_from_its_source_each_time(build, pretrained, tmp_path):
    exclude = ["*:backbone.*"]
    section = {"every": 4, "exclude": exclude, "labels": ["frozen"], "load": {"path": str(pretrained)}}
    whole = build("whole", {"checkpoint": section})
    expected = whole.train()
    build("run", {"checkpoint": section, "run": {"directory": str(tmp_path / "run"), "max_iterations": 4}}).train()
    again = build("run", {"checkpoint": section}, seed=0)
    summary = again.train()
    (*_, newest) = again.checkpoint.store.checkpoints()

    assert summary["start"] == "restart" and summary["weights_sha256"] == expected["weights_sha256"]
    assert newest.manifest.left_out["model"] == ["backbone.weight", "backbone.bias"]
    assert newest.manifest.labels == ["frozen"] and newest.manifest.parent == "iteration_00000004"
    measured = build("run", {"checkpoint": section}).evaluate()
    assert measured["val/loss"] == summary["metrics"]["val/loss"]


def test_settings_that_are_no_plan_are_refused_when_the_run_is_built(build, tmp_path):
    with pytest.raises(ConfigError, match=r"^config: checkpoint.load: parts has 'data' without 'counters'"):
        build("run", {"checkpoint": {"load": {"path": "x", "parts": ["model", "data"]}}})
    assert not (tmp_path / "run").exists()


def test_a_run_begins_with_several_sources(build, pretrained, tmp_path):
    build("heads", {"ema": {"decay": None}, "checkpoint": {"best": "val/loss"}}, seed=6).train()
    load = [
        {"path": str(pretrained), "weights": "ema"},
        {"path": str(tmp_path / "heads"), "parts": ["model:head.*"], "which": "best"},
        {"path": str(tmp_path / "nowhere.pt"), "required": False},
    ]
    run = build("run", {"checkpoint": {"load": load}})
    began = []
    run.trainer.add_event_handler(Events.STARTED, lambda: began.append(state_of(run)))
    assert run.train()["start"] == "fine-tune"
    store = run.checkpoint.store
    first = store.load(pretrained / "checkpoints" / "iteration_00000008").shared["ema"]["weights"]
    best = LoadSource(tmp_path / "heads", which="best").find()
    assert best is not None
    second = store.load(best.path).shared["model"]
    assert torch.equal(began[0]["backbone.weight"], first["backbone.weight"])
    assert torch.equal(began[0]["head.weight"], second["head.weight"])
    assert yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())["checkpoint"]["load"][1]["which"] == "best"
    assert build("run", {"checkpoint": {"load": load}}).train()["start"] == "restart"


def test_a_dynamic_source_is_loaded_again(build, pretrained, tmp_path):
    load = {"path": str(pretrained), "dynamic": True}
    run = build("run", {"checkpoint": {"load": load, "reload_every": 2}})

    @run.trainer.on(Events.ITERATION_STARTED(once=3))
    def train_on():
        build("pretrained", {"run": {"directory": str(pretrained), "max_iterations": 12, "seed": 5}}).train()

    began = []
    run.trainer.add_event_handler(Events.ITERATION_STARTED(once=5), lambda: began.append(state_of(run)))
    run.train()
    source = run.checkpoint.store.load(pretrained / "checkpoints" / "iteration_00000012").shared["model"]
    assert all(torch.equal(began[0][name], value) for name, value in source.items())
    again = build("run", {"checkpoint": {"load": load, "reload_every": 2}, "run": {"max_iterations": 9}})
    assert again.train()["start"] == "restart"
    (bank,) = [each for each in again.trainer.registry.objects.values() if isinstance(each, ModelBank)]
    assert bank.loaded[0]["at_iteration"] == 4 and bank.loaded[0]["iteration"] == 12


def test_a_dynamic_source_with_other_parts_is_refused(build):
    with pytest.raises(ConfigError, match=r"checkpoint.load.0: A dynamic source is loaded while training: its parts"):
        build("run", {"checkpoint": {"load": [{"path": "a", "dynamic": True, "parts": ["*"]}]}})
