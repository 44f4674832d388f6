"""The folder that a run saves in: taken, kept, swept; and saves that are asked for now."""

import contextlib
import os
import shutil
import threading

import pytest
import torch
from ignite.engine import Events

from ignite_engine import TrainingEvents
from ignite_engine.errors import CheckpointError
from ignite_engine.handlers import Checkpoint
from tests.kit import runs, saved
from tests.kit.processes import child, start, wait_until
from tests.kit.refusals import CommandRefused, command, refuses
from tests.kit.tiny import linear, numbers_loader, trainer_of, weights

EACH = Events.ITERATION_COMPLETED


def made(folder, event=EACH, **options):
    trainer, checkpoint = trainer_of(linear(dropout=True)), Checkpoint(folder, **options)
    checkpoint.attach(trainer, event)
    return trainer, checkpoint


def hidden(folder):
    return sorted(each.name for each in folder.iterdir() if each.name.startswith((".tmp", ".trash")))


def contents(folder):
    return {each: each.stat().st_mtime_ns for each in folder.rglob("*")}


# -- other processes --------------------------------------------------------------------------------------------------


def trains_until_told(folder):
    """As the same script in another terminal."""
    trainer, _ = made(folder)

    @trainer.on(EACH)
    def wait():
        (folder / "started").touch()
        wait_until((folder / "go").exists)

    trainer.run(numbers_loader(), max_iters=3)


def test_the_same_script_in_two_terminals_trains_once(tmp_path):
    first = start(trains_until_told, tmp_path)
    wait_until((tmp_path / "started").exists, first)
    trainer, checkpoint = made(tmp_path)
    words = f"{tmp_path} in use process {first.pid}"
    refuses(lambda: trainer.run(numbers_loader(), max_iters=3), CheckpointError, words)
    assert trainer.state.iteration == 0
    (tmp_path / "go").touch()
    first.answer()
    assert saved.iterations(tmp_path) == [2, 3]

    assert checkpoint.resume() == saved.checkpoint(tmp_path, 3)
    trainer.run(numbers_loader(), max_iters=4)
    assert saved.iterations(tmp_path) == [3, 4]


@pytest.mark.parametrize("fails", [False, True])
def test_the_folder_is_released_when_the_run_ends(tmp_path, fails):
    trainer, _ = made(tmp_path)
    if fails:
        trainer.add_event_handler(EACH(once=2), lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError) if fails else contextlib.nullcontext():
        trainer.run(numbers_loader(), max_iters=2)
    assert child(lambda: made(tmp_path)[0].run(numbers_loader(), max_iters=3).iteration) == 3


def killed_in_a_save(folder):
    """What it was writing is left, in a folder of its own."""
    real = os.rename

    def die(source, target, **options):
        if str(target).endswith("iteration_00000005"):
            os._exit(9)
        real(source, target, **options)

    os.rename = die
    made(folder)[0].run(numbers_loader(), max_iters=9)


