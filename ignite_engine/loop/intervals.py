"""Intervals for any handler: ``every(epochs=0.25)``, ``every(seconds=30)``, ``every(samples=10_000)`` are events.

An interval is the filter of an Ignite event, so it works with every handler. There are two kinds:

- a function of the position (iterations, epochs, windows, samples, tokens): a resumed run has the same places;
- of rank 0's clock (seconds, minutes): all ranks agree at a step boundary, and it counts from the start of the process.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from fractions import Fraction
from typing import Any

from ignite.engine import Events

from ignite_engine.errors import is_number
from ignite_engine.events import Phase, TrainingEvents
from ignite_engine.ranks import agreement, mesh
from ignite_engine.state import TOTALS
from ignite_engine.update.micro_batches import first_dimension, group_of

Count = Callable[[Any], float]

_SECONDS = {"seconds": 1.0, "minutes": 60.0}
_LARGEST_DENOMINATOR = 1000


def every(
    *,
    iterations: int | None = None,
    epochs: float | None = None,
    windows: int | None = None,
    samples: float | None = None,
    tokens: float | None = None,
    seconds: float | None = None,
    minutes: float | None = None,
    count: Count | None = None,
) -> Any:
    """Make the event of an interval, for ``attach(trainer, event)`` and ``add_event_handler``; give one unit.

    Args:
        iterations: updates.
        epochs: whole ones, at their ends; or a part of one, such as 0.25: at the iterations nearest above each quarter,
            as many in each epoch, the last of them at its end. The data must have a length then.
        windows: of :class:`~ignite_engine.Windows`.
        samples, tokens: after the iteration in which their number over all ranks reaches a multiple; ``state.samples``
            and ``state.tokens`` have the numbers since the run began, over every resume.
        seconds, minutes: since it last came, by rank 0's clock.
            The handler then acts at another iteration in each run.
        count: ``count(batch) -> int``, of a micro-batch on the host. Of samples: by default the first dimension of the
            first tensor. Of tokens: by default the update's ``weight_fn``.

    Raises:
        ValueError: not one unit, a number that is not above 0 or, where it must be, whole; ``count`` without samples
            or tokens. When attached: nothing counts tokens. In the run: a part of an epoch of unknown length.
    """
    units: dict[str, Any] = {**locals()}
    del units["count"]
    given = {unit: number for unit, number in units.items() if number is not None}
    if len(given) != 1:
        raise ValueError(f"every() takes one of {', '.join(units)}, got {', '.join(given) or 'none'}.")
    ((unit, number),) = given.items()
    is_real = unit in _SECONDS or unit == "epochs"
    if not is_number(number) or not 0 < number < math.inf or not (is_real or number == int(number)):
        raise ValueError(f"every({unit}=...) takes a {'' if is_real else 'whole '}number above 0, got {number!r}.")
    if count is not None and unit not in TOTALS:
        raise ValueError(f"count has no effect on every({unit}=...): it is of samples or tokens.")
    if unit in _SECONDS:
        return Events.ITERATION_COMPLETED(event_filter=Clock(unit, number))
    if unit in TOTALS:
        return Events.ITERATION_COMPLETED(event_filter=Counted(unit, int(number), count))
    if number != int(number):
        return Events.ITERATION_COMPLETED(event_filter=PartOfEpoch(unit, number))
    by_counter = {
        "iterations": Events.ITERATION_COMPLETED,
        "epochs": Events.EPOCH_COMPLETED,
        "windows": TrainingEvents.WINDOW_COMPLETED,
    }
    return by_counter[unit](every=int(number))


class Interval:
    """The filter of an event that comes at intervals; it has no state, so one event serves several trainers."""

    def __init__(self, unit: str, number: float) -> None:
        self.unit, self.number = unit, number
        self.__qualname__ = str(self)  # the name in describe()

    def __str__(self) -> str:
        return f"every({self.unit}={self.number:.15g})"

    __repr__ = __str__

    def __call__(self, trainer: Any, event: int) -> bool:
        """Whether it comes at this iteration."""
        raise NotImplementedError


class PartOfEpoch(Interval):
    """Comes when the number of parts since the run began increases."""

    def __init__(self, unit: str, number: float) -> None:
        super().__init__(unit, number)
        self._part = Fraction(number).limit_denominator(_LARGEST_DENOMINATOR)

    def __call__(self, trainer: Any, event: int) -> bool:
        length, progress = trainer.state.epoch_length, trainer.progress
        if length is None:
            raise ValueError(
                f"{self} needs data with a length, or run(epoch_length=...): parts of an epoch are unknown."
            )
        now = progress.epochs_completed * length + progress.epoch_iteration
        return bool(self._parts(now, length) > self._parts(now - 1, length))

    def _parts(self, iterations: int, length: int) -> int:
        return iterations * self._part.denominator // (length * self._part.numerator)


class Counted(Interval):
    """Comes when the number of samples or tokens reaches the next multiple."""

    def __init__(self, unit: str, number: int, count: Count | None) -> None:
        super().__init__(unit, number)
        self.count = count

    def __call__(self, trainer: Any, event: int) -> bool:
        total = getattr(trainer.state, self.unit)
        return bool(total // self.number > trainer.intervals.before.get(self.unit, total) // self.number)


class Clock(Interval):
    """Comes when so much time has passed on rank 0's clock."""

    @property
    def in_seconds(self) -> float:
        return self.number * _SECONDS[self.unit]

    def __call__(self, trainer: Any, event: int) -> bool:
        return self in trainer.intervals.come


