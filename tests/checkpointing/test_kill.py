"""SIGKILL at every single file operation: there is always a newest valid checkpoint, and the next process goes on."""

import os
import shutil
import signal
import time

import pytest

from ignite_engine.checkpointing import CheckpointStore, Retention
from tests.checkpointing.states import holds, left_over, save
from tests.kit.faults import FileOperations, in_child, kill_this_process, start_child, wait_for

pytestmark = pytest.mark.faults


def kill_everywhere(template, work, check):
    """Kill ``work`` at each of its operations, each time on a fresh copy of ``template``.

    Args:
        check: called after each kill with the directory, the operation's number, and the number of the first rename.

    Returns:
        How many operations there were.
    """
    rehearsal = template.with_name("rehearsal")
    shutil.copytree(template, rehearsal)
    with FileOperations(rehearsal) as seen:
        work(rehearsal)
    first_rename = [operation for operation, _ in seen.seen].index("rename")
    for number in range(len(seen.seen)):
        directory = template.with_name(f"killed_{number}")
        shutil.copytree(template, directory)

        def killed(directory=directory, number=number):
            with FileOperations(directory, at=number, action=kill_this_process):
                work(directory)

        assert in_child(killed)[0] == -signal.SIGKILL
        check(directory, number, first_rename)
        shutil.rmtree(directory)
    return len(seen.seen)


@pytest.mark.row("D6")
@pytest.mark.slow
def test_killed_at_any_file_operation_of_a_save_the_newest_valid_one_loads(tmp_path):
    template = tmp_path / "template"
    save(CheckpointStore(template), 100)

    def check(directory, number, first_rename):
        store = CheckpointStore(directory)
        newest, skipped = store.latest()
        assert newest is not None and skipped == []
        # the action comes before the operation: killed at the rename itself, the new one is not there yet
        expected = 100 if number <= first_rename else 200
        assert newest.iteration == expected
        assert holds(store, newest.path, expected)
        assert bool(left_over(directory)) == (0 < number <= first_rename)
        store.sweep()
        assert left_over(directory) == []
        path = save(store, 300)
        assert holds(store, path, 300)

    operations = kill_everywhere(template, lambda directory: save(CheckpointStore(directory), 200), check)
    assert operations >= 18


@pytest.mark.slow
def test_killed_at_any_file_operation_of_several_writers_the_newest_valid_one_loads(tmp_path):
    template, size = tmp_path / "template", 3000
    save(CheckpointStore(template), 100, size=size, writers=2)

    def check(directory, number, first_rename):
        store = CheckpointStore(directory)
        newest, skipped = store.latest()
        assert newest is not None and skipped == []
        assert {"shared.pt", "shared_1.pt"} < set(newest.manifest.files)
        assert holds(store, newest.path, 100 if number <= first_rename else 200, size)
        store.sweep()
        assert left_over(directory) == []

    kill_everywhere(
        template,
        lambda directory: save(CheckpointStore(directory), 200, size=size, writers=2),
        check,
    )


@pytest.mark.slow
def test_killed_while_the_same_iteration_is_saved_again_one_of_the_two_loads(tmp_path):
    template = tmp_path / "template"
    save(CheckpointStore(template), 100)
    save(CheckpointStore(template), 200, labels=["first"])

    def check(directory, number, first_rename):
        store = CheckpointStore(directory)
        newest, skipped = store.latest()
        assert newest is not None and skipped == []
        assert newest.manifest.labels == (["first"] if number <= first_rename else ["first", "second"])
        assert holds(store, newest.path, 200)
        store.sweep()
        assert left_over(directory) == []
        store.prune(Retention(keep_last=1))
        assert [each.path for each in store.checkpoints()] == [newest.path]

    kill_everywhere(template, lambda directory: save(CheckpointStore(directory), 200, labels=["second"]), check)


@pytest.mark.slow
def test_killed_at_any_file_operation_of_a_prune_nothing_kept_is_lost(tmp_path):
    template = tmp_path / "template"
    for iteration in (100, 200, 300):
        save(CheckpointStore(template), iteration)

    def check(directory, number, first_rename):
        store = CheckpointStore(directory)
        newest, skipped = store.latest()
        # nothing is ever seen half removed: what was being deleted is no damaged checkpoint afterwards
        assert newest is not None and skipped == []
        assert all(store.verify(each.path) == [] for each in store.checkpoints())
        assert holds(store, newest.path, 300)
        store.sweep()
        store.prune(Retention(keep_last=1))
        assert [each.iteration for each in store.checkpoints()] == [300]
        assert left_over(directory) == []

    operations = kill_everywhere(
        template, lambda directory: CheckpointStore(directory).prune(Retention(keep_last=1)), check
    )
    assert operations == 2 + 2 + 2 + 2 * 4  # two locks and renames, one fsync of the parent, twice 3 files and a folder


@pytest.mark.slow
def test_keep_last_one_survives_kills_between_save_and_prune(tmp_path):
    template = tmp_path / "template"
    save(CheckpointStore(template), 100)

    def save_and_prune(directory):
        store = CheckpointStore(directory)
        save(store, 200)
        store.prune(Retention(keep_last=1))

    def check(directory, number, first_rename):
        newest = CheckpointStore(directory).latest().checkpoint
        assert newest is not None
        assert newest.iteration == (100 if number <= first_rename else 200)

    kill_everywhere(template, save_and_prune, check)


def test_sweep_leaves_a_living_writer_alone_and_clears_up_after_a_dead_one(tmp_path):
    store = CheckpointStore(tmp_path)
    save(store, 100)
    reached = tmp_path.with_name(f"{tmp_path.name}-reached")

    def wait_in_the_middle():
        reached.touch()
        time.sleep(60)

    def writer():
        with FileOperations(tmp_path, at=3, action=wait_in_the_middle):
            save(CheckpointStore(tmp_path), 200)

    child = start_child(writer)
    deadline = time.monotonic() + 30
    while not reached.exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    (temporary,) = left_over(tmp_path)
    assert store.sweep() == []
    assert (tmp_path / temporary / "shared.pt").stat().st_size > 0
    os.kill(child[0], signal.SIGKILL)
    assert wait_for(child)[0] == -signal.SIGKILL
    assert store.sweep() == [tmp_path / temporary]
    assert left_over(tmp_path) == []


def test_keep_last_one_keeps_one_across_five_processes(tmp_path):
    def one_run(iteration):
        store = CheckpointStore(tmp_path)
        before = store.latest().checkpoint
        save(store, iteration)
        store.prune(Retention(keep_last=1))
        return [os.getpid(), None if before is None else before.iteration]

    processes = set()
    for number in range(1, 6):
        code, answer = in_child(lambda number=number: one_run(100 * number))
        assert code == 0
        process, resumed_from = answer
        processes.add(process)
        assert resumed_from == (100 * (number - 1) or None)
        assert [each.name for each in tmp_path.iterdir()] == [f"iteration_{100 * number:08d}"]
        assert holds(CheckpointStore(tmp_path), tmp_path / f"iteration_{100 * number:08d}", 100 * number)
    assert len(processes) == 5 and os.getpid() not in processes
