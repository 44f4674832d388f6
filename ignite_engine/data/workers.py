"""Loader workers: they leave signals to the training process, which ends them itself."""

from __future__ import annotations

import copy
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any


class WorkerInit:
    """Loader workers leave stops to the training process: Ctrl-C, and SIGTERM of many launchers, go to the whole group.

    It shuts them down itself; one that died before would be an error in it, at any place.
    """

    sees_to_signals = True

    def __init__(self, user: Callable[[int], None] | None) -> None:
        self.user = user

    def __call__(self, worker: int) -> None:
        for number in (signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGHUP})
        trainer = multiprocessing.parent_process()
        if trainer is not None:
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
            threading.Thread(target=_end_for, args=(trainer.pid,), daemon=True).start()
        if self.user is not None:
            self.user(worker)


def _end_for(process: int | None) -> None:
    """End this process on SIGTERM, if it is ``process`` that sends it."""
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != process:
        pass
    os._exit(0)


def begin_pass(data: Any) -> Iterator[Any]:
    """``iter(data)``, whose workers begin with signals held back until they see to them: see ``data.py``."""
    if not getattr(getattr(data, "worker_init_fn", None), "sees_to_signals", False):
        return iter(data)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM, signal.SIGHUP})
    try:
        return iter(data)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def end_workers(iterator: Any, data: Any) -> None:
    """Terminate a ``DataLoader`` iterator's worker processes, if it has any; torch would wait 5 s for each."""
    for worker in getattr(iterator, "_workers", ()):
        worker.terminate()
    if iterator is not None and getattr(data, "_iterator", None) is iterator:
        data._iterator = None  # persistent workers: else the next pass would ask the dead ones


def with_own_workers(data: Any) -> Any:
    """``data``, or a shallow copy of a ``DataLoader`` whose workers persist, which shares none of its workers.

    Such a loader has one iterator: a second pass would end one that is under way.
    """
    if not getattr(data, "persistent_workers", False):
        return data
    data = copy.copy(data)
    data._iterator = None
    return data
