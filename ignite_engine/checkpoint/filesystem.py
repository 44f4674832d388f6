"""Every file operation of the store, each a single system call of ``os``.

The order of these calls is the commit protocol, so they are in one place: a test replaces ``os.open``, ``os.write``,
``os.fsync``, ``os.rename``, ``os.unlink``, ``os.rmdir`` and ``os.mkdir`` and sees, fails or kills every step of a save.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import secrets
import stat
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Annotated, Any, TypeVar, cast

import msgspec
import numpy as np
from blake3 import blake3

PIECE_BYTES = 1 << 20
"""The number of bytes that are read or written at a time."""


@dataclass(frozen=True)
class FileRecord:
    """Size and hash of one file."""

    bytes: int
    hash: Annotated[str, msgspec.Meta(pattern=r"\Ablake3:")]
    """BLAKE3, which is faster than a disk on one core, in hexadecimal digits: ``blake3:9f86d0...``."""

    @classmethod
    def of(cls, size: int, digest: Any) -> FileRecord:
        """The record of a file that a ``blake3()`` object has hashed."""
        return cls(size, f"blake3:{digest.hexdigest()}")

    def problem(self, name: str, found: FileRecord) -> str | None:
        """How a file of this name differs from its record, in words; None if it does not."""
        if found.bytes != self.bytes:
            return f"{name} has {found.bytes} bytes, the manifest says {self.bytes}"
        if found.hash != self.hash:
            digest, said = (record.hash.partition(":")[2][:12] for record in (found, self))
            return f"{name} has changed: BLAKE3 {digest}, the manifest says {said}"
        return None


class HashingFile(io.RawIOBase):
    """A new file that is hashed while it is written, so that it need not be read again.

    After a failed write it ignores further writes and keeps the error in ``error``, because the caller may replace a
    write error by one of its own that hides the reason.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._hash = blake3()
        self._bytes = 0
        self.error: OSError | None = None
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        if self.error is not None:
            return len(view)
        piece = view[:PIECE_BYTES]
        try:
            written = os.write(self._descriptor, piece)
        except OSError as error:
            self.error = OSError(error.errno, error.strerror, str(self._path))
            raise self.error from error
        self._bytes += written
        self._hash.update(piece[:written])  # after the write, which has brought it into the processor's cache
        return written

    def synchronise(self) -> FileRecord:
        """fsync; returns size and hash of what was written."""
        try:
            os.fsync(self._descriptor)
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self._path)) from error
        return FileRecord.of(self._bytes, self._hash)

    def close(self) -> None:
        if not self.closed:
            super().close()
            os.close(self._descriptor)


def write_file(path: Path, write: Callable[[IO[bytes]], object]) -> FileRecord:
    """Create ``path``, let ``write`` fill it, fsync it.

    Returns:
        Size and hash, taken while writing.

    Raises:
        OSError: with the path; also where ``write`` turned it into an error of its own.
        FileExistsError: nothing is ever overwritten in place.
    """
    raw = HashingFile(path)
    # closing() and not `with raw`: the buffer must not be flushed a second time after a failure
    with contextlib.closing(raw):
        buffered = io.BufferedWriter(raw, buffer_size=PIECE_BYTES)
        try:
            write(cast(IO[bytes], buffered))
            buffered.flush()
        except Exception as error:
            if raw.error is not None and error is not raw.error:
                raise raw.error from error
            raise
        finally:
            with contextlib.suppress(OSError, ValueError):
                buffered.detach()
        if raw.error is not None:
            raise raw.error
        return raw.synchronise()


