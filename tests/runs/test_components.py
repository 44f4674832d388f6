"""The parts of a run: how many updates it has, who shuffles, what is refused before training."""

import socket
from pathlib import Path

import pytest
from torch import nn

from ignite_engine import Task
from ignite_engine.config import ConfigError, config_from_dict
from ignite_engine.runs import components
from tests.faults.commands import Command
from tests.kit.tiny import Numbers, linear, mse

ROOT = Path(__file__).resolve().parents[2]


def config(**sections):
    return config_from_dict({"task": "unused.py:build", "run": {"max_epochs": 3}, **sections})


@pytest.mark.slow
@pytest.mark.distributed
def test_other_config_on_one_rank_is_refused_on_all(tmp_path, monkeypatch):
    command = ["train", "configs/digits.yaml", "task=nowhere.py:build"]
    command += [f"run.directory={tmp_path}/run", "--backend", "gloo"]
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    launched = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    ranks = []
    for rank in range(2):
        for name, value in {**launched, "RANK": str(rank), "LOCAL_RANK": str(rank)}.items():
            monkeypatch.setenv(name, value)
        ranks.append(Command(ROOT, *command, f"optimizer.lr=0.{rank + 1}"))
    errors = [rank.communicate()[1] for rank in ranks]

    expected = "error: rank 1 was started with another config than rank 0: optimizer.lr: 0.1 -> 0.2; start all ranks"
    assert [rank.returncode for rank in ranks] == [2, 2], errors
    assert [sum(line.startswith(expected) for line in each.splitlines()) for each in errors] == [1, 0]
    assert not (tmp_path / "run").exists()


def test_optimizer_has_the_tasks_groups_or_all_that_requires_gradients():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    model[0].requires_grad_(False)
    task = Task(model, mse, Numbers(4))
    optimizer = components.make_optimizers(config(), task, model)["optimizer"]
    task.parameter_groups = [{"params": [model[1].weight], "lr": 0.5}]
    grouped = components.make_optimizers(config(), task, model)["optimizer"]

    assert optimizer.param_groups[0]["params"] == list(model[1].parameters())
    assert [(each["lr"], len(each["params"])) for each in grouped.param_groups] == [(0.5, 1)]


def two_optimizers():
    return {"tables": {"name": "RowwiseAdagrad", "lr": 0.5}, "dense": {"name": "SGD"}}


def test_each_named_optimizer_has_the_tasks_parameters_of_its_name():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    groups = {"tables": list(model[0].parameters()), "dense": [{"params": model[1].parameters(), "lr": 0.25}]}
    task = Task(model, mse, Numbers(4), parameter_groups=groups)
    settings = config(optimizers=two_optimizers())
    components.check_fit(settings, task)
    made = components.make_optimizers(settings, task, model)

    assert [type(each).__name__ for each in made.values()] == ["RowwiseAdagrad", "SGD"]
    assert [each.param_groups[0]["lr"] for each in made.values()] == [0.5, 0.25]
    assert made["tables"].param_groups[0]["params"] == list(model[0].parameters())


@pytest.mark.parametrize(
    ("optimizers", "groups", "line"),
    [
        ({}, {"dense": []}, "optimizer: got one optimizer, but the task has parameter_groups for dense; expected a"),
        (two_optimizers(), {"dense": []}, "optimizers: got tables, dense, but the task has parameter_groups for dense"),
        (two_optimizers(), None, "optimizers: got tables, dense, but the task's parameter_groups are not a mapping of"),
    ],
)
def test_optimizers_that_do_not_fit_the_tasks_groups_are_refused(optimizers, groups, line):
    task = Task(linear(), mse, Numbers(4), parameter_groups=groups)

    with pytest.raises(ConfigError, match=line):
        components.check_fit(config(optimizers=optimizers), task)
