"""Checkpoints that are read while their run prunes: retention leaves them, and where it cannot, readers look again."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from ignite_engine.checkpoint.lock import InUse, lock

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
