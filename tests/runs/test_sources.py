"""What a run begins with besides its own checkpoints, and weights for other programs."""

import sys

import pytest
import torch
from ignite.engine import Events
from torch import nn

from ignite_engine import Task, Trainer, load_weights
from ignite_engine.cli import main
from ignite_engine.errors import CheckpointError, StateMismatch
from ignite_engine.handlers import EMA, Checkpoint
from ignite_engine.runs.load_model import load_model
from tests.kit.fitting import at, digest, fitted, log, manifest, net, stop
from tests.kit.refusals import refusals, refuses
from tests.kit.tiny import linear, numbers_loader, one, trainer_of


def began(run_in, **arguments):
    """A run, and the weights that it began with."""
    first = {}

    def note(trainer):
        first.update({name: value.clone() for name, value in trainer.update.model.state_dict().items()})

    return run_in(handlers=[(note, Events.STARTED)], **arguments), first


def weights_of(folder, **options):
    model = net()
    load_weights(model, folder, **options)
    return model.state_dict()


def same(one, other, names=None):
    return all(torch.equal(one[name], other[name]) for name in names or one)


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pretrained")
    fitted(folder, seed=5, EMA={"decay": 0.5}, best="val/loss")
    return folder


@pytest.mark.row("D9")
def test_a_run_begins_with_the_weights_of_another_and_restarts_from_its_own(pretrained, tmp_path):
    def run(folder, path=pretrained, **more):
        return fitted(tmp_path / folder, load=[{"path": str(path), "weights": "ema"}], **more)

    whole, first = began(lambda **given: run("whole", **given))
    assert whole.summary["resumed_from"] is None and whole.summary["iteration"] == 18
    assert same(first, weights_of(pretrained, ema=True)) and whole.summary["start"] == "fine-tune"
    run("run", handlers=[at(5, stop)])
    resumed = run("run", path=tmp_path / "gone")  # what it began with is not asked for again
    assert digest(resumed) == digest(whole) and log(tmp_path / "run") == log(tmp_path / "whole")


def test_a_branch_goes_on_where_the_other_run_was_with_a_log_of_its_own(pretrained, tmp_path):
    before = log(pretrained)
    load = [{"path": str(pretrained), "parts": ["*"]}]
    branch = fitted(tmp_path, seed=5, EMA={"decay": 0.5}, best="val/loss", max_epochs=4, load=load)
    assert branch.summary["iteration"] == 24 and min(line["iteration"] for line in log(tmp_path)) > 18
    assert log(pretrained) == before


def test_a_run_begins_with_several_sources_in_order(pretrained, tmp_path):
    fitted(tmp_path / "heads", seed=6, best="val/loss")
    load = [
        {"path": str(pretrained), "weights": "ema"},
        {"path": str(tmp_path / "heads" / "best"), "parts": ["model:2.*"]},
        {"path": str(tmp_path / "nowhere.pt"), "required": False},
    ]
    run, first = began(lambda **given: fitted(tmp_path / "run", load=load, **given))
    assert same(first, weights_of(pretrained, ema=True), ["0.weight", "0.bias"])
    assert same(first, weights_of(tmp_path / "heads", which="best"), ["2.weight", "2.bias"])
    assert run.config["load"][1]["path"].endswith("heads/best")


def test_what_is_frozen_is_left_out_and_comes_from_its_source_each_time(pretrained, tmp_path):
    frozen = {"Checkpoint": {"exclude": ["*:0.*"], "labels": ["frozen"]}, "load": [{"path": str(pretrained)}]}

    def run(folder, *handlers):
        model = net()
        model[0].requires_grad_(False)
        return fitted(tmp_path / folder, model=model, handlers=[*handlers], **frozen)

    whole = run("whole")
    run("run", at(4, stop))
    resumed = run("run")
    assert digest(resumed) == digest(whole) and resumed.evaluate()["val/loss"] == whole.metrics["val/loss"]
    newest = manifest(tmp_path / "run", 18)
    assert newest["labels"] == ["frozen"] and newest["left_out"]["model"] == ["0.weight", "0.bias"]


