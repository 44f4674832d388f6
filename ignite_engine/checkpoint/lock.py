"""Locks a file or a folder against other processes and threads; a lock ends with its process, however that ends."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import platform
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar


class InUse(BlockingIOError):
    """Another process or thread holds the lock; the message names the holder if it is known."""


@contextlib.contextmanager
def lock(
    path: Path, *, shared: bool = False, wait_s: float = 0.0, again: bool = False, own_file: bool = False
) -> Iterator[bool]:
    """Hold the lock of ``path`` within the body. Closing other files or forking does not release it.

    Args:
        shared: share it with other shared holders; otherwise hold it alone.
        wait_s: how long to wait for other holders, in seconds.
        again: a thread that holds it alone may take it once more.
        own_file: ``path`` is only a lock file: it is made, names the holder, and is removed at the end.

    Yields:
        True; False if the file system has no locks.

    Raises:
        InUse: others hold it, or this thread does and ``again`` is not set.
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
    """A lock that this process holds, with the number of times that it was taken."""

    def __init__(self, path: Path, descriptor: int, thread: int | None, own_file: bool) -> None:
        self.path, self.descriptor, self.thread, self.own_file = path, descriptor, thread, own_file
        self.is_locked, self.taken = True, 1

    def release(self) -> None:
        with _changing:
            if self not in _locks:  # it belongs to the parent that forked this process
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
                    fcntl.flock(self.descriptor, fcntl.LOCK_UN)  # also for children forked outside of Python
                os.close(self.descriptor)


_locks: set[_Lock] = set()
_changing = threading.RLock()


def _take(path: Path, shared: bool, again: bool, own_file: bool) -> _Lock | None:
    """Take the lock; None: others hold it, or the file was removed meanwhile."""
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
    """Close the parent's locks: kept open here, they would outlive the parent."""
    for held in _locks:
        os.close(held.descriptor)
    _locks.clear()
    _changing.release()


os.register_at_fork(before=_changing.acquire, after_in_parent=_changing.release, after_in_child=_after_fork)


LOOKS = 10
"""How many times a checkpoint is chosen anew if each one is deleted before it was read."""
_WAIT_S = 0.5
"""How long to wait for a save, which holds its checkpoint shortly beyond the commit, or for a prune."""
_WRITE_WITHIN_S = 10.0
LOCK_NAME = ".lock"
_ASKED_FOR_S = 0.1
"""How long to wait for a process that only asks whether the directory is held."""
T = TypeVar("T")
logger = logging.getLogger(__name__)


def _call(work: Callable[[], T]) -> T:
    return work()


@contextlib.contextmanager
def in_use(checkpoint: Path) -> Iterator[bool]:
    """Keep any process from deleting a checkpoint within the body.

    Yields:
        Whether it is there. Without locks in the file system it may still be deleted.
    """
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            stack.enter_context(lock(checkpoint, shared=True, wait_s=_WAIT_S))
        yield checkpoint.exists()


@contextlib.contextmanager
def unused(checkpoints: Iterable[Path]) -> Iterator[set[Path]]:
    """The checkpoints that no process reads; within the body none can begin to.

    Raises:
        OSError: the first that could not be locked; raised after the body.
    """
    found: set[Path] = set()
    errors: list[OSError] = []
    with contextlib.ExitStack() as stack:
        for checkpoint in checkpoints:
            try:
                stack.enter_context(lock(checkpoint))
                found.add(checkpoint)
            except InUse:
                continue
            except OSError as error:
                errors.append(error)
        yield found
    if errors:
        raise errors[0]


@contextlib.contextmanager
def one_writer(directory: Path) -> Iterator[None]:
    """Let only one process at a time change manifests in a folder of checkpoints, so that no change is lost.

    Raises:
        OSError: the folder is not there, or another process held the lock for too long.
    """
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(lock(directory, wait_s=_WRITE_WITHIN_S))
        except InUse:
            raise OSError(errno.EBUSY, "Another process is changing a manifest", str(directory)) from None
        yield


def read_chosen(
    choose: Callable[[], Path], read: Callable[[Path], T], on_rank_0: Callable[[Callable[[], Any]], Any] = _call
) -> T:
    """Choose a path and read it; choose again if it is deleted meanwhile. Returns what ``read(path)`` returns.

    Args:
        on_rank_0: calls a function on rank 0 for all ranks; needed if ``read`` is a collective.

    Raises:
        Exception: from ``choose``; or from ``read``, if the path is still there or was deleted several times.
    """
    for _ in range(LOOKS - 1):
        path = on_rank_0(choose)
        with contextlib.ExitStack() as stack:
            if not on_rank_0(lambda: stack.enter_context(in_use(path))):  # noqa: B023  # called at once
                continue
            try:
                return read(path)
            except Exception:  # reading what is being deleted fails in many ways
                if on_rank_0(path.exists):
                    raise
    return read(on_rank_0(choose))


class DirectoryInUse(RuntimeError):
    """Another process holds the directory; the message names the process."""


@contextlib.contextmanager
def held(directory: Path) -> Iterator[None]:
    """Hold a directory against other processes; it is made if it is missing. A thread may hold it twice.

    If the file system has no locks, a warning says so.

    Raises:
        DirectoryInUse: another process holds it.
    """
    with contextlib.ExitStack() as stack:
        reason: str | None = "the file system has no locks"
        try:
            directory.mkdir(parents=True, exist_ok=True)
            if stack.enter_context(lock(directory / LOCK_NAME, again=True, own_file=True, wait_s=_ASKED_FOR_S)):
                reason = None
        except InUse as holder:
            raise DirectoryInUse(str(holder)) from None
        except OSError as error:
            reason = error.strerror
        if reason is not None:
            logger.warning("%s cannot be locked (%s): do not start a second run in it.", directory, reason)
        yield


def is_held(directory: Path) -> bool:
    """Whether another process or thread holds a directory by :func:`held`."""
    try:
        with lock(directory / LOCK_NAME, shared=True, again=True):
            return False
    except InUse:
        return True
    except OSError:
        return False
