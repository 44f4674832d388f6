"""``verify-resume``: real processes, a real SIGKILL, and the first piece of state that differs is named."""

import random
import re
import sys
import tempfile
import time
from pathlib import Path

import pytest
import torch
import yaml

from ignite_engine import Task
from ignite_engine.cli import main
from ignite_engine.ext.replay.verify import NotProven
from ignite_engine.ext.replay.verify import verify as compared
from tests.kit.fitting import TRAIN, loss_fn, net
from tests.kit.processes import child

FORKED = f"""#!{sys.executable}
import os, sys
from tests.kit.processes import start
def main(words):
    from ignite_engine.cli import main
    sys.exit(main(words))
output = os.readlink("/proc/self/fd/1")
code = start(main, sys.argv[3:], folder=os.getcwd(), output=output).wait()
os.kill(os.getpid(), -code) if code < 0 else os._exit(code)
"""
"""A python that imports neither torch nor the engine: the command is forked from a process that has."""


class Forgetful:
    """A loss that depends on what no checkpoint holds: how often it was called, or numbers that none can repeat."""

    def __init__(self, forgets):
        self.forgets, self.calls = forgets, 0

    def __call__(self, model, batch):
        self.calls += self.forgets == "counter"
        factor = random.SystemRandom().random() if self.forgets == "seed" else 1 + 0.01 * self.calls
        return loss_fn(model, batch) * factor


class Stateful(torch.nn.Module):
    """A model with a state that its ``state_dict`` does not have."""

    def __init__(self, forgets):
        super().__init__()
        self.net, self.forgets, self.calls = net(), forgets, 0
        self.register_buffer("mean", torch.zeros(4), persistent=False)

    def forward(self, inputs):
        if self.forgets == "buffer":
            self.mean = 0.9 * self.mean + 0.1 * inputs.detach().mean(0)
        self.calls += self.forgets == "attribute"
        return self.net(inputs - self.mean) * (1 + 0.01 * self.calls)


class Clock:
    def attach(self, trainer):
        trainer.register("clock", self)

    def state_dict(self):
        return {"now": time.perf_counter()}

    def load_state_dict(self, state):
        pass


def build(options):
    """The task of the config below."""
    forgets = options.get("forgets")
    if forgets == "everything":
        raise ValueError("nothing is left")
    data = torch.utils.data.TensorDataset(*TRAIN)
    model = Stateful(forgets) if forgets in ("attribute", "buffer") else net()
    return Task(model, Forgetful(forgets), data, {"val": data}, handlers=[Clock()] if forgets == "clock" else [])


@pytest.fixture(autouse=True)
def temporary(tmp_path, monkeypatch):
    """Where the command makes its folder; its processes are forked."""
    child(int)  # the server is there
    python, folder = tmp_path / "python", tmp_path / "temporary"
    python.write_text(FORKED)
    python.chmod(0o755)
    folder.mkdir()
    monkeypatch.setattr(sys, "executable", str(python))
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    yield folder
    assert list(folder.iterdir()) == []


def config(folder, forgets=None, **sections):
    values = {
        "task": f"{__file__}:build",
        "task_options": {"forgets": forgets},
        "run": {"max_epochs": 3, "threads": 1, "directory": str(folder / "the users own")},
        "data": {"batch_size": 8},
        "handlers": {"Checkpoint": {"keep_last": 1}},
        **sections,
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(values))
    return folder / "config.yaml"


@pytest.fixture
def verify(capsys):
    def call(*words):
        """Its exit code, what it prints, and its errors."""
        try:
            code = main(["verify-resume", *map(str, words)])
        except SystemExit as left:
            code = left.code
        said = capsys.readouterr()
        return code, said.out, [line for line in said.err.splitlines() if line.startswith("error")]

    return call


def test_right_run_is_killed_resumed_and_found_equal(tmp_path, verify):
    code, said, _ = verify(config(tmp_path), "optimizer.lr=0.01", "--iterations", 12, "--kill-at", 9)
    assert code == 0 and said.count("\n") == 1
    assert said.startswith("Resume is exact: killed at iteration 9, resumed from 8, equal up to 12: 4 steps of rank 0")
    assert "changed on purpose was noticed" in said
    assert not (tmp_path / "the users own").exists()


