"""What a sweep has shown: for each setting that differs, a picture with a point for each run."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

from ignite_engine.report.charts import LOG_FROM
from ignite_engine.report.panels import COLOURS
from ignite_engine.report.records import Record
from ignite_engine.report.scales import log_ticks, ticks
from ignite_engine.run_directory import flat
from ignite_engine.text import short

SHOWN = 8
"""Pictures; of more settings the first."""
LEAST = 3
"""Runs; fewer are read in the table."""
_WIDTH, _HEIGHT = 360, 220
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 12, 10, 26


class _Axis:
    """From values to their places between two coordinates: numbers, powers where they lie far apart, or names."""

    def __init__(self, values: Sequence[object], start: float, end: float, *, may_be_log: bool = True) -> None:
        self._start, self._end = start, end
        numbers = [float(v) for v in values if isinstance(v, int | float) and not isinstance(v, bool)]
        self._names = [] if len(numbers) == len(values) else sorted({str(value) for value in values})
        low, high = (min(numbers), max(numbers)) if not self._names else (0.0, max(len(self._names) - 1, 1))
        self._is_log = may_be_log and not self._names and low > 0 and high / low >= LOG_FROM
        if self._names:
            self.ticks = [(float(at), name) for at, name in enumerate(self._names)]
        else:
            found = log_ticks(low, high, 4) if self._is_log else ticks(low, high, 4)
            self.ticks = [(tick, short(tick, 3)) for tick in found]
        self._low, self._high = self._scaled(low), self._scaled(high)

    def _scaled(self, number: float) -> float:
        return math.log10(number) if self._is_log else number

    def place(self, value: object) -> float:
        number = float(self._names.index(str(value))) if self._names else float(value)  # type: ignore[arg-type]  # a number
        return self.at(number)

    def at(self, number: float) -> float:
        width = (self._high - self._low) or 1.0
        share = 0.06 + 0.88 * ((self._scaled(number) - self._low) / width if self._high > self._low else 0.5)
        return self._start + share * (self._end - self._start)


def scatter_section(
    runs: Sequence[Record],
    names: Sequence[str],
    settings: Sequence[str],
    metric: str | None,
    mode: str | None,
    marks: Mapping[int, int],
) -> list[str]:
    """The pictures as HTML: the best value of ``metric`` over each of ``settings``; nothing for fewer than three runs.

    Args:
        marks: the colour of each run, by its place.
    """
    if metric is None:
        return []
    best = {place: point[1] for place, run in enumerate(runs) if (point := run.best(metric, mode)) is not None}
    configs = [flat(run.config) for run in runs]
    if len(best) < LEAST:
        return []
    figures = []
    for key in settings:
        values = {place: configs[place][key] for place in best if key in configs[place]}
        if len(values) >= LEAST and len({repr(value) for value in values.values()}) > 1 and not _names_runs(key):
            figures.append(_figure(key, values, best, names, marks))
    if not figures:
        return []
    title = f'<h2>What made the difference <span class="unit">{escape(metric)}, best of each run</span></h2>'
    return [title, f'<div class="charts">{"".join(figures[:SHOWN])}</div>']


def _names_runs(key: str) -> bool:
    return key in ("run.name", "run.seed")


def _figure(
    key: str, values: Mapping[int, object], best: Mapping[int, float], names: Sequence[str], marks: Mapping[int, int]
) -> str:
    across = _Axis(list(values.values()), _LEFT, _WIDTH - _RIGHT)
    up = _Axis([best[place] for place in values], _HEIGHT - _BOTTOM, _TOP)
    parts = []
    for tick, text in up.ticks:
        y = up.at(tick)
        parts.append(f'<path d="M{_LEFT} {y:.1f}H{_WIDTH - _RIGHT}"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{escape(text)}</text>')
    for tick, text in across.ticks:
        x = across.at(tick)
        shown = text if len(text) <= 14 else f"{text[:13]}\N{HORIZONTAL ELLIPSIS}"
        parts.append(f'<text x="{x:.1f}" y="{_HEIGHT - 6}" text-anchor="middle">{escape(shown)}</text>')
    for place, value in values.items():
        title = f"{names[place]}: {key} {value}, {short(best[place], 5)}"
        colour, x, y = marks[place] % COLOURS, across.place(value), up.place(best[place])
        parts.append(
            f'<circle class="c{colour}" cx="{x:.1f}" cy="{y:.1f}" r="5"><title>{escape(title)}</title></circle>'
        )
    picture = f'<svg class="scatter" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img">{"".join(parts)}</svg>'
    return f"<figure><figcaption><h4>{escape(key)}</h4></figcaption>{picture}</figure>"
