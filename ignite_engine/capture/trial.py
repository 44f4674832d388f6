"""The trial of ``auto``: plain iterations are timed, then captured ones."""

from __future__ import annotations

import time
from statistics import median

MEASURED = 50
WARM_UP = 10
MUST_GAIN = 0.95
"""Largest median of a captured iteration, in those of the plain way, with which ``auto`` keeps the capture."""


class Trial:
    """The durations of iterations, first of plain ones and then of captured ones."""

    def __init__(self) -> None:
        self._durations: tuple[list[float], list[float]] = [], []
        self._phase = 0
        self._seen = 0
        self._last: float | None = None

    @property
    def is_captured(self) -> bool:
        return self._phase == 1

    @property
    def ratio(self) -> float | None:
        """The ratio of the median durations, captured to plain; None: not known yet."""
        plain, captured = self._durations
        return None if len(captured) < MEASURED else median(captured) / median(plain)

    def count(self) -> None:
        """An iteration begins."""
        now = time.perf_counter()
        if self._last is not None:
            self._seen += 1
            if self._seen > WARM_UP:
                self._durations[self._phase].append(now - self._last)
        self._last = now
        if self._phase == 0 and len(self._durations[0]) >= MEASURED:
            self._phase, self._seen = 1, 0
