"""The learning rate over a run before it runs, as an SVG."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from ignite_engine.report.charts import svg_file
from ignite_engine.report.panels import Line, Panel

POINTS = 600


class Curve(Protocol):
    """A schedule that can be asked for the LR of each parameter group at any step."""

    def lrs_at(self, step: int) -> list[float]: ...


def lr_svg(schedules: Mapping[str, Curve], total: int) -> str:
    """The LR of every parameter group of each optimizer as an SVG picture; groups with equal LRs share a line."""
    steps = sorted({round(index * (total - 1) / (POINTS - 1)) for index in range(POINTS)})
    found: dict[tuple[float, ...], str] = {}
    for name, schedule in schedules.items():
        groups = dict.fromkeys(zip(*[schedule.lrs_at(step) for step in steps]))
        for index, rates in enumerate(groups):
            group = f"group {index}" if len(schedules) == 1 else f"{name} {index}" if len(groups) > 1 else name
            found.setdefault(rates, group)
    lines = [
        Line(label, [(step + 1, rate) for step, rate in zip(steps, rates)], mark)
        for mark, (rates, label) in enumerate(found.items())
    ]
    return svg_file(Panel("Learning rate", "", lines))
