"""A folder is one run's, a checkpoint that is read stays: locks end with whoever took them, and with nothing else."""

import errno
import fcntl
import itertools
import os
import signal

import pytest
import torch
from torch import nn

from ignite_engine import TrainingEvents, load_weights
from ignite_engine.cli import main
from ignite_engine.errors import CheckpointError
from tests.checkpoint.made_states import (
    CheckpointStore,
    Retention,
    attached,
    holds,
    manifest_of,
    run_to,
    save,
    shared_parts,
)
from tests.kit.faults import FileOperations
from tests.kit.processes import child, start, wait_until
from tests.kit.refusals import refuses
from tests.kit.tiny import numbers_loader

# ------------------------------------------------------------------------------------------------ one run in a folder


def waiting_run(folder, iteration, forks=False):
    """Trains in ``folder`` and waits there after an iteration until the file ``go`` is there."""

    def wait():
        if forks and os.fork() == 0:  # a worker of its own, that outlives it
            signal.pause()
        (folder / "waits").touch()
        wait_until((folder / "go").exists)

    trainer, _ = attached(folder, every=1)
    trainer.add_event_handler(TrainingEvents.RESUME_POINT(once=iteration), wait)
    trainer.run(numbers_loader(shuffle=True), max_iters=iteration + 1)


def refused_run(folder):
    trainer, _ = attached(folder)
    refuses(lambda: trainer.run(numbers_loader(shuffle=True), max_iters=3), CheckpointError, f"{folder} in use process")
    return trainer.state.iteration


def test_a_second_process_is_refused_in_one_line_until_the_first_has_ended(tmp_path):
    first = start(waiting_run, tmp_path, 2)
    wait_until((tmp_path / "waits").exists, first)
    assert child(refused_run, tmp_path) == refused_run(tmp_path) == 0
    assert f"process {first.pid} on " in (tmp_path / ".lock").read_text()
    (tmp_path / "go").touch()
    first.answer()
    assert not (tmp_path / ".lock").exists() and run_to(tmp_path, 4)[0] == 3


@pytest.mark.parametrize("forks", [False, True])
def test_a_killed_run_does_not_keep_the_folder(tmp_path, forks):
    first = start(waiting_run, tmp_path, 2, forks)
    wait_until((tmp_path / "waits").exists, first)
    os.kill(first.pid, signal.SIGKILL)  # and not its worker
    assert first.wait() == -signal.SIGKILL and (tmp_path / ".lock").exists()
    assert run_to(tmp_path, 4)[0] in (1, 2)
    first.signal(signal.SIGKILL)


def test_the_process_that_trains_may_read_and_save_in_its_folder(tmp_path):
    trainer, checkpoint = attached(tmp_path, every=1)

    @trainer.on(TrainingEvents.RESUME_POINT(once=2))
    def look():
        assert checkpoint.store.latest().checkpoint is not None
        (tmp_path / ".lock").read_text()
        assert main(["checkpoints", "verify", str(tmp_path)]) == 0
        assert child(refused_run, tmp_path) == 0

    trainer.run(numbers_loader(shuffle=True), max_iters=3)
    assert not (tmp_path / ".lock").exists()


@pytest.mark.parametrize("operation", ["open", "write", "unlink"])
def test_a_lock_that_cannot_be_written_or_deleted_is_harmless(tmp_path, operation):
    """On a full or read-only disk; the same process may train again."""

    def read_only():
        raise OSError(errno.EROFS, "Read-only file system")

    with FileOperations(tmp_path, at=(operation, ".lock"), action=read_only) as seen:
        run_to(tmp_path, 2)
    assert seen.acted == 1
    assert run_to(tmp_path, 4)[0] == 2 and child(run_to, tmp_path, 6)[0] == 4
    assert not (tmp_path / ".lock").exists()


# ------------------------------------------------------------------------------------------ readers beside a run


class Small(nn.Module):
    """What ``shared_parts`` saves."""

    def __init__(self):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.zeros(300, 100)), nn.Parameter(torch.zeros(3))


