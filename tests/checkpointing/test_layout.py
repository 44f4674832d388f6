"""The names in a checkpoint directory, and what is removed of them: nothing that is not the store's own."""

import errno
import logging
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from ignite_engine.checkpointing import CheckpointError, CheckpointStore, Retention, layout
from tests.checkpointing.states import left_over, save
from tests.kit.faults import FileOperations


def content(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.fixture
def other(tmp_path):
    """Another run's folder, which must not change."""
    save(CheckpointStore(tmp_path / "other"), 100)
    save(CheckpointStore(tmp_path / "other"), 300)
    return tmp_path / "other"


@pytest.mark.parametrize("name", ["iteration_00000001", "iteration_123456789", "iteration_00000001.2"])
def test_names_of_committed_checkpoints(name):
    assert layout.named_iteration(Path("x") / name) == int(name[10:].split(".")[0])


@pytest.mark.parametrize("name", ["iteration_1", "iteration_00000001.x", ".tmp-iteration_00000001-01234567", "x\n"])
def test_other_names_are_not_checkpoints(name):
    assert layout.named_iteration(Path("x") / name) is None


def test_a_name_that_is_taken_gets_a_revision(tmp_path):
    assert layout.free_name(tmp_path, 7) == tmp_path / "iteration_00000007"
    (tmp_path / "iteration_00000007").mkdir()
    assert layout.free_name(tmp_path, 7) == tmp_path / "iteration_00000007.1"


def test_a_checkpoint_that_is_a_symbolic_link_is_never_read_or_deleted(tmp_path, other):
    before, store = content(other), CheckpointStore(tmp_path / "run")
    save(store, 200)
    for number in (100, 300):
        (store.directory / f"iteration_{number:08d}").symlink_to(other / f"iteration_{number:08d}")
    newest = store.latest()
    assert newest.checkpoint is not None and newest.checkpoint.iteration == 200
    assert [(path.name, "symbolic link" in reason) for path, reason in newest.skipped] == [("iteration_00000300", True)]
    save(store, 400)
    save(store, 300)
    store.prune(Retention(keep_last=1))
    assert content(other) == before
    assert sorted(each.name for each in store.directory.iterdir() if each.is_symlink()) == [
        "iteration_00000100",
        "iteration_00000300",
    ]


def test_a_dangling_link_in_the_place_of_a_checkpoint_is_left(tmp_path):
    store = CheckpointStore(tmp_path)
    (tmp_path / "iteration_00000100").symlink_to(tmp_path / "gone")
    for _ in range(2):
        path = save(store, 100)
    assert path.name.startswith("iteration_00000100.") and len(store.checkpoints()) == 1
    assert (tmp_path / "iteration_00000100").is_symlink() and store.verify(path) == []


def test_the_folder_itself_may_be_a_link(tmp_path):
    (tmp_path / "scratch").mkdir()
    (tmp_path / "run").symlink_to("scratch")
    store = CheckpointStore(tmp_path / "run")
    for iteration in (100, 200):
        save(store, iteration)
    (tmp_path / "scratch" / ".tmp-iteration_00000300-0123abcd").mkdir()
    assert len(store.sweep()) == 1 and len(store.prune(Retention(keep_last=1))) == 1
    assert os.listdir(tmp_path / "scratch") == ["iteration_00000200"]


@pytest.mark.parametrize("kind", [".tmp", ".trash"])
def test_a_leftover_that_is_a_symbolic_link_is_unlinked(tmp_path, other, kind):
    before, store = content(other), CheckpointStore(tmp_path / "run")
    save(store, 200)
    link = store.directory / f"{kind}-iteration_00000300-0123abcd"
    link.symlink_to(other)
    assert store.sweep() == [link] and not link.is_symlink()
    assert content(other) == before


@pytest.mark.parametrize("kind", [".tmp", ".trash"])
def test_links_inside_a_leftover_are_unlinked(tmp_path, other, kind):
    before = content(other)
    leftover = tmp_path / "run" / f"{kind}-iteration_00000300-0123abcd"
    leftover.mkdir(parents=True)
    (leftover / "folder").symlink_to(other)
    (leftover / "file").symlink_to(other / "iteration_00000100" / "manifest.json")
    assert CheckpointStore(tmp_path / "run").sweep() == [leftover] and not leftover.exists()
    assert content(other) == before


@pytest.mark.parametrize(
    "name", [".tmp-x", ".trash-mine", ".tmp-iteration_00000300", ".tmp-iteration_00000300-0123abcd~"]
)
def test_what_only_looks_like_a_leftover_is_left(tmp_path, name):
    (tmp_path / name).mkdir()
    (tmp_path / name / "mine").write_text("work")
    assert CheckpointStore(tmp_path).sweep() == [] and (tmp_path / name / "mine").read_text() == "work"


@pytest.mark.parametrize("file", ["manifest.json", "shared.pt"])
def test_a_file_of_a_checkpoint_that_is_a_symbolic_link_is_not_read(tmp_path, other, file):
    store = CheckpointStore(tmp_path / "run")
    path = save(store, 100)
    (path / file).unlink()
    (path / file).symlink_to(other / "iteration_00000100" / file)
    (problem,) = store.verify(path)
    assert f"{file}" in problem and ("missing" in problem or "symbolic link" in problem)
    with pytest.raises(CheckpointError, match="symbolic link, which is not followed"):
        store.load(path)
    assert store.latest().checkpoint is None


def busy():
    raise OSError(errno.EBUSY, "Device or resource busy")


Leave = Callable[[CheckpointStore], Path]


@pytest.mark.parametrize("kind", [".tmp", ".trash"])
@pytest.mark.parametrize("operation", ["unlink", "rmdir"])
def test_a_leftover_that_cannot_be_deleted_is_a_warning(tmp_path, caplog, kind, operation):
    stuck, next_one = (tmp_path / f"{kind}-iteration_0000030{number}-0123abcd" for number in (0, 1))
    for each in (stuck, next_one):
        each.mkdir()
        (each / "shared.pt").write_bytes(b"")
    at = (operation, "/shared.pt" if operation == "unlink" else stuck.name.rsplit("-", 1)[0])
    with caplog.at_level(logging.WARNING), FileOperations(tmp_path, at=at, action=busy) as seen:
        assert CheckpointStore(tmp_path).sweep() == [next_one]
    assert seen.acted == 1
    (record,) = caplog.records
    assert "leftover that cannot be deleted: Device or resource busy" in record.getMessage()
    assert str(stuck) in record.getMessage() and "\n" not in record.getMessage()
    assert CheckpointStore(tmp_path).sweep() == [stuck]


def test_a_leftover_that_is_a_file_is_a_warning(tmp_path, caplog):
    (tmp_path / ".tmp-iteration_00000300-0123abcd").write_text("")
    assert CheckpointStore(tmp_path).sweep() == []
    assert "cannot be deleted: Not a directory" in caplog.text


def test_one_checkpoint_that_cannot_be_deleted_does_not_keep_the_others(tmp_path):
    store = CheckpointStore(tmp_path)
    for iteration in (100, 200, 300, 400):
        save(store, iteration)
    with (
        FileOperations(tmp_path, at=("rename", "iteration_00000100"), action=busy) as seen,
        pytest.raises(CheckpointError, match="Pruning failed: Device or resource busy"),
    ):
        store.prune(Retention(keep_last=1))
    assert seen.acted == 1
    assert [each.iteration for each in store.checkpoints()] == [100, 400] and left_over(tmp_path) == []
    store.prune(Retention(keep_last=1))
    assert [each.iteration for each in store.checkpoints()] == [400]


def test_a_save_is_committed_though_the_one_it_replaces_cannot_be_deleted(tmp_path, caplog):
    store = CheckpointStore(tmp_path)
    save(store, 100)
    with FileOperations(tmp_path, at=("unlink", "/shared.pt"), action=busy) as seen:
        path = save(store, 100)
    assert seen.acted == 1 and "cannot be deleted: Device or resource busy" in caplog.text
    newest = store.latest().checkpoint
    assert newest is not None and newest.path == path and os.path.isdir(path)
    store.sweep()
    assert left_over(tmp_path) == []
