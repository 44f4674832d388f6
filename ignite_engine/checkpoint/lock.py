"""One lock of a file or a folder, against other processes and threads; it ends with its process, however that ends."""

from __future__ import annotations

import contextlib
import fcntl
import os
import platform
import threading
import time
from collections.abc import Iterator
from pathlib import Path


class InUse(BlockingIOError):
    """Another process, or another thread, has the lock; the message is who, where that is known."""


@contextlib.contextmanager
def lock(
    path: Path, *, shared: bool = False, wait_s: float = 0.0, again: bool = False, own_file: bool = False
) -> Iterator[bool]:
    """Hold the lock of ``path`` within the body. What the process closes or forks meanwhile changes nothing.

    Args:
        shared: with others that share it; otherwise alone.
        wait_s: how long, in seconds, others are waited for.
        again: the thread that holds it alone may take it once more.
        own_file: ``path`` is a file for the lock alone: it is made, says who holds it, and is removed with it.

    Yields:
        True; False where the file system has no locks.

    Raises:
        InUse: others have it, or this thread, unless ``again``.
        OSError: ``path`` cannot be opened.
    """
    deadline = time.monotonic() + wait_s
    while (held := _take(path, shared, again, own_file)) is None:
        if time.monotonic() >= deadline:
            raise InUse(_holder(path) if own_file else "another process")
        time.sleep(0.005)
    try:
        yield held.is_locked
    finally:
        held.release()


class _Lock:
    """A lock that this process holds, once for each time that it was taken."""

    def __init__(self, path: Path, descriptor: int, thread: int | None, own_file: bool) -> None:
        self.path, self.descriptor, self.thread, self.own_file = path, descriptor, thread, own_file
        self.is_locked, self.taken = True, 1

    def release(self) -> None:
        with _changing:
            if self not in _locks:  # it is of the process that has forked this one
                return
            self.taken -= 1
            if self.taken:
                return
            _locks.remove(self)
            try:
                with contextlib.suppress(OSError):  # the folder may be read-only or gone by now
                    if self.own_file and _is_at(self.descriptor, self.path):
                        os.unlink(self.path)
            finally:
                with contextlib.suppress(OSError):
                    fcntl.flock(self.descriptor, fcntl.LOCK_UN)  # also for a process that was forked without Python
                os.close(self.descriptor)


_locks: set[_Lock] = set()
_changing = threading.RLock()


def _take(path: Path, shared: bool, again: bool, own_file: bool) -> _Lock | None:
    """The lock; None: others have it, or the file was removed meanwhile."""
    with _changing:
        descriptor = _opened(path, own_file)
        for known in _locks if again else ():
            if known.thread == threading.get_ident() and _is_at(known.descriptor, path):
                os.close(descriptor)
                known.taken += 1
                return known
        held = _Lock(path, descriptor, None if shared else threading.get_ident(), own_file)
        try:
            fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return None
        except OSError:
            held.is_locked = False
        if not _is_at(descriptor, path):
            os.close(descriptor)
            return None
        _locks.add(held)
        if own_file and not shared:
            try:
                with contextlib.suppress(OSError):  # on a full disk it names nobody
                    os.ftruncate(descriptor, 0)
                    os.write(descriptor, f"process {os.getpid()} on {platform.node()}\n".encode())
            except BaseException:
                held.release()
                raise
        return held


def _opened(path: Path, make: bool) -> int:
    if path.is_dir():
        return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:  # for writing, without which a network file system gives no lock
        return os.open(path, os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if make else 0), 0o666)
    except PermissionError:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except OSError:
        return False


def _holder(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip() or "another process"
    except (OSError, ValueError):
        return "another process"


def _after_fork() -> None:
    """Locks stay the parent's: kept open here, they would outlive it."""
    for held in _locks:
        os.close(held.descriptor)
    _locks.clear()
    _changing.release()


os.register_at_fork(before=_changing.acquire, after_in_parent=_changing.release, after_in_child=_after_fork)
