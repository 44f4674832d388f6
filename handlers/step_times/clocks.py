"""Clocks that divide the time of a run into parts: the host's, and that of a device, read without waiting."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Any, Protocol

import torch

from ignite_engine import devices

STEP = ("data_wait", "copy", "forward", "backward", "reduction", "optimizer", "update")
"""The parts of a step; ``update``: total time of a custom update function."""

BETWEEN = ("evaluation", "checkpoint", "logging", "handlers")
"""The parts of the time between steps; ``handlers`` includes the handlers that run within a step."""

PARTS = (*STEP, *BETWEEN, "startup")


class Durations:
    """Counts durations in buckets, in constant memory; a quantile is within 1 % of the true one.

    The bounds of a bucket are 2 % apart, from 1 us to about 3 hours.
    """

    _LOWEST_S, _RATIO = 1e-6, math.log(1.02)

    def __init__(self) -> None:
        self.counts = [0] * 1164
        self.count = 0

    def add(self, seconds: float) -> None:
        bucket = int(math.log(seconds / self._LOWEST_S) / self._RATIO) if seconds > self._LOWEST_S else 0
        self.counts[min(bucket, len(self.counts) - 1)] += 1
        self.count += 1

    def quantile(self, share: float) -> float:
        """The duration in s that ``share`` of all do not exceed; 0 without any."""
        below, wanted = 0, max(math.ceil(share * self.count), 1)
        for bucket, count in enumerate(self.counts):
            below += count
            if below >= wanted:
                return self._LOWEST_S * math.exp((bucket + 0.5) * self._RATIO)
        return 0.0


@dataclass
class Longest:
    """The longest step without its wait for data, its number, and the longest time of handlers from step to step."""

    step_s: float = 0.0
    step: int = 0
    handlers_s: float = 0.0


class StepClock(Protocol):
    """Seconds by the parts of PARTS; each mark says what the time since the mark before it was."""

    seconds: dict[str, float]
    steps: int
    durations: Durations
    longest: Longest

    def mark(self, part: str) -> None: ...

    def end_step(self, part: str) -> None:
        """Mark the end of a step."""

    def read(self) -> None:
        """Bring ``seconds`` up to date as far as it is known."""

    def caught_up(self) -> bool:
        """Whether the device has done all that it was given: it waits for the host."""


class HostClock:
    """The host's own time."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(PARTS, 0.0)
        self.steps, self.durations = 0, Durations()
        self.longest = Longest()
        self._last, self._before = perf_counter(), (0.0, 0.0, 0.0)

    def mark(self, part: str) -> None:
        now = perf_counter()
        self.seconds[part] += now - self._last
        self._last = now

    def end_step(self, part: str) -> None:
        self.mark(part)
        own, longest = self.seconds, self.longest
        wait, handlers = own["data_wait"], own["handlers"] + own["logging"]
        worked = (own["copy"] + own["forward"] + own["backward"] + own["reduction"] + own["optimizer"]) + own["update"]
        wait_before, handlers_before, worked_before = self._before
        self._before, self.steps = (wait, handlers, worked), self.steps + 1
        step = worked - worked_before
        self.durations.add(wait - wait_before + step)
        if step > longest.step_s and self.steps > 2:  # the first two compile and warm up
            longest.step_s, longest.step = step, self.steps
        if handlers - handlers_before > longest.handlers_s:
            longest.handlers_s = handlers - handlers_before

    def read(self) -> None:
        pass

    def caught_up(self) -> bool:
        return False


class DeviceClock:
    """The time of a device, by events in its current stream, read when they have completed: no host sync.

    The device's time in ``data_wait`` is that in which it had nothing to do for lack of data, not the host's.

    Args:
        device: that of the model.
        make_event: another kind of event with timing, for tests.
    """

    _IGNORED_S = 20e-6
    """Handlers that take less get no event of their own: it would cost as much."""

    def __init__(self, device: torch.device, make_event: Callable[[], Any] | None = None) -> None:
        self.seconds = dict.fromkeys(PARTS, 0.0)
        self.steps, self.durations = 0, Durations()
        self.longest = Longest()  # of a device it is not measured
        self._make = make_event or partial(devices.timing_event, device)
        self._device = device
        self._free: list[Any] = []
        self._pending: deque[tuple[str, Any, bool]] = deque()
        self._before = self._recorded()
        self._step = 0.0
        self._last = perf_counter()
        self._forward: Any = None

    def mark(self, part: str) -> None:
        now = perf_counter()
        if part == "handlers" and now - self._last < self._IGNORED_S:
            return
        self._last = now
        event = self._recorded()
        self._pending.append((part, event, False))
        if part == "forward":
            self._forward = event

    def end_step(self, part: str) -> None:
        self._last = perf_counter()
        self._pending.append((part, self._recorded(), True))
        if len(self._pending) > 1024:  # they have not been read for long
            self.read()

    def read(self) -> None:
        pending, free = self._pending, self._free
        self._forward = None
        while pending and pending[0][1].query():
            part, event, ends_step = pending.popleft()
            seconds = self._before.elapsed_time(event) / 1e3
            free.append(self._before)
            self._before = event
            self.seconds[part] += seconds
            if part in STEP:
                self._step += seconds
            if ends_step:
                self.durations.add(self._step)
                self._step, self.steps = 0.0, self.steps + 1

    def caught_up(self) -> bool:
        return self._forward is not None and bool(self._forward.query())

    def _recorded(self) -> Any:
        event = self._free.pop() if self._free else self._make()
        event.record(devices.current_stream(self._device))
        return event


def own_time(parts: Sequence[float]) -> float:
    """The time of a step, given by its parts (STEP), without waiting for other ranks."""
    return sum(parts) - parts[STEP.index("reduction")]
