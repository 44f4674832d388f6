"""Disks that are full, read-only or failing: one clear line, the checkpoint before stands, the next save works."""

import contextlib
import errno
import os
import re
import resource
import signal
from pathlib import Path

import pytest
import torch

from ignite_engine.checkpointing import CheckpointError, CheckpointStore, Retention
from ignite_engine.checkpointing.filesystem import write_file
from tests.checkpointing.states import holds, left_over, local_parts, save, shared_parts
from tests.kit.faults import (
    FileOperations,
    can_mount,
    in_child,
    make_read_only,
    mount_small_file_system,
)

pytestmark = pytest.mark.faults


def failing_save(store, iteration, size=300):
    with pytest.raises(CheckpointError) as failed:
        store.save(shared_parts(iteration, size), local_parts(iteration), iteration=iteration, epoch=1)
    message = str(failed.value)
    assert "\n" not in message
    return message


def out_of_space_on_a_small_file_system(directory):
    mount_small_file_system(directory, 1024)
    store = CheckpointStore(directory)
    save(store, 100)
    message = failing_save(store, 200, size=4000)
    # the fault is real: what is free is less than what was to be written
    free_bytes = os.statvfs(directory).f_bavail * os.statvfs(directory).f_frsize
    assert free_bytes < 4000 * 100 * 4
    assert left_over(directory) == []
    assert holds(store, store.latest().checkpoint.path, 100)
    assert holds(store, save(store, 300), 300)
    return message


def out_of_space_by_a_size_limit(directory):
    store = CheckpointStore(directory)
    save(store, 100)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # the write fails then, as on a full disk
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, resource.RLIM_INFINITY))
    message = failing_save(store, 200, size=4000)
    assert left_over(directory) == []
    assert holds(store, store.latest().checkpoint.path, 100)
    assert holds(store, save(store, 300), 300)
    return message


# Where nothing may be mounted the size limit remains, which takes the same path through the code.
FULL_DISKS = [(out_of_space_by_a_size_limit, "File too large")]
if can_mount():
    FULL_DISKS.append((out_of_space_on_a_small_file_system, "No space left on device"))


@pytest.mark.parametrize(("fill", "cause"), FULL_DISKS)
def test_full_disk_is_one_line_and_the_checkpoint_before_stands(tmp_path, fill, cause):
    code, message = in_child(lambda: fill(tmp_path))
    assert code == 0
    start = f"The checkpoint of iteration 200 was not saved in {tmp_path}: {cause} ({tmp_path}/.tmp-iteration_00000200-"
    assert message.startswith(start)
    free = r", \d+\.\d MiB free" if cause == "No space left on device" else ""
    assert re.search(rf"/shared\.pt{free}\); earlier checkpoints are untouched\.$", message)


def read_only_file_system(directory):
    mount_small_file_system(directory, 1024)
    store = CheckpointStore(directory)
    for iteration in (100, 200):
        save(store, iteration)
    make_read_only(directory)
    with pytest.raises(OSError) as refused:  # the fault is real
        (directory / "probe").touch()
    assert refused.value.errno == errno.EROFS
    message = failing_save(store, 300)
    with pytest.raises(CheckpointError, match=r"Pruning failed: Read-only file system"):
        store.prune(Retention(keep_last=1))
    assert [each.iteration for each in store.checkpoints()] == [100, 200]
    assert holds(store, store.latest().checkpoint.path, 200)
    return message


def a_file_in_the_way(directory):
    (directory / "file").touch()
    return failing_save(CheckpointStore(directory / "file" / "checkpoints"), 300)


# root ignores permission bits, so a directory that cannot be written to needs a mount or a file in its place
READ_ONLY = [(a_file_in_the_way, "Not a directory")]
if can_mount():
    READ_ONLY.append((read_only_file_system, "Read-only file system"))


class Fault:
    """Raises an error once and remembers that it did."""

    def __init__(self, error):
        self.error = error
        self.raised = 0

    def __call__(self):
        self.raised += 1
        raise self.error


def everywhere(tmp_path, work, error):
    """Raise ``error`` at each operation of ``work`` in turn, each time over a new store with checkpoint 100.

    Returns:
        Of each: the directory, whether it was before the first rename, and what came out of ``work``.
    """
    rehearsal = tmp_path / "rehearsal"
    save(CheckpointStore(rehearsal), 100)
    with FileOperations(rehearsal) as seen:
        work(rehearsal)
    first_rename = [operation for operation, _ in seen.seen].index("rename")
    outcomes = []
    for number in range(len(seen.seen)):
        directory = tmp_path / f"failed_{number}"
        save(CheckpointStore(directory), 100)
        fault = Fault(error)
        outcome = None
        with FileOperations(directory, at=number, action=fault):
            try:
                outcome = work(directory)
            except BaseException as raised:
                outcome = raised
        assert fault.raised == 1
        outcomes.append((directory, number <= first_rename, outcome))
    return outcomes