def replace_file(path: Path, write: Callable[[IO[bytes]], object]) -> None:
    """Replace ``path`` atomically and durably: readers see the old file or the new one, also after a kill.

    Raises:
        OSError: the old file, if there was one, is as it was.
    """
    temporary = path.with_name(f".{path.name}.tmp-{secrets.token_hex(4)}")
    try:
        write_file(temporary, write)
        os.rename(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    synchronise_directory(path.parent)


def open_regular(path: Path) -> IO[bytes]:
    """Open a file for reading, without a buffer; a symbolic link, a pipe or a device is refused with an ``OSError``."""
    mode = os.lstat(path).st_mode
    if stat.S_ISLNK(mode):
        raise OSError(errno.ELOOP, "It is a symbolic link, which is not followed", str(path))
    if not stat.S_ISREG(mode):  # opening a pipe would wait for its other end
        raise OSError(errno.EINVAL, "It is not a regular file", str(path))
    return open(path, "rb", buffering=0)


def hash_file(file: IO[bytes]) -> FileRecord:
    """Size and hash of an open file from its start; leaves it at its end."""
    file.seek(0)
    digest = blake3()
    size = 0
    buffer = memoryview(bytearray(PIECE_BYTES))
    while count := file.readinto(buffer):  # type: ignore[attr-defined]  # binary files have it, IO[bytes] does not say
        digest.update(buffer[:count])
        size += count
    return FileRecord.of(size, digest)


def read_into(file: IO[bytes], into: np.ndarray[Any, Any], offset: int) -> None:
    """Fill bytes with those of a file from ``offset`` on.

    Raises:
        OSError: with the path.
    """
    left = into.data
    while len(left):
        try:
            received = os.preadv(file.fileno(), [left], offset)
        except OSError as error:
            raise OSError(error.errno, error.strerror, file.name) from error
        if received == 0:
            raise OSError(errno.EIO, "It has become shorter while it was read", file.name)
        left, offset = left[received:], offset + received


def make_directory(path: Path) -> None:
    """Create one new directory."""
    os.mkdir(path)


def ensure_directory(path: Path) -> None:
    """Create ``path`` and its missing parents, each durable in its own parent."""
    missing = [directory for directory in (path, *path.parents) if not directory.exists()]
    for directory in reversed(missing):
        with contextlib.suppress(FileExistsError):
            os.mkdir(directory)
        synchronise_directory(directory.parent)
    if not path.is_dir():
        raise NotADirectoryError(20, "Not a directory", str(path))


def synchronise_directory(path: Path) -> None:
    """fsync the directory itself, which makes created, renamed and removed names durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def rename(old: Path, new: Path) -> None:
    """Rename; the target must not exist (an empty directory would be replaced silently)."""
    if os.path.lexists(new):
        raise FileExistsError(17, "File exists", str(new))
    os.rename(old, new)


def remove_tree(path: Path) -> None:
    """Remove a file, or a directory and its contents; ignores what another process has removed meanwhile.

    A symbolic link is removed itself, never its target.
    """
    if path.is_symlink() or path.is_file():
        os.unlink(path)
        return
    try:
        entries = sorted(os.scandir(path), key=lambda entry: entry.name)
    except FileNotFoundError:
        return
    for entry in entries:
        with contextlib.suppress(FileNotFoundError):
            if entry.is_dir(follow_symlinks=False):
                remove_tree(Path(entry.path))
            else:
                os.unlink(entry.path)
    with contextlib.suppress(FileNotFoundError):
        os.rmdir(path)


Signature = tuple[int, int, int, int]


def signature(path: Path) -> Signature | None:
    """Values that change when a regular file is written or replaced: inode, size, times in ns.

    None if there is no regular file; a symbolic link is none.
    """
    try:
        status = os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    if not stat.S_ISREG(status.st_mode):
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


THREADS = 4
T = TypeVar("T")
R = TypeVar("R")


def in_threads(work: Callable[[T], R], items: Iterable[T], threads: int = THREADS) -> list[R]:
    """Call ``work`` on each item, in threads if there are several items; returns or raises when all have ended."""
    todo = list(items)
    if len(todo) < 2 or threads < 2:
        return [work(item) for item in todo]
    with ThreadPoolExecutor(min(threads, len(todo)), "checkpoint-file") as pool:
        return list(pool.map(work, todo))
