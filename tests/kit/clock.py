"""A clock that a test moves: no test waits for a real one."""

import contextlib
import sys
import time

import pytest

NAMES = ("time", "monotonic", "perf_counter", "time_ns", "monotonic_ns", "perf_counter_ns", "sleep")


class Clock:
    """Stands still until it is moved; ``time.sleep`` moves it, and calls ``on_sleep`` with the seconds.

    Replaces what NAMES has of the module ``time``, also where a module of the engine or of Ignite has imported it.

    Attributes:
        tick_s: by so much it goes on when it is read, where something is divided by what has passed.
    """

    def __init__(self, patch):
        self.now, self.tick_s = 1_700_000_000.0, 0.0
        self.on_sleep = lambda seconds: None
        self._real = {name: getattr(time, name) for name in NAMES}
        self._own = {name: self._now_ns if name.endswith("_ns") else self._now for name in NAMES}
        self._own["sleep"] = self.sleep
        for module, name in [*((time, name) for name in NAMES), *_importers_of(self._real)]:
            patch.setattr(module, name, self._own[name])

    def move(self, seconds):
        self.now += seconds

    def sleep(self, seconds):
        self.move(seconds)
        self.on_sleep(seconds)

    def leave(self):
        """Give the real ones to modules that were imported meanwhile."""
        for module, name in _importers_of(self._own):
            setattr(module, name, self._real[name])

    def _now(self):
        self.now += self.tick_s
        return self.now

    def _now_ns(self):
        return int(self._now() * 1e9)


def _importers_of(functions):
    modules = [each for name, each in sys.modules.items() if name.partition(".")[0] in ("ignite", "ignite_engine")]
    return [
        (module, name)
        for module in modules
        for name, function in functions.items()
        if vars(module).get(name) == function
    ]


@contextlib.contextmanager
def still_clock():
    """The clock of this process, a standing rank's too, is moved by hand within it."""
    with pytest.MonkeyPatch.context() as patch:
        clock = Clock(patch)
        yield clock
        clock.leave()


@pytest.fixture
def clock():
    with still_clock() as clock:
        yield clock
