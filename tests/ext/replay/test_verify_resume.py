"""``verify-resume``: real processes, a real SIGKILL, and the first piece of state that differs is named."""

import random
import sys
import tempfile
import time

import pytest
import torch
import yaml

from ignite_engine import Task
from ignite_engine.cli import main
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
    return Task(net(), Forgetful(forgets), data, {"val": data}, handlers=[Clock()] if forgets == "clock" else [])


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
        "checkpoint": {"every": {"epochs": 1}, "keep_last": 1},
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
    assert said.startswith("Resume is exact: killed at iteration 9, resumed from 8, ")
    assert int(said.split(", ")[2].split()[0]) > 5 * 12, "weights, momenta, counters, generators at each boundary"
    assert not (tmp_path / "the users own").exists()


@pytest.mark.parametrize(
    ("forgets", "line", "row"),
    [
        ("counter", "Resume is NOT exact: at iteration 4", ["4", "model", "0.weight"]),
        pytest.param("seed", "The run is not deterministic", ["1", "model", "0.weight"], marks=pytest.mark.nightly),
    ],
)
def test_run_that_depends_on_what_is_not_saved_is_caught(tmp_path, verify, forgets, line, row):
    code, said, _ = verify(config(tmp_path, forgets), "--iterations", 6)
    first, *rows = said.splitlines()
    assert code == 1 and first.startswith(line)
    assert rows[0].split() == ["iteration", "component", "piece", "uninterrupted", "resumed"]
    assert rows[1].split()[:3] == row and len(rows) <= 12


@pytest.mark.nightly
def test_clocks_are_left_out_and_said_to_be(tmp_path, verify):
    code, said, _ = verify(config(tmp_path, "clock"), "--iterations", 6)
    assert code == 0 and "not compared" in said and "clock now" in said


@pytest.mark.nightly
def test_run_shorter_than_asked_for_is_compared_to_its_end(tmp_path, verify):
    code, said, _ = verify(config(tmp_path), "run.max_epochs=1")
    assert code == 0 and "killed at iteration 4, resumed from 3" in said and "3 to 6 are equal" in said


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


SCRIPT = """
import torch
from ignite_engine import fit, seed_everything

def make_model():
    seed_everything(1)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 3))

def loss_fn(model, batch):
    return torch.nn.functional.cross_entropy(model(batch[0]), batch[1])

seed_everything(0)
data = torch.randn(60, 4), torch.arange(60) % 3
run = fit(make_model(), loss_fn, data, directory="the users own", max_epochs=4, batch_size=8)
fit(make_model(), loss_fn, data, directory="the users second", max_epochs=1)
"""


@pytest.mark.nightly
def test_script_is_verified_up_to_the_end_of_its_first_call_of_fit(tmp_path, verify, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(SCRIPT)
    said = verify("train.py", "--iterations", 6)[1]
    assert said.startswith("Resume is exact: killed at iteration 4, resumed from 3")
    (tmp_path / "empty.py").write_text("print(1)")
    code, _, errors = verify("empty.py")
    assert code == 1 and "without a call of fit" in errors[0]
    assert {path.name for path in tmp_path.iterdir()} == {"python", "temporary", "empty.py", "train.py"}
