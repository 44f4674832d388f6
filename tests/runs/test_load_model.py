"""A model comes back from its checkpoint alone, and no file that a checkpoint names runs unless the caller says so."""

import sys

import pytest
import torch
from torch import nn

from ignite_engine import Task, load_model
from ignite_engine.checkpointing import CheckpointError, CheckpointStore
from ignite_engine.cli import main
from ignite_engine.errors import StateMismatch
from ignite_engine.task import TaskError
from tests.kit.tiny import one

TASK = """
from pathlib import Path
import torch
from ignite_engine import Task

Path(__file__).with_suffix(".ran").touch()


def build(options):
    torch.rand(5)
    width = options["width"]
    model = torch.nn.Sequential(torch.nn.Linear(2, width), torch.nn.Dropout(), torch.nn.Linear(width, 1))
    model[0].requires_grad_(False)
    data = torch.utils.data.TensorDataset(torch.arange(64.0).reshape(32, 2) / 64)
    return Task(model=model, loss_fn=lambda model, batch: (model(batch[0]) - 1).square().mean(), train_set=data)
"""

CONFIG = """
task: tasks/{name}.py:build
task_options: {{width: 5}}
run: {{directory: runs/one, max_iterations: 8, seed: 3}}
ema: {{decay: 0.5}}
checkpoint: {{every: 4{more}}}
logging: {{progress: false, console: false, clearml: false, report: false}}
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A finished run of a task file whose name no other test has; elsewhere is the working directory after."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    train(tmp_path, monkeypatch)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    return tmp_path


def train(folder, monkeypatch, more=""):
    monkeypatch.chdir(folder)
    name = task_name(folder)
    (folder / "tasks").mkdir(exist_ok=True)
    (folder / "tasks" / f"{name}.py").write_text(TASK)
    (folder / "config.yaml").write_text(CONFIG.format(name=name, more=more))
    assert main(["train", "config.yaml"]) == 0
    forget(folder)


def task_name(folder):
    return f"task_of_{folder.name}"


def forget(folder):
    """As in a process that never imported the task."""
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", "")).startswith(str(folder)):
            del sys.modules[name]
    (folder / "tasks" / f"{task_name(folder)}.ran").unlink(missing_ok=True)


def saved(folder, part="model"):
    store = CheckpointStore(folder / "runs/one/checkpoints")
    return store.load(store.checkpoints()[-1].path).shared[part]


def other_build(options):
    torch.rand(99)
    model = nn.Sequential(nn.Linear(2, options["width"]), nn.Dropout(), nn.Linear(options["width"], 1))
    return Task(model, lambda model, batch: model(batch), torch.utils.data.TensorDataset(torch.zeros(1)))


@pytest.mark.row("D12")
def test_task_is_imported_only_if_the_caller_says_so(folder):
    ran = folder / "tasks" / f"{task_name(folder)}.ran"
    with pytest.raises(
        TaskError, match=r"tasks/task_of_.*:build', which would be imported and run: use import_task=True"
    ):
        load_model(folder / "runs/one")
    assert not ran.exists()
    model = load_model(folder / "runs/one", import_task=True)

    assert ran.exists() and not model.training
    assert all(torch.equal(value, saved(folder)[name]) for name, value in model.state_dict().items())


@pytest.mark.row("D12")
def test_average_is_loaded_into_the_model(folder):
    model = load_model(folder / "runs/one/checkpoints", ema=True, import_task=True)
    average = saved(folder, "ema")["weights"]

    assert all(torch.equal(value, average[name]) for name, value in model.state_dict().items())
    assert not torch.equal(average["2.weight"], saved(folder)["2.weight"])
    with pytest.raises(ValueError, match=r"weights='slow', but .* holds no average of that name; expected raw or ema"):
        load_model(folder / "runs/one", ema="slow", import_task=True)


def test_function_of_the_callers_own_takes_the_place_of_the_task(folder):
    before = torch.get_rng_state()
    model = load_model(folder / "runs/one/checkpoints/iteration_00000004", task=other_build)
    store = CheckpointStore(folder / "runs/one/checkpoints")
    weights = store.load(store.directory / "iteration_00000004").shared["model"]

    assert torch.equal(one(model), torch.cat([value.reshape(-1) for value in weights.values()]))
    assert torch.equal(torch.get_rng_state(), before)
    assert not (folder / "tasks" / f"{task_name(folder)}.ran").exists()


def test_what_was_left_out_is_asked_for(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    train(tmp_path, monkeypatch, more=", exclude: ['*:0.*']")
    with pytest.raises(StateMismatch, match=r"2 missing: 0\.weight, 0\.bias"):
        load_model("runs/one", import_task=True)
    model = load_model("runs/one", import_task=True, strict=False)
    assert main(["train", "config.yaml", "run.directory=runs/whole", "checkpoint.exclude=null"]) == 0
    store = CheckpointStore("runs/whole/checkpoints")
    whole = store.load(store.checkpoints()[-1].path).shared["model"]

    # built under the run's seed, as the run built it
    assert all(torch.equal(value, whole[name]) for name, value in model.state_dict().items())


def test_checkpoint_without_a_config_needs_a_task(tmp_path):
    CheckpointStore(tmp_path).save({"model": nn.Linear(2, 1).state_dict()}, {}, iteration=1, epoch=0)
    with pytest.raises(CheckpointError, match="holds no config, so how its model is built is unknown: give task="):
        load_model(tmp_path, import_task=True)
    with pytest.raises(CheckpointError, match="does not exist"):
        load_model(tmp_path / "nowhere", import_task=True)

    def build(options):
        assert options == {}
        return Task(nn.Linear(2, 1), lambda model, batch: model(batch), torch.utils.data.TensorDataset(torch.zeros(1)))

    assert isinstance(load_model(tmp_path, task=build), nn.Linear)
