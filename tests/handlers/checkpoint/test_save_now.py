"""Save now, within a run and outside of it; a folder that must be new."""

import pytest
import torch
import torch.distributed as dist
from ignite.engine import Events
from torch import nn

from ignite_engine import TrainingEvents
from ignite_engine.checkpointing import CheckpointError, CheckpointStore, filesystem
from ignite_engine.cli import main
from ignite_engine.handlers import Checkpoint
from tests.kit.faults import in_child
from tests.kit.tiny import linear, numbers_loader, on_two_ranks, trainer_of, weights


def run_of(folder, **options):
    model = linear(dropout=True)
    if dist.is_initialized():
        model = nn.parallel.DistributedDataParallel(model)
    trainer, checkpoint = trainer_of(model), Checkpoint(folder, **options)
    checkpoint.attach(trainer, Events.COMPLETED)
    return trainer, checkpoint


def names(folder):
    return sorted(each.name for each in folder.glob("*"))


@pytest.mark.parametrize("event", [TrainingEvents.RESUME_POINT, Events.ITERATION_COMPLETED, Events.COMPLETED])
def test_a_save_asked_for_at_the_last_boundary_is_made(tmp_path, event):
    """Also by a handler that runs after the boundary's own save."""
    trainer, checkpoint = run_of(tmp_path / "run", save_at_end=False)
    folder = tmp_path / "run"

    def save():
        if trainer.state.iteration == 3:
            checkpoint.save()
            # the run still writes there
            assert in_child(lambda: filesystem.is_held(tmp_path / "run")) == (0, True)

    trainer.add_event_handler(event, save)
    trainer.run(numbers_loader(), max_iters=3)
    newest = CheckpointStore(folder).latest().checkpoint
    assert newest is not None and newest.iteration == 3
    again, other = run_of(folder)
    other.resume()
    assert torch.equal(weights(again), weights(trainer)) and again.state.iteration == 3


def test_into_its_own_folder(tmp_path):
    trainer, checkpoint = run_of(tmp_path, save_at_end=False)
    trainer.add_event_handler(Events.ITERATION_COMPLETED(once=3), lambda: checkpoint.save())
    trainer.run(numbers_loader(), max_iters=5)
    assert names(tmp_path) == ["iteration_00000003"]
    assert checkpoint.save() == tmp_path / "iteration_00000005" == trainer.state.checkpoint_path
    assert names(tmp_path) == ["iteration_00000003", "iteration_00000005"]
    trainer.run(numbers_loader(), max_iters=7)  # continues, and may save again
    assert checkpoint.save() == tmp_path / "iteration_00000007"


def test_a_folder_that_must_be_new(tmp_path):
    trainer, checkpoint = run_of(tmp_path, must_be_new=True)
    assert checkpoint.resume() is None
    trainer.run(numbers_loader(), max_iters=3)
    trainer.run(numbers_loader(), max_iters=5)  # goes on in its own
    before = {each: each.stat().st_mtime_ns for each in tmp_path.rglob("*")}
    for start in ("resume", "run"):
        other, its = run_of(tmp_path, must_be_new=True)
        with pytest.raises(CheckpointError, match=r"holds iteration_00000005, but must_be_new was given: give another"):
            its.resume() if start == "resume" else other.run(numbers_loader(), max_iters=9)
        assert other.state.iteration == 0
    assert {each: each.stat().st_mtime_ns for each in tmp_path.rglob("*")} == before


def test_a_folder_of_a_config_that_must_be_new(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "task.py").write_text(TASK)
    (tmp_path / "config.yaml").write_text(
        "task: task.py:build\nrun: {directory: run, max_epochs: 1, must_be_new: true}\n"
        "logging: {clearml: false, progress: false, report: false}\n"
    )
    assert main(["train", "config.yaml"]) == 0
    capsys.readouterr()
    before = {each: each.stat().st_mtime_ns for each in tmp_path.rglob("*")}
    assert main(["train", "config.yaml"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "run.must_be_new: got true, but run holds a run (config.yaml, metrics" in error
    assert {each: each.stat().st_mtime_ns for each in tmp_path.rglob("*")} == before
    assert main(["train", "config.yaml", "run.must_be_new=false"]) == 0


TASK = """
import torch
from ignite_engine import Task


def build(options):
    model = torch.nn.Linear(2, 1)
    data = torch.utils.data.TensorDataset(torch.ones(8, 2))
    return Task(model, lambda model, batch: model(batch[0]).square().mean(), data)
"""


def _on_a_rank(folder):
    trainer, checkpoint = run_of(folder / "run")
    trainer.add_event_handler(Events.ITERATION_COMPLETED(once=2), lambda: checkpoint.save())
    trainer.run(numbers_loader(16), max_iters=4)
    saved = [each.iteration for each in checkpoint.store.checkpoints()]
    after = checkpoint.save()
    new = run_of(folder / "run", must_be_new=True)[1]
    with pytest.raises(CheckpointError, match="but must_be_new was given") as caught:
        new.resume()
    return {"after": str(after), "saved": saved, "error": str(caught.value)}


@pytest.mark.slow
@pytest.mark.distributed
def test_two_ranks_save_now(tmp_path):
    answers = on_two_ranks(lambda rank: _on_a_rank(tmp_path), tmp_path / "store")
    assert answers["after"] == [str(tmp_path / "run" / "iteration_00000004")] * 2
    assert answers["saved"] == [[2, 4]] * 2 and answers["error"][0] == answers["error"][1]
