"""Several files, or pieces of memory, at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

THREADS = 4
T = TypeVar("T")
R = TypeVar("R")


def in_threads(work: Callable[[T], R], items: Iterable[T], threads: int = THREADS) -> list[R]:
    """``work`` of each item, by several threads if there are several items; all have ended when one has failed."""
    todo = list(items)
    if len(todo) < 2 or threads < 2:
        return [work(item) for item in todo]
    with ThreadPoolExecutor(min(threads, len(todo)), "checkpoint-file") as pool:
        return list(pool.map(work, todo))
