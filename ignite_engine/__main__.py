"""``python -m ignite_engine`` and the ``ignite-engine`` command."""

from __future__ import annotations

import signal
import sys
import threading

# The imports take seconds. Within them KeyboardInterrupt may become another exception, and another exit code.
_is_first = __name__ != "__mp_main__" and threading.current_thread() is threading.main_thread()
_raises = _is_first and signal.getsignal(signal.SIGINT) is signal.default_int_handler
if _raises:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
try:
    from ignite_engine.cli import main
finally:
    if _raises:
        signal.signal(signal.SIGINT, signal.default_int_handler)

__all__ = ["main"]

if __name__ == "__main__":
    sys.exit(main())
