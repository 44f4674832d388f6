"""A panel as a place for a chart and the data that the page's script draws in it; and as a picture of its own."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from ignite_engine.report.panels import COLOURS, Line, Panel
from ignite_engine.report.scales import Point, averaged, log_ticks, thin, ticks
from ignite_engine.text import short

BUCKETS = 500
LOG_FROM = 30.0
WIDTH, HEIGHT = 1000.0, 300.0


class Axes:
    """From values to coordinates in a picture of WIDTH by HEIGHT with its origin at the top left."""

    def __init__(self, panel: Panel) -> None:
        ys = [point[1] for line in panel.lines for point in line.points]
        self.left, self.right = span_of([panel])
        low, high = min(ys), max(ys)
        self.is_log = is_log(panel)
        if panel.from_zero and not self.is_log and low >= 0:
            low = 0.0
        if not high > low:
            low, high = low - (abs(low) or 1.0) / 2, high + (abs(high) or 1.0) / 2
        self._scale = math.log10 if self.is_log else float
        margin = (self._scale(high) - self._scale(low)) * 0.05
        self.bottom = self._scale(low) - (0 if low == 0 else margin)
        self.top = self._scale(high) + margin
        self.y_ticks = log_ticks(low, high) if self.is_log else self._ticks_inside()
        self.x_ticks = [tick for tick in ticks(self.left, self.right, 5) if tick == int(tick)]

    def _ticks_inside(self) -> list[float]:
        return [tick for tick in ticks(self.bottom, self.top, 4) if self.bottom <= tick <= self.top]

    def x(self, value: float) -> float:
        return (value - self.left) / ((self.right - self.left) or 1.0) * WIDTH

    def y(self, value: float) -> float:
        return (1 - (self._scale(value) - self.bottom) / (self.top - self.bottom)) * HEIGHT


def span_of(panels: Sequence[Panel]) -> tuple[float, float]:
    """The first and the last iteration of all curves."""
    xs = [line.points[end][0] for panel in panels for line in panel.lines for end in (0, -1)]
    return min(xs), max(xs)


def is_log(panel: Panel) -> bool:
    """Whether an axis of powers shows more: values are positive and far apart."""
    ys = [point[1] for line in panel.lines for point in line.points]
    return panel.may_be_log and min(ys) > 0 and max(ys) / min(ys) > LOG_FROM


def chart(panel: Panel, number: int) -> tuple[str, dict[str, Any]]:
    """The panel as a ``<figure>``, and what the page's script draws in it: lines of ``[iteration, value]``."""
    notes = "".join(f'<p class="note">{escape(note)}</p>' for note in panel.notes)
    html = (
        f'<figure data-chart="{number}"><figcaption><h3>{escape(panel.title)}</h3>'
        f'<span class="unit">{escape(panel.unit)}</span></figcaption><div class="plot"></div>{notes}</figure>'
    )
    data = {
        "title": panel.title,
        "log": is_log(panel),
        "zero": panel.from_zero,
        "stacked": panel.stacked,
        "exact": panel.exact,
        "lines": [
            {
                "name": line.name,
                "mark": line.mark % COLOURS,
                "dashed": line.dashed,
                "run": line.run,
                "points": [[_short_number(x), _short_number(y)] for x, y in _thinned(line, panel.stacked)],
            }
            for line in panel.lines
        ],
    }
    return html, data


def script_data(values: Sequence[Mapping[str, Any]]) -> str:
    """JSON that is safe inside a ``<script>``."""
    return json.dumps(values, separators=(",", ":")).replace("<", "\\u003c")


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


def _thinned(line: Line, stacked: bool) -> Sequence[Point]:
    return averaged(line.points, BUCKETS) if stacked else thin(line.points, BUCKETS)


def _tick(value: float, all_ticks: Sequence[float]) -> str:
    return "0" if abs(value) < 1e-9 * max(abs(tick) for tick in all_ticks) else short(value)


def _short_number(value: float) -> float | int:
    return int(value) if abs(value) < 1e15 and value == int(value) else float(f"{value:.5g}")
