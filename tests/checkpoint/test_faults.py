"""Killed, a full disk, an interrupt at every file operation: a valid checkpoint is there, and the next run goes on."""

import errno
import os
import resource
import signal

import pytest
import torch

from ignite_engine.errors import CheckpointError
from tests.checkpoint.made_states import (
    CheckpointStore,
    Retention,
    holds,
    iterations,
    left_over,
    newest,
    run_to,
    save,
)
from tests.kit.faults import (
    FileOperations,
    can_mount,
    everywhere,
    full_disk,
    interrupt,
    kill_this_process,
    make_read_only,
    mount_small_file_system,
)
from tests.kit.processes import child, start, wait_until
from tests.kit.refusals import refuses

FAULTS = {"killed": kill_this_process, "full disk": full_disk, "interrupt": interrupt}


def save_and_prune(folder):
    save(CheckpointStore(folder), 200)
    return CheckpointStore(folder).prune(Retention(keep_last=1))


def by_two_writers(folder, iteration=200):
    return save(CheckpointStore(folder), iteration, size=3000, writers=2)


def prune(folder):
    return CheckpointStore(folder).prune(Retention(keep_last=1))


def measured(folder):
    return CheckpointStore(folder).add_metrics(folder / "iteration_00000100", {"new": 1})


# what is done to a folder, what it holds before, and what it may be found with
WORKS = {
    "a save and a prune": (save_and_prune, (100,), 300),
    "several writers": (by_two_writers, (100,), 3000),
    "the same iteration again": (lambda folder: save(CheckpointStore(folder), 100, labels=["again"]), (50, 100), 300),
    "a prune": (prune, (100, 200, 300), 300),
    "new metrics": (measured, (100,), 300),
}
LONG = {"several writers": "full disk", "the same iteration again": "killed"}
"""Works of many operations, with the fault of every day; a save and a prune have all of them."""


@pytest.mark.row("D6")
@pytest.mark.parametrize(
    ("name", "fault"),
    [
        pytest.param(name, fault, marks=[] if name not in LONG or fault == LONG[name] else pytest.mark.nightly)
        for name in WORKS
        for fault in FAULTS
    ],
)
def test_at_any_file_operation_the_newest_one_is_whole_and_the_next_save_works(tmp_path, name, fault):
    work, before, size = WORKS[name]
    for iteration in before:
        save(CheckpointStore(tmp_path / "run"), iteration, size=size)
    made = not name.startswith(("the same", "a prune", "new"))

    def check(folder, point):
        store = CheckpointStore(folder)
        found, skipped = store.latest()
        committed = point.has_done("rename", "-> iteration_") or point.returned
        assert skipped == [] and found.iteration == (200 if made and committed else before[-1]), point.done[-1:]
        assert all(holds(store, each.path, each.iteration, size) for each in store.checkpoints())
        if fault == "full disk" and not committed and name != "a prune":
            assert isinstance(point.result, CheckpointError) and "No space left" in str(point.result)
        if name == "the same iteration again":
            assert found.manifest.labels == (["again"] if committed else [])
        if fault == "interrupt" and not point.returned:  # it was another thread's operation
            assert isinstance(point.result, KeyboardInterrupt)
        if fault != "killed" and not committed and name != "a prune":
            assert left_over(folder) == []  # who lives clears up
        assert all(each.name.startswith((".tmp-", ".trash-", "iteration_")) for each in folder.iterdir())
        store.sweep()
        assert holds(store, save(store, 400), 400)
        store.prune(Retention(keep_last=1))
        assert iterations(folder) == [400] and left_over(folder) == []

    points = everywhere(work, tmp_path / "run", FAULTS[fault], check)
    assert len(points) >= 5


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The weights of a run that nothing happened to."""
    return run_to(tmp_path_factory.mktemp("whole"), 3)[1]


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("fault", "background"),
    [(FAULTS["killed"], False), (FAULTS["killed"], True), (full_disk, False), (full_disk, True), (interrupt, False)],
)
def test_at_any_file_operation_of_a_run_the_next_one_ends_with_the_same_bits(tmp_path, whole, fault, background):
    options = {"every": 1, "keep_last": 1, "background": background}
    run_to(tmp_path / "run", 1, **options)

    def check(folder, point):
        left = newest(folder)
        assert left == (2 if point.has_done("rename", "-> iteration_") or point.returned else 1), point.done[-1:]
        resumed, weights = run_to(folder, 3, **options)
        assert resumed == left and torch.equal(weights, whole)
        assert iterations(folder) == [3] and left_over(folder) == []

    points = everywhere(lambda folder: run_to(folder, 2, **options), tmp_path / "run", fault, check)
    assert len(points) > 30


# --------------------------------------------------------------------------------------------------------- real disks


def refused_save(store, iteration, size=300):
    """The message of a save that is refused in one line, with the iteration and the folder."""
    return str(refuses(lambda: save(store, iteration, size=size), CheckpointError, f"{iteration} {store.directory}"))


def on_a_small_disk(folder):
    mount_small_file_system(folder, 1024)
    return "No space left on device"


def below_a_size_limit(folder):
    """Where nothing may be mounted; it takes the same path through the code."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # the write fails then, as on a full disk
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, resource.RLIM_INFINITY))
    return "File too large"


