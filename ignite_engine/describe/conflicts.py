"""Settings of a run that contradict each other."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ignite.engine import Engine, Events
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, OneCycleLR, PolynomialLR, ReduceLROnPlateau

from ignite_engine.checkpointing import SaveOptions
from ignite_engine.describe.attached import (
    Attached,
    attached_to,
    followed_by,
    options_of,
    owners,
    scheduler_of,
    set_of,
)
from ignite_engine.describe.timetable import ActingTimes, times_of
from ignite_engine.engine.bus import describe_filter, handlers_of
from ignite_engine.engine.length import Length
from ignite_engine.errors import did_you_mean
from ignite_engine.schedules import Schedule

_FOREVER = 2**50
_LENGTHS: dict[type, str] = {
    OneCycleLR: "total_steps",
    CosineAnnealingLR: "T_max",
    LinearLR: "total_iters",
    PolynomialLR: "total_iters",
}
_OWN_GROUPS = ("time", "throughput", "memory", "lr")


@dataclass(frozen=True)
class Conflict:
    """One sentence with the remedy; ``certain``: no handler of the user's can make it right."""

    text: str
    certain: bool = True


Acting = tuple[Attached, ActingTimes]
"""An entry of the bus, and when it acts."""


def conflicts_of(engine: Engine, length: Length, sections: Mapping[str, str] | None = None) -> list[Conflict]:
    """The settings of a run of this length that contradict each other; the cost does not grow with the length.

    Args:
        sections: of a config, the section of each schedule by the name of its handler, for the remedy.
    """
    acting = _acting(engine, length)
    entries = [entry for entry, _ in acting]
    return [
        *_never(acting, length),
        *_schedules(acting, sections or {}),
        *_two_schedules(entries),
        *_retention(acting, length),
        *_metrics(acting),
    ]


def schedule_conflicts(engine: Engine, length: Length, sections: Mapping[str, str] | None = None) -> list[Conflict]:
    """The conflicts with schedules that end before or after a run of this length."""
    return list(_schedules(_acting(engine, length), sections or {}))


def _acting(engine: Engine, length: Length) -> list[Acting]:
    return [(entry, times_of(entry, length)) for entry in attached_to(engine)]


def _never(acting: Sequence[Acting], length: Length) -> Iterator[Conflict]:
    """Intervals that are longer than the run."""
    last = {"iteration": length.iterations, "epoch": length.epochs}
    for entry, times in acting:
        if entry.acts and times.never and (end := last.get(times.unit)):
            yield Conflict(
                f"{entry.name} {describe_filter(entry.handler)} never acts: the run ends after {end:,} "
                f"{times.unit}{'s' if end != 1 else ''}; give a shorter interval."
            )


def _schedules(acting: Sequence[Acting], sections: Mapping[str, str]) -> Iterator[Conflict]:
    for entry, times in acting:
        scheduler = scheduler_of(entry.owner)
        if scheduler is None or not entry.acts or _has_the_runs_length(scheduler) or not times.counts:
            continue
        run, unit = len(times.counts), "update" if times.unit == "iteration" else times.unit
        end = end_of(scheduler, run)
        if end is None or end == run:
            continue
        name = getattr(entry.owner, "name", type(scheduler).__name__)
        section = f"{sections[name]}." if name in sections else ""
        setting = section + _LENGTHS.get(type(scheduler), "total")
        kind = "ends at" if end < run else "reaches its end only at"
        after = (
            f" (the LR is {_rates(scheduler, end)} from there on)"
            if end < run and isinstance(scheduler, Schedule)
            else ""
        )
        yield Conflict(
            f"The schedule {name} {kind} {unit} {end:,}{after}, the run at {unit} {run:,}: {setting}={run} makes them "
            "end together."
        )


def _has_the_runs_length(scheduler: Any) -> bool:
    is_over_the_run = isinstance(scheduler, Schedule) and scheduler.shape is not None
    return is_over_the_run or isinstance(scheduler, ReduceLROnPlateau)


