"""Whether the memory of this process grows from iteration to iteration."""

from __future__ import annotations

from itertools import pairwise

from ignite_engine.handlers.host_memory import anonymous_mib
from ignite_engine.report.goodput import Growth

_MOST = 128
"""Samples that are kept: at more every second one is dropped, and half as many are taken from then on."""


class MemoryGrowth:
    """Samples of the process's own memory, without the pages of files that it reads."""

    def __init__(self) -> None:
        self._samples: list[tuple[int, float]] = []
        self._stride = 1
        self.due = 1
        """The step after which the next sample is taken."""
        self.in_first_pass = True
        """All samples are of the first pass over the data, in which a data set may fill a cache."""

    def sample(self, step: int) -> None:
        """Take one, after so many steps."""
        self._samples.append((step, anonymous_mib()))
        if len(self._samples) > _MOST:
            self._samples, self._stride = self._samples[::2], 2 * self._stride
        self.due = step + self._stride

    def pass_ended(self) -> None:
        """The first pass has ended: what came before is no sign."""
        if self.in_first_pass:
            self.in_first_pass, self._samples = False, []

    def found(self) -> Growth | None:
        """How it has grown since the first quarter of the samples, which warm up; None: not steadily.

        In each of four windows the least that was in use counts, as garbage comes and goes.
        """
        judged = self._samples[len(self._samples) // 4 :]
        size = len(judged) // 4
        if size < 2:
            return None
        least = [min(judged[at * size : (at + 1) * size], key=lambda sample: sample[1]) for at in range(4)]
        total = least[3][1] - least[0][1]
        if any(after[1] - before[1] < total / 6 for before, after in pairwise(least)):
            return None
        return Growth(least[3][0] - least[0][0], total, judged[-1][1], self.in_first_pass) if total > 0 else None