@pytest.mark.parametrize("limit", [below_a_size_limit, *([on_a_small_disk] if can_mount() else [])])
def test_a_full_disk_is_one_line_and_the_checkpoint_before_stands(tmp_path, limit):
    def fill():
        cause, store = limit(tmp_path), CheckpointStore(tmp_path)
        save(store, 100)
        message = refused_save(store, 200, size=4000)
        left = left_over(tmp_path)
        assert newest(tmp_path) == 100 and holds(store, save(store, 300), 300)
        return cause in message and "earlier checkpoints are untouched" in message, left

    assert child(fill) == (True, [])


def read_only_disk(folder):
    mount_small_file_system(folder, 1024)
    store = CheckpointStore(folder)
    for iteration in (100, 200):
        save(store, iteration)
    make_read_only(folder)
    with pytest.raises(OSError) as refused:  # the fault is real
        (folder / "probe").touch()
    assert refused.value.errno == errno.EROFS
    refuses(lambda: store.prune(Retention(keep_last=1)), CheckpointError, "read-only")
    assert iterations(folder) == [100, 200] and holds(store, folder / "iteration_00000200", 200)
    return refused_save(store, 300)


def a_file_in_the_place_of_the_folder(folder):
    (folder / "file").touch()
    return refused_save(CheckpointStore(folder / "file" / "checkpoints"), 300)


NOT_WRITABLE = {"Not a directory": a_file_in_the_place_of_the_folder}
if can_mount():  # root ignores permission bits
    NOT_WRITABLE["Read-only file system"] = read_only_disk


@pytest.mark.parametrize("cause", NOT_WRITABLE)
def test_a_folder_that_cannot_be_written_is_one_line_and_its_checkpoints_load(tmp_path, cause):
    assert cause in child(NOT_WRITABLE[cause], tmp_path)


def test_a_disk_that_takes_less_than_it_is_given_has_all_in_the_end(tmp_path, monkeypatch):
    write = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: write(descriptor, memoryview(data)[: 1 << 16]))
    store = CheckpointStore(tmp_path)
    path = save(store, 100, size=3000)
    monkeypatch.undo()
    assert CheckpointStore(tmp_path).verify(path) == [] and holds(CheckpointStore(tmp_path), path, 100, 3000)


def test_what_a_dead_writer_left_goes_and_a_living_one_is_left_alone(tmp_path):
    store = CheckpointStore(tmp_path)
    save(store, 100)

    def writer():
        with FileOperations(tmp_path, at=("fsync", "manifest.json"), action=signal.pause):
            save(CheckpointStore(tmp_path), 200)

    process = start(writer)
    wait_until(lambda: list(tmp_path.glob(".tmp-*/manifest.json")), process)
    (temporary,) = left_over(tmp_path)
    assert store.sweep() == [] and store.latest().checkpoint.iteration == 100
    process.signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert store.sweep() == [tmp_path / temporary] and left_over(tmp_path) == []


@pytest.mark.parametrize("operation", ["unlink", "rmdir", "rename"])
def test_what_cannot_be_deleted_keeps_nothing_else(tmp_path, operation):
    """One file is held by another program for a while."""
    store = CheckpointStore(tmp_path)
    for iteration in (100, 200, 300, 400):
        save(store, iteration)

    def busy():
        raise OSError(errno.EBUSY, "Device or resource busy")

    at = (operation, "iteration_00000100" if operation == "rename" else "")
    with FileOperations(tmp_path, at=at, action=busy) as seen:
        refuses(lambda: store.prune(Retention(keep_last=1)), CheckpointError, "busy")
    assert seen.acted == 1 and set(iterations(tmp_path)) <= {100, 400}
    store.sweep()
    store.prune(Retention(keep_last=1))
    assert iterations(tmp_path) == [400] and left_over(tmp_path) == []