@pytest.mark.parametrize(
    ("forgets", "line"),
    [
        ("counter", r"Resume is NOT exact: .* iteration 4, steps of rank 0: the gradient of 0\.weight"),
        ("attribute", r"Resume is NOT exact: .* iteration 4, steps of rank 0: the gradient"),
        pytest.param("buffer", r"Resume is NOT exact: .* iteration 4, steps of rank 0", marks=pytest.mark.nightly),
        pytest.param("seed", r"The run is not deterministic: .*iteration 1, ", marks=pytest.mark.nightly),
    ],
)
def test_run_that_depends_on_what_is_not_saved_is_caught(tmp_path, verify, forgets, line):
    code, _, errors = verify(config(tmp_path, forgets), "--iterations", 6)
    assert code == 1 and re.match(f"error: {line}", errors[0]), errors


def test_comparison_that_sees_nothing_is_no_proof(tmp_path):
    def start(phase):
        folder = Path(phase.directory)
        folder.mkdir(exist_ok=True)
        steps = folder / "steps_0.jsonl"
        first = 4 if steps.exists() else 1  # resumed from 3
        last = phase.until if phase.kill_at is None else phase.kill_at - 1
        with steps.open("a") as file:
            file.writelines(f'{{"iteration": {at}}}\n' for at in range(first, last + 1))

    with pytest.raises(NotProven, match="on purpose"):
        compared(start, tmp_path, 6, None)


@pytest.mark.nightly
def test_clocks_are_left_out_and_said_to_be(tmp_path, verify):
    code, said, _ = verify(config(tmp_path, "clock"), "--iterations", 6)
    assert code == 0 and "not compared" in said and "the state of clock, now" in said


@pytest.mark.nightly
def test_run_shorter_than_asked_for_is_compared_to_its_end(tmp_path, verify):
    code, said, _ = verify(config(tmp_path), "run.max_epochs=1")
    assert code == 0 and "killed at iteration 4, resumed from 3, equal up to 6" in said


REFUSED = [
    ("it fails", ["task_options.forgets=everything"], 1, "reference code 2"),
    ("it is too short", ["run.max_epochs=null", "run.max_iterations=2"], 1, "iteration 2 nothing to compare"),
    ("few iterations", ["--iterations", 2], 2, "at least 3 iterations"),
    ("killed at once", ["--kill-at", 1], 2, "kill after the first"),
    ("killed at the end", ["--kill-at", 20], 2, "kill before the last"),
]


@pytest.mark.parametrize(("words", "code", "complaint"), [pytest.param(*case[1:], id=case[0]) for case in REFUSED])
def test_run_that_cannot_be_compared_is_one_line(tmp_path, verify, words, code, complaint):
    found, _, errors = verify(config(tmp_path), *words)
    assert found == code and len(errors) == 1
    assert all(word in errors[0] for word in complaint.split())


BUILD = """
import torch
from ignite_engine import fit, seed_everything

def loss_fn(model, batch):
    return torch.nn.functional.cross_entropy(model(batch[0]), batch[1])

def build(directory):
    seed_everything(1)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 3))
    data = torch.randn(60, 4), torch.arange(60) % 3
    return fit(model, loss_fn, data, directory=directory, max_epochs=4, batch_size=8)

if __name__ == "__main__":
    build("the users own")
"""

BUILD_TRAINER = """
import torch
from ignite_engine import Trainer, Update, loader, seed_everything
from ignite_engine.handlers import Checkpoint

def build(directory):
    seed_everything(1)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = Trainer(Update(model, optimizer, lambda model, batch: model(batch).square().mean()))
    Checkpoint(directory / "checkpoints").attach(trainer)
    return trainer, {"data": loader(torch.randn(24, 4), 4, shuffle=True), "max_epochs": 3}
"""


@pytest.mark.nightly
def test_run_of_a_trainer_is_built_by_its_function(tmp_path, verify):
    (tmp_path / "train.py").write_text(BUILD_TRAINER)
    said = verify(f"{tmp_path}/train.py:build", "--iterations", 6)[1]
    assert said.startswith("Resume is exact: killed at iteration 4, resumed from 3")


@pytest.mark.nightly
def test_run_of_fit_is_built_by_its_function(tmp_path, verify, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(BUILD)
    said = verify("train.py:build", "--iterations", 6)[1]
    assert said.startswith("Resume is exact: killed at iteration 4, resumed from 3")
    code, _, errors = verify("train.py")
    assert code == 2 and "FILE:FUNCTION" in errors[0]
    assert {path.name for path in tmp_path.iterdir()} == {"python", "temporary", "train.py"}
