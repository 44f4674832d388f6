"""Runs that belong together, such as the seeds of one config: a mean with a band in the place of a curve for each."""

from __future__ import annotations

import math
import os
import re
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ignite_engine.errors import did_you_mean
from ignite_engine.report.records import Record
from ignite_engine.report.scales import Point
from ignite_engine.run_directory import flat
from ignite_engine.text import short

SEED = "run.seed"
_OF_EACH_RUN = (SEED, "run.name", "run.directory")
POINTS = 500
"""Points of a mean curve."""


class NoSuchKey(ValueError):
    """No config has the key to group by; one line that names those which there are."""


@dataclass(frozen=True)
class Group:
    """Runs by their place among those compared, with one name and colour."""

    name: str
    members: Sequence[int]


def groups_of(runs: Sequence[Record], names: Sequence[str], key: str | None = None) -> list[Group]:
    """The groups in the order of their first runs.

    Args:
        key: dotted, of the configs; runs with the same value are a group. None: runs that differ in their seed alone.

    Raises:
        NoSuchKey: no config has the key.
    """
    configs = [flat(run.config) for run in runs]
    if key is not None:
        known = dict.fromkeys(key for config in configs for key in config)
        if key not in known:
            raise NoSuchKey(f"--group-by: got {key!r}, which no config has{did_you_mean(key, known)}")
        values = [repr(config.get(key)) for config in configs]
        word = key.rpartition(".")[2]
        titles = [f"{word} {_text(config.get(key, 'not set'))}" for config in configs]
        return [Group(titles[members[0]], members) for members in _by_value(values)]
    values = [repr({key: value for key, value in config.items() if key not in _OF_EACH_RUN}) for config in configs]
    groups: list[Group] = []
    for members in _by_value(values):
        seeds = {repr(configs[member].get(SEED)) for member in members}
        if len(members) > 1 and configs[members[0]] and len(seeds) == len(members):
            groups.append(Group(f"{_common(names, members)}, {len(members)} seeds", members))
        else:
            groups += [Group(names[member], [member]) for member in members]
    return sorted(groups, key=lambda group: group.members[0])


def _by_value(values: Sequence[str]) -> list[list[int]]:
    found: dict[str, list[int]] = {}
    for place, value in enumerate(values):
        found.setdefault(value, []).append(place)
    return list(found.values())


def _common(names: Sequence[str], members: Sequence[int]) -> str:
    """``lr0.1`` for ``lr0.1_seed1`` and ``lr0.1_seed2``; the first name where they have nothing in common."""
    prefix = os.path.commonprefix([names[member] for member in members])  # noqa: RUF071  # of letters, not of a path
    return re.sub(r"[ _.=-]*(?:(?<![a-z])(?:seed|s)[ _.=-]*\d*)?$", "", prefix) or names[members[0]]


def _text(value: Any) -> str:
    return short(value) if isinstance(value, float) else str(value)


def mean_and_band(curves: Sequence[Sequence[Point]]) -> tuple[list[Point], list[tuple[float, float, float]]]:
    """The mean of several curves, and the lowest and highest of them, from where all have begun to where one ends.

    Between its points a curve is straight.

    Returns:
        Points ``(x, mean)``, and ``(x, lowest, highest)``.
    """
    first, last = max(curve[0][0] for curve in curves), min(curve[-1][0] for curve in curves)
    if first > last:
        return [], []
    places = sorted({x for curve in curves for x, _ in curve if first <= x <= last})
    step = math.ceil(len(places) / POINTS) or 1
    chosen = [*places[:-1:step], *places[-1:]]
    columns = [[_at(curve, x) for curve in curves] for x in chosen]
    means = [(x, math.fsum(column) / len(column)) for x, column in zip(chosen, columns, strict=True)]
    return means, [(x, min(column), max(column)) for x, column in zip(chosen, columns, strict=True)]


def _at(curve: Sequence[Point], x: float) -> float:
    place = bisect_left(curve, x, key=lambda point: point[0])
    if curve[place][0] == x:
        return curve[place][1]
    (left, low), (right, high) = curve[place - 1], curve[place]
    return low + (high - low) * (x - left) / (right - left)


def summary_of(values: Sequence[float]) -> str:
    """``0.91 (0.90 to 0.93)``."""
    if len(values) == 1:
        return short(values[0], 5)
    mean = math.fsum(values) / len(values)
    return f"{short(mean, 4)} ({short(min(values), 4)} to {short(max(values), 4)})"


def marks_of(groups: Sequence[Group]) -> Mapping[int, int]:
    """The number of the group of each run."""
    return {member: number for number, group in enumerate(groups) for member in group.members}
