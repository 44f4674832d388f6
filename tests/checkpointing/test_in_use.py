"""Checkpoints are read while another process saves and prunes as fast as it can: no reader fails."""

import errno
import fcntl
import itertools
import os
import signal
import time

import pytest
import torch
from torch import nn

from ignite_engine import load_weights
from ignite_engine.checkpointing import CheckpointError, CheckpointStore, Retention, in_use
from ignite_engine.checkpointing.weights_source import read_named
from ignite_engine.cli.arguments import main
from tests.checkpointing.states import holds, save, shared_parts
from tests.kit.faults import FileOperations, start_child, wait_for

BY_LOSS = Retention(keep_last=1, best="val/loss")


class Small(nn.Module):
    """What ``shared_parts`` saves."""

    def __init__(self):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.zeros(300, 100)), nn.Parameter(torch.zeros(3))


def save_and_prune(directory, iteration):
    """One save of a run whose loss falls; the newest and the best are the same one."""
    store = CheckpointStore(directory)
    save(store, iteration, metrics={"val/loss": 1 / iteration}, best={"metric": "val/loss", "mode": "min"})
    store.prune(BY_LOSS)


@pytest.fixture
def run_beside(tmp_path):
    """A folder in which another process saves, keeping one checkpoint, until the test has ended."""

    def write():
        for iteration in itertools.count(2):
            save_and_prune(tmp_path, iteration)

    save_and_prune(tmp_path, 1)
    child = start_child(write)
    yield tmp_path
    os.kill(child[0], signal.SIGKILL)
    assert wait_for(child)[0] == -signal.SIGKILL


@pytest.fixture
def no_locks(monkeypatch):
    """A file system that has none."""

    def refuse(descriptor, kind):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)


@pytest.mark.faults
def test_no_read_beside_a_run_that_saves_each_iteration_fails(run_beside):
    model, store, seen = Small(), CheckpointStore(run_beside), set()
    deadline = time.monotonic() + 60
    for look in itertools.count():
        newest, best = store.latest().checkpoint, store.best("val/loss", "min")
        assert newest is not None and best is not None and store.checkpoints()
        path = load_weights(model, run_beside, "best" if look % 2 else "last")
        iteration = int(path.name.removeprefix("iteration_"))
        assert torch.equal(model.weight, shared_parts(iteration)["model"]["weight"])
        seen.add(iteration)
        if look >= 12 and len(seen) > 3:  # the other process has saved and pruned in between
            break
        assert time.monotonic() < deadline
    assert main(["checkpoints", "verify", str(run_beside)]) == 0


@pytest.mark.faults
@pytest.mark.usefixtures("no_locks")
def test_without_locks_it_is_looked_again(run_beside):
    model, store = Small(), CheckpointStore(run_beside)
    for which in ["best", "last"] * 3:
        load_weights(model, run_beside, which)
        assert store.latest().checkpoint is not None


def test_what_is_read_is_pruned_when_it_has_been_read(tmp_path):
    store = CheckpointStore(tmp_path)
    first, second = (save(store, iteration) for iteration in (1, 2))
    with in_use.in_use(first) as is_there:
        assert is_there
        assert CheckpointStore(tmp_path).prune(Retention(keep_last=1)) == [] and holds(store, first, 1)
    assert store.prune(Retention(keep_last=1)) == [first] and second.exists()
    with in_use.in_use(first) as is_there:
        assert not is_there


def test_saved_again_while_it_is_read_both_stay_until_the_next_prune(tmp_path):
    store = CheckpointStore(tmp_path)
    first = save(store, 1)
    with in_use.in_use(first):
        again = save(store, 1)
        assert again.name == "iteration_00000001.1" and holds(store, first, 1)
    assert store.prune(Retention(keep_last=5)) == [first] and holds(store, again, 1)


@pytest.mark.faults
def test_the_lock_of_a_reader_ends_with_its_process(tmp_path):
    store = CheckpointStore(tmp_path / "checkpoints")
    first, _ = save(store, 1), save(store, 2)

    def read():
        with in_use.in_use(first):
            (tmp_path / "reads").touch()
            time.sleep(60)

    child = start_child(read)
    deadline = time.monotonic() + 30
    while not (tmp_path / "reads").exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert store.prune(Retention(keep_last=1)) == []
    os.kill(child[0], signal.SIGKILL)
    assert wait_for(child)[0] == -signal.SIGKILL
    assert store.prune(Retention(keep_last=1)) == [first]


def test_a_worker_that_was_forked_meanwhile_does_not_keep_it(tmp_path):
    store = CheckpointStore(tmp_path)
    first, _ = save(store, 1), save(store, 2)
    with in_use.in_use(first):
        child = start_child(lambda: time.sleep(60))
    assert store.prune(Retention(keep_last=1)) == [first]
    os.kill(child[0], signal.SIGKILL)
    wait_for(child)


def test_a_worker_that_is_forked_while_a_checkpoint_is_written_does_not_keep_it(tmp_path):
    store, workers = CheckpointStore(tmp_path), list[tuple[int, int]]()
    with FileOperations(tmp_path, ("fsync", ".pt"), lambda: workers.append(start_child(lambda: time.sleep(60)))):
        first = save(store, 1)
    save(store, 2)
    assert store.prune(Retention(keep_last=1)) == [first]
    os.kill(workers[0][0], signal.SIGKILL)
    wait_for(workers[0])


@pytest.mark.usefixtures("no_locks")
@pytest.mark.parametrize("what", ["latest", "best", "load"])
def test_deleted_at_each_look_it_is_the_true_error_in_the_end(tmp_path, what, monkeypatch):
    iterations, looks = itertools.count(2), []
    save_and_prune(tmp_path, 1)

    def next_one():
        looks.append(None)
        save_and_prune(tmp_path, next(iterations))

    store = CheckpointStore(tmp_path)
    if what == "load":

        def use(source, weights):
            next_one()
            raise CheckpointError("shared.pt is missing.")

        with pytest.raises(CheckpointError, match=r"shared\.pt is missing"):
            read_named(tmp_path, use=use)
    else:
        verified = store._verification.problems
        monkeypatch.setattr(store._verification, "problems", lambda *arguments: (next_one(), verified(*arguments))[1])
        found = store.latest().checkpoint if what == "latest" else store.best("val/loss", "min")
        assert found is None
    assert len(looks) == in_use.LOOKS


@pytest.mark.faults
def test_two_processes_annotate_one_checkpoint_and_nothing_is_lost(tmp_path):
    path = save(CheckpointStore(tmp_path), 1)

    def annotate(name):
        for number in range(15):
            CheckpointStore(tmp_path).annotate(path, metrics={f"{name}/{number}": number})

    children = [start_child(lambda name=name: annotate(name)) for name in ("a", "b")]
    assert [wait_for(child)[0] for child in children] == [0, 0]
    metrics = CheckpointStore(tmp_path).checkpoints()[0].manifest.metrics
    assert metrics == {f"{name}/{number}": number for name in ("a", "b") for number in range(15)}
