"""``verify-resume``: real processes, a real SIGKILL, and the first piece of state that differs is named."""

import tempfile
from pathlib import Path

import pytest
import yaml

from ignite_engine.cli import main, verify_resume
from tests.faults.commands import fork_the_runs_of_verify_resume

HERE = Path(__file__).resolve().parents[2] / "faults"


def config(folder, forgets=None, **sections):
    values = {
        "task": f"{HERE / 'forgetful_task.py'}:build",
        "task_options": {"forgets": forgets},
        "run": {"max_epochs": 3, "threads": 1, "directory": str(folder / "the users own")},
        "data": {"batch_size": 8},
        "checkpoint": {"every": {"epochs": 1}, "keep_last": 1},
        **sections,
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(values))
    return str(folder / "config.yaml")


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    """Where the command makes its folder."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


@pytest.mark.slow
@pytest.mark.faults
def test_right_run_is_killed_resumed_and_found_equal(tmp_path, temporary, capsys, monkeypatch):
    ended = []
    start = verify_resume._ThreeRuns._start

    def watched(self, command):
        code, output = start(self, command)
        ended.append(code)
        return code, output

    monkeypatch.setattr(verify_resume._ThreeRuns, "_start", watched)
    assert main(["verify-resume", config(tmp_path), "optimizer.lr=0.01", "--iterations", "12", "--kill-at", "9"]) == 0
    assert ended == [0, -9, 0]
    said = capsys.readouterr().out
    assert said.startswith("Resume is exact: killed at iteration 9, resumed from 8, ") and said.count("\n") == 1
    assert not (tmp_path / "the users own").exists() and list(temporary.iterdir()) == []


@pytest.fixture
def forked(monkeypatch):
    fork_the_runs_of_verify_resume(monkeypatch)


@pytest.mark.slow
@pytest.mark.faults
@pytest.mark.parametrize("forgets", ["generator", "counter"])
def test_run_that_depends_on_what_is_not_saved_is_caught(tmp_path, temporary, forked, forgets, capsys):
    with pytest.raises(SystemExit) as left:
        main(["verify-resume", config(tmp_path, forgets), "--iterations", "6"])
    assert left.value.code == 1
    line, *rows = capsys.readouterr().out.splitlines()
    assert line.startswith("Resume is NOT exact: at iteration 4 0.weight of model differs first. ")
    assert rows[0].split() == ["iteration", "component", "piece", "uninterrupted", "resumed"]
    assert rows[1].split()[:3] == ["4", "model", "0.weight"] and len(rows) <= 12
    assert list(temporary.iterdir()) == []


@pytest.mark.faults
@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["task_options.forgets=everything"], "The reference run ended with code 2: error: "),
        (["run.max_epochs=null", "run.max_iterations=2"], "The run ends at iteration 2: there is nothing to compare"),
    ],
)
def test_run_that_cannot_be_compared_is_one_line(
    tmp_path,
    temporary,
    forked,
    arguments,
    complaint,
    capsys,
):
    with pytest.raises(SystemExit) as left:
        main(["verify-resume", config(tmp_path), *arguments])
    assert left.value.code == 1
    said = capsys.readouterr().err
    assert said.startswith(f"error: {complaint}") and said.count("\n") == 1


@pytest.mark.slow
@pytest.mark.faults
def test_run_shorter_than_asked_for_is_compared_to_its_end(tmp_path, temporary, forked, capsys):
    assert main(["verify-resume", config(tmp_path), "run.max_epochs=1"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("Resume is exact: killed at iteration 4, resumed from 3, ") and "3 to 7 are equal" in said


@pytest.mark.slow
@pytest.mark.faults
def test_save_in_the_background_is_waited_for_before_the_kill(tmp_path, temporary, forked, capsys):
    path = config(tmp_path, checkpoint={"every": 4, "background": True})
    assert main(["verify-resume", path, "--iterations", "8", "--kill-at", "5"]) == 0
    assert capsys.readouterr().out.startswith("Resume is exact: killed at iteration 5, resumed from 4, ")


@pytest.mark.parametrize("arguments", [["--iterations", "2"], ["--kill-at", "1"], ["--kill-at", "20"]])
def test_kill_that_leaves_nothing_to_compare_is_refused(tmp_path, arguments, capsys):
    assert main(["verify-resume", config(tmp_path), *arguments]) == 2
    said = capsys.readouterr().err
    assert "expected at least 3 iterations and a kill after the first and before the last" in said


SCRIPT = """
import torch
from ignite_engine import fit, seed_everything

def make_model():
    seed_everything(1)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 3))

class Loss:
    def __init__(self):
        self.calls = 0

    def __call__(self, model, batch):
        self.calls += FORGETS
        return torch.nn.functional.cross_entropy(model(batch[0]), batch[1]) * (1 + self.calls)

seed_everything(0)
data = torch.randn(60, 4), torch.arange(60) % 3
run = fit(make_model(), Loss(), data, directory="the users own", max_epochs=4, batch_size=8)
fit(make_model(), Loss(), data, directory="the users second", max_epochs=1)
"""


def script(folder, forgets):
    (folder / "train.py").write_text(SCRIPT.replace("FORGETS", str(int(forgets))))
    return str(folder / "train.py")


@pytest.mark.slow
@pytest.mark.faults
def test_script_is_killed_resumed_and_found_equal_up_to_the_end_of_its_first_call_of_fit(
    tmp_path, temporary, monkeypatch, capsys
):
    fork_the_runs_of_verify_resume(monkeypatch)
    monkeypatch.chdir(tmp_path)
    assert main(["verify-resume", script(tmp_path, forgets=False), "--iterations", "12", "--kill-at", "9"]) == 0
    assert capsys.readouterr().out.startswith("Resume is exact: killed at iteration 9, resumed from 8, ")
    with pytest.raises(SystemExit):
        main(["verify-resume", script(tmp_path, forgets=True), "--iterations", "6"])
    assert "Resume is NOT exact" in capsys.readouterr().out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["temporary", "train.py"]


@pytest.mark.faults
@pytest.mark.long  # each rank imports torch
def test_script_is_verified_on_two_ranks(tmp_path, temporary, capsys):
    assert main(["verify-resume", script(tmp_path, forgets=False), "--iterations", "6", "--nproc-per-node", "2"]) == 0
    assert capsys.readouterr().out.startswith("Resume is exact: killed at iteration 4, resumed from 3, ")


@pytest.mark.faults
def test_script_that_calls_no_fit_is_one_line(tmp_path, temporary, forked, capsys):
    (tmp_path / "empty.py").write_text("print(1)")
    with pytest.raises(SystemExit):
        main(["verify-resume", str(tmp_path / "empty.py")])
    said = capsys.readouterr().err
    assert "empty.py ended without a call of fit(): there is nothing to compare" in said and said.count("\n") == 1