class Intervals:
    """The counters and clocks behind a trainer's intervals; empty if none are used."""

    def __init__(self) -> None:
        self.before: dict[str, float] = {}
        """The counted samples and tokens before this iteration."""
        self.come: set[Clock] = set()
        """The clocks that are due at this iteration."""
        self._counts: dict[str, Count] = {}
        self._due: dict[Clock, float] = {}
        """When each clock is due, by rank 0's time."""
        self._attached = False

    def add(self, trainer: Any, interval: Interval) -> None:
        """An event with this interval gets a handler.

        Raises:
            ValueError: nothing counts its tokens, or two functions would count the same.
        """
        if isinstance(interval, Counted):
            self._add_count(trainer, interval)
        elif isinstance(interval, Clock):
            self._due.setdefault(interval, time.monotonic() + interval.in_seconds)
        if not self._attached and (self._counts or self._due):
            self._attached = True
            trainer.add_event_handler(Events.ITERATION_COMPLETED, self._measure)

    def begin(self, trainer: Any, *, fresh: bool) -> None:
        """Start the clocks and counters of a run."""
        state, self.come = trainer.state, set()
        for unit in TOTALS:
            total = getattr(state, unit)
            setattr(state, unit, None if unit not in self._counts else 0 if fresh or total is None else total)
        now = time.monotonic()
        self._due = {clock: now + clock.in_seconds for clock in self._due}

    def _add_count(self, trainer: Any, interval: Counted) -> None:
        unit, known = interval.unit, self._counts.get(interval.unit)
        given = interval.count or known or trainer.update.weight_fn
        if unit == "samples":
            given = interval.count or known or _samples
        if given is None:
            raise ValueError(
                f"{interval} needs a function that counts: every(tokens=..., count=...), or Update(weight_fn=...)."
            )
        if known is not None and given is not known:
            raise ValueError(f"{interval}: {unit} are counted by {known} already, got {given}; give all the same one.")
        self._counts[unit] = given
        if getattr(trainer.state, unit) is None:
            setattr(trainer.state, unit, 0)

    def _measure(self, trainer: Any) -> None:
        """Count the samples and tokens of this iteration over all ranks, and look at rank 0's clock."""
        if not self._counts and not self._due:
            return
        state, now = trainer.state, time.monotonic()
        batches = group_of(trainer, state.batch).real if self._counts else ()
        own = [sum(float(count(batch)) for batch in batches) for count in self._counts.values()]
        rows = agreement.gather_floats([*own, *(float(now >= due) for due in self._due.values())])
        for unit, *counted in zip(self._counts, *mesh.by_data_rank(rows)):
            self.before[unit] = getattr(state, unit)
            setattr(state, unit, self.before[unit] + int(sum(counted)))
        self.come = {clock for clock, is_due in zip(self._due, rows[0][len(own) :], strict=True) if is_due}
        self._due |= {clock: now + clock.in_seconds for clock in self.come}

    _measure.phase = Phase.PREPARE  # type: ignore[attr-defined]  # before any handler that asks


def _samples(batch: Any) -> int:
    size = first_dimension(batch)
    if size is None:
        raise ValueError(
            f"every(samples=...) finds no tensor in a {type(batch).__name__}: give count=, a function of a micro-batch."
        )
    return size
