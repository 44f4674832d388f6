"""A clock that a test moves: no test waits for a real one."""

import time

import pytest


class Clock:
    """Stands still until it is moved; ``time.sleep`` moves it, and calls ``on_sleep`` with the seconds.

    Replaces ``time``, ``monotonic``, ``perf_counter``, their ``_ns`` and ``sleep`` of the module ``time``.
    """

    def __init__(self, patch):
        self.now, self._began = 1_700_000_000.0, time.monotonic()
        self.on_sleep = lambda seconds: None
        for name in ("time", "monotonic", "perf_counter"):
            patch.setattr(time, name, lambda: self.now)
            patch.setattr(time, f"{name}_ns", lambda: int(self.now * 1e9))
        patch.setattr(time, "sleep", self.sleep)

    def move(self, seconds):
        self.now += seconds

    def sleep(self, seconds):
        self.move(seconds)
        self.on_sleep(seconds)


@pytest.fixture
def clock(monkeypatch):
    return Clock(monkeypatch)
