"""A panel as HTML: the curves as SVG that scales with the page, the labels as text that does not."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from html import escape
from typing import Any

from ignite_engine.report.panels import COLOURS, Line, Panel
from ignite_engine.report.scales import Point, averaged, log_ticks, short, thin, ticks

BUCKETS = 300
LOG_FROM = 30.0
DOTS_UP_TO = 30
WIDTH, HEIGHT = 1000.0, 300.0
_LAST = ' class="last"'


class Axes:
    """From values to coordinates in a picture of WIDTH by HEIGHT with its origin at the top left.

    Args:
        span: the first and last iteration of the axis; None: those of the panel.
    """

    def __init__(self, panel: Panel, span: tuple[float, float] | None = None) -> None:
        points = [point for line in panel.lines for point in line.points]
        ys = [point[1] for point in points]
        self.left, self.right = span or span_of([panel])
        low, high = min(ys), max(ys)
        if panel.stacked:
            totals = [sum(column) for column in zip(*[[point[1] for point in line.points] for line in panel.lines])]
            low, high = 0.0, max(totals)
        self.is_log = panel.may_be_log and low > 0 and high / low > LOG_FROM
        if panel.from_zero and not self.is_log and low >= 0:
            low = 0.0
        if not high > low:
            low, high = low - (abs(low) or 1.0) / 2, high + (abs(high) or 1.0) / 2
        self._scale = math.log10 if self.is_log else float
        margin = (self._scale(high) - self._scale(low)) * 0.05
        self.bottom = self._scale(low) - (0 if low == 0 else margin)
        self.top = self._scale(high) + margin
        self.y_ticks = log_ticks(low, high) if self.is_log else self._ticks_inside(low, high)
        self.x_ticks = [tick for tick in ticks(self.left, self.right, 5) if tick == int(tick)]

    def _ticks_inside(self, low: float, high: float) -> list[float]:
        return [tick for tick in ticks(self.bottom, self.top, 4) if self.bottom <= tick <= self.top]

    def x(self, value: float) -> float:
        return (value - self.left) / ((self.right - self.left) or 1.0) * WIDTH

    def y(self, value: float) -> float:
        return (1 - (self._scale(value) - self.bottom) / (self.top - self.bottom)) * HEIGHT


def span_of(panels: Sequence[Panel]) -> tuple[float, float]:
    """The first and the last iteration of all curves."""
    xs = [line.points[end][0] for panel in panels for line in panel.lines for end in (0, -1)]
    return min(xs), max(xs)


def chart(panel: Panel, number: int, span: tuple[float, float]) -> tuple[str, dict[str, Any]]:
    """The panel as a ``<figure>``, and the data from which the page's script shows the values under the pointer."""
    lines = [_thinned(line, panel.stacked) for line in panel.lines]
    axes = Axes(panel, span)
    drawn = _areas(lines, axes) if panel.stacked else "".join(_curve(line, axes) for line in lines)
    grid = "".join(f'<path class="grid" d="M0 {axes.y(tick):.1f}H{WIDTH:g}"/>' for tick in axes.y_ticks)
    y_labels = "".join(
        f'<span style="top:{axes.y(tick) / HEIGHT:.2%}">{escape(_tick(tick, axes.y_ticks))}</span>'
        for tick in axes.y_ticks
    )
    x_labels = "".join(
        f'<span{_LAST if axes.x(tick) > 0.97 * WIDTH else ""} style="left:{axes.x(tick) / WIDTH:.2%}">'
        f"{escape(_tick(tick, axes.x_ticks))}</span>"
        for tick in axes.x_ticks
    )
    legend = "".join(f'<li class="c{line.mark % COLOURS}">{escape(line.name)}</li>' for line in lines)
    unit = ", ".join(part for part in (panel.unit, "logarithmic" if axes.is_log else "") if part)
    notes = "".join(f'<p class="note">{escape(note)}</p>' for note in panel.notes)
    label = escape(f"{panel.title} by iteration", quote=True)
    html = (
        f'<figure data-chart="{number}"><figcaption><h3>{escape(panel.title)}</h3>'
        f'<span class="unit">{escape(unit)}</span><ul class="legend">{legend}</ul></figcaption>'
        f'<div class="plot"><div class="y">{y_labels}</div><div class="field">'
        f'<svg viewBox="0 0 {WIDTH:g} {HEIGHT:g}" preserveAspectRatio="none" role="img" aria-label="{label}">'
        f'{grid}{drawn}</svg><div class="cursor"></div><div class="values"></div></div>'
        f'<div class="x">{x_labels}</div><div class="xname">iteration</div></div>{notes}</figure>'
    )
    data = {
        "left": axes.left,
        "right": axes.right,
        "lines": [
            {"name": line.name, "mark": line.mark % COLOURS, "points": [[_plain(x), _plain(y)] for x, y in line.points]}
            for line in lines
        ],
    }
    return html, data


