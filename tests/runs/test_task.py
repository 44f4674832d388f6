"""A task is found by file or module with its neighbours, and a run's folder can be read whatever its values are."""

import json
import math
import sys

import pytest

from tests.kit.fitting import at, fitted
from tests.kit.refusals import CommandRefused, command, refuses

TASK = """
from pathlib import Path

import torch
from ignite.metrics import Average
from ignite_engine import Task
import neighbour_of_{name}

with Path(__file__).with_suffix(".ran").open("a") as file:
    file.write("ran ")


def build(options):
    data = neighbour_of_{name}.data(torch)
    return Task(torch.nn.Linear(2, 1), lambda model, batch: model(batch[0]).mean(), data)


def number(options):
    return 3


def no_predict(options):
    task = build(options)
    task.metrics = {{"mean": Average()}}
    return task
"""


@pytest.fixture
def name(tmp_path, monkeypatch):
    """A task, above its config, of a name that no other test has."""
    name = f"task_{abs(hash(tmp_path))}"
    (tmp_path / f"{name}.py").write_text(TASK.format(name=name))
    neighbour = "def data(torch):\n    return torch.utils.data.TensorDataset(torch.ones(8, 2))\n"
    (tmp_path / f"neighbour_of_{name}.py").write_text(neighbour)
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "run.yaml").write_text(f"task: {name}.py:build\nrun: {{max_iterations: 1}}\n")
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path / "configs")
    return name


def test_file_is_found_above_the_config_imports_its_neighbours_and_runs_once(name, tmp_path):
    for task in (f"{name}.py:build", f"{tmp_path / name}.py:build"):
        assert "Trains for 1 iterations" in command("describe", "run.yaml", f"task={task}")
    sys.path.insert(0, str(tmp_path))
    assert "Trains for 1 iterations" in command("describe", "run.yaml", f"task={name}:build")
    assert (tmp_path / f"{name}.ran").read_text() in ("ran ", "ran ran ")  # a module of that name is another one


@pytest.mark.parametrize(
    ("function", "words"), [("number", "returned int Task"), ("no_predict", "metrics (mean) predict")]
)
def test_only_a_whole_task_is_taken(function, words, name):
    refuses(lambda: command("describe", "run.yaml", f"task={name}.py:{function}"), CommandRefused, words)


def test_numbers_that_json_lacks_are_strings_that_float_reads_back(tmp_path):
    odd = {"lost": math.nan, "least": -math.inf}
    fitted(tmp_path, max_epochs=1, handlers=[at(2, lambda trainer: trainer.state.metrics.update(odd))])

    values = json.loads((tmp_path / "summary.json").read_text(), parse_constant=lambda constant: 1 / 0)["metrics"]
    assert math.isnan(float(values["lost"])) and float(values["least"]) == -math.inf
