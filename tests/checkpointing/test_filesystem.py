"""File operations: replaced whole, removed without following links, held by one process."""

import errno
import os

import pytest
from blake3 import blake3

from ignite_engine.checkpointing import CheckpointError, CheckpointStore, filesystem
from ignite_engine.checkpointing.filesystem import (
    DirectoryInUse,
    FileRecord,
    held,
    open_regular,
    remove_tree,
    replace_file,
    write_file,
)
from tests.checkpointing.states import save
from tests.kit.faults import FileOperations, in_child


def test_a_file_is_replaced_durably(tmp_path):
    path = tmp_path / "file"
    path.write_text("old")
    with FileOperations(tmp_path) as seen:
        replace_file(path, lambda file: file.write(b"new"))
    assert path.read_text() == "new"
    assert [operation for operation, _ in seen.seen] == ["open", "write", "fsync", "rename", "open", "fsync"]
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.parametrize("operation", ["open", "write", "fsync", "rename"])
def test_a_file_that_cannot_be_written_leaves_the_old_one_and_nothing_else(tmp_path, operation):
    path = tmp_path / "file"
    path.write_text("old")

    def full():
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError, match="No space"), FileOperations(tmp_path, at=(operation, ""), action=full) as seen:
        replace_file(path, lambda file: file.write(b"new"))
    assert seen.acted == 1 and path.read_text() == "old" and os.listdir(tmp_path) == ["file"]


def test_of_a_link_only_the_link_is_removed(tmp_path):
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "file").write_text("kept")
    (tmp_path / "link").symlink_to("kept")
    (tmp_path / "loop").symlink_to("loop")
    for name in ("link", "loop", "missing"):
        remove_tree(tmp_path / name)
    assert sorted(os.listdir(tmp_path)) == ["kept"] and (tmp_path / "kept" / "file").read_text() == "kept"


def test_a_link_is_not_opened_and_has_no_signature(tmp_path):
    (tmp_path / "file").write_text("x")
    (tmp_path / "link").symlink_to("file")
    with open_regular(tmp_path / "file") as file:
        assert file.read() == b"x"
    with pytest.raises(OSError, match="symbolic link, which is not followed"):
        open_regular(tmp_path / "link")
    assert filesystem.signature(tmp_path / "file") and filesystem.signature(tmp_path / "link") is None


def test_a_directory_is_held_by_one_process(tmp_path):
    folder = tmp_path / "new" / "folder"

    def try_to_hold():
        try:
            with held(folder):
                return "held"
        except DirectoryInUse as holder:
            return str(holder)

    with held(folder):
        code, answer = in_child(try_to_hold)
        assert code == 0 and answer.startswith(f"process {os.getpid()} on ")
        assert in_child(lambda: [filesystem.is_held(folder), filesystem.is_held(folder)]) == (0, [True, True])
        with held(folder):
            assert not filesystem.is_held(folder), "not by another process"
        assert in_child(lambda: filesystem.is_held(folder)) == (0, True)
    assert in_child(lambda: filesystem.is_held(folder)) == (0, False)
    assert in_child(try_to_hold) == (0, "held") and os.listdir(folder) == []


def test_a_lock_that_cannot_be_deleted_is_left_and_harmless(tmp_path):
    def read_only():
        raise OSError(errno.EROFS, "Read-only file system")

    with FileOperations(tmp_path, at=("unlink", ".lock"), action=read_only) as seen, held(tmp_path):
        pass
    assert seen.acted == 1 and os.listdir(tmp_path) == [".lock"]
    with held(tmp_path):
        assert in_child(lambda: (tmp_path / ".lock").read_text())[1].startswith(f"process {os.getpid()}")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("name", ["shared.pt", "rank_0.pt", "manifest.json"])
def test_a_pipe_in_the_place_of_a_file_is_refused(tmp_path, name):
    """Opening it would wait for its other end."""
    store = CheckpointStore(tmp_path)
    path = save(store, 1)
    (path / name).unlink()
    os.mkfifo(path / name)

    with pytest.raises(CheckpointError, match=r"is not a regular file|is missing"):
        store.load(path, 0)
    assert store.latest().checkpoint is None


@pytest.mark.parametrize("at_once", [None, 3 << 20])
def test_what_is_hashed_after_the_write_is_what_is_in_the_file(at_once, tmp_path, monkeypatch):
    """A file system may take a part of what it is given."""
    write = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: write(descriptor, data[:at_once]))
    content = os.urandom(20 << 20)
    record = write_file(tmp_path / "file", lambda file: [file.write(b"head"), file.write(content), file.write(b"tail")])

    written = (tmp_path / "file").read_bytes()
    assert written == b"head" + content + b"tail"
    assert record == FileRecord(len(written), f"blake3:{blake3(written).hexdigest()}")


def test_full_disk_in_the_middle_of_a_large_write_is_that_error(tmp_path, monkeypatch):
    write, calls = os.write, iter(range(10))

    def fill(descriptor, data):
        if next(calls) == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(descriptor, data[: 1 << 20])

    monkeypatch.setattr(os, "write", fill)
    with pytest.raises(OSError, match="No space left on device") as error:
        write_file(tmp_path / "file", lambda file: file.write(bytes(20 << 20)))
    assert error.value.filename == str(tmp_path / "file")
