"""Complete a run when a metric has stopped improving."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, Literal

from ignite.engine import Engine, Events

from ignite_engine import Trainer, TrainingEvents
from ignite_engine.checkpoint.retention import mode_of
from ignite_engine.errors import is_number, is_whole
from ignite_engine.handlers.followed_metric import FollowedMetric, improves

logger = logging.getLogger(__name__)


class EarlyStopping:
    """End the run after ``patience`` values of a metric in a row without an improvement.

    Args:
        key: in ``state.metrics``; its mean over the ranks is compared, so that all of them decide the same.
        mode: whether lower (``min``) or higher (``max``) is better; None: as the metric's name says.
        patience: number of values without an improvement, at least 1.
        min_delta: the smallest change that is an improvement, exclusive, in the metric's unit.
        name: in checkpoints.

    The run ends as ``completed``: ``state.reason`` starts with ``early stopping:``, a checkpoint is saved, ``run()``
    returns. A value that is not finite is not an improvement. Started again, the run trains nothing further, unless
    ``patience`` is larger now.

    Raises:
        ValueError: a setting is out of its range.
    """

    def __init__(
        self,
        key: str,
        *,
        patience: int,
        mode: Literal["min", "max"] | None = None,
        min_delta: float = 0.0,
        name: str = "early_stopping",
    ) -> None:
        if not (is_whole(patience) and patience >= 1 and is_number(min_delta) and min_delta >= 0):
            raise ValueError(
                f"EarlyStopping needs patience of at least 1 value and min_delta of at least 0, got {patience=} and "
                f"{min_delta=}; mode gives the direction."
            )
        self.key, self.mode, self.patience = key, mode_of(key, mode, "key"), patience
        self.min_delta, self.name = min_delta, name
        self.best: float | None = None
        """The best value so far; None before the first finite one."""
        self.bad = 0
        """Number of values since the best one."""
        self._followed = FollowedMetric(key, f"EarlyStopping(key={key!r})", self.mode)

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
            "seen_at": self._followed.seen_at,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore best value and count; the settings are those given now."""
        if (state["key"], state["mode"]) != (self.key, self.mode):
            logger.warning(
                "%s followed %s (%s) before and follows %s (%s) now: best value and count start over.",
                *(self.name, state["key"], state["mode"], self.key, self.mode),
            )
            return
        self.best, self.bad = state["best"], state["bad"]
        self._followed.seen_at = state["seen_at"]

    def begin_anew(self) -> None:
        """A run starts over: nothing was measured."""
        self.best, self.bad = None, 0

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
        if self.bad < self.patience:
            return
        why = "was not finite"
        if self.best is not None:
            bound = self.best - self.min_delta if self.mode == "min" else self.best + self.min_delta
            why = f"was not {'below' if self.mode == 'min' else 'above'} {bound:.6g}"
        reason = f"early stopping: {self.key} {why}, {self.bad} times in a row"
        logger.info("Iteration %d, %s.", trainer.state.iteration, reason)
        trainer.finish(reason)
