"""The folder that a run saves in: taken, kept, and what is in its way."""

import contextlib
import errno
import os
import platform
import shutil
import threading
import time
from pathlib import Path

import pytest
from ignite.engine import Events

from ignite_engine import TrainingEvents
from ignite_engine.checkpointing import CheckpointError, CheckpointStore
from ignite_engine.handlers import Checkpoint
from tests.faults.commands import program
from tests.kit.faults import FileOperations
from tests.kit.tiny import numbers_loader, trainer_of

ROOT = Path(__file__).resolve().parents[3]
EVERY = Events.ITERATION_COMPLETED(every=1)


def iterations(directory):
    return [each.iteration for each in CheckpointStore(directory).checkpoints()]


def test_a_leftover_that_cannot_be_deleted_does_not_stop_a_run(tmp_path, caplog):
    stuck = tmp_path / ".trash-iteration_00000005-0123abcd"
    stuck.mkdir()

    def busy():
        raise OSError(errno.EBUSY, "Device or resource busy")

    for _ in range(2):
        trainer = trainer_of()
        Checkpoint(tmp_path).attach(trainer)
        with FileOperations(tmp_path, at=("rmdir", stuck.name.rsplit("-", 1)[0]), action=busy) as seen:
            trainer.run(numbers_loader(), max_iters=4)
        assert seen.acted == 1 and iterations(tmp_path) == [4]
    assert caplog.text.count("cannot be deleted") == 2


def test_old_checkpoints_are_deleted_beside_training_and_before_the_next_save(tmp_path, monkeypatch):
    unlink, trained_on, seen = os.unlink, threading.Event(), list[tuple[bool, int]]()

    def wait_for_training(path):
        if "trash-iteration_00000002" in str(path):
            seen.append((trained_on.wait(10.0), trainer.state.iteration))
        unlink(path)

    monkeypatch.setattr(os, "unlink", wait_for_training)
    trainer = trainer_of()
    checkpoint = Checkpoint(tmp_path, keep_last=1)
    checkpoint.attach(trainer, Events.ITERATION_COMPLETED(every=2))
    trainer.add_event_handler(Events.ITERATION_STARTED(once=5), lambda: trained_on.set())  # after the save of 4
    left = []
    trainer.add_event_handler(
        Events.ITERATION_STARTED(once=6),
        lambda: left.append([each.iteration for each in checkpoint.store.checkpoints()]),
    )
    trainer.run(numbers_loader(), max_iters=6)

    assert seen and all(waited for waited, _ in seen), "the save of iteration 4 waited for it"
    assert left == [[4]] and iterations(tmp_path) == [6]


SCRIPT = """
import sys, time
from pathlib import Path
from ignite.engine import Events
from ignite_engine.handlers import Checkpoint
from tests.kit.tiny import numbers_loader, trainer_of
trainer = trainer_of()
Checkpoint(sys.argv[1]).attach(trainer, Events.ITERATION_COMPLETED(every=1))

@trainer.on(Events.ITERATION_COMPLETED)
def wait():
    Path(sys.argv[1], "started").touch()
    while not Path(sys.argv[1], "go").exists():
        time.sleep(0.01)

trainer.run(numbers_loader(), max_iters=3)
"""


def test_the_same_script_in_two_terminals_trains_once(tmp_path):
    first = program(ROOT, SCRIPT, str(tmp_path))
    try:
        deadline = time.monotonic() + 60
        while not (tmp_path / "started").exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        trainer = trainer_of()
        Checkpoint(tmp_path).attach(trainer)
        with pytest.raises(CheckpointError) as error:
            trainer.run(numbers_loader(), max_iters=3)
        assert str(error.value) == (
            f"{tmp_path} is in use by process {first.pid} on {platform.node()}, which saves its checkpoints there: "
            "wait until it has ended, or give this run another directory."
        )
        assert trainer.state.iteration == 0
    finally:
        (tmp_path / "go").touch()
    first.communicate(60)
    assert first.returncode == 0
    assert iterations(tmp_path) == [2, 3] and not (tmp_path / ".lock").exists()
    trainer = trainer_of()
    checkpoint = Checkpoint(tmp_path)
    checkpoint.attach(trainer)
    assert checkpoint.resume() is not None
    trainer.run(numbers_loader(), max_iters=4)
    assert iterations(tmp_path) == [3, 4]


def test_a_killed_run_does_not_keep_the_folder(tmp_path):
    (tmp_path / ".lock").write_text("process 1 on another machine\n")
    trainer = trainer_of()
    Checkpoint(tmp_path).attach(trainer)
    trainer.run(numbers_loader(), max_iters=2)
    assert iterations(tmp_path) == [2]


@pytest.mark.parametrize("fails", [False, True])
def test_a_folder_is_released_when_the_run_ends(tmp_path, fails):
    trainer, seen = trainer_of(), list[bool]()
    Checkpoint(tmp_path).attach(trainer)
    trainer.add_event_handler(EVERY, lambda: seen.append((tmp_path / ".lock").exists()))
    if fails:
        trainer.add_event_handler(Events.ITERATION_COMPLETED(once=2), lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError) if fails else contextlib.nullcontext():
        trainer.run(numbers_loader(), max_iters=2)
    assert seen == [True, True] and not (tmp_path / ".lock").exists()


def test_a_relative_directory_is_that_of_the_start(tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    trainer = trainer_of()
    Checkpoint("checkpoints").attach(trainer, EVERY)
    trainer.add_event_handler(Events.ITERATION_COMPLETED(once=2), lambda: os.chdir(tmp_path / "elsewhere"))
    trainer.run(numbers_loader(), max_iters=4)
    assert iterations(tmp_path / "checkpoints") == [3, 4] and not list((tmp_path / "elsewhere").iterdir())


def test_a_folder_that_is_deleted_under_the_run_is_made_again(tmp_path):
    folder = tmp_path / "run" / "checkpoints"
    trainer = trainer_of()
    Checkpoint(folder).attach(trainer, EVERY)
    trainer.add_event_handler(Events.ITERATION_COMPLETED(once=3), lambda: shutil.rmtree(tmp_path / "run"))
    trainer.run(numbers_loader(), max_iters=4)
    assert iterations(folder) == [3, 4]


class Batches:
    """A loader of the user's with the attributes of an unbatched DataLoader, but for the samplers."""

    batch_size = None

    def __iter__(self):
        yield from numbers_loader(6)


def test_a_loader_without_samplers_is_saved(tmp_path):
    trainer = trainer_of()
    Checkpoint(tmp_path).attach(trainer, EVERY)
    trainer.run(Batches(), max_epochs=2)
    assert iterations(tmp_path) == [5, 6]
    assert "Batches keeps no state" in CheckpointStore(tmp_path).checkpoints()[-1].manifest.reproducibility[0]


def test_a_pause_waits_for_the_save_beside_training(tmp_path):
    trainer, saved = trainer_of(), list[int]()
    Checkpoint(tmp_path, background=True).attach(trainer, Events.ITERATION_COMPLETED(once=2))
    trainer.add_event_handler(TrainingEvents.CHECKPOINT_SAVED, lambda: saved.append(trainer.state.iteration))
    trainer.add_event_handler(Events.ITERATION_COMPLETED(once=2), trainer.interrupt)
    rename = os.rename

    def late(*paths):
        time.sleep(0.3)
        rename(*paths)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "rename", late)
        trainer.run(numbers_loader(), max_epochs=1)
    assert (trainer.state.iteration, saved, iterations(tmp_path)) == (2, [2], [2])

    trainer.run(max_epochs=1)
    assert trainer.state.status == "completed" and saved == [2, trainer.state.iteration]
