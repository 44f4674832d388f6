"""Edit and run again: what has changed is said, and the old run can be moved aside."""

import os
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from ignite.metrics import Accuracy
from torch import nn

from ignite_engine import fit
from ignite_engine.config import ConfigError
from ignite_engine.run_directory import RunDirectory
from tests.kit.tiny import on_two_ranks
from tests.runs.test_fit import QUIET, TRAIN, VAL, fitted, loss_fn, net


def smoothed(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1], label_smoothing=0.1)


def run_of(directory, loss=loss_fn, **arguments):
    return fit(net(), loss, TRAIN, VAL, directory=directory, **{"max_epochs": 1, "batch_size": 8, **QUIET, **arguments})


def said(caplog):
    lines = [line for line in caplog.messages if "To train with them give another directory, or restart" in line]
    caplog.clear()
    return lines


def test_finished_run_that_is_started_with_something_else_says_what_and_what_to_do(tmp_path, caplog):
    run_of(tmp_path)
    assert not said(caplog)
    run_of(tmp_path)
    assert not said(caplog)
    run_of(tmp_path, clip_norm=1.0)
    assert any("update.clip_norm: None -> 1.0" in line for line in caplog.messages)
    assert len(said(caplog)) == 1


def test_restart_moves_the_run_aside_and_begins_anew(tmp_path, caplog):
    folder = tmp_path / "run"
    first = run_of(folder, restart=True)
    assert not (tmp_path / "run.1").exists()  # there was none
    second = run_of(folder, smoothed, restart=True)
    third = run_of(folder, smoothed, restart=True)

    assert [run.trainer.state.start.value for run in (first, second, third)] == ["fresh"] * 3
    assert second.summary["weights_sha256"] != first.summary["weights_sha256"] == read(tmp_path / "run.1")
    assert read(tmp_path / "run.2") == second.summary["weights_sha256"] == third.summary["weights_sha256"]
    assert f"The run that was in {folder} is now in {tmp_path / 'run.2'}." in caplog.messages
    assert not (tmp_path / "run.1" / ".lock").exists()
    again = run_of(folder, smoothed)  # without it the run is the one that it was, and no setting differs
    assert again.trainer.state.iteration == again.first_iteration and "run.restart:" not in caplog.text


def read(folder):
    return str(RunDirectory(folder).read_summary()["weights_sha256"])


def test_run_that_another_process_moves_at_the_same_time_is_moved_once(tmp_path, monkeypatch):
    run_of(tmp_path / "run")
    hold = RunDirectory.held

    @contextmanager
    def held(directory):
        os.rename(directory.path, tmp_path / "run.1")  # the other one is faster
        with hold(directory):
            yield

    monkeypatch.setattr(RunDirectory, "held", held)
    assert RunDirectory(tmp_path / "run").move_aside() is None
    assert sorted(path.name for path in tmp_path.glob("run*")) == ["run", "run.1"]


def test_run_that_failed_before_its_first_update_is_none(tmp_path):
    with pytest.raises(ValueError, match="loss_fn returned the number"):
        run_of(tmp_path, lambda model, batch: loss_fn(model, batch).item(), run={"must_be_new": True})
    assert run_of(tmp_path, run={"must_be_new": True}).summary["status"] == "completed"
    with pytest.raises(ConfigError, match=r"holds a run \(config\.yaml, "):
        run_of(tmp_path, run={"must_be_new": True})


@pytest.mark.distributed
def test_ranks_go_on_where_one_of_them_knows_that_it_was_started_again(tmp_path):
    fitted(tmp_path / "run", max_epochs=1)

    def case(rank):
        torch.set_num_threads(1)
        os.environ["TORCHELASTIC_RESTART_COUNT"] = str(rank)  # in a process of its own
        return {"start": run_of(tmp_path / "run", restart=True).trainer.state.start.value}

    assert on_two_ranks(case, tmp_path / "meeting")["start"] == ["resumed", "resumed"]


@pytest.mark.distributed
@pytest.mark.parametrize("wrong", ["optimizer", "data", "metric"])
def test_run_stays_where_the_program_that_restarts_it_is_refused(tmp_path, caplog, wrong):
    directory = tmp_path / "run"
    run_of(directory)
    before = files_in(directory)
    arguments = {
        "optimizer": {"optimizer": lambda model: 1 / 0},
        "data": {"batch_size": 10**9, "data": {"drop_last": True}},
        "metric": {"metrics": {"accuracy": Accuracy(output_transform=lambda output: 1 / 0)}},
    }[wrong]
    with pytest.raises((ZeroDivisionError, ConfigError)):
        run_of(directory, restart=True, **arguments)

    assert f"The run that was moved aside to {directory}.1 is in {directory} again." in caplog.messages
    assert files_in(directory) == before
    assert not Path(f"{directory}.1").exists()
    run_of(directory, restart=True)
    assert Path(f"{directory}.1").is_dir()


def files_in(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name != ".lock"}


def test_ranks_move_it_aside_once(tmp_path):
    fitted(tmp_path / "run", max_epochs=1)

    def case(rank):
        torch.set_num_threads(1)
        return {"start": run_of(tmp_path / "run", restart=True).trainer.state.start.value}

    assert on_two_ranks(case, tmp_path / "meeting")["start"] == ["fresh", "fresh"]
    assert sorted(path.name for path in tmp_path.glob("run*")) == ["run", "run.1"]
