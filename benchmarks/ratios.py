"""Ratios of medians, their confidence intervals, and the targets they are compared with."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median


@dataclass(frozen=True)
class Ratio:
    """A ratio of two medians with the bounds of its 95 % interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"


@dataclass(frozen=True)
class Target:
    """``contender`` should cost at most ``goal`` times ``baseline``, and never more than ``limit`` times."""

    setting: str
    contender: str
    baseline: str
    goal: float
    limit: float

    def verdict(self, ratio: Ratio) -> str:
        """``met``, ``within the limit`` or ``missed``, by the ratio itself, not its interval."""
        if ratio.value <= self.goal:
            return "met"
        return "within the limit" if ratio.value <= self.limit else "missed"


TARGETS = (
    Target("full", "ours+10real", "plain", goal=0.84, limit=0.88),
    Target("full", "ours+10real", "cheapest", goal=1.0, limit=1.06),
    Target("full", "ours+10", "plain", goal=0.88, limit=0.92),
    Target("full", "ours+10", "cheapest", goal=1.03, limit=1.06),
    Target("full", "ours+100", "ours+10", goal=1.02, limit=1.02),
    Target("bare", "ours+10real", "plain", goal=0.95, limit=1.0),
    Target("bare", "ours", "plain", goal=0.95, limit=1.0),
    Target("bare", "ours+100", "ours+10", goal=1.02, limit=1.02),
)


def ratio_of_medians(
    numerator: Sequence[float], denominator: Sequence[float], resamples: int = 2000, *, processes: int = 1
) -> Ratio:
    """The ratio with its bootstrap interval; rounds are drawn in pairs, because a slow round is slow for both.

    Args:
        numerator: one value per round.
        denominator: one value per round, the same rounds.
        processes: that the rounds come from, equally many each, one after the other; of several, processes are drawn
            first and then their rounds.

    Raises:
        ValueError: the lengths differ, or there is no round.
    """
    if len(numerator) != len(denominator) or not numerator:
        raise ValueError(
            f"Both sides need the same number of rounds, at least one, got {len(numerator)} and {len(denominator)}."
        )
    pairs = list(zip(numerator, denominator, strict=True))
    draw = random.Random(0)
    each = len(pairs) // processes
    by_process = [pairs[first : first + each] for first in range(0, len(pairs), each)]

    def sample() -> list[tuple[float, float]]:
        chosen = draw.choices(by_process, k=processes) if processes > 1 else by_process
        return [pair for rounds in chosen for pair in draw.choices(rounds, k=each)]

    drawn = sorted(_ratio(sample()) for _ in range(resamples))
    return Ratio(_ratio(pairs), drawn[int(0.025 * resamples)], drawn[int(0.975 * resamples)])


def _ratio(pairs: Sequence[tuple[float, float]]) -> float:
    return median(pair[0] for pair in pairs) / median(pair[1] for pair in pairs)
