"""The step boundary between two updates: ranks agree, metrics are published, the run is saved and may end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ignite.engine import Engine

from ignite_engine.events import TrainingEvents
from ignite_engine.loop.progress import Progress
from ignite_engine.loop.requests import COLLECT, END, SAVE, STOP, Requests
from ignite_engine.ranks import agreement
from ignite_engine.state import TrainingState
from ignite_engine.update.base import BaseUpdate

_METRICS_READY, _RESUME_POINT = TrainingEvents.METRICS_READY, TrainingEvents.RESUME_POINT


class RunEnds(Exception):
    """``terminate()`` was called, or all ranks agreed to stop: the run ends at once."""


class EpochEnds(Exception):
    """``terminate_epoch()`` was called: the epoch ends at once."""


class RunPauses(Exception):
    """``interrupt()`` was called: the run stops at this step boundary, and the next ``run()`` continues."""


class StepBoundary:
    """The step boundaries of one run."""

    def __init__(
        self, engine: Engine, update: BaseUpdate, state: TrainingState, progress: Progress, requests: Requests
    ) -> None:
        self._engine, self._state, self._progress, self._requests = engine, state, progress, requests
        self._update = update
        self._fire: Callable[..., bool] = engine._fire_event  # type: ignore[assignment]  # the Trainer's, which may be wrapped

    def after_iteration(self) -> None:
        """The boundary of an iteration that does not complete its epoch; does nothing if nobody needs it."""
        engine, state, requests = self._engine, self._state, self._requests
        if state.max_iters is not None and state.iteration >= state.max_iters:
            self.at(last=True)
            terminate(engine)
        elif engine.should_terminate_single_epoch:
            return  # the boundary of the epoch follows
        elif (
            requests.asked
            or not requests.single_process
            or state.metrics.fresh
            or engine.should_terminate
            or engine._event_handlers.get(_RESUME_POINT)
        ):
            self.at(last=bool(engine.should_terminate), within_epoch=True)

    def at(self, *, last: bool, within_epoch: bool = False) -> None:
        """Agree, publish, fire RESUME_POINT, and terminate if all ranks agreed to stop.

        Where what was published ends the epoch, the rest is left to the boundary at its end.
        """
        state, engine = self._state, self._engine
        if self._update.between_steps and not last:
            self.publish()
            return
        agreed = self.agree()
        if STOP in agreed:
            terminate(engine)
        if state.metrics.fresh:
            state.at_boundary(last=last or STOP in agreed or END in agreed, stopping=STOP in agreed)
            self.publish()
        self._progress.epoch_ends = self._progress.epoch_iteration > 0 and engine.should_terminate_single_epoch
        state.at_boundary(  # what was measured may have ended the run
            last=last or bool(agreed & {STOP, END}) or bool(engine.should_terminate) or engine.should_interrupt,
            stopping=STOP in agreed or engine.should_interrupt,
            save_requested=SAVE in agreed,
            background_done=COLLECT in agreed,
        )
        if within_epoch and engine.should_terminate_single_epoch and not state.last:
            return
        if engine._event_handlers.get(_RESUME_POINT):  # keeps Ignite's `last_event_name` right
            self._fire(_RESUME_POINT)
        self._requests.agreed -= {SAVE, COLLECT}  # a stop and an end stay for the rest of the run
        state.save_requested = state.background_done = False

    def before_the_end(self) -> None:
        """Handle ``terminate()`` after a boundary that was not known to be the last."""
        if not self._state.last and not self._progress.updating:
            self._progress.put_back()
            self.at(last=True)

    def do_what_came_late(self) -> None:
        """Do what was requested after the exchange of the boundary at which ``interrupt()`` stops the run."""
        if self.agree():
            self.at(last=True)

    def publish(self) -> None:
        """Fire METRICS_READY if there are new values."""
        metrics = self._state.metrics
        if metrics.fresh and self._engine._event_handlers.get(_METRICS_READY):
            self._fire(_METRICS_READY)
        metrics.fresh = {}

    def collect_stop(self) -> None:
        """After COMPLETED: handle a stop that was requested after the last boundary, such as in an evaluation."""
        self._state.stopping = STOP in self.agree()

    def agree(self) -> set[str]:
        """Agree with all ranks on what was requested; records in the state why the run ends."""
        state, requests, engine = self._state, self._requests, self._engine
        if engine.should_terminate and state.status == "running":  # perhaps on this rank only
            requests.request_end(engine.should_terminate, state.reason)
        if requests.single_process and not requests.asked | requests.agreed:
            return set()
        agreed = requests.agree(state.metrics.fresh)
        if requests.names_differ:
            self._share_metrics()
        if STOP in agreed and requests.stop is not None:
            state.status, state.reason = "interrupted", requests.stop[0]
        elif END in agreed and state.status == "running":
            engine.should_terminate, state.reason = requests.end, state.reason or requests.reason
        return agreed

    def _share_metrics(self) -> None:
        """Give a metric that only some ranks have written to the others, as handlers that follow it would else hang."""
        metrics = self._state.metrics
        for written in agreement.gather_objects(dict(metrics.fresh)):
            metrics.update({name: value for name, value in written.items() if name not in metrics.fresh})

    def check(self) -> None:
        """Raise what a handler has requested by ``terminate()`` or ``terminate_epoch()``.

        Raises:
            RunEnds, EpochEnds: they were called.
        """
        if self._engine.should_terminate:
            raise RunEnds
        if self._engine.should_terminate_single_epoch:
            raise EpochEnds

    def check_or_pause(self) -> None:
        """As :meth:`check`, at a step boundary, where ``interrupt()`` takes effect, too.

        Raises:
            RunEnds, EpochEnds, RunPauses: they were called.
        """
        engine = self._engine
        if engine.should_terminate or engine.should_terminate_single_epoch:
            self.check()
        if engine.should_interrupt:
            raise RunPauses


def terminate(engine: Any) -> None:
    """End the run as ``terminate()`` does; what a handler has asked for by ``terminate(skip_completed=True)`` stays."""
    engine.should_terminate = engine.should_terminate or True  # a string stays: Ignite keeps the option in it
