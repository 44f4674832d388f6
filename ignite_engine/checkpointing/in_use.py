"""Checkpoints that are read while their run prunes: retention leaves them, and where it cannot, readers look again."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

LOOKS = 10
"""So often a checkpoint is chosen, if each one is deleted before it was read."""
_WAIT_S = 0.5
"""A save holds its checkpoint a moment longer than until it is committed, a prune until it is renamed."""
_WRITE_WITHIN_S = 10.0
T = TypeVar("T")


def _call(work: Callable[[], T]) -> T:
    return work()


@contextlib.contextmanager
def in_use(checkpoint: Path) -> Iterator[bool]:
    """Keep retention, of any process, from deleting a checkpoint within the body; the lock ends with its process.

    Yields:
        Whether it is there. True also where the file system allows no lock: then it may be deleted.
    """
    try:
        descriptor = os.open(checkpoint, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:  # a file of weights, too
        yield checkpoint.exists()
        return
    try:
        deadline = time.monotonic() + _WAIT_S
        while _is_at(descriptor, checkpoint) and not _lock(descriptor, fcntl.LOCK_SH) and time.monotonic() < deadline:
            time.sleep(0.005)
        yield _is_at(descriptor, checkpoint)
    finally:
        with contextlib.suppress(OSError):  # closing alone would leave it to a worker that was forked meanwhile
            fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)


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
                descriptor = os.open(checkpoint, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            except OSError as error:
                errors.append(error)
                continue
            stack.callback(os.close, descriptor)
            if _lock(descriptor, fcntl.LOCK_EX):
                found.add(checkpoint)
        yield found
    if errors:
        raise errors[0]


@contextlib.contextmanager
def one_writer(directory: Path) -> Iterator[None]:
    """Let one process at a time change manifests of a folder of checkpoints: what each one adds to them stays.

    Raises:
        OSError: the folder is not there, or another process has changed some for too long.
    """
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        deadline = time.monotonic() + _WRITE_WITHIN_S
        while not _lock(descriptor, fcntl.LOCK_EX):
            if time.monotonic() > deadline:
                raise OSError(errno.EBUSY, "Another process is changing a manifest", str(directory))
            time.sleep(0.005)
        yield
    finally:
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)


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


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except OSError:
        return False


def _lock(descriptor: int, kind: int) -> bool:
    """Whether it is locked now, or cannot be on this file system."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True