def script_data(charts: Sequence[dict[str, Any]]) -> str:
    """JSON that is safe inside a ``<script>``."""
    return json.dumps(charts, separators=(",", ":")).replace("<", "\\u003c")


def svg_file(panel: Panel, *, width: int = 720, height: int = 360) -> str:
    """One panel as a stand-alone SVG picture with its labels."""
    axes, left, top = Axes(panel), 64, 40
    across, down = (width - left - 16) / WIDTH, (height - top - 44) / HEIGHT
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'font-family="system-ui, sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<text x="{left}" y="24" font-size="15" font-weight="600">{escape(panel.title)}</text>',
        f'<text x="{width - 16}" y="{height - 10}" text-anchor="end" fill="#555">iteration</text>',
    ]
    for tick in axes.y_ticks:
        at = top + axes.y(tick) * down
        parts.append(f'<path d="M{left} {at:.1f}H{width - 16}" stroke="#ddd"/>')
        parts.append(f'<text x="{left - 8}" y="{at + 4:.1f}" text-anchor="end">{_tick(tick, axes.y_ticks)}</text>')
    for tick in axes.x_ticks:
        at = left + axes.x(tick) * across
        parts.append(f'<text x="{at:.1f}" y="{height - 26}" text-anchor="middle">{_tick(tick, axes.x_ticks)}</text>')
    for line, colour in zip(panel.lines, ("#2563eb", "#c2410c", "#047857", "#7c3aed") * len(panel.lines)):
        points = " ".join(
            f"{left + axes.x(x) * across:.1f},{top + axes.y(y) * down:.1f}" for x, y in thin(line.points, BUCKETS)
        )
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def _thinned(line: Line, stacked: bool) -> Line:
    points = averaged(line.points, BUCKETS) if stacked else thin(line.points, BUCKETS)
    return Line(line.name, points, line.mark, line.dashed)


def _curve(line: Line, axes: Axes) -> str:
    places = [(axes.x(x), axes.y(y)) for x, y in line.points]
    kind = f"c{line.mark % COLOURS}{' dashed' if line.dashed else ''}"
    drawn = f'<path class="line {kind}" d="{_path(places)}"/>'
    if len(places) <= DOTS_UP_TO:
        drawn += f'<path class="dot {kind}" d="{"".join(f"M{x:.1f} {y:.1f}h0" for x, y in places)}"/>'
    return drawn


def _areas(lines: Sequence[Line], axes: Axes) -> str:
    """Each line's values on top of those before it."""
    floor = [0.0] * len(lines[0].points)
    drawn = []
    for line in lines:
        ceiling = [below + point[1] for below, point in zip(floor, line.points)]
        xs = [axes.x(point[0]) for point in line.points]
        over = [(x, axes.y(value)) for x, value in zip(xs, ceiling)]
        under = [(x, axes.y(value)) for x, value in zip(reversed(xs), reversed(floor))]
        drawn.append(f'<path class="area c{line.mark % COLOURS}" d="{_path([*over, *under])}Z"/>')
        floor = ceiling
    return "".join(drawn)


def _path(places: Sequence[Point]) -> str:
    return "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in places)


def _tick(value: float, all_ticks: Sequence[float]) -> str:
    return "0" if abs(value) < 1e-9 * max(abs(tick) for tick in all_ticks) else short(value)


def _plain(value: float) -> float | int:
    return int(value) if value == int(value) else float(f"{value:.5g}")
