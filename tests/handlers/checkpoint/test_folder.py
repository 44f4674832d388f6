"""The folder that a run saves in, and its ranks: taken, kept, swept; and saves that are asked for now."""

import contextlib
import os
import shutil
import threading

import pytest
import torch
from ignite.engine import Events
from torch import nn

from ignite_engine import TrainingEvents
from ignite_engine.errors import CheckpointError
from ignite_engine.handlers import Checkpoint
from tests.kit import saved
from tests.kit.processes import child, ranks, start, wait_until
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
    replacing = tmp_path / "..memory.tmp-0123abcd"
    replacing.touch()
    assert len(hidden(tmp_path)) == 2 and saved.iterations(tmp_path)[-1] == 4
    trainer, checkpoint = made(tmp_path)
    if resumes:
        checkpoint.resume()
        assert len(hidden(tmp_path)) == 2, "another process may be saving until the run starts"
    trainer.add_event_handler(Events.STARTED, lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        trainer.run(numbers_loader(), max_iters=9)
    assert not hidden(tmp_path) and not replacing.exists() and saved.iterations(tmp_path)[-1] == 4


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
    size = sum(each.stat().st_size for each in paths[1].glob("*.safetensors"))
    assert (times.saves, times.save_bytes, times.load_s) == (2, size, None)
    assert times.waited_s > 0 and times.save_s == trainer.state.save_seconds
    assert [line.partition(": ")[0] for line in lines] == [f"Saved {path}" for path in paths]
    assert ["beside training" in line for line in lines] == [background, False]  # the last one is waited for

    _, times, (line,) = run(4)
    assert (times.save_s, times.load_bytes) == (None, size) and f"in {times.load_s:.3g} s" in line


def holds(folder):
    trainer = trainer_of()
    Checkpoint(folder).attach(trainer, Events.COMPLETED)
    trainer.add_event_handler(Events.STARTED, lambda: (folder / "held").touch())
    trainer.add_event_handler(EACH, lambda: wait_until((folder / "go").exists))
    trainer.run(numbers_loader(), max_iters=1)


def starts(rank, folder):
    trainer = trainer_of()
    Checkpoint(folder).attach(trainer)
    with pytest.raises(CheckpointError, match="in use by process"):
        trainer.run(numbers_loader(), max_iters=4)
    return trainer.state.iteration


def test_a_folder_in_use_is_refused_on_both(tmp_path):
    other = start(holds, tmp_path)
    wait_until((tmp_path / "held").exists, other)
    assert ranks(2, starts, tmp_path) == [0, 0]
    (tmp_path / "go").touch()
    other.answer()


def two_at_once(rank, folder):
    """What handlers that save in the background at the same boundaries leave."""
    trainer = trainer_of()
    checkpoints = [Checkpoint(folder / name, keep_last=9, background=True, name=name) for name in ("one", "other")]
    for each in checkpoints:
        each.attach(trainer, EACH)
    trainer.run(numbers_loader(), max_iters=4)
    threads = threading.active_count()
    trainer.run(numbers_loader(), max_iters=6)
    found = [each.store.verify(saved.path) for each in checkpoints for saved in each.store.checkpoints()]
    return found, threading.active_count() - threads


def test_several_save_in_the_background_at_once_and_leave_no_thread(tmp_path):
    assert ranks(2, two_at_once, tmp_path) == [([[]] * 12, 0)] * 2


def saves_now(rank, folder):
    model = nn.parallel.DistributedDataParallel(linear(dropout=True))
    trainer, checkpoint = trainer_of(model), Checkpoint(folder, save_at_end=False)
    checkpoint.attach(trainer, Events.COMPLETED)
    trainer.add_event_handler(EACH(once=2), lambda: checkpoint.save())
    trainer.run(numbers_loader(16), max_iters=4)
    before, after = saved.iterations(folder), checkpoint.save()
    assert after == trainer.state.checkpoint_path
    trainer.run(numbers_loader(16), max_iters=6)  # continues, and may save again
    assert checkpoint.save() == saved.checkpoint(folder, 6)
    return before, str(after)


def test_saves_within_a_run_and_after_it_are_of_both_ranks(tmp_path):
    first, second = ranks(2, saves_now, tmp_path)
    assert first == second == ([2], str(saved.checkpoint(tmp_path, 4)))
