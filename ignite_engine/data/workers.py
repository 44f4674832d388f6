"""Sets up loader workers so that they leave signals to the training process and do not outlive it."""

from __future__ import annotations

import copy
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import DataLoader


class WorkerInit:
    """Loader workers leave stops to the training process: Ctrl-C, and SIGTERM of many launchers, go to the whole group.

    It ends them itself; a worker that died earlier would be an error in it, at any point. If it is killed, they end,
    too.
    """

    handles_signals = True

    def __init__(self, user: Callable[[int], None] | None) -> None:
        self.user = user

    def __call__(self, worker: int) -> None:
        for number in (signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGHUP})
        trainer = multiprocessing.parent_process()
        if trainer is not None and hasattr(signal, "sigtimedwait"):  # macOS does not tell who has sent a signal
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
            threading.Thread(target=_end_for, args=(trainer,), daemon=True).start()
        if self.user is not None:
            self.user(worker)


def _end_for(trainer: Any) -> None:
    """End this process on a SIGTERM of ``trainer``, the training process, or when that is dead."""
    parent = os.getppid()  # the trainer or, with forkserver, the fork server
    while trainer.is_alive() and os.getppid() == parent:
        received = signal.sigtimedwait({signal.SIGTERM}, 1.0)
        if received is not None and received.si_pid == trainer.pid:
            break
    os._exit(0)


def begin_pass(data: Any) -> Iterator[Any]:
    """``iter(data)``, whose workers start with signals blocked until :class:`WorkerInit` handles them."""
    handles_signals = getattr(getattr(data, "worker_init_fn", None), "handles_signals", False)
    blocked = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP} if handles_signals else ()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, blocked)
    try:
        return iter(data)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def end_workers(iterator: Any, data: Any) -> None:
    """End a ``DataLoader`` iterator's worker processes at once, if it has any; torch would wait 5 s for each.

    Persistent ones of a loader that is not ``data`` itself are left: that loader would ask the dead workers.
    """
    workers = getattr(iterator, "_workers", ()) if hasattr(iterator, "_shutdown_workers") else ()
    is_kept = getattr(iterator, "_persistent_workers", False)
    if not workers or (is_kept and getattr(data, "_iterator", None) is not iterator):
        return
    for worker in workers:
        worker.terminate()
    iterator._shutdown_workers()  # else a traceback that holds the iterator keeps queues and threads
    if is_kept:
        data._iterator = None


def with_own_iterator(data: Any) -> Any:
    """``data``, or a shallow copy of a ``DataLoader`` that keeps its iterator, which shares none of it.

    Of a loader with persistent workers, or a state, a second pass would end one that is under way, or be the one whose
    position is saved.
    """
    if not isinstance(data, DataLoader) or not (data.persistent_workers or hasattr(data, "state_dict")):
        return data
    data = copy.copy(data)
    data._iterator = None
    return data
