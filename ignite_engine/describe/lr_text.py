"""The learning rate over a run before it runs, as a plot in characters."""

from __future__ import annotations

from typing import Protocol

from ignite_engine.text import short


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
    first, middle, last = "1", short((total + 1) / 2), short(total, 6)
    under = f"{first:<{width // 2}}{middle:<{width - width // 2 - len(last)}}{last}"
    return [*lines, f"  {'0':>9} +{'-' * width}", f"  {unit:>9}  {under}"]
