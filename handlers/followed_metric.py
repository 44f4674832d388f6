"""One key of ``state.metrics`` that a handler acts on."""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Callable, Mapping
from typing import Any

from ignite.engine import Engine

from ignite_engine.checkpoint.retention import usual_mode
from ignite_engine.errors import did_you_mean
from ignite_engine.ranks import agreement

logger = logging.getLogger(__name__)


class FollowedMetric:
    """New values of one metric, the same on every rank, for a handler of ``METRICS_READY``.

    Args:
        key: in ``state.metrics``; written on every rank, at the same iterations.
        setting: the handler and its argument, for the warning about a key that nothing writes:
            ``"Checkpoint(best='val/loss')"``.
        mode: ``min`` or ``max``: which value the handler takes for better; a warning if the key's name says otherwise.
        elsewhere: whether the metric was written outside of the run, by an evaluation beside it, say.
    """

    def __init__(
        self, key: str, setting: str, mode: str | None = None, *, elsewhere: Callable[[], bool] = lambda: False
    ) -> None:
        self.key, self.setting, self._elsewhere = key, setting, elsewhere
        if mode is not None and usual_mode(key) not in (None, mode) and agreement.rank() == 0:
            better = "larger" if mode == "max" else "smaller"
            logger.warning(
                "%s treats %s values as better (mode=%r): check that this is intended.", setting, better, mode
            )
        self.seen_at: int | None = None
        """The iteration of the last value, for the handler's state: each value is used once, also over a resume."""
        self._warned = False

    def new_value(self, trainer: Engine) -> float | None:
        """The mean over the ranks of the value written at this iteration, or None; a collective if there is one."""
        metrics, iteration = trainer.state.metrics, trainer.state.iteration
        fresh: Mapping[str, Any] = getattr(metrics, "fresh", metrics)
        if self.key not in fresh:
            group = self.key.rpartition("/")[0]
            if self.seen_at is None and group and any(name.startswith(f"{group}/") for name in metrics):
                self._warn(metrics)  # its group was written without it
            return None
        if self.seen_at == iteration:
            return None
        self.seen_at, value = iteration, fresh[self.key]
        if isinstance(value, list):
            raise ValueError(
                f"{self.setting}: {self.key} is a list, expected a metric that is one number: give the metric an "
                "average, or follow another one."
            )
        return agreement.mean_of([row[0] for row in agreement.gather_floats([float(value)])])

    def begin(self, trainer: Engine) -> None:
        """At the start of a run: forget a value of a later iteration, which belongs to another run."""
        if self.seen_at is not None and self.seen_at > trainer.state.iteration:
            self.seen_at = None

    def warn_if_never_written(self, trainer: Engine) -> None:
        """Warn at the end of a run in which the key was never written."""
        completed = trainer.state.iteration and getattr(trainer.state, "status", "") == "completed"
        if completed and self.seen_at is None and self.key not in trainer.state.metrics and not self._elsewhere():
            self._warn(trainer.state.metrics)

    def _warn(self, written: Mapping[str, Any]) -> None:
        if self._warned or agreement.rank() != 0:
            return
        self._warned = True
        warnings.warn(
            f"{self.setting} has no effect: nothing has written that metric{did_you_mean(self.key, written)}",
            stacklevel=2,
        )


def improves(value: float, best: float | None, mode: str, min_delta: float = 0.0) -> bool:
    """Whether a finite ``value`` is better than ``best`` by more than ``min_delta``; None: there was none before."""
    if not math.isfinite(value) or best is None:
        return math.isfinite(value)
    return value < best - min_delta if mode == "min" else value > best + min_delta
