"""A save that fails does not end the training; what could not be saved is refused before it."""

import errno
import os
from collections import defaultdict

import numpy as np
import pytest
import torch
from ignite.engine import Events
from torch import nn

from ignite_engine import TrainingEvents
from ignite_engine.errors import CheckpointError
from ignite_engine.handlers import Checkpoint
from tests.kit import saved
from tests.kit.processes import ranks
from tests.kit.refusals import refuses
from tests.kit.tiny import linear, numbers_loader, trainer_of, weights

EACH = Events.ITERATION_COMPLETED


class Foreign:
    """Has a state that no checkpoint can hold, at some iterations."""

    def __init__(self, trainer, iterations, state):
        self.trainer, self.iterations, self.state = trainer, iterations, state

    def state_dict(self):
        return self.state() if self.trainer.state.iteration in self.iterations else {}

    def load_state_dict(self, state): ...


def cyclic():
    state = {}
    state["again"] = [state]
    return state


UNSAVABLE = {
    "an object": (lambda: {"x": object()}, "foreign['x'] builtins.object"),
    "a subclass": (lambda: {"points": defaultdict(list)}, "foreign['points'] collections.defaultdict"),
    "numpy": (lambda: {"best": np.float64(1.0)}, "foreign['best'] numpy.float64"),
    "meta": (lambda: {"x": torch.empty(2, device="meta")}, "foreign['x'] meta device"),
    "cyclic": (cyclic, "'foreign' contains itself"),
    "its own error": (lambda: 1 // 0, "ZeroDivisionError"),
}


def run_with(folder, iterations, state, **options):
    """A run of 6 iterations that saves after each second one; the events of its saves, and the error that ended it."""
    trainer, events, error = trainer_of(), [], None
    trainer.register("foreign", Foreign(trainer, iterations, state))
    checkpoint = Checkpoint(folder, **options)
    checkpoint.attach(trainer, EACH(every=2))
    for event in (TrainingEvents.CHECKPOINT_SAVED, TrainingEvents.CHECKPOINT_FAILED):
        trainer.add_event_handler(event, lambda name: events.append((name, str(checkpoint.error))), event.name)
    try:
        trainer.run(numbers_loader(), max_iters=6)
    except Exception as raised:
        error = raised
    return trainer, events, error


def names(text, words):
    assert all(word in text for word in words.split()) and "\n" not in text, text


@pytest.mark.parametrize("case", UNSAVABLE)
@pytest.mark.parametrize("background", [False, True])
def test_training_goes_on_after_a_save_that_failed(case, background, tmp_path, caplog):
    state, words = UNSAVABLE[case]
    trainer, events, error = run_with(tmp_path, {2}, state, background=background)

    assert error is None and trainer.state.status == "completed" and trainer.state.checkpoints == 2
    assert [name for name, _ in events] == ["CHECKPOINT_FAILED", "CHECKPOINT_SAVED", "CHECKPOINT_SAVED"]
    names(events[0][1], words)
    names(next(line for line in caplog.messages if "was not saved" in line), words)
    assert saved.iterations(tmp_path) == [4, 6] and saved.parts(tmp_path, 4)["trainer"]["checkpoints"] == 1


class Scaled(nn.Linear):
    """Gives what it does not load, as bitsandbytes' layers of 4-bit weights do."""

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}weight.scale"] = torch.ones(1)


def test_a_model_that_does_not_load_its_own_state_is_refused_unless_that_layer_is_left_out(tmp_path):
    def run(**options):
        trainer = trainer_of(nn.Sequential(Scaled(3, 3).requires_grad_(False), linear()))
        checkpoint = Checkpoint(tmp_path, **options)
        checkpoint.attach(trainer)
        checkpoint.resume()
        return trainer.run(numbers_loader(), max_epochs=1 + len(saved.iterations(tmp_path)))

    refuses(run, CheckpointError, "0.weight.scale exclude=['model:0.weight*']")
    for _ in range(2):
        state = run(exclude=["model:0.weight*"])
    assert state.iteration == 12


