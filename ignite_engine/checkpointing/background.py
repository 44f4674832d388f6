"""One save in the background: copied while the weights do not change, written while they do."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

from ignite_engine.checkpointing.snapshot import Snapshot
from ignite_engine.errors import CheckpointError

T = TypeVar("T")


class ChangedWhileCopied(CheckpointError):
    """What is copied late was changed before the copy was made."""


class BackgroundSave(Generic[T]):
    """Runs ``write`` in a thread, once the late half of ``snapshot`` is copied and was not changed meanwhile.

    Args:
        snapshot: just taken.
        write: what is done with the copy, e.g. a ``CheckpointStore.save``; its result or error is :meth:`result`'s.
        done: called in the thread when ``write`` has ended, with or without an error.

    The caller must call :meth:`before_change` before it changes what the snapshot copies late. The thread is a daemon:
    a process that is forced to end does not wait for it, and what it leaves on disk is a temporary directory.
    """

    def __init__(self, snapshot: Snapshot, write: Callable[[], T], done: Callable[[], None] = lambda: None) -> None:
        self._snapshot, self._write, self._done = snapshot, write, done
        self._copied, self._judged = threading.Event(), threading.Event()
        self._untouched = True
        self._value: T | None = None
        self._error: BaseException | None = None
        self._started = time.perf_counter()
        self.seconds = 0.0
        """From the start to the commit, or to the error."""
        self.ended = False
        """``write`` has ended, with or without an error."""
        self._thread = threading.Thread(target=self._run, name="checkpoint", daemon=True)
        self._thread.start()

    def before_change(self) -> None:
        """Wait until the copy is made: what it was made of may change from now on. Calling it again costs nothing."""
        if self._judged.is_set():
            return
        self._copied.wait()
        self._snapshot.before_change()
        self._untouched = self._snapshot.check_untouched()
        self._snapshot.release()
        self._judged.set()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Whether it has ended, after waiting for it."""
        self.before_change()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def result(self) -> T:
        """What ``write`` returned, after waiting for it.

        Raises:
            ChangedWhileCopied: what is copied late was changed before :meth:`before_change`; nothing was written.
            Exception: whatever ``write`` raised.
        """
        self.wait()
        if self._error is not None:
            raise self._error
        return self._value  # type: ignore[return-value]  # set where there is no error

    def _run(self) -> None:
        try:
            try:
                self._snapshot.copy_late()
            finally:
                self._copied.set()
            self._judged.wait()
            if not self._untouched:
                raise ChangedWhileCopied(
                    "This checkpoint was not saved: an optimizer's state was changed outside of its step while it was "
                    "copied in the background. From now on it is copied before training continues."
                )
            self._snapshot.wait_for_devices()
            self._value = self._write()
        except BaseException as error:
            self._error = error
        finally:
            self.seconds, self.ended = time.perf_counter() - self._started, True
            self._done()
