"""The learning rate over a run before it runs: as a plot in characters, and as an SVG."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from ignite_engine.report.charts import svg_file
from ignite_engine.report.panels import Line, Panel
from ignite_engine.report.scales import short

POINTS = 600


class Curve(Protocol):
    """A schedule that can be asked for the LR of each parameter group at any step."""

    def lrs_at(self, step: int) -> list[float]: ...


def lr_text(schedule: Curve, total: int, *, width: int = 60, height: int = 12, unit: str = "update") -> list[str]:
    """Lines of text: the first group's LR at 11 steps, and a plot of ``width`` by ``height`` characters."""
    steps = sorted({round(share * (total - 1) / 10) for share in range(11)})
    lines = [f"Learning rate by {unit}:", *(f"  {step + 1:>9}  {schedule.lrs_at(step)[0]:.4e}" for step in steps)]
    columns = [schedule.lrs_at(round(column * (total - 1) / max(width - 1, 1)))[0] for column in range(width)]
    peak = max(columns)
    if peak <= 0:
        return lines
    for row in range(height, 0, -1):
        label = short(peak * row / height, 3) if row in (height, height // 2) else ""
        cells = "".join("#" if value >= peak * (row - 0.5) / height else " " for value in columns)
        lines.append(f"  {label:>9} |{cells}".rstrip())
    first, middle, last = "1", short((total + 1) / 2, 3), short(total, 6)
    under = f"{first:<{width // 2}}{middle:<{width - width // 2 - len(last)}}{last}"
    return [*lines, f"  {'0':>9} +{'-' * width}", f"  {unit:>9}  {under}"]


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
