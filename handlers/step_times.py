"""Where the time of an iteration goes: by the host's clock, or by a device's events, which nobody waits for."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from time import perf_counter
from typing import Any

import torch
from ignite.engine import Engine, Events

from ignite_engine import Trainer, TrainingEvents, devices
from ignite_engine.events import Phase
from ignite_engine.ranks import agreement

STEP = ("data_wait", "forward", "backward", "optimizer", "update")
"""The parts of a step; ``update`` is what lies between the others, or a custom update function."""
PARTS = (*STEP, "other")


class StepTimes:
    """Times of the parts of an iteration.

    Written at the event, in ms per iteration since it last wrote, means over the ranks:

    - ``time/data_wait_ms``: for the loader, and the copy to the device;
    - ``time/forward_ms``; ``time/backward_ms``, with the reduction over the ranks; ``time/optimizer_ms``: unscale, clip
      and step;
    - ``time/step_ms``: from the wait for the batch to the end of the iteration; of a custom update function it is known
      without its parts;
    - ``time/other_ms``: between iterations, in handlers, evaluations and saves.

    On an accelerator the times are the device's, by events in its stream that are read once they have completed. One
    collective at the event, none between. No state is saved.
    """

    phase = Phase.LOG

    def __init__(self) -> None:
        self._clock: HostClock | DeviceClock = HostClock()
        self._written = (0, dict.fromkeys(PARTS, 0.0))
        self._waiting = False

    def attach(self, engine: Engine, event: Any = Events.ITERATION_COMPLETED(every=50)) -> None:  # noqa: B008  # immutable
        """Write at ``event``."""
        trainer = Trainer.of(engine)
        on, own = trainer.add_event_handler, TrainingEvents
        on(Events.STARTED, self._start)
        on(Events.EPOCH_STARTED, self._wait_starts)  # a pass is opened next, with its workers
        on(Events.GET_BATCH_STARTED, self._wait_starts)
        for event_of_part, part in (
            (Events.GET_BATCH_COMPLETED, "data_wait"),
            (own.FORWARD_STARTED, "data_wait"),
            (own.FORWARD_COMPLETED, "forward"),
            (own.BACKWARD_COMPLETED, "backward"),
            (own.OPTIMIZER_STEP_COMPLETED, "optimizer"),
            (own.OPTIMIZER_STEP_SKIPPED, "optimizer"),
            (Events.ITERATION_COMPLETED, "update"),
            (Events.EPOCH_COMPLETED, "other"),
        ):
            on(event_of_part, _Mark(self, part))
        on(event, self)

    def __call__(self, trainer: Trainer) -> None:
        """Write the interval's means into ``state.metrics``; a collective."""
        clock = self._clock
        clock.read()
        steps, (steps_before, before) = clock.steps, self._written
        spent = [clock.seconds[part] - before[part] for part in PARTS]
        self._written = steps, dict(clock.seconds)
        rows = agreement.gather_floats([float(steps - steps_before), *spent])
        if not min(row[0] for row in rows):
            return
        mean = {
            part: 1e3 * sum(row[index] / row[0] for row in rows) / len(rows)
            for index, part in enumerate(PARTS, start=1)
        }
        metrics = trainer.state.metrics
        metrics["time/step_ms"] = sum(mean[part] for part in STEP)
        for part in PARTS:
            if part != "update" and mean[part]:
                metrics[f"time/{part}_ms"] = mean[part]

    def _start(self, trainer: Trainer) -> None:
        device = trainer.update.device or torch.device("cpu")
        self._clock = DeviceClock(device) if devices.is_accelerator(device.type) else HostClock()
        self._written = (0, dict.fromkeys(PARTS, 0.0))
        self._waiting = False

    def _wait_starts(self) -> None:
        self.mark("other")
        self._waiting = True

    _wait_starts.phase = Phase.LAST  # type: ignore[attr-defined]  # after all other handlers of the event

    def mark(self, part: str) -> None:
        """The time since the last mark was that of ``part``, or of the wait that it ends."""
        if part == "other" and self._waiting:  # a stream may be known to have ended only after a wait
            part = "data_wait"
        self._waiting = False
        self._clock.mark(part, ends_step=part == "update")


class _Mark:
    """Says at an event what the time since the one before it was."""

    phase = Phase.FIRST

    def __init__(self, times: StepTimes, part: str) -> None:
        self.times, self.part = times, part
        self.__qualname__ = f"StepTimes.{part}"  # in describe()

    def __call__(self) -> None:
        self.times.mark(self.part)


class HostClock:
    """The host's own time: seconds by the names of PARTS."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(PARTS, 0.0)
        self.steps = 0
        self._last = perf_counter()

    def mark(self, part: str, *, ends_step: bool = False) -> None:
        """The time since the last mark was that of ``part``."""
        now = perf_counter()
        self.seconds[part] += now - self._last
        self._last = now
        self.steps += ends_step

    def read(self) -> None:
        """Nothing is to be read: it is known at once."""


class DeviceClock:
    """The time of a device, by events in its current stream, read when they have completed: no host sync.

    The device's time in ``data_wait`` is that in which it had nothing to do for lack of data, not the host's.

    Args:
        device: that of the model.
        make_event: another kind of event with timing, for tests.
    """

    def __init__(self, device: torch.device, make_event: Callable[[], Any] | None = None) -> None:
        self.seconds = dict.fromkeys(PARTS, 0.0)
        self.steps = 0
        self._make = make_event or partial(torch.Event, device.type, enable_timing=True)
        self._device = device
        self._free: list[Any] = []
        self._pending: deque[tuple[str, Any, bool]] = deque()
        self._before = self._recorded()

    def mark(self, part: str, *, ends_step: bool = False) -> None:
        """The time since the last mark was that of ``part``."""
        self._pending.append((part, self._recorded(), ends_step))
        if ends_step and len(self._pending) > 1024:  # they have not been read for long
            self.read()

    def read(self) -> None:
        """Bring ``seconds`` up to date as far as the device has come."""
        while self._pending and self._pending[0][1].query():
            part, event, ends_step = self._pending.popleft()
            self.seconds[part] += self._before.elapsed_time(event) / 1e3
            self._free.append(self._before)
            self._before = event
            self.steps += ends_step

    def _recorded(self) -> Any:
        event = self._free.pop() if self._free else self._make()
        event.record(devices.current_stream(self._device))
        return event
