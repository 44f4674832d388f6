"""``python -m ignite_engine`` and the ``ignite-engine`` command."""

from __future__ import annotations

import signal
import sys

# The imports take seconds. Within them KeyboardInterrupt may become another exception, and another exit code.
_raises = __name__ != "__mp_main__" and signal.getsignal(signal.SIGINT) is signal.default_int_handler
if _raises:
    signal.signal(signal.SIGINT, signal.SIG_DFL)

from ignite_engine.cli import main  # noqa: E402

if _raises:
    signal.signal(signal.SIGINT, signal.default_int_handler)

__all__ = ["main"]

if __name__ == "__main__":
    sys.exit(main())
