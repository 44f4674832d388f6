"""The axes of epochs and hours of a run, and the marks where it was stopped and resumed, from its log."""

from __future__ import annotations

import datetime
import math
from collections.abc import Mapping
from typing import Any

from ignite_engine.ext.report.records import Record

PLACES = 300


def timeline(run: Record) -> dict[str, Any]:
    """Data for the page's script: iterations per epoch or None, pairs of iteration and hours, of iteration and mark."""
    return {"epoch": iterations_per_epoch(run), "hours": hours(run), "marks": marks(run)}


def iterations_per_epoch(run: Record) -> float | None:
    """The length of an epoch if all log points agree with one; None with fewer than two epochs."""
    points = run.series.get("epoch", ())
    if not points or points[-1][1] < 2:
        return None
    least = max(iteration / epoch for iteration, epoch in points if epoch >= 1)
    most = min((iteration / (epoch - 1) for iteration, epoch in points if epoch > 1), default=math.inf)
    return least if least <= most else None


def hours(run: Record) -> list[tuple[float, float]]:
    """Hours of training without evaluations, by iteration; empty if no speed was logged."""
    pace = [(at, ms / 3.6e6) for at, ms in run.series.get("time/step_ms", ())]
    if not pace:
        pace = [(at, 1 / rate / 3600) for at, rate in run.series.get("throughput/steps_per_s", ()) if rate > 0]
    total, before = 0.0, 0.0
    found: list[tuple[float, float]] = [(0, 0.0)]
    for iteration, hours_each in pace:
        total, before = total + (iteration - before) * hours_each, iteration
        found.append((iteration, float(f"{total:.6g}")))
    step = math.ceil(len(found) / PLACES)
    return [*found[:-1:step], found[-1]] if len(found) > 1 else []


def marks(run: Record) -> list[tuple[int, str]]:
    """The iterations at which the run was stopped, killed or resumed."""
    found: dict[int, list[str]] = {}
    ended = True
    for entry in run.history:
        what, iteration = str(entry.get("what")), entry["iteration"]
        if what == "resumed":
            found.setdefault(iteration, []).append("resumed" if ended else "resumed after a kill")
        elif what not in ("started", "completed", "running"):
            found.setdefault(iteration, []).append(str(entry.get("reason") or what)[:24])
        ended = what not in ("started", "resumed")
    return [(iteration, ", ".join(dict.fromkeys(words))) for iteration, words in sorted(found.items())]


def seconds(run: Record) -> float | None:
    """The total duration of all starts of the run; None if none is recorded."""
    total, began, known = 0.0, None, False
    for entry in run.history:
        at = _time_of(entry)
        if entry.get("what") in ("started", "resumed"):
            began = at
        elif began is not None and at is not None:
            total, began, known = total + (at - began).total_seconds(), None, True
    if known:
        return total
    wall = run.summary.get("wall_s")
    return float(wall) if isinstance(wall, int | float) else None


def _time_of(entry: Mapping[str, Any]) -> datetime.datetime | None:
    try:
        at = datetime.datetime.fromisoformat(str(entry.get("at")))
    except ValueError:
        return None
    return at if at.tzinfo is not None else at.replace(tzinfo=datetime.UTC)