def test_a_dynamic_source_is_loaded_again_while_training(pretrained, tmp_path):
    folder = tmp_path / "source"
    fitted(folder, max_epochs=1)
    load = [{"path": str(folder), "dynamic": True}]
    loaded = {}

    def train_on(trainer):
        fitted(folder, max_epochs=2)

    def note(trainer):
        loaded.update({name: value.clone() for name, value in trainer.update.model.state_dict().items()})

    handlers = [(train_on, Events.ITERATION_STARTED(once=3)), (note, Events.ITERATION_STARTED(once=5))]
    fitted(tmp_path / "run", load=load, ModelBank={"every": 2}, handlers=handlers)
    assert same(loaded, weights_of(folder))


# ---------------------------------------------------------------------------------------------- weights and models


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of which iteration 4 is the best, and the weights of each iteration."""
    folder, seen = tmp_path_factory.mktemp("run"), {}
    trainer = trainer_of()
    EMA(0.5).attach(trainer)

    @trainer.on(Events.ITERATION_COMPLETED)
    def score():
        seen[trainer.state.iteration] = one(trainer.update.model).clone()
        trainer.state.metrics["score"] = -abs(trainer.state.iteration - 4)

    checkpoint = Checkpoint(folder / "checkpoints", best="score", mode="max", keep_last=1)
    checkpoint.attach(trainer, Events.COMPLETED)
    trainer.run(numbers_loader(), max_iters=6)
    return folder, seen


@pytest.mark.parametrize(("where", "iteration"), [((), 6), (("last",), 6), (("best",), 4)])
def test_weights_are_loaded_by_name(where, iteration, run):
    model = linear().eval()
    assert load_weights(model, run[0], *where).name == f"iteration_{iteration:08d}"
    assert torch.equal(one(model), run[1][iteration]) and not model.training


def test_averaged_weights_are_loaded(run):
    averaged = linear()
    load_weights(averaged, run[0], "best", ema=True)
    assert not torch.equal(one(averaged), run[1][4])


@pytest.mark.parametrize("wrap", [torch.compile, nn.DataParallel, lambda model: nn.DataParallel(torch.compile(model))])
def test_wrapping_makes_no_difference(wrap, run, tmp_path):
    """Neither that of the model, nor that of a model whose state_dict was saved elsewhere."""
    model = linear()
    load_weights(wrap(model), run[0], "best")
    torch.save(wrap(model).state_dict(), tmp_path / "weights.pt")
    for other in (linear(), wrap(linear())):
        with torch.no_grad():
            next(other.parameters()).zero_()
        load_weights(other, tmp_path / "weights.pt")
        assert torch.equal(one(other), run[1][4])


def test_what_does_not_fit_is_one_line_and_loads_nothing(run, tmp_path):
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2), nn.Linear(2, 1))
    before = one(model).clone()
    refuses(lambda: load_weights(model, run[0], "best"), StateMismatch, "3.weight 2.weight (1, 4) (2, 4) strict=False")
    assert torch.equal(one(model), before)
    load_weights(model, run[0], "best", strict=False)
    assert torch.equal(model[0].weight, run[1][4][:12].view(4, 3))
    refuses(lambda: load_weights(nn.Linear(3, 4), run[0], strict=False), StateMismatch, "2 missing 4 unexpected")
    refuses(lambda: load_weights(run[0], model), TypeError, "model")
    refuses(lambda: load_weights(model, tmp_path / "nowhere"), CheckpointError, "does not exist")


def test_a_model_of_another_name_is_found_and_one_of_several_is_named(tmp_path):
    first, second = linear(), nn.Linear(2, 1)
    trainer = Trainer(lambda engine, batch: 0.0)
    trainer.register("net", first, shared=True)
    checkpoint = Checkpoint(tmp_path)
    checkpoint.attach(trainer)
    checkpoint.save()
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    load_weights(model, tmp_path)
    assert torch.equal(one(model), one(first))

    trainer.register("head", second, shared=True)
    checkpoint.save()
    head = nn.Linear(2, 1)
    load_weights(head, tmp_path, part="head")
    assert torch.equal(one(head), one(second))
    refuses(lambda: load_weights(head, tmp_path), CheckpointError, "no model net, head part=")


TASK = """
from pathlib import Path
import torch
from ignite_engine import Task