def end_of(scheduler: Any, run: int) -> int | None:
    """The step from which on a schedule is constant; None: it has no end, or its end cannot be found."""
    if not isinstance(scheduler, Schedule):
        if type(scheduler) not in _LENGTHS or (
            isinstance(scheduler, LinearLR) and scheduler.start_factor <= scheduler.end_factor
        ):
            return None  # a warm-up alone may end anywhere
        return int(getattr(scheduler, _LENGTHS[type(scheduler)]))
    last = scheduler.lrs_at(_FOREVER)
    if scheduler.lrs_at(_FOREVER // 2) != last:
        return None
    # from above: a warm-up may pass through the last rate
    low = next((2**power for power in range(49, -1, -1) if scheduler.lrs_at(2**power) != last), 0)
    high = 2 * low or 1
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if scheduler.lrs_at(middle) == last else (middle + 1, high)
    peak = max(scheduler.lrs_at(step)[0] for step in {0, max(high - 1, 0), *(run * part // 20 for part in range(20))})
    return high if last[0] < peak else None  # a warm-up alone may end anywhere


def _rates(schedule: Schedule, step: int) -> str:
    return ", ".join(f"{lr:g}" for lr in dict.fromkeys(schedule.lrs_at(step)))


def _two_schedules(entries: Sequence[Attached]) -> Iterator[Conflict]:
    by_optimizer: dict[int, list[str]] = {}
    for owner in owners([entry for entry in entries if entry.acts]):
        if (scheduler := scheduler_of(owner)) is not None and hasattr(scheduler, "optimizer"):
            name = str(getattr(owner, "name", type(scheduler).__name__))
            by_optimizer.setdefault(id(scheduler.optimizer), []).append(name)
    for names in by_optimizer.values():
        if len(names) > 1:
            yield Conflict(
                f"{' and '.join(names)} set the rates of one optimizer, where the last one wins: attach one of them, "
                "or make one schedule of both."
            )


def _retention(acting: Sequence[Acting], length: Length) -> Iterator[Conflict]:
    """Checkpoints that are deleted before what needs them."""
    entries = [entry for entry, _ in acting]
    for owner in owners(entries):
        if (found := options_of(owner)) is None:
            continue
        options, _ = found
        saves = [times for entry, times in acting if entry.owner is owner and entry.acts and _counts(entry)]
        yield from _kept_every(options, saves, length)
        gap = max((gap for times in saves if (gap := _gap(times, length))), default=None)
        for follower in owners(entries):
            patience, key = getattr(follower, "patience", None), getattr(follower, "key", None)
            if not isinstance(patience, int) or not isinstance(key, str) or gap is None or options.best == key:
                continue
            gaps = [
                _gap(times, length) or 0
                for entry, times in acting
                if (label := set_of(entry.owner)) is not None and key.startswith(f"{label}/") and _counts(entry)
            ]
            since = max(gaps, default=0) * patience
            if since >= options.keep_last * gap and not options.keep_every:
                yield Conflict(
                    f"{type(follower).__name__} ends the run {since:,} iterations after the best {key}, of which the "
                    f"checkpoints (keep_last={options.keep_last}, every {gap:,} iterations) are deleted by then: give "
                    f"Checkpoint best={key!r} to keep the best one."
                )


def _kept_every(options: SaveOptions, saves: Sequence[ActingTimes], length: Length) -> Iterator[Conflict]:
    known = [iterations for times in saves if (iterations := times.iterations(length)) is not None]
    every = options.keep_every
    if not (every and known and length.iterations) or options.best:
        return
    if not any(_has_a_multiple(iterations, every) for iterations in known):
        yield Conflict(
            f"keep_every={every} keeps nothing: no checkpoint is saved at a multiple of it; give a multiple of the "
            "interval at which it saves."
        )


def _has_a_multiple(iterations: Sequence[int], number: int) -> bool:
    if isinstance(iterations, range):  # whose remainders repeat
        iterations = iterations[: number // math.gcd(number, iterations.step)]
    return any(iteration % number == 0 for iteration in iterations)


def _counts(entry: Attached) -> bool:
    return entry.event not in (Events.STARTED, Events.COMPLETED)


def _gap(times: ActingTimes, length: Length) -> int | None:
    """Iterations from one time to the next."""
    if times.every is None:
        return None
    return times.every if times.unit == "iteration" else times.every * length.per_epoch if length.per_epoch else None


def _metrics(acting: Sequence[Acting]) -> Iterator[Conflict]:
    """Metrics that are followed, and that no attached handler is known to write."""
    entries = [entry for entry, _ in acting]
    evaluations = {label: owner for owner in owners(entries) if (label := set_of(owner)) is not None}
    runs: dict[str, bool] = {}
    for entry, times in acting:
        if (label := set_of(entry.owner)) is not None and (entry.acts or not _counts(entry)):
            runs[label] = runs.get(label, False) or not (times.never or _is_bookkeeping(entry))
    for owner in owners(entries):
        if (followed := followed_by(owner)) is None:
            continue
        key, setting = followed
        group, slash, name = key.rpartition("/")
        if not slash or group in _OWN_GROUPS:
            continue
        if group not in evaluations:
            near = did_you_mean(group, evaluations) if evaluations else "."
            yield Conflict(
                f"{setting} follows {key}, and no evaluation is called {group!r}{near.removesuffix('.')}: a handler of "
                "your own must write it.",
                certain=False,
            )
        elif name not in (metrics := metrics_of(evaluations[group].evaluator)) and metrics:
            near = did_you_mean(name, metrics)
            yield Conflict(f"{setting} follows {key}, which the evaluation {group} does not write{near}", certain=False)
        elif not runs.get(group, False):
            yield Conflict(f"{setting} follows {key}, and the evaluation {group} never runs: attach it to an event.")


def metrics_of(evaluator: Engine) -> list[str]:
    """The names under which Ignite's metrics are attached to an engine."""
    arguments = (args for _, args, _ in handlers_of(evaluator, Events.EPOCH_COMPLETED))
    return list(dict.fromkeys(str(argument) for args in arguments for argument in args if isinstance(argument, str)))


def _is_bookkeeping(entry: Attached) -> bool:
    return entry.event == Events.STARTED and not entry.acts and describe_filter(entry.handler) == ""
