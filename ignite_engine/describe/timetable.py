"""When handlers will act, as far as their filters and the length of the run tell."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ignite.engine import Engine, Events

from ignite_engine.describe.attached import Attached, options_of, set_of
from ignite_engine.engine.bus import event_name, filter_name, filter_options, name_of
from ignite_engine.engine.intervals import Interval
from ignite_engine.engine.length import Length
from ignite_engine.events import TrainingEvents
from ignite_engine.text import in_columns

_BY_ITERATION = (
    Events.GET_BATCH_STARTED,
    Events.GET_BATCH_COMPLETED,
    Events.ITERATION_STARTED,
    Events.ITERATION_COMPLETED,
    TrainingEvents.OPTIMIZER_STEP_STARTED,
    TrainingEvents.OPTIMIZER_STEP_COMPLETED,
    TrainingEvents.RESUME_POINT,
)
_BY_EPOCH = (Events.EPOCH_STARTED, Events.EPOCH_COMPLETED)
_WINDOWS = (TrainingEvents.WINDOW_STARTED, TrainingEvents.WINDOW_COMPLETED)
_RHYTHMIC = (Events.STARTED, Events.COMPLETED, Events.ITERATION_COMPLETED, *_BY_EPOCH, *_WINDOWS)
_PREPARES = "Evaluation._start"
_SHOWN = 3


@dataclass(frozen=True)
class ActingTimes:
    """When one handler acts.

    Attributes:
        counts: of its event, in order; None: what decides is not a count, or the run's length is unknown.
        unit: what is counted: ``iteration``, ``epoch`` or another event's name.
        every: the interval, in units.
        condition: what decides instead of an interval of the event.
    """

    counts: Sequence[int] | None
    unit: str
    every: int | None
    condition: str = ""

    @property
    def never(self) -> bool:
        """Whether it is certain that it does not act in this run."""
        return self.counts is not None and not self.counts

    def iterations(self, length: Length) -> Sequence[int] | None:
        """The iterations at whose end it acts."""
        if self.counts is None or self.unit == "iteration":
            return self.counts
        if self.unit == "epoch" and length.per_epoch:
            if isinstance(self.counts, range):
                counts, per_epoch = self.counts, length.per_epoch
                return range(counts.start * per_epoch, counts.stop * per_epoch, counts.step * per_epoch)
            return [count * length.per_epoch for count in self.counts]
        return None

    def text(self, length: Length) -> str:
        if self.condition:
            at = f", {len(self.counts):,} times (at {_listed(self.counts)})" if self.counts else ""
            return self.condition + at
        times = self.iterations(length)
        rhythm = self._rhythm()
        if times is None:
            return rhythm
        if len(times) == 0:
            return f"{rhythm}: never in this run".removeprefix(": ")
        if self.every is None and len(times) <= 2 * _SHOWN:
            return f"at {_listed(times)}"
        plural = "once" if len(times) == 1 else f"{len(times):,} times"
        return f"{rhythm}, {plural} (at {_listed(times)})"

    def _rhythm(self) -> str:
        units = f"{self.unit}s" if self.unit.islower() else self.unit  # else the name of an event
        if self.every is None:
            return f"at certain {units}"
        return f"every {self.unit}" if self.every == 1 else f"every {self.every:,} {units}"


class _Lazy(Sequence[int]):
    """Numbers that are listed when they are asked for: an interval within an epoch may come a million times."""

    def __init__(self, make: Callable[[], list[int]], is_empty: bool) -> None:
        self._make, self._is_empty = make, is_empty

    @cached_property
    def _numbers(self) -> list[int]:
        return self._make()

    def __bool__(self) -> bool:
        return not self._is_empty

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, index: Any) -> Any:
        return self._numbers[index]


def _of_interval(interval: Interval, length: Length) -> Sequence[int] | None:
    """The iterations at which an ``every()`` comes; None: its count is not one of iterations."""
    last, per_epoch = length.iterations, length.per_epoch
    first = None if last is None or not per_epoch else min(last, math.ceil(interval.number) * per_epoch)
    known = interval.iterations(per_epoch, first)  # up to its first time, as far as the run goes
    return None if known is None else _Lazy(lambda: interval.iterations(per_epoch, last) or [], not known)


def times_of(entry: Attached, length: Length) -> ActingTimes:
    """When one entry of the bus acts; unknown filters are named, not evaluated."""
    event = entry.event
    unit = "iteration" if event in _BY_ITERATION else "epoch" if event in _BY_EPOCH else event_name(event)
    options = filter_options(entry.handler)
    if isinstance(interval := getattr(entry.handler, "filter", None), Interval):
        return ActingTimes(_of_interval(interval, length), unit, None, interval.words)
    if options is None:
        return ActingTimes(None, unit, None, f"when its filter says so ({filter_name(entry.handler)})")
    if event in (Events.STARTED, Events.COMPLETED):
        return ActingTimes(None, unit, None, "at the start" if event == Events.STARTED else "at the end")
    last = {"iteration": length.iterations, "epoch": length.epochs}.get(unit)
    every = options.get("every", None if options else 1)
    if "once" in options:
        once = options["once"]
        given = sorted(once) if isinstance(once, list | tuple | set) else [once]
        return ActingTimes([count for count in given if last is None or count <= last], unit, None)
    after, before = options.get("after", 0), options.get("before", float("inf"))
    if last is None and before == float("inf"):
        return ActingTimes(None, unit, every or 1)
    end = int(min(before, float("inf") if last is None else last + 1))
    # with a bound Ignite counts an interval from the first one, without one from 0
    bounded = "after" in options or "before" in options
    step = every or 1
    return ActingTimes(range(after + 1 if bounded else step, end, step), unit, every or 1)


def timetable(engine: Engine, entries: Sequence[Attached], length: Length) -> list[str]:
    """A line for each handler with a rhythm of its own, and one for those that act at each iteration."""
    found: dict[tuple[str, int], list[str]] = {}
    always: list[str] = []
    for entry in entries:
        saves, evaluates = options_of(entry.owner), set_of(entry.owner) is not None
        if not (entry.acts or (evaluates and entry.event == Events.STARTED and name_of(entry.handler) != _PREPARES)):
            continue
        if entry.event in (Events.STARTED, Events.COMPLETED) and not (saves or evaluates):
            continue
        if entry.event not in _RHYTHMIC and filter_options(entry.handler) == {}:
            continue
        if (
            entry.event == Events.ITERATION_COMPLETED
            and filter_options(entry.handler) == {}
            and not (saves or evaluates)
        ):
            always.append(entry.name)
            continue
        said = found.setdefault((entry.name, id(entry.owner)), [])
        texts = [times_of(entry, length).text(length)]
        if saves is not None:
            options, _ = saves
            texts += ["at the end"] if options.save_at_end else []
            texts += [f"at a new best {options.best}"] if options.best else []
            texts += ["on a stop"]
        said += [text for text in texts if text not in said]
    rows = [(f"  {name}", "; ".join(sorted(said, key=_is_conditional))) for (name, _), said in found.items()]
    if always:
        rows.insert(0, ("  every iteration", ", ".join(dict.fromkeys(always))))
    return [f"What happens when (in {length})", *in_columns(rows)] if rows else []


def _is_conditional(text: str) -> bool:
    return text.startswith("when ")


def _listed(times: Sequence[int]) -> str:
    if len(times) <= 2 * _SHOWN:
        return ", ".join(f"{count:,}" for count in times)
    first = ", ".join(f"{count:,}" for count in times[:_SHOWN])
    return f"{first}, ..., {times[-1]:,}"
