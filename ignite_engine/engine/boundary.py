"""What happens between two updates: the ranks vote, values are published, a run is saved, and ends if it must."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ignite.engine import Engine

from ignite_engine.engine import bus
from ignite_engine.engine.progress import Progress
from ignite_engine.engine.stop_requests import BACKGROUND_DONE, END, SAVE, STOP, StopRequests
from ignite_engine.events import TrainingEvents
from ignite_engine.state import Boundary, TrainingState

_METRICS_READY, _RESUME_POINT = TrainingEvents.METRICS_READY, TrainingEvents.RESUME_POINT


_ENDS_EVERY = 16
"""Iterations after which ranks ask each other, beside the ends of epochs, whether one has called ``terminate()``."""


class RunEnds(Exception):
    """``terminate()`` was called, or all ranks agreed to stop: the run ends where it is."""


class EpochEnds(Exception):
    """``terminate_epoch()`` was called: the epoch ends where it is."""


class RunPauses(Exception):
    """``interrupt()`` was called: the run pauses at this step boundary."""


class StepBoundary:
    """The step boundaries of one run; ``state.boundary`` says what each of them is."""

    def __init__(self, engine: Engine, state: TrainingState, progress: Progress, requests: StopRequests) -> None:
        self._engine, self._state, self._progress, self._requests = engine, state, progress, requests
        self._fire: Callable[..., bool] = engine._fire_event  # type: ignore[assignment]  # the Trainer's, which may be wrapped

    def after_iteration(self) -> None:
        """The boundary of an iteration that does not complete its epoch; does nothing where nothing can happen."""
        engine, state, requests = self._engine, self._state, self._requests
        if state.max_iters is not None and state.iteration >= state.max_iters:
            self.at(last=True)
            terminate(engine)
        elif engine.should_terminate_single_epoch:
            return  # the boundary of the epoch follows
        elif (
            requests.pending
            or not requests.single_process
            or state.metrics.fresh
            or engine.should_terminate
            or engine._event_handlers.get(_RESUME_POINT)
        ):
            self.at(last=bool(engine.should_terminate), within_epoch=True)

    def at(self, *, last: bool, within_epoch: bool = False) -> None:
        """Vote, publish, fire RESUME_POINT, and terminate if all ranks agreed to stop.

        Where what was published ends the epoch, the rest is left to the boundary at its end.
        """
        state, engine, requests = self._state, self._engine, self._requests
        # where a rank has called terminate(), its peers learn of it at places that do not depend on the clock
        ends_here = not requests.single_process and state.iteration % _ENDS_EVERY == 0
        agreed = 0
        if requests.pending or not requests.single_process:
            agreed = self._agree(now=last or not within_epoch or engine.should_interrupt or ends_here)
        stopping = bool(agreed & STOP)
        if stopping:
            terminate(engine)
        last = last or stopping or bool(agreed & END)
        boundary = state.boundary = Boundary(last, stopping, bool(agreed & SAVE), bool(agreed & BACKGROUND_DONE))
        self.publish()
        self._progress.epoch_ends = self._progress.epoch_iteration > 0 and engine.should_terminate_single_epoch
        if engine.should_terminate and not last:  # what was measured has ended the run
            boundary = state.boundary = boundary._replace(last=True)
        if within_epoch and engine.should_terminate_single_epoch and not boundary.last:
            self._requests.request_again(agreed)
        elif bus.handlers_of(engine, _RESUME_POINT):  # else `last_event_name` stays Ignite's
            self._fire(_RESUME_POINT)
        if boundary.save or boundary.collect:
            state.boundary = boundary._replace(save=False, collect=False)

    def before_the_end(self) -> None:
        """``terminate()`` outside an iteration: the boundary before it was not known to be the last."""
        if not self._state.boundary.last and self._progress.at_boundary:
            self.at(last=True)

    def publish(self) -> None:
        """Fire METRICS_READY if there are new values."""
        metrics = self._state.metrics
        if metrics.fresh:
            if bus.handlers_of(self._engine, _METRICS_READY):
                self._fire(_METRICS_READY)
            metrics.fresh = {}

    def collect_stop(self) -> None:
        """After COMPLETED: a stop that was requested after the last boundary, in an evaluation for instance."""
        stopping = bool(self._agree(now=True) & STOP)
        self._state.boundary = Boundary(last=self._state.boundary.last, stopping=stopping)

    def _agree(self, *, now: bool) -> int:
        """What all ranks agree on here of what any has requested; the reason of a stop is noted in the state."""
        state, requests = self._state, self._requests
        agreed = requests.agree(state.iteration, now=now)
        if agreed & STOP and requests.stop is not None:
            state.status, state.reason = "interrupted", requests.stop[0]
        elif agreed & END and requests.end is not None and state.status == "running":
            state.reason, self._engine.should_terminate = requests.end
        return agreed

    def agree_to_end(self) -> None:
        """After STARTED: all ranks learn of a rank on which a handler has called ``terminate()``."""
        if not self._requests.single_process:
            self._requests.request_again(self._agree(now=True))
            self._requests.first_vote_after(self._state.iteration)

    def check(self) -> None:
        """Do what a handler has asked for by ``terminate()`` or ``terminate_epoch()``.

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
        self.check()
        if not self._engine.should_interrupt:
            return
        if self._is_asked_late():
            self.at(last=False)
            self.check()
        raise RunPauses

    def _is_asked_late(self) -> bool:
        """Whether something was requested after the vote of this boundary, where ``interrupt()`` was called, too."""
        if self._requests.single_process:
            return self._requests.pending
        agreed = self._agree(now=True)
        self._requests.request_again(agreed)
        return bool(agreed)


def terminate(engine: Any) -> None:
    """End the run as ``terminate()`` does; what a handler has asked for by ``terminate(skip_completed=True)`` stays."""
    engine.should_terminate = engine.should_terminate or True  # a string stays: Ignite keeps the option in it