Path(__file__).with_suffix(".ran").touch()


def build(options):
    torch.rand(5)
    width = options["width"]
    model = torch.nn.Sequential(torch.nn.Linear(2, width), torch.nn.Dropout(), torch.nn.Linear(width, 1))
    data = torch.utils.data.TensorDataset(torch.arange(64.0).reshape(32, 2) / 64)
    return Task(model=model, loss_fn=lambda model, batch: (model(batch[0]) - 1).square().mean(), train_set=data)
"""
CONFIG = """
task: tasks/{name}.py:build
task_options: {{width: 5}}
run: {{directory: run, max_iterations: 8, seed: 3}}
handlers:
  EMA: {{decay: 0.5}}
  Checkpoint: {{every: 4}}
  MetricLogger: {{console: false}}
  Progress: null
  Report: null
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A finished run of a task file whose name no other test has, which this process has not imported."""
    name = f"task_of_{tmp_path.name}"
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / f"{name}.py").write_text(TASK)
    (tmp_path / "config.yaml").write_text(CONFIG.format(name=name))
    assert main(["train", "config.yaml"]) == 0
    for key, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[key]
    ran(tmp_path).unlink()
    return tmp_path


def ran(folder):
    """There once the task file has been imported."""
    return folder / "tasks" / f"task_of_{folder.name}.ran"


def other_build(options):
    torch.rand(99)
    model = nn.Sequential(nn.Linear(2, options["width"]), nn.Dropout(), nn.Linear(options["width"], 1))
    return Task(model, lambda model, batch: model(batch), torch.utils.data.TensorDataset(torch.zeros(1)))


@pytest.mark.row("D12")
def test_a_model_is_built_by_its_task_only_if_the_caller_says_so(folder):
    refuses(lambda: load_model(folder / "run"), ValueError, "imported import_task=True")
    assert not ran(folder).exists()
    model, averaged = (load_model(folder / "run", ema=ema, import_task=True) for ema in (None, True))
    assert ran(folder).exists() and not model.training

    before = torch.get_rng_state()
    mine = load_model(folder / "run" / "checkpoints" / "iteration_00000008", task=other_build)
    assert torch.equal(one(mine), one(model)) and torch.equal(torch.get_rng_state(), before)
    load_weights(mine, folder / "run", ema=True)
    assert torch.equal(one(mine), one(averaged)) and not torch.equal(one(averaged), one(model))
    refuses(lambda: load_model(folder / "run", ema="slow", import_task=True), ValueError, "'slow' raw ema")


@pytest.mark.row("D12")
def test_what_was_left_out_is_built_under_the_seed_of_the_run(folder):
    whole = load_model(folder / "run", import_task=True)
    assert (
        main(["train", "config.yaml", "run.directory=part", "handlers.Checkpoint.exclude=['*:0.*']", "optimizer.lr=0"])
        == 0
    )
    refuses(lambda: load_model(folder / "part", import_task=True), StateMismatch, "2 missing 0.weight")
    left_out = load_model(folder / "part", import_task=True, strict=False)
    assert main(["train", "config.yaml", "run.directory=still", "optimizer.lr=0"]) == 0
    assert torch.equal(one(left_out), one(load_model(folder / "still", import_task=True)))
    assert not torch.equal(one(left_out), one(whole))


def without_a_config(folder):
    trainer = trainer_of()
    checkpoint = Checkpoint(folder)
    checkpoint.attach(trainer)
    checkpoint.save()
    load_model(folder, import_task=True)


def of_python(folder):
    fitted(folder, max_epochs=1)
    load_model(folder)


test_load_model_refuses = refusals(
    [
        ("no config", without_a_config, CheckpointError, "no config task="),
        ("nothing", lambda folder: load_model(folder / "nowhere"), CheckpointError, "does not exist"),
        ("made by fit", of_python, ValueError, "fit() load_weights"),
    ]
)
