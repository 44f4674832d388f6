"""Complete a run when a metric has stopped improving."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any, Literal

from ignite.engine import Engine, Events

from ignite_engine import Trainer, TrainingEvents
from ignite_engine.checkpoint.retention import mode_of
from ignite_engine.errors import check_type, is_number, is_whole
from ignite_engine.handlers.followed_metric import FollowedMetric, improves

logger = logging.getLogger(__name__)


class EarlyStopping:
    """End the run after ``patience`` values of a metric in a row without an improvement, or at a threshold.

    Args:
        key: in ``state.metrics``; its mean over the ranks is compared, so that all of them decide the same.
        mode: whether lower (``min``) or higher (``max``) is better; None: as the metric's name says.
        patience: number of values without an improvement, at least 1; None: any, where a threshold is given.
        min_delta: the smallest change that is an improvement, exclusive, in the metric's unit.
        stopping_threshold: a value as good as this is good enough: the run ends.
        divergence_threshold: a value worse than this, or one that is not finite, ends the run.
        name: in checkpoints.

    The run ends as ``completed``: ``state.reason`` starts with ``early stopping:``, a checkpoint is saved, ``run()``
    returns. A value that is not finite is not an improvement. Started again, the run trains nothing further, unless
    ``patience`` is larger now or the threshold another.

    Raises:
        ValueError: a setting is out of its range, or nothing would end the run.
    """

    def __init__(
        self,
        key: str,
        *,
        patience: int | None = None,
        mode: Literal["min", "max"] | None = None,
        min_delta: float = 0.0,
        stopping_threshold: float | None = None,
        divergence_threshold: float | None = None,
        name: str = "early_stopping",
    ) -> None:
        check_type("key", key, isinstance(key, str), "the name of a metric")
        check_type("patience", patience, patience is None or is_whole(patience), "a whole number of values")
        check_type("min_delta", min_delta, is_number(min_delta), "a number")
        thresholds = {"stopping_threshold": stopping_threshold, "divergence_threshold": divergence_threshold}
        for setting, threshold in thresholds.items():
            check_type(setting, threshold, threshold is None or is_number(threshold), "a number, or None")
        if patience is None and stopping_threshold is None and divergence_threshold is None:
            raise ValueError(
                "EarlyStopping needs patience, stopping_threshold or divergence_threshold: got none of them."
            )
        if patience is not None and patience < 1:
            raise ValueError(f"patience must be at least 1 value without improvement, got {patience}.")
        if not 0 <= min_delta < math.inf:
            raise ValueError(f"min_delta must be a number of at least 0, got {min_delta}; mode gives the direction.")
        mode = mode_of(key, mode, "key")
        self.key, self.mode, self.patience, self.min_delta, self.name = key, mode, patience, min_delta, name
        self.stopping_threshold, self.divergence_threshold = stopping_threshold, divergence_threshold
        self.last: float | None = None
        """The newest value; None before the first."""
        self.best: float | None = None
        """The best value so far; None before the first finite one."""
        self.bad = 0
        """Number of values since the best one."""
        self._followed = FollowedMetric(key, f"EarlyStopping(key={key!r})", mode)

    def attach(self, engine: Engine, event: Any = TrainingEvents.METRICS_READY) -> None:
        """Compare at ``event``, if there is a new value."""
        trainer = Trainer.of(engine)
        trainer.register(self.name, self, shared=True)
        trainer.add_event_handler(Events.STARTED, self._start)
        trainer.add_event_handler(event, self)
        trainer.add_event_handler(Events.COMPLETED, self._followed.warn_if_never_written)

    def __call__(self, trainer: Trainer) -> None:
        """Compare a new value with the best one; a collective if there is a new value."""
        if trainer.state.status == "completed":
            return
        value = self._followed.new_value(trainer)
        if value is None:
            return
        self.last = value
        if improves(value, self.best, self.mode, self.min_delta):
            self.best, self.bad = value, 0
        else:
            self.bad += 1
        self._finish_if_due(trainer)

    def state_dict(self) -> dict[str, Any]:
        return {
            "key": self.key,
            "mode": self.mode,
            "best": self.best,
            "bad": self.bad,
            "last": self.last,
            "seen_at": self._followed.seen_at,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore best value and count; the settings are those given now."""
        if (state["key"], state["mode"]) != (self.key, self.mode):
            logger.warning(
                "%s followed %s (%s) before and follows %s (%s) now: best value and count start over.",
                self.name,
                state["key"],
                state["mode"],
                self.key,
                self.mode,
            )
            return
        self.best, self.bad, self.last = state["best"], state["bad"], state["last"]
        self._followed.seen_at = state["seen_at"]

    def begin_anew(self) -> None:
        """A run starts over: nothing was measured."""
        self.best, self.last, self.bad = None, None, 0

    def _start(self, trainer: Trainer) -> None:
        self._followed.begin(trainer)
        if not trainer.progress.epoch_is_full():
            self._finish_if_due(trainer)
            return

        def at_its_end(trainer: Trainer) -> None:
            epoch_ends.remove()
            self._finish_if_due(trainer)

        # a stop came between the value that decided and the end of its epoch
        epoch_ends = trainer.add_event_handler(Events.EPOCH_COMPLETED, at_its_end)

    def _finish_if_due(self, trainer: Trainer) -> None:
        if (why := self._why()) is not None:
            reason = f"early stopping: {self.key} {why}"
            logger.info("Iteration %d, %s.", trainer.state.iteration, reason)
            trainer.finish(reason)

    def _why(self) -> str | None:
        """Why the run is over; None: it is not."""
        last, good, bad = self.last, self.stopping_threshold, self.divergence_threshold
        sign = 1 if self.mode == "min" else -1
        if last is not None and good is not None and sign * last <= sign * good:
            return f"is {last:.6g}, as good as stopping_threshold={good:g}"
        if last is not None and bad is not None and not sign * last <= sign * bad:  # NaN, too
            return f"is {last:.6g}, worse than divergence_threshold={bad:g}"
        if self.patience is None or self.bad < self.patience:
            return None
        if self.best is None:
            return f"was not finite, {self.bad} times in a row"
        better = "below" if self.mode == "min" else "above"
        return f"was not {better} {self._bound():.6g}, {self.bad} times in a row"

    def _bound(self) -> float:
        assert self.best is not None
        return self.best - self.min_delta if self.mode == "min" else self.best + self.min_delta
