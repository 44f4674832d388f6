"""A panel as a place for a chart and the data that the page's script draws in it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from ignite_engine.ext.report.panels import COLOURS, Panel
from ignite_engine.ext.report.scales import averaged, thin

BUCKETS = 500
LOG_FROM = 30.0


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
    thinned = averaged if panel.stacked else thin
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
                "points": [[_short_number(x), _short_number(y)] for x, y in thinned(line.points, BUCKETS)],
            }
            for line in panel.lines
        ],
    }
    return html, data


def script_data(values: Sequence[Mapping[str, Any]]) -> str:
    """JSON that is safe inside a ``<script>``."""
    return json.dumps(values, separators=(",", ":")).replace("<", "\\u003c")


def _short_number(value: float) -> float | int:
    return int(value) if abs(value) < 1e15 and value == int(value) else float(f"{value:.5g}")
