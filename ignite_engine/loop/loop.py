"""The loop of a :class:`~ignite_engine.Trainer`, from STARTED to COMPLETED.

In short (``docs/the_loop.md`` has all of it)::

    STARTED
    while not done:
        EPOCH_STARTED
        for group in the pass over the data:         GET_BATCH_STARTED, GET_BATCH_COMPLETED
            WINDOW_STARTED at the first of a window (ext/windows)
            ITERATION_STARTED
            state.output = update(trainer, group)
            ITERATION_COMPLETED
            step boundary: METRICS_READY if there are new values, RESUME_POINT, stop if all ranks agreed
            WINDOW_COMPLETED after the last of a window, and a step boundary
        EPOCH_COMPLETED
        step boundary
    COMPLETED
"""

from __future__ import annotations

import time
from collections.abc import Callable

from ignite.engine import Engine, Events

from ignite_engine import rng
from ignite_engine.checkpoint.states.registry import Registry, ResumeState
from ignite_engine.errors import RollBack
from ignite_engine.events import TrainingEvents
from ignite_engine.loop import bus
from ignite_engine.loop.boundary import EpochEnds, RunEnds, RunPauses, StepBoundary, terminate
from ignite_engine.loop.feed import Feed
from ignite_engine.loop.position import limit_reached
from ignite_engine.loop.progress import Progress
from ignite_engine.loop.requests import STOP, Requests
from ignite_engine.state import Start, TrainingState
from ignite_engine.update.base import BaseUpdate