@pytest.mark.parametrize("resumes", [False, True])
def test_the_start_of_a_run_sweeps_what_a_killed_one_was_writing(tmp_path, resumes):
    start(killed_in_a_save, tmp_path).wait()
    (tmp_path / ".trash-iteration_00000002-0123abcd").mkdir()
    assert len(hidden(tmp_path)) == 2 and saved.iterations(tmp_path)[-1] == 4
    trainer, checkpoint = made(tmp_path)
    if resumes:
        checkpoint.resume()
        assert len(hidden(tmp_path)) == 2, "another process may be saving until the run starts"
    trainer.add_event_handler(Events.STARTED, lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        trainer.run(numbers_loader(), max_iters=9)
    assert not hidden(tmp_path) and saved.iterations(tmp_path)[-1] == 4


# -- whatever happens to it -------------------------------------------------------------------------------------------


def test_a_folder_that_is_deleted_under_the_run_is_made_again(tmp_path):
    trainer, _ = made(tmp_path / "run" / "checkpoints")
    trainer.add_event_handler(EACH(once=3), lambda: shutil.rmtree(tmp_path / "run"))
    trainer.run(numbers_loader(), max_iters=4)
    assert saved.iterations(tmp_path / "run" / "checkpoints") == [3, 4]


def test_old_ones_are_deleted_beside_training_and_before_the_next_save(tmp_path, monkeypatch):
    unlink, trained_on, waited = os.unlink, threading.Event(), []

    def wait_for_training(path, **options):
        if "trash-iteration_00000002" in str(path):
            waited.append(trained_on.wait(10.0))
        unlink(path, **options)

    monkeypatch.setattr(os, "unlink", wait_for_training)
    trainer, _ = made(tmp_path, EACH(every=2), keep_last=1)
    trainer.add_event_handler(Events.ITERATION_STARTED(once=5), trained_on.set)  # after the save of 4
    trainer.run(numbers_loader(), max_iters=6)
    assert waited and all(waited), "the save of iteration 4 waited for it"
    assert saved.iterations(tmp_path) == [6]


# -- saves that are asked for now -------------------------------------------------------------------------------------


@pytest.mark.parametrize("event", [TrainingEvents.RESUME_POINT, EACH, Events.COMPLETED])
def test_a_save_asked_for_at_the_last_boundary_is_made(tmp_path, event):
    """Also by a handler that runs after the boundary's own save."""
    trainer, checkpoint = made(tmp_path, Events.COMPLETED, save_at_end=False)
    trainer.add_event_handler(event, lambda: trainer.state.iteration == 3 and checkpoint.save())
    trainer.run(numbers_loader(), max_iters=3)
    assert saved.iterations(tmp_path) == [3]
    again, other = made(tmp_path)
    other.resume()
    assert torch.equal(weights(again), weights(trainer)) and again.state.iteration == 3


def test_a_save_within_a_run_and_after_it_is_a_checkpoint_of_its_own(tmp_path):
    trainer, checkpoint = made(tmp_path, Events.COMPLETED, save_at_end=False)
    trainer.add_event_handler(EACH(once=3), lambda: checkpoint.save())
    trainer.run(numbers_loader(), max_iters=5)
    assert saved.iterations(tmp_path) == [3]
    assert checkpoint.save() == saved.checkpoint(tmp_path, 5) == trainer.state.checkpoint_path
    assert saved.iterations(tmp_path) == [3, 5]
    trainer.run(numbers_loader(), max_iters=7)  # continues, and may save again
    assert checkpoint.save() == saved.checkpoint(tmp_path, 7)


def test_a_folder_that_must_be_new_may_hold_its_own_checkpoints_alone(tmp_path):
    trainer, checkpoint = made(tmp_path, must_be_new=True)
    assert checkpoint.resume() is None
    for last in (3, 5):  # goes on in its own
        trainer.run(numbers_loader(), max_iters=last)
    before = contents(tmp_path)
    for starts in (lambda _, its: its.resume(), lambda other, _: other.run(numbers_loader(), max_iters=9)):
        other, its = made(tmp_path, must_be_new=True)
        refuses(starts, CheckpointError, "iteration_00000005 must_be_new", other, its)
        assert other.state.iteration == 0
    assert contents(tmp_path) == before


def test_so_may_the_folder_of_a_config(tmp_path):
    config = runs.write_config(tmp_path, run={"must_be_new": True, "max_epochs": 1})
    runs.trained(config)
    before = contents(tmp_path / "run")
    refuses(lambda: command("train", config), CommandRefused, "run.must_be_new true holds a run")
    assert contents(tmp_path / "run") == before
    runs.trained(config, "run.must_be_new=false")


# -- what it took -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("background", [False, True])
def test_each_save_and_the_resume_say_bytes_and_seconds(tmp_path, caplog, background):
    caplog.set_level("INFO")

    def run(last):
        caplog.clear()
        trainer, checkpoint = made(tmp_path, EACH(every=2), background=background)
        checkpoint.resume()
        trainer.run(numbers_loader(), max_iters=last)
        return trainer, checkpoint.times, [line for line in caplog.messages if line.startswith(("Saved", "Resumed"))]

    trainer, times, lines = run(4)
    paths = [saved.checkpoint(tmp_path, iteration) for iteration in (2, 4)]
    size = sum(each.stat().st_size for each in paths[1].glob("*.pt"))
    assert (times.saves, times.saved.bytes, times.loaded) == (2, size, None)
    assert times.waited_s > 0 and times.saved.seconds == trainer.state.save_seconds
    assert [line.partition(": ")[0] for line in lines] == [f"Saved {path}" for path in paths]
    assert ["beside training" in line for line in lines] == [background, False]  # the last one is waited for

    _, times, lines = run(4)
    assert (times.saved, times.loaded.bytes) == (None, size)
    assert times.as_dict()["load_bytes_per_s"] == round(size / times.loaded.seconds)
    assert len(lines) == 1 and str(paths[1]) in lines[0] and str(times.loaded) in lines[0]