@pytest.mark.parametrize("case", UNSAVABLE)
@pytest.mark.parametrize("at", [0, 6])
def test_the_save_at_the_end_and_what_could_never_be_saved_end_the_run(case, at, tmp_path):
    state, words = UNSAVABLE[case]
    trainer, _, error = run_with(tmp_path, {at}, state)

    assert isinstance(error, ZeroDivisionError if (case, at) == ("its own error", 0) else CheckpointError)
    names(f"{type(error).__name__}: {error}", words)
    assert (trainer.state.iteration, trainer.state.status) == (at, "failed")
    assert saved.iterations(tmp_path) == ([] if at == 0 else [2, 4])


def of_rank_1(rank, folder, iteration, case, background=False):
    """It has the state, and rank 0 has none."""
    trainer, events, error = run_with(folder, {iteration} if rank else (), UNSAVABLE[case][0], background=background)
    return events, f"{type(error).__name__}: {error}", trainer.state.iteration


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("case", ["an object", "its own error"])
def test_what_one_rank_cannot_save_fails_the_save_of_both(case, background, tmp_path):
    first, second = ranks(2, of_rank_1, tmp_path, 2, case, background)
    assert first == second and saved.iterations(tmp_path) == [4, 6]
    assert [name for name, _ in first[0]] == ["CHECKPOINT_FAILED", "CHECKPOINT_SAVED", "CHECKPOINT_SAVED"]
    names(first[0][0][1], UNSAVABLE[case][1])


def test_it_is_refused_at_the_start_on_both(tmp_path):
    for _, error, iteration in ranks(2, of_rank_1, tmp_path, 0, "an object"):
        assert iteration == 0 and error.startswith("CheckpointError")
        names(error, UNSAVABLE["an object"][1])


def refusing(operation, ending, number):
    """An operation of ``os`` that fails for paths with this in it; the paths, filled."""
    tried, real = [], getattr(os, operation)

    def refuse(path, *more, **options):
        if any(ending in str(each) for each in (path, *more)):
            tried.append(path)
            raise OSError(number, os.strerror(number))
        return real(path, *more, **options)

    return tried, refuse


@pytest.mark.parametrize("background", [False, True])
def test_a_full_disk_fails_one_save(background, tmp_path, monkeypatch):
    tried, refuse = refusing("rename", "iteration_00000002", errno.ENOSPC)
    monkeypatch.setattr(os, "rename", refuse)
    _, events, error = run_with(tmp_path, (), dict, background=background)

    assert error is None and tried and saved.iterations(tmp_path) == [4, 6]
    assert [name for name, _ in events] == ["CHECKPOINT_FAILED", "CHECKPOINT_SAVED", "CHECKPOINT_SAVED"]
    names(events[0][1], "No space left")


def test_an_old_one_that_cannot_be_deleted_does_not_stop_training(tmp_path, monkeypatch, caplog):
    tried, refuse = refusing("rename", ".trash", errno.EROFS)
    monkeypatch.setattr(os, "rename", refuse)
    trainer, _, error = run_with(tmp_path, (), dict, keep_last=1)

    assert error is None and len(tried) >= 2 and trainer.state.checkpoints == 3
    assert saved.iterations(tmp_path) == [2, 4, 6] and "Read-only file system" in caplog.text


@pytest.mark.row("D2")
def test_an_exception_saves_what_was_done_before_it(tmp_path):
    def run(folder, fails_at=None):
        trainer, checkpoint = trainer_of(), Checkpoint(folder, on_exception=True)
        checkpoint.attach(trainer)
        checkpoint.resume()
        if fails_at is not None:
            trainer.add_event_handler(TrainingEvents.BACKWARD_COMPLETED(once=fails_at), lambda: 1 / 0)
        trainer.run(numbers_loader(), max_iters=6)
        return trainer

    with pytest.raises(ZeroDivisionError):
        run(tmp_path / "cut", fails_at=4)
    assert saved.iterations(tmp_path / "cut") == [3]
    assert any("exception" in reason for reason in saved.manifest(tmp_path / "cut")["reproducibility"])
    assert torch.equal(weights(run(tmp_path / "cut")), weights(run(tmp_path / "whole")))


def test_an_exception_leaves_what_was_being_written_whole(tmp_path):
    trainer = trainer_of()
    Checkpoint(tmp_path, background=True).attach(trainer, EACH(once=3))
    trainer.add_event_handler(Events.ITERATION_STARTED(once=4), lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        trainer.run(numbers_loader(), max_iters=6)

    assert saved.parts(tmp_path, 3)["trainer"]["iteration"] == 3
    assert not [each for each in tmp_path.iterdir() if each.name.startswith(".")]
