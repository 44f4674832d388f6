"""Durations in constant memory, and the time of a device that nobody waits for."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from ignite_engine import devices
from ignite_engine.handlers.step_times.clocks import DeviceClock, Durations, HostClock


def test_quantiles_are_within_one_percent() -> None:
    draw = random.Random(0)
    for scale in (2e-6, 1e-3, 1.0, 900.0):
        durations = Durations()
        values = sorted(scale * draw.lognormvariate(0, 0.5) for _ in range(2000))
        for value in values:
            durations.add(value)
        for share, index in ((0.5, 999), (0.99, 1979)):
            assert durations.quantile(share) == pytest.approx(max(values[index], 1e-6), rel=0.0101)


def test_none_one_and_what_is_out_of_range() -> None:
    durations = Durations()
    assert durations.quantile(0.5) == 0.0
    durations.add(0.0)
    assert durations.quantile(0.99) < 1.1e-6
    durations.add(1e9)
    assert durations.quantile(0.99) > 9000


def test_marks_of_the_host_lose_nothing() -> None:
    clock = HostClock()
    began = clock._last
    for part in ("data_wait", "copy", "forward", "backward", "optimizer", "handlers", "evaluation"):
        clock.mark(part)
    clock.end_step("handlers")

    assert sum(clock.seconds.values()) == pytest.approx(clock._last - began, rel=1e-9)
    assert clock.steps == clock.durations.count == 1


def test_longest_time_of_handlers_within_an_iteration_has_that_of_logging(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("ignite_engine.handlers.step_times.clocks.perf_counter", lambda: now[0])
    clock = HostClock()
    for handlers_s, logging_s in ((1.0, 0.0), (1.0, 4.0), (3.0, 0.0)):
        for part, seconds in (("forward", 9.0), ("handlers", handlers_s), ("logging", logging_s)):
            now[0] += seconds
            clock.mark(part)
        clock.end_step("handlers")
    assert clock.longest.handlers_s == 5.0


META = torch.device("meta")


@pytest.fixture(autouse=True)
def stream_of_each_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "current_stream", lambda device: f"stream of {device}")


class Device:
    """A stream that executes what was recorded when it is told to, each event at its own time."""

    def __init__(self) -> None:
        self.recorded: list[Event] = []
        self.done, self.made = 0, 0

    def execute(self, *milliseconds: float) -> None:
        for each in milliseconds:
            before = self.recorded[self.done - 1].at if self.done else 0.0
            self.recorded[self.done].at = before + each
            self.recorded[self.done].completed = True
            self.done += 1

    def make_event(self) -> Any:
        self.made += 1
        return Event(self)


class Event:
    def __init__(self, device: Device) -> None:
        self.device, self.at, self.completed = device, 0.0, False

    def record(self, stream: Any = None) -> None:
        self.stream = stream
        self.completed = False
        self.device.recorded.append(self)

    def query(self) -> bool:
        return self.completed

    def elapsed_time(self, end: Event) -> float:
        assert self.completed and end.completed
        return end.at - self.at


def step(clock: DeviceClock) -> None:
    for part in ("data_wait", "copy", "forward", "backward", "optimizer"):
        clock.mark(part)
    clock.end_step("handlers")


def test_device_is_read_when_it_is_done_and_never_waited_for() -> None:
    device = Device()
    clock = DeviceClock(META, device.make_event)
    step(clock)
    clock.read()
    assert clock.steps == 0 and not any(clock.seconds.values())

    device.execute(0, 1, 2, 3)  # all but backward and what follows
    clock.read()
    assert (clock.seconds["data_wait"], clock.seconds["copy"], clock.seconds["forward"]) == pytest.approx(
        (1e-3, 2e-3, 3e-3)
    )
    assert clock.seconds["backward"] == 0 and clock.steps == 0

    device.execute(4, 5, 6)
    clock.read()
    assert clock.seconds["optimizer"] == pytest.approx(5e-3) and clock.seconds["handlers"] == pytest.approx(6e-3)
    assert clock.steps == 1 and clock.durations.quantile(0.5) == pytest.approx(15e-3, rel=0.0101)


def test_device_that_waits_for_the_host_is_noticed() -> None:
    device = Device()
    clock = DeviceClock(META, device.make_event)
    step(clock)
    assert not clock.caught_up()
    device.execute(0, 1, 1, 1)
    assert clock.caught_up()


def test_events_are_used_again_and_their_number_is_bounded() -> None:
    device = Device()
    clock = DeviceClock(META, device.make_event)
    device.execute(0)
    for _ in range(1000):
        step(clock)
        device.execute(*[1.0] * (len(device.recorded) - device.done))

    clock.read()
    assert clock.steps == 1000
    assert device.made < 1100
    assert sum(clock.seconds.values()) == pytest.approx(1000 * 6e-3)


def test_events_are_recorded_on_the_stream_of_the_models_device() -> None:
    """Else the times of a model on the second device are those of the first one's idle stream."""
    device = Device()
    step(DeviceClock(torch.device("cuda:1"), device.make_event))

    assert {event.stream for event in device.recorded} == {"stream of cuda:1"}
