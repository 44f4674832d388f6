"""The clean edge between two updates, and the end of a run: where all ranks hear the same, and what is due is saved."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from ignite.engine import Engine, Events
from ignite.engine.utils import _to_hours_mins_secs

from ignite_engine.engine.planned_engine import PlannedEngine
from ignite_engine.engine.progress import RunPosition
from ignite_engine.engine.stop_requests import ATTEND, SAVE, STOP, Requests
from ignite_engine.events import TrainingEvents
from ignite_engine.state import TrainingState
from ignite_engine.states.registry import Registry


class EngineWithEdges(PlannedEngine):
    """What happens where no update is under way; the loop decides when."""

    state: TrainingState
    registry: Registry
    position: RunPosition

    def __init__(self, update: Callable[[Engine, Any], Any]) -> None:
        super().__init__(update)
        self.requests = Requests()

    def _edge(self, *, last: bool, within_epoch: bool = False) -> None:
        """The clean edge after an update: publish, save if due, and stop if all ranks agreed to.

        Where what was published ends the epoch, the rest is left to the edge at its end.
        """
        state = self.state
        agreed = self._agree(now=last)
        if agreed & STOP:
            self.should_terminate = self.should_terminate or True
        state.save_requested = bool(agreed & SAVE)
        state.attention = bool(agreed & ATTEND)
        state.last = last or state.stopping
        self._publish()
        state.last = state.last or bool(self.should_terminate)  # what was measured may have ended the run
        if within_epoch and self.should_terminate_single_epoch and not state.last:
            self.requests.ask_again(agreed)
        elif self.hears(TrainingEvents.RESUME_POINT):  # else `last_event_name` stays Ignite's
            self._fire_event(TrainingEvents.RESUME_POINT)
        state.save_requested = state.attention = False

    def _agree(self, *, now: bool) -> int:
        """What all ranks hear here of what any has asked for; a stop is noted in the state."""
        state = self.state
        agreed = self.requests.agree(state.iteration, now=now)
        state.stopping = bool(agreed & STOP)
        if state.stopping and self.requests.stop is not None:
            state.status, state.reason = "interrupted", self.requests.stop[0]
        return agreed

    def _last_edge(self) -> None:
        """``terminate()`` outside an iteration: the edge before it was not known to be the last."""
        state, position = self.state, self.position
        if not state.last and position.clean:
            # a resumed run that ends before it trains stands in the epoch in which it was saved
            state.epoch = max(state.epoch, position.epochs_completed + int(position.epoch_iteration > 0))
            self._edge(last=True)

    def _publish(self) -> None:
        metrics = self.state.metrics
        if metrics.fresh:
            if self.hears(TrainingEvents.METRICS_READY):
                self._fire_event(TrainingEvents.METRICS_READY)
            metrics.fresh = {}

    def _complete(self, duration: float) -> None:
        state = self.state
        if state.status == "running":
            state.status = "completed"
            state.reason = state.reason or self.position.reason_of_end()
        state.times[Events.COMPLETED.name] = duration
        if self.should_terminate != "skip_completed":
            started = time.time()
            self._fire_event(Events.COMPLETED)
            self._publish()
            duration += time.time() - started
            state.times[Events.COMPLETED.name] = duration
        if self.requests.hurried:  # an evaluation was broken off after the last edge
            self._agree(now=True)
        self._log_time("Engine run finished.", duration)

    def _log_time(self, what: str, duration: float) -> None:
        hours, minutes, seconds = _to_hours_mins_secs(duration)
        self.logger.info(f"{what} Time taken: {hours:02d}:{minutes:02d}:{seconds:06.3f}")

    @staticmethod
    def _is_done(state: Any) -> bool:
        # not by iterations per epoch, as Ignite: passes differ in length, and a resumed run may group otherwise
        by_epochs = state.max_epochs is not None and state.epoch >= state.max_epochs
        return by_epochs or (state.max_iters is not None and state.iteration >= state.max_iters)
