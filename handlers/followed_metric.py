"""One key of ``state.metrics`` that a handler acts on."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from typing import Any

from ignite.engine import Engine

from ignite_engine.ranks import agreement


class FollowedMetric:
    """New values of one metric, the same on every rank, for a handler of ``METRICS_READY``.

    Args:
        key: in ``state.metrics``; written on every rank, at the same iterations.
        follower: names the handler in the warning about a key that nothing writes.
    """

    def __init__(self, key: str, follower: str) -> None:
        self.key, self.follower = key, follower
        self.seen_at: int | None = None
        """The iteration of the last value, for the handler's state: each value is used once, also over a resume."""
        self._warned = False

    def new_value(self, trainer: Engine) -> float | None:
        """The mean over the ranks of the value written at this iteration, or None; a collective if there is one."""
        metrics, iteration = trainer.state.metrics, trainer.state.iteration
        fresh: Mapping[str, Any] = getattr(metrics, "fresh", metrics)
        if self.key not in fresh:
            group = self.key.rpartition("/")[0]
            if group and self.seen_at is None and any(key.startswith(f"{group}/") for key in fresh):
                self._warn(fresh)
            return None
        if self.seen_at == iteration:
            return None
        self.seen_at = iteration
        return agreement.mean_floats([float(fresh[self.key])])[0]

    def begin(self, trainer: Engine) -> None:
        """At the start of a run: forget a value of a later iteration, which belongs to another run."""
        if self.seen_at is not None and self.seen_at > trainer.state.iteration:
            self.seen_at = None

    def warn_if_never_written(self, trainer: Engine) -> None:
        """Warn at the end of a run in which the key was never written."""
        if self.seen_at is None and trainer.state.iteration and getattr(trainer.state, "status", "") == "completed":
            self._warn(trainer.state.metrics)

    def _warn(self, written: Mapping[str, Any]) -> None:
        if self._warned or agreement.rank() != 0:
            return
        self._warned = True
        keys = ", ".join(sorted(written)) or "nothing"
        warnings.warn(
            f"{self.follower} follows {self.key!r}, which has not been written (written: {keys}): it does nothing; "
            "name one of those, or attach the handler that writes it.",
            stacklevel=2,
        )


def improves(value: float, best: float | None, mode: str, min_delta: float = 0.0) -> bool:
    """Whether a finite ``value`` is better than ``best`` by more than ``min_delta``; None: there was none before."""
    if not math.isfinite(value) or best is None:
        return math.isfinite(value)
    return value < best - min_delta if mode == "min" else value > best + min_delta
