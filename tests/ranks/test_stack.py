"""A thread that waits writes where it is into the log file of its rank."""

from __future__ import annotations

import logging
import threading
import time
from pathlib import Path

import pytest

from ignite_engine.ranks import signals
from ignite_engine.ranks.stack import write_stack


@pytest.mark.skipif(signals.STACK is None, reason="needs real-time signals")
def test_a_thread_writes_its_stack_where_it_waits_and_goes_on_waiting(tmp_path: Path) -> None:
    file, event = logging.FileHandler(tmp_path / "rank_0.log"), threading.Event()
    logging.getLogger().addHandler(file)
    waiting = threading.Thread(target=event.wait, args=(30.0,))
    waiting.start()
    try:
        write_stack(waiting)
        deadline = time.monotonic() + 10
        while "in wait" not in (tmp_path / "rank_0.log").read_text() and time.monotonic() < deadline:
            time.sleep(0.01)
        assert "in wait" in (tmp_path / "rank_0.log").read_text() and waiting.is_alive()
    finally:
        event.set()
        waiting.join()
        logging.getLogger().removeHandler(file)
        file.close()
    write_stack(waiting)  # it has ended: nothing happens
