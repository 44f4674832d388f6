"""Goals of the benchmarks: what was measured, and the most that it should be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.ratios import Ratio


@dataclass(frozen=True)
class Goal:
    """``what`` should be at most ``goal``.

    Args:
        what: as a reader of the table needs it: both sides of a ratio, or the quantity and its unit.
        value: the figure; NaN misses.
        goal: None: a figure that is reported beside the goals.
        low: of its 95 % interval; None: it has none.
        high: likewise.
    """

    what: str
    value: float
    goal: float | None
    low: float | None = None
    high: float | None = None

    @classmethod
    def of(cls, what: str, ratio: Ratio, goal: float | None) -> Goal:
        return cls(what, ratio.value, goal, ratio.low, ratio.high)

    @classmethod
    def read(cls, report: dict[str, Any]) -> list[Goal]:
        """Those of a benchmark's JSON: its ``goals``, or the ``targets`` of the overhead."""
        goals = [cls(**row) for row in report.get("goals", ())]
        for row in report.get("targets", ()):
            what = f"{row['setting']}: {row['contender']} / {row['baseline']}"
            goals.append(cls(what, row["value"], row["goal"], row["low"], row["high"]))
        return goals

    @property
    def verdict(self) -> str:
        """By the figure itself, not its interval."""
        if self.goal is None:
            return "-"
        return "met" if self.value <= self.goal else "missed"

    @property
    def figure(self) -> str:
        bracket = "" if self.low is None or self.high is None else f" [{self.low:.3f}, {self.high:.3f}]"
        return f"{self.value:.3f}{bracket}"


def print_goals(goals: Sequence[Goal]) -> None:
    """One line each."""
    for each in goals:
        goal = "" if each.goal is None else f", goal {each.goal:g}: {each.verdict}"
        print(f"{each.what}: {each.figure}{goal}")
