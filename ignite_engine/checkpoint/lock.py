"""One lock of a file or a folder, against other processes and threads; it ends with its process, however that ends."""

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


LOOKS = 10
"""So often a checkpoint is chosen, if each one is deleted before it was read."""
_WAIT_S = 0.5
"""A save holds its checkpoint a moment longer than until it is committed, a prune until it is renamed."""
_WRITE_WITHIN_S = 10.0
LOCK_NAME = ".lock"
_ASKED_FOR_S = 0.1
"""Who asks whether a directory is held has its lock for a moment."""
T = TypeVar("T")
logger = logging.getLogger(__name__)


def _call(work: Callable[[], T]) -> T:
    return work()


@contextlib.contextmanager
def in_use(checkpoint: Path) -> Iterator[bool]:
    """Keep retention, of any process, from deleting a checkpoint within the body; the lock ends with its process.

    Yields:
        Whether it is there. True also where the file system allows no lock: then it may be deleted.
    """
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            stack.enter_context(lock(checkpoint, shared=True, wait_s=_WAIT_S))
        yield checkpoint.exists()


@contextlib.contextmanager
def unused(checkpoints: Iterable[Path]) -> Iterator[set[Path]]:
    """Those that no process reads; within the body none begins to.

    Raises:
        OSError: of the first one that could not be locked, after the body.
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
    """Let one process at a time change manifests of a folder of checkpoints: what each one adds to them stays.

    Raises:
        OSError: the folder is not there, or another process has changed some for too long.
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
    """What ``read`` returns of the path that ``choose`` returns; where that is deleted meanwhile it is chosen again.

    Args:
        on_rank_0: calls on one rank for all of them, where ``read`` is a collective that fails on all of them.

    Raises:
        Exception: of ``choose``, or of ``read`` where the path is there, or was deleted at each of several looks.
    """
    for _ in range(LOOKS - 1):
        path = on_rank_0(choose)
        with contextlib.ExitStack() as stack:
            if not on_rank_0(lambda: stack.enter_context(in_use(path))):  # noqa: B023  # called at once
                continue
            try:
                return read(path)
            except Exception:  # of any kind: what is deleted while it is read fails in many ways
                if on_rank_0(path.exists):
                    raise
    return read(on_rank_0(choose))


class DirectoryInUse(RuntimeError):
    """Another process holds the lock of a directory; the message is the process."""


@contextlib.contextmanager
def held(directory: Path) -> Iterator[None]:
    """Keep other processes from holding a directory, which is made if it is missing; a thread may hold it twice.

    Where the file system does not allow a lock, that is a warning.

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