@pytest.mark.slow
def test_an_error_at_any_file_operation_of_a_save_leaves_a_valid_checkpoint_and_no_rubbish(tmp_path):
    outcomes = everywhere(
        tmp_path, lambda directory: save(CheckpointStore(directory), 200), OSError(errno.EIO, "Input/output error")
    )
    for directory, before_commit, outcome in outcomes:
        assert isinstance(outcome, CheckpointError) and "Input/output error" in str(outcome)
        assert left_over(directory) == []
        store = CheckpointStore(directory)
        newest, skipped = store.latest()
        assert newest is not None and skipped == []
        assert holds(store, newest.path, 100 if before_commit else 200)
        assert holds(store, save(store, 200), 200)
        assert [each.iteration for each in store.checkpoints()] == [100, 200]


def test_an_interrupt_during_a_save_passes_through_and_leaves_no_rubbish(tmp_path):
    outcomes = everywhere(tmp_path, lambda directory: save(CheckpointStore(directory), 200), KeyboardInterrupt())
    for directory, before_commit, outcome in outcomes:
        assert isinstance(outcome, KeyboardInterrupt)
        assert left_over(directory) == []
        newest = CheckpointStore(directory).latest().checkpoint
        assert newest is not None and newest.iteration == (100 if before_commit else 200)


def test_an_error_in_a_prune_leaves_the_newest_and_the_next_prune_finishes(tmp_path):
    def save_and_prune(directory):
        store = CheckpointStore(directory)
        save(store, 200)
        store.prune(Retention(keep_last=1))

    for directory, before_commit, outcome in everywhere(tmp_path, save_and_prune, OSError(errno.EIO, "I/O error")):
        assert isinstance(outcome, CheckpointError)
        store = CheckpointStore(directory)
        newest, skipped = store.latest()
        assert newest is not None and skipped == []
        assert holds(store, newest.path, 100 if before_commit else 200)
        store.sweep()
        store.prune(Retention(keep_last=1))
        assert [each.iteration for each in store.checkpoints()] == [newest.iteration]
        assert left_over(directory) == []


def test_an_error_while_annotating_leaves_the_old_manifest(tmp_path):
    store = CheckpointStore(tmp_path)
    path = save(store, 100, labels=["old"])
    for number in range(5):  # its lock, open, write, fsync, rename
        fault = Fault(OSError(errno.ENOSPC, "No space left on device"))
        with FileOperations(tmp_path, at=number, action=fault), pytest.raises(CheckpointError, match="No space left"):
            store.annotate(path, labels=["new"])
        assert fault.raised == 1
        assert store.checkpoints()[0].manifest.labels == ["old"]
        assert sorted(each.name for each in path.iterdir()) == ["manifest.json", "rank_0.pt", "shared.pt"]


def test_a_write_error_that_the_writer_hides_is_raised_all_the_same(tmp_path):
    def hide_errors(file):
        for _ in range(3):
            with contextlib.suppress(OSError):
                file.write(bytes(2_000_000))

    fault = Fault(OSError(errno.EIO, "I/O error"))
    with FileOperations(tmp_path, at=1, action=fault), pytest.raises(OSError, match="I/O error") as failed:
        write_file(tmp_path / "file", hide_errors)
    assert fault.raised == 1 and failed.value.filename == str(tmp_path / "file")


@pytest.mark.parametrize("value", [Path("runs"), torch.nn.Linear(1, 1), torch.Generator(), frozenset((1,))])
def test_what_could_not_be_loaded_is_refused_before_anything_is_written(tmp_path, value):
    store = CheckpointStore(tmp_path)
    with FileOperations(tmp_path) as seen, pytest.raises(CheckpointError, match=r"model\['layers'\]\[1\] is a "):
        store.save({"model": {"layers": [1, value]}}, {}, iteration=1, epoch=0)
    assert "write" not in [operation for operation, _ in seen.seen]
    assert left_over(tmp_path) == []


def test_metrics_and_config_that_cannot_be_written_are_refused_by_name(tmp_path):
    store = CheckpointStore(tmp_path)
    with pytest.raises(CheckpointError, match="Metric 'val/loss' is str, expected a number"):
        save(store, 1, metrics={"val/loss": "low"})
    with pytest.raises(CheckpointError, match="config of a checkpoint must be plain JSON data"):
        save(store, 1, config={"model": torch.ones(1)})
    with pytest.raises(ValueError, match="iteration must be at least 0, got -1"):
        save(store, -1)
    assert store.checkpoints() == [] and left_over(tmp_path) == []
