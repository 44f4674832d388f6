"""Where a thread is: its stack, which it writes itself, in a signal handler of :mod:`faulthandler`.

No other thread reads it: in CPython 3.11 both ``sys._current_frames`` and ``faulthandler.dump_traceback`` have ended
ranks whose threads ran. Where there are no real-time signals (macOS) nothing is written.
"""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import signal
import sys
import threading

from ignite_engine.ranks import signals


def write_stack(thread: threading.Thread) -> None:
    """Have a thread write its stack, the innermost line first, to this rank's log file, or to stderr without one."""
    if signals.STACK is None or thread.ident is None or not thread.is_alive():
        return
    files = [handler for handler in logging.getLogger().handlers if isinstance(handler, logging.FileHandler)]
    file = next((handler.stream for handler in reversed(files) if handler.stream is not None), sys.stderr)
    with contextlib.suppress(OSError, ValueError, RuntimeError, AttributeError):  # the file is closed, or is none
        faulthandler.register(signals.STACK, file, all_threads=False)
        signal.pthread_kill(thread.ident, signals.STACK)
