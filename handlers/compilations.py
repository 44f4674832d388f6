"""When torch compiles: a captured update, or whatever else calls ``torch.compile`` within a run."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any


def call_around_compilations(starts: Callable[[], None], ends: Callable[[], None]) -> Callable[[], None]:
    """Call ``starts`` before and ``ends`` after each compilation in this thread.

    Returns:
        What ends it.
    """
    # not imported here: it takes a second, and a run in which nothing is compiled does without it
    module = sys.modules.get("torch._dynamo.callback")
    if module is None:
        return lambda: None
    handler, own = module.callback_handler, threading.get_ident()

    def on_start(_: Any) -> None:
        if threading.get_ident() == own:
            starts()

    def on_end(_: Any) -> None:
        if threading.get_ident() == own:
            ends()

    handler.register_start_callback(on_start)
    handler.register_end_callback(on_end)

    def stop() -> None:
        # torch._dynamo.callback_handler.clear() may have been called
        if on_start in handler.start_callbacks:
            handler.remove_start_callback(on_start)
        if on_end in handler.end_callbacks:
            handler.remove_end_callback(on_end)

    return stop
