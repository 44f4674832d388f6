"""Several files of a store at once, in threads that do not keep the process from ending."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import TypeVar

THREADS = 4
T = TypeVar("T")
R = TypeVar("R")


def in_threads(work: Callable[[T], R], items: Iterable[T], threads: int = THREADS) -> list[R]:
    """``work`` of each item, by several threads if there are several items; all have ended when one has failed.

    The threads of a ``ThreadPoolExecutor`` are waited for when the process ends, however long a store is silent.
    """
    todo = list(items)
    if len(todo) < 2 or threads < 2:
        return [work(item) for item in todo]
    results: dict[int, R] = {}
    errors: dict[int, BaseException] = {}
    left, lock = iter(range(len(todo))), threading.Lock()

    def run() -> None:
        while not errors:
            with lock:
                number = next(left, None)
            if number is None:
                return
            try:
                results[number] = work(todo[number])
            except BaseException as error:
                errors[number] = error

    running = [threading.Thread(target=run, name="mirror-file", daemon=True) for _ in range(min(threads, len(todo)))]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    if errors:
        raise errors[min(errors)]
    return [results[number] for number in range(len(todo))]
