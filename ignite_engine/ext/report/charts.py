"""Groups curves into charts, and prepares the data that the page's script draws."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from ignite_engine.ext.report.records import Record

COLOURS = 8
OF_ENGINE = ("throughput/", "time/", "memory/")
"""Prefixes of the engine's own measurements."""
_PLACES = ("loss", "", "lr", "grad_norm", "throughput", "time", "memory")
"""The order of the charts, by name or its first part; all others come second."""
_BUCKETS = 500
_LOG_FROM = 30.0

Point = tuple[float, float]


def charts_of(runs: Sequence[Record], names: Sequence[str]) -> list[dict[str, Any]]:
    """The charts: of one run one for each metric, with a line for each of its sets; of several one for each series.

    ``exact`` is without noise, so never smoothed. A series of one point has none, nor a result that never changes.
    """
    charts: dict[str, dict[str, Any]] = {}
    for number, run in enumerate(runs):
        drawn = {name: points for name, points in run.series.items() if len(points) > 1 and name != "epoch"}
        for name, points in drawn.items():
            title, line = _place(name) if len(runs) == 1 else (name, names[number])
            is_same = name.startswith("lr/") and points == drawn.get("lr")
            if is_same or (_is_result(name) and len({value for _, value in points}) == 1):
                continue
            chart = charts.setdefault(title, {"title": title, "name": name, "lines": [], "notes": []})
            mark = number if len(runs) > 1 else len(chart["lines"])
            thinned = [[_short(x), _short(y)] for x, y in thin(points)]
            chart["lines"].append(
                {"name": line, "mark": mark % COLOURS, "dashed": mark >= COLOURS, "run": number, "points": thinned}
            )
            if at := run.not_finite.get(name):
                more = f" and {len(at) - 3} more" if len(at) > 3 else ""
                chart["notes"].append(f"{line} is not finite at iteration {', '.join(map(str, at[:3]))}{more}")
    for chart in charts.values():
        name, values = chart["name"], [value for line in chart["lines"] for _, value in line["points"]]
        is_far_apart = min(values) > 0 and max(values) / min(values) > _LOG_FROM
        chart["log"] = is_far_apart and (name == "grad_norm" or "loss" in name.split("/"))
        chart["zero"] = not _is_result(name) and name != "loss"
        chart["exact"] = name.partition("/")[0] == "lr"
        chart["of_engine"] = name.startswith(OF_ENGINE)
    return sorted(charts.values(), key=lambda chart: _order(chart["name"]))


def figure(chart: dict[str, Any], number: int) -> str:
    """The HTML element of a chart."""
    notes = "".join(f'<p class="note">{escape(note)}</p>' for note in chart["notes"])
    return (
        f'<figure data-chart="{number}"><figcaption><h3>{escape(chart["title"])}</h3></figcaption>'
        f'<div class="plot"></div>{notes}</figure>'
    )


def thin(points: Sequence[Point]) -> list[Point]:
    """Keep the first, lowest, highest and last point in each of 500 equal parts of the range.

    No extreme is lost, and the curve looks like the whole at that many pixels.
    """
    if len(points) <= 4 * _BUCKETS:
        return list(points)
    low, high = points[0][0], points[-1][0]
    parts: dict[int, list[Point]] = {}
    for point in points:
        parts.setdefault(min(int((point[0] - low) / (high - low) * _BUCKETS), _BUCKETS - 1), []).append(point)
    return [
        point
        for part in parts.values()
        for point in sorted({part[0], min(part, key=_value), max(part, key=_value), part[-1]})
    ]


def _place(name: str) -> tuple[str, str]:
    """The chart and the line of a series of one run: ``val/loss`` is the line ``val`` of the chart ``loss``."""
    first, _, rest = name.partition("/")
    if first == "lr":
        return "lr", rest or "lr"
    if first == "throughput":
        return rest.replace("_per_s", "/s"), "all ranks"
    if name.startswith(OF_ENGINE):
        unit = rest.rpartition("_")[2]
        return (f"{first}, {'MiB' if unit == 'mib' else unit}"), rest.removesuffix(f"_{unit}")
    of, _, metric = name.rpartition("/")
    return metric, of or "train"


def _is_result(name: str) -> bool:
    """Whether it is a metric of an evaluation, such as ``val/loss``."""
    return "/" in name and not name.startswith(("lr/", *OF_ENGINE))


def _order(name: str) -> int:
    first = name.partition("/")[0]
    if name.rpartition("/")[2] == "loss":
        first = "loss"
    return _PLACES.index(first if first in _PLACES else "")


def _value(point: Point) -> float:
    return point[1]


def _short(value: float) -> float | int:
    return int(value) if abs(value) < 1e15 and value == int(value) else float(f"{value:.5g}")
