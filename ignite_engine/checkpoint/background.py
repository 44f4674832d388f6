"""One save in the background: written by a thread while training continues."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class BackgroundSave(Generic[T]):
    """Runs ``write`` in a thread.

    Args:
        write: e.g. a ``CheckpointStore.save`` of a copy; its result or error is :meth:`result`'s.
        done: called in the thread when ``write`` has ended, with or without an error.

    The thread is a daemon: a process that is forced to end does not wait for it, and what it leaves on disk is a
    temporary directory.
    """

    def __init__(self, write: Callable[[], T], done: Callable[[], None] = lambda: None) -> None:
        self._write, self._done = write, done
        self._value: T | None = None
        self._error: BaseException | None = None
        self._started = time.perf_counter()
        self.seconds = 0.0
        """From the start to the commit, or to the error."""
        self.ended = False
        """``write`` has ended, with or without an error."""
        self._thread = threading.Thread(target=self._run, name="checkpoint", daemon=True)
        self._thread.start()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Whether it has ended, after waiting for it."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def result(self) -> T:
        """What ``write`` returned, after waiting for it.

        Raises:
            Exception: whatever ``write`` raised.
        """
        self.wait()
        if self._error is not None:
            raise self._error
        return self._value  # type: ignore[return-value]  # set where there is no error

    def _run(self) -> None:
        try:
            self._value = self._write()
        except BaseException as error:
            self._error = error
        finally:
            self.seconds, self.ended = time.perf_counter() - self._started, True
            self._done()
