"""What the judges share: case seeds, when to stop drawing, the result and how it is printed.

A judge is a module with ``run(seed, cases, minutes) -> Result``. Case ``i`` of a run is drawn from the number
``seed + i`` alone, so ``run(number, 1, None)`` reproduces it.
"""

from __future__ import annotations

import itertools
import os
import time
from collections import Counter
from dataclasses import dataclass, field

DEVICE = "SEARCH_DEVICE"
"""Names the kind of device on which cases of the resume and update judges train, here and in processes started here."""
PASSED = "passed"
REFUSED = "refused"
"""Every run of the case was refused at construction: it proves nothing."""


@dataclass(frozen=True)
class Failure:
    """A case that broke the promise: ``case`` reproduces it, ``reason`` says on one line what differs first."""

    judge: str
    case: int
    reason: str

    def __str__(self):
        return f"FAILED {self.judge} --case {self.case}: {self.reason}"


@dataclass
class Result:
    """What a judge found.

    Attributes:
        judge: its name.
        seed: of the run; its cases are ``seed``, ``seed + 1``, ...
        features: all that can be drawn, as ``dimension: value``; each must be exercised by a long enough run.
        outcomes: cases by outcome: ``passed``, ``refused``, and others of the judge's own. Failures are not in it.
        exercised: for each feature, in how many cases that were judged it really took part.
    """

    judge: str
    seed: int
    features: tuple[str, ...] = ()
    outcomes: Counter[str] = field(default_factory=Counter)
    exercised: Counter[str] = field(default_factory=Counter)
    failures: list[Failure] = field(default_factory=list)
    reasons: Counter[str] = field(default_factory=Counter)
    """Why cases came out otherwise than passed, such as ``refused: ValueError: ...``."""
    seconds: float = 0.0

    @property
    def cases(self):
        return self.outcomes.total() + len(self.failures)

    @property
    def never_exercised(self):
        """Features that no judged case exercised: in a long run a defect of the search."""
        return [feature for feature in self.features if not self.exercised[feature]]


def device_kind():
    return os.environ.get(DEVICE, "cpu")


def case_seeds(seed, cases, minutes):
    """The seeds of a run's cases, until there are ``cases`` of them or ``minutes`` have passed.

    Raises:
        ValueError: neither bounds the run.
    """
    if cases is None and minutes is None:
        raise ValueError("A search needs a number of cases or of minutes.")
    end = None if minutes is None else time.monotonic() + 60.0 * minutes
    for number in itertools.count(seed):
        if (cases is not None and number - seed >= cases) or (end is not None and time.monotonic() >= end):
            return
        yield number


def table_of(result):
    """The result as text: one line for each failure, then outcomes, then how often each feature was exercised."""
    lines = [str(each) for each in result.failures]
    counts = ", ".join(f"{count} {outcome}" for outcome, count in sorted(result.outcomes.items()))
    lines.append(
        f"{result.judge}: seed {result.seed}, {result.cases} cases in {result.seconds:.0f} s: "
        f"{len(result.failures)} failed{', ' if counts else ''}{counts}"
    )
    lines += [f"  {count} {reason}" for reason, count in result.reasons.most_common()]
    if result.cases == 1:
        return "\n".join(lines)
    lines.append("| dimension | exercised in so many cases |")
    lines.append("|---|---|")
    for dimension, values in itertools.groupby(result.features, lambda each: each.partition(": ")[0]):
        cells = [f"{value.partition(': ')[2]} {result.exercised[value]}" for value in values]
        lines.append(f"| {dimension} | {', '.join(cells)} |")
    if result.never_exercised:
        lines.append(f"never exercised: {', '.join(result.never_exercised)}")
    return "\n".join(lines)