class Loop:
    """One run of ``engine``; its parts are the Trainer's."""

    def __init__(
        self,
        engine: Engine,
        update: BaseUpdate,
        state: TrainingState,
        progress: Progress,
        requests: Requests,
        registry: Registry,
        resume: ResumeState,
    ) -> None:
        self.engine, self.update, self.state, self.progress = engine, update, state, progress
        self.requests, self.registry, self.resume = requests, registry, resume
        self.boundary = StepBoundary(engine, update, state, progress, requests)
        self.feed = Feed(engine, state, progress, self.boundary)
        self._fire: Callable[..., bool] = engine._fire_event  # type: ignore[assignment]  # the Trainer's, which may be wrapped
        self._reported: BaseException | None = None

    def run(self) -> None:
        """The whole run, begun by :func:`ignite_engine.loop.start.begin`."""
        engine, started = self.engine, time.time()
        try:
            try:
                self._start()
                if self.progress.is_within_epoch():
                    self._epoch(begun=True)
                while not self.progress.is_done() and not engine.should_terminate:
                    self.state.epoch += 1
                    self._epoch()
            except RunEnds:
                self.boundary.before_the_end()
                self._fire(Events.TERMINATE)
            except RunPauses:
                self.boundary.do_what_came_late()
                self.state.status, self.state.reason = "interrupted", self.state.reason or "interrupt"
                self._fire(Events.INTERRUPT)
                return
            except EpochEnds:
                raise RuntimeError(
                    "terminate_epoch() was called on STARTED or EPOCH_STARTED, where no epoch runs yet: "
                    "call it on an event of an iteration."
                ) from None
            self.resume.clear()
            self._complete(time.time() - started)
        except BaseException as error:
            self._raise_unless_handled(error)
        finally:
            engine._dataloader_iter = None

    def _start(self) -> None:
        engine, state = self.engine, self.state
        state.times[Events.EPOCH_COMPLETED.name] = state.times[Events.COMPLETED.name] = 0.0
        self._fire(Events.STARTED)
        self.registry.check_all_claimed()
        if STOP in self.boundary.agree():  # asked for in a handler, perhaps on one rank
            terminate(engine)
        self.resume.restore_metrics()
        within = self.progress.is_within_epoch()
        if within and self.progress.epoch_ends:
            engine.should_terminate_single_epoch = self.progress.epoch_ends
        # an evaluation that is done again here publishes and ends what it would have in the uninterrupted run
        at_end_of_epoch = within and (self.progress.epoch_is_full() or engine.should_terminate_single_epoch)
        measured = not at_end_of_epoch and bool(state.metrics.fresh)
        if not at_end_of_epoch:  # which does it
            self.boundary.publish()
        if self.resume.rng is not None:
            rng.restore(self.resume.rng)  # handlers of STARTED may have drawn
        if measured and bus.handlers_of(engine, TrainingEvents.RESUME_POINT):
            state.at_boundary(last=self.progress.is_done())
            self._fire(TrainingEvents.RESUME_POINT)  # what was measured is that of these weights, not of later ones
        if within and not engine.should_terminate:
            return  # `_epoch` ends, if a handler has asked for it
        if state.start is not Start.FRESH:
            engine.should_terminate_single_epoch = False  # at the end of an epoch there is no rest of it
        self.boundary.check()

    def _epoch(self, *, begun: bool = False) -> None:
        """An epoch, or the rest of the one within which the run begins."""
        engine, state, progress, boundary, started = self.engine, self.state, self.progress, self.boundary, time.time()
        feed, update, fire = self.feed, self.update, self._fire
        if not begun:
            progress.before_epoch = rng.snapshot()
            fire(Events.EPOCH_STARTED)
        self.resume.clear()
        if not begun:
            boundary.check()
        feed.open()
        try:
            boundary.check()
            is_full = progress.epoch_is_full()  # a resumed epoch may be, but for its EPOCH_COMPLETED
            while not is_full and feed.next() is not None:
                progress.updating, progress.steps_before = True, state.optimizer_steps
                state.iteration += 1
                if fire(Events.ITERATION_STARTED):
                    boundary.check()
                state.output = update(engine, state.batch)
                progress.epoch_iteration += 1
                progress.group_consumed()
                fire(Events.ITERATION_COMPLETED)
                if not (is_full := progress.epoch_is_full()):
                    boundary.after_iteration()
                    boundary.check_or_pause()
                elif engine.should_terminate:
                    boundary.at(last=True)
                    raise RunEnds
                else:
                    boundary.check()
        except EpochEnds:
            fire(Events.TERMINATE_SINGLE_EPOCH, iter_counter=progress.epoch_iteration)
            feed.give_up_pass()
        except (RunEnds, RunPauses):
            raise
        except Exception as error:
            self._raise_unless_handled(error)
            progress.group_consumed()
        self._end_epoch(started)

    def _end_epoch(self, started: float) -> None:
        engine, state = self.engine, self.state
        state.times[Events.EPOCH_COMPLETED.name] = time.time() - started
        if engine.should_terminate_single_epoch != "skip_epoch_completed":
            self._fire(Events.EPOCH_COMPLETED)
            state.times[Events.EPOCH_COMPLETED.name] = time.time() - started
        self._log_time(f"Epoch[{state.epoch}] Complete.", time.time() - started)
        self.progress.end_epoch()
        done = self.progress.is_done()
        self.boundary.at(last=bool(engine.should_terminate) or done)
        engine.should_terminate_single_epoch = False
        if done:
            self.boundary.check()  # the run is over: there is nothing to pause
        else:
            self.boundary.check_or_pause()

    # -- the end --------------------------------------------------------------------------------------------------

    def _complete(self, duration: float) -> None:
        state = self.state
        if state.status == "running":
            state.status = "completed"
            reached = limit_reached(self.progress.counted, self.progress.plan)
            state.reason = state.reason or reached or "terminate"
        state.times[Events.COMPLETED.name] = duration
        if self.engine.should_terminate != "skip_completed":
            started = time.time()
            self._fire(Events.COMPLETED)
            self.boundary.publish()
            duration += time.time() - started
            state.times[Events.COMPLETED.name] = duration
        self.boundary.collect_stop()
        self._log_time("Engine run finished.", duration)

    def _raise_unless_handled(self, error: BaseException) -> None:
        """As in Ignite: a handler of EXCEPTION_RAISED that does not raise swallows the error."""
        handled = error is self._reported or isinstance(error, RollBack)  # the run goes on
        if handled or not bus.handlers_of(self.engine, Events.EXCEPTION_RAISED):
            raise error
        self._reported = error
        self._fire(Events.EXCEPTION_RAISED, error)

    def _log_time(self, what: str, duration: float) -> None:
        minutes, seconds = divmod(duration, 60)
        hours, minutes = divmod(int(minutes), 60)
        self.engine.logger.info(f"{what} Time taken: {hours:02d}:{minutes:02d}:{seconds:06.3f}")