def save_and_prune(folder, iteration):
    """One save of a run whose loss falls; the newest and the best are the same one."""
    store = CheckpointStore(folder)
    save(store, iteration, metrics={"val/loss": 1 / iteration}, best={"metric": "val/loss", "mode": "min"})
    return store.prune(Retention(keep_last=1, best="val/loss"))


def save_for_ever(folder):
    for iteration in itertools.count(2):
        save_and_prune(folder, iteration)


@pytest.mark.parametrize("locks", [True, pytest.param(False, marks=pytest.mark.nightly)])
def test_no_read_beside_a_run_that_saves_each_iteration_fails(tmp_path, locks, monkeypatch):
    def refuse(descriptor, kind):
        raise OSError(errno.ENOLCK, "No locks available")

    save_and_prune(tmp_path, 1)
    writer, model, seen = start(save_for_ever, tmp_path), Small(), set()
    if not locks:  # a file system that has none: it is looked again
        monkeypatch.setattr(fcntl, "flock", refuse)
    for look in itertools.count():
        store = CheckpointStore(tmp_path)
        assert store.latest().checkpoint is not None and store.best("val/loss", "min") is not None
        iteration = int(load_weights(model, tmp_path, "best" if look % 2 else "last").name.removeprefix("iteration_"))
        assert torch.equal(model.weight, shared_parts(iteration)["model"]["weight"])
        seen.add(iteration)
        if look >= 12 and len(seen) > 3:  # the other process has saved and pruned in between
            break
        assert look < 500
    assert writer.poll() is None
    assert not locks or main(["checkpoints", "verify", str(tmp_path)]) == 0
    writer.signal(signal.SIGKILL)
    assert writer.wait() == -signal.SIGKILL


def reading(folder, path):
    """A process that loads ``path`` and stays in the middle of it."""

    def read():
        class Waits(Small):
            def state_dict(self, *arguments, **options):
                (folder / "reads").touch()
                wait_until((folder / "read").exists)
                return super().state_dict(*arguments, **options)

        load_weights(Waits(), path)

    process = start(read)
    wait_until((folder / "reads").exists, process)
    return process


@pytest.mark.parametrize("end", ["killed", "read"])
def test_what_is_read_is_pruned_when_it_has_been_read(tmp_path, end):
    store = CheckpointStore(tmp_path / "run")
    first, second = (save(store, iteration) for iteration in (1, 2))
    process = reading(tmp_path, first)
    assert store.prune(Retention(keep_last=1)) == [] and holds(store, first, 1)
    again = save(store, 1)
    assert again.name == "iteration_00000001.1" and holds(store, first, 1)
    if end == "killed":
        process.signal(signal.SIGKILL)
        process.wait()
    else:
        (tmp_path / "read").touch()
        process.answer()
    assert set(store.prune(Retention(keep_last=2))) == {first} and second.exists()


def test_a_worker_that_is_forked_while_a_checkpoint_is_written_does_not_keep_it(tmp_path):
    store, workers = CheckpointStore(tmp_path), []

    def fork():
        if (pid := os.fork()) == 0:
            signal.pause()
        workers.append(pid)

    with FileOperations(tmp_path, ("fsync", "manifest.json"), fork):
        first = save(store, 1)
    save(store, 2)
    try:
        assert store.prune(Retention(keep_last=1)) == [first]
    finally:
        os.kill(workers[0], signal.SIGKILL)
        os.waitpid(workers[0], 0)


def test_two_processes_annotate_one_checkpoint_and_nothing_is_lost(tmp_path):
    path = save(CheckpointStore(tmp_path), 1)

    def annotate(name):
        for number in range(15):
            CheckpointStore(tmp_path).add_metrics(path, {f"{name}/{number}": number})

    for process in [start(annotate, name) for name in ("a", "b")]:
        process.answer()
    assert manifest_of(path)["metrics"] == {f"{name}/{number}": number for name in "ab" for number in range(15)}
