"""The loop of a :class:`~ignite_engine.Trainer`, from STARTED to COMPLETED.

In short (``docs/the_loop.md`` has all of it)::

    STARTED
    while not done:
        EPOCH_STARTED
        for group in the pass over the data:         GET_BATCH_STARTED, GET_BATCH_COMPLETED
            WINDOW_STARTED at the first of a window
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

import logging
import time
import warnings
from collections.abc import Callable, Generator
from typing import Any

from ignite.engine import Engine, Events

from ignite_engine import rng
from ignite_engine.data.windows import WindowedSource
from ignite_engine.engine import bus
from ignite_engine.engine.progress import Progress
from ignite_engine.engine.start import is_done
from ignite_engine.engine.stop_requests import BACKGROUND_DONE, SAVE, STOP, StopRequests
from ignite_engine.errors import RollBack, StopRequested
from ignite_engine.events import TrainingEvents
from ignite_engine.ranks import agreement
from ignite_engine.state import TrainingState
from ignite_engine.states.registry import Registry
from ignite_engine.states.resume_state import ResumeState

logger = logging.getLogger(__name__)

Pauses = Generator[None, None, None]
"""Yields where ``interrupt()`` pauses the run, and continues from there."""


class _RunEnds(Exception):
    """``terminate()`` was called: the run ends where it is."""


class _EpochEnds(Exception):
    """``terminate_epoch()`` was called: the epoch ends where it is."""


class Loop:
    """One run of ``engine``; its parts are the Trainer's."""

    def __init__(
        self,
        engine: Engine,
        update: Callable[[Engine, Any], Any],
        state: TrainingState,
        progress: Progress,
        requests: StopRequests,
        registry: Registry,
        resume: ResumeState,
    ) -> None:
        self.engine, self.update, self.state, self.progress = engine, update, state, progress
        self.requests, self.registry, self.resume = requests, registry, resume
        self._fire: Callable[..., bool] = engine._fire_event  # type: ignore[assignment]  # the Trainer's
        self._began_at = state.iteration
        self._reported: BaseException | None = None

    def run(self) -> Pauses:
        """The whole run, begun by :func:`ignite_engine.engine.start.begin`."""
        engine, started = self.engine, time.time()
        try:
            try:
                yield from self._start()
                if self._within_epoch():
                    yield from self._epoch(begun=True)
                while not self._done() and not engine.should_terminate:
                    self.state.epoch += 1
                    yield from self._epoch()
            except _RunEnds:
                self._boundary_before_the_end()
                self._fire(Events.TERMINATE)
            except _EpochEnds:
                raise RuntimeError(
                    "terminate_epoch() was called on STARTED or EPOCH_STARTED, where no epoch runs yet: "
                    "call it on an event of an iteration."
                ) from None
            self.resume.clear()
            self._complete(time.time() - started)
        except BaseException as error:
            engine._dataloader_iter = None
            self._raise_unless_handled(error)
        engine._dataloader_iter = None

    def _start(self) -> Pauses:
        engine, state = self.engine, self.state
        state.times[Events.EPOCH_COMPLETED.name] = state.times[Events.COMPLETED.name] = 0.0
        self.requests.first_vote_after(state.iteration)
        self._fire(Events.STARTED)
        self.registry.check_all_claimed()
        self._name_handlers_without_windows()
        self.resume.restore_metrics()
        within = self._within_epoch()
        if within and self.progress.epoch_ends:
            engine.should_terminate_single_epoch = self.progress.epoch_ends
        # an evaluation that is done again here publishes and ends what it would have in the uninterrupted run
        at_end_of_epoch = within and (self.progress.epoch_is_full() or engine.should_terminate_single_epoch)
        before_a_window = self.progress.windows is not None and self.progress.windows.is_untouched
        measured = bool(state.metrics.fresh) and not at_end_of_epoch and not before_a_window
        if not at_end_of_epoch and not before_a_window:
            self._publish()  # else the end of the epoch does, or that of the first iteration
        self._restore_rng()
        if measured and bus.handlers_of(engine, TrainingEvents.RESUME_POINT):
            self._fire(TrainingEvents.RESUME_POINT)  # what was measured is that of these weights, not of later ones
        if within and not engine.should_terminate:
            return  # `_epoch` pauses or ends
        if state.start.continues:
            engine.should_terminate_single_epoch = False  # at the end of an epoch there is no rest of it
        yield from self._pause_or_end()

    def _epoch(self, *, begun: bool = False) -> Pauses:
        """An epoch, or the rest of the one within which the run begins."""
        engine, state, progress, started = self.engine, self.state, self.progress, time.time()
        self._fire(Events.EPOCH_STARTED)
        self._take_the_rest_of_what_was_loaded()
        if not begun:
            yield from self._pause_or_end()
        if engine._dataloader_iter is None:
            engine._dataloader_iter = progress.open_pass()
        try:
            if begun:
                yield from self._pause_or_end()
            while not progress.epoch_is_full():  # a resumed epoch may be, but for its EPOCH_COMPLETED
                state.batch = None
                if state.dataloader is not None and self._fire(Events.GET_BATCH_STARTED):
                    yield from self._pause_or_end()
                group = self._next()
                if group is _END:
                    group = yield from self._first_of_next_pass()
                    if group is _END:
                        break
                # reset here, not at the epoch's end: handlers of EPOCH_COMPLETED read the last output
                state.batch, state.output = group, None
                if state.dataloader is not None and self._fire(Events.GET_BATCH_COMPLETED):
                    yield from self._pause_or_end()
                if progress.windows is not None and not progress.windows.begun:
                    progress.begin_window()
                    if self._fire(TrainingEvents.WINDOW_STARTED):
                        yield from self._pause_or_end()

                progress.group_fetched(group)
                state.iteration += 1
                if self._fire(Events.ITERATION_STARTED):
                    yield from self._pause_or_end()
                state.output = self.update(engine, state.batch)
                progress.group_consumed()
                self._fire(Events.ITERATION_COMPLETED)

                if progress.epoch_is_full():
                    if engine.should_terminate:
                        self._boundary(last=True)
                    yield from self._pause_or_end()
                    break
                if state.max_iters is not None and state.iteration >= state.max_iters:
                    self._boundary(last=True)
                    engine.should_terminate = engine.should_terminate or True
                elif self._boundary_matters():
                    self._boundary(last=bool(engine.should_terminate), within_epoch=True)
                if engine.should_terminate or engine.should_terminate_single_epoch or engine.should_interrupt:
                    yield from self._pause_or_end()
        except _EpochEnds:
            self._fire(Events.TERMINATE_SINGLE_EPOCH, iter_counter=progress.epoch_iteration)
            progress.at_boundary = True
            progress.end_pass()
            engine._dataloader_iter = progress.open_pass()
        except _RunEnds:
            raise
        except Exception as error:
            self._raise_unless_handled(error)
            progress.group_discarded()
        state.times[Events.EPOCH_COMPLETED.name] = time.time() - started
        if engine.should_terminate_single_epoch != "skip_epoch_completed":
            self._fire(Events.EPOCH_COMPLETED)
            state.times[Events.EPOCH_COMPLETED.name] = time.time() - started
        self._log_time(f"Epoch[{state.epoch}] Complete.", time.time() - started)
        progress.end_epoch()
        self._boundary(last=bool(engine.should_terminate) or self._done())
        engine.should_terminate_single_epoch = False
        yield from self._pause_or_end()

    # -- data -----------------------------------------------------------------------------------------------------

    def _next(self) -> Any:
        """The next group, or ``_END``; where a signal breaks the wait for it, the run ends."""
        requests = self.requests
        try:
            requests.waiting_for_data = requests.single_process  # several say it where they can agree on it
            try:
                return next(self.engine._dataloader_iter, _END)  # type: ignore[arg-type]  # it is open
            finally:
                requests.waiting_for_data = False
        except StopRequested:
            # the group was not consumed; on several ranks all of them are here
            if self.progress.source is not None:
                self.progress.source.abandon()
            self.engine._dataloader_iter = None
            self._boundary(last=True)
            raise _RunEnds from None

    def _first_of_next_pass(self) -> Generator[None, None, Any]:
        """The first group of the next pass over the data, or ``_END`` where the epoch ends with this one."""
        state, progress = self.state, self.progress
        if progress.windows is not None:
            return (yield from self._first_of_next_window(progress.windows))
        if progress.rest_is_unread():
            return _END
        emptied = False
        while True:
            if progress.measured and progress.epoch_iteration:
                state.epoch_length = progress.epoch_iteration
            if emptied or (progress.measured and progress.pass_is_untouched):
                self._data_is_exhausted()
                return _END
            if state.dataloader is not None:
                self._fire(Events.DATALOADER_STOP_ITERATION)
                yield from self._pause_or_end()
            progress.end_pass()
            if progress.measured and progress.epoch_iteration:
                # opened when it is needed: what this draws comes after the position is saved, as in a resumed run
                self.engine._dataloader_iter = None
                return _END
            self.engine._dataloader_iter = progress.open_pass()
            emptied = True
            if (group := self._next()) is not _END:
                return group

    def _first_of_next_window(self, windows: WindowedSource) -> Generator[None, None, Any]:
        """The first group of the next window that has one, or ``_END`` where the epoch ends with this one."""
        engine, progress, begun_again = self.engine, self.progress, False
        while True:
            progress.rest_is_unread()
            if begun := windows.begun:
                self._fire(TrainingEvents.WINDOW_COMPLETED)
            progress.end_pass()
            engine._dataloader_iter = None
            if windows.epoch_is_over and not progress.epoch_iteration and not begun_again:
                begun_again = windows.reader.begin_again()  # the epoch before has ended with the sequence
            if windows.epoch_is_over:
                if windows.reader.over and self._fire(Events.DATALOADER_STOP_ITERATION):
                    yield from self._pause_or_end()
                if not progress.epoch_iteration:
                    self._stream_is_exhausted(windows)
                return _END
            if begun:
                if is_done(self.state, progress.epochs_completed):
                    engine.should_terminate = engine.should_terminate or True
                self._boundary(last=bool(engine.should_terminate), within_epoch=True)
                yield from self._pause_or_end()
            engine._dataloader_iter = progress.open_pass()
            if (group := self._next()) is not _END:
                return group

    def _stream_is_exhausted(self, windows: WindowedSource) -> None:
        """No window came in this epoch: the run is over, and the epoch is none."""
        if not self.state.windows:
            raise ValueError(f"No window with a batch came from {windows.data.stream!r}: give windows that have some.")
        self.state.reason, self.engine.should_terminate = "end of data", True
        raise _RunEnds

    def _data_is_exhausted(self) -> None:
        state = self.state
        if self._done():
            return
        if state.iteration == self._began_at:
            raise ValueError(
                f"The data gave no batch, and the run is not at its end (iteration {state.iteration}): "
                "give data that is not empty and can be iterated again."
            )
        warnings.warn(
            "Data iterator can not provide data anymore, but the run is not at its end "
            f"(iteration {state.iteration}): give data that can be iterated again.",
            stacklevel=2,
        )
        if state.max_epochs is None:  # else epochs without an iteration would follow for ever
            state.reason, self.engine.should_terminate = "end of data", True

    # -- the start ------------------------------------------------------------------------------------------------

    def _restore_rng(self) -> None:
        if self.resume.rng is not None:
            rng.restore(self.resume.rng)

    def _name_handlers_without_windows(self) -> None:
        """Warn of handlers of windows where there are none."""
        for event in (TrainingEvents.WINDOW_STARTED, TrainingEvents.WINDOW_COMPLETED):
            handlers = bus.handlers_of(self.engine, event)
            if handlers and self.progress.windows is None and agreement.rank() == 0:
                logger.warning(
                    "%s of %s will not be called, as the data has no windows: give run() Windows, or attach to another "
                    "event.",
                    *(", ".join(bus.name_of(handler) for handler, _, _ in handlers), bus.event_name(event)),
                )

    def _take_the_rest_of_what_was_loaded(self) -> None:
        """After the first EPOCH_STARTED, which within an epoch is one more than in the uninterrupted run."""
        if self.progress.epoch_iteration:
            self.resume.restore_metrics()
            self._restore_rng()
        self.resume.clear()

    # -- boundaries and the end -----------------------------------------------------------------------------------

    def _pause_or_end(self) -> Pauses:
        """What a handler has asked for by ``terminate()``, ``terminate_epoch()`` or ``interrupt()``."""
        engine = self.engine
        if engine.should_terminate:
            raise _RunEnds
        if engine.should_terminate_single_epoch:
            raise _EpochEnds
        if engine.should_interrupt:
            self._fire(Events.INTERRUPT)
            engine.should_interrupt = False
            yield

    def _done(self) -> bool:
        return is_done(self.state, self.state.epoch)

    def _within_epoch(self) -> bool:
        """Whether the run begins within an epoch, which it completes first, if only by its EPOCH_COMPLETED."""
        state, progress = self.state, self.progress
        if not state.start.continues or progress.epoch_iteration == 0:
            return False
        return progress.epoch_is_full() or not is_done(state, progress.epochs_completed)

    def _boundary_matters(self) -> bool:
        """Whether anything can happen at the boundary of this iteration."""
        engine, requests = self.engine, self.requests
        if engine.should_terminate_single_epoch:
            return False  # the boundary of the epoch follows
        return bool(
            requests.pending
            or not requests.single_process
            or self.state.metrics.fresh
            or self.state.media
            or engine.should_terminate
            or bus.handlers_of(engine, TrainingEvents.RESUME_POINT)
        )

    def _boundary(self, *, last: bool, within_epoch: bool = False) -> None:
        """The step boundary after an update: publish, save if due, and stop if all ranks agreed to.

        Where what was published ends the epoch, the rest is left to the boundary at its end.
        """
        state, engine = self.state, self.engine
        agreed = self._agree(now=last)
        if agreed & STOP:
            engine.should_terminate = engine.should_terminate or True
        state.save_requested = bool(agreed & SAVE)
        state.background_done = bool(agreed & BACKGROUND_DONE)
        state.last = last or state.stopping
        self._publish()
        self.progress.epoch_ends = self.progress.epoch_iteration > 0 and engine.should_terminate_single_epoch
        state.last = state.last or bool(engine.should_terminate)  # what was measured may have ended the run
        if within_epoch and engine.should_terminate_single_epoch and not state.last:
            self.requests.request_again(agreed)
        elif bus.handlers_of(engine, TrainingEvents.RESUME_POINT):  # else `last_event_name` stays Ignite's
            self._fire(TrainingEvents.RESUME_POINT)
        state.save_requested = state.background_done = False

    def _agree(self, *, now: bool) -> int:
        """What all ranks agree on here of what any has requested; a stop is noted in the state."""
        state = self.state
        agreed = self.requests.agree(state.iteration, now=now)
        state.stopping = bool(agreed & STOP)
        if state.stopping and self.requests.stop is not None:
            state.status, state.reason = "interrupted", self.requests.stop[0]
        return agreed

    def _boundary_before_the_end(self) -> None:
        """``terminate()`` outside an iteration: the boundary before it was not known to be the last."""
        state, progress = self.state, self.progress
        if not state.last and progress.at_boundary:
            self._boundary(last=True)

    def _publish(self) -> None:
        metrics, media = self.state.metrics, self.state.media
        if metrics.fresh or media:
            if bus.handlers_of(self.engine, TrainingEvents.METRICS_READY):
                self._fire(TrainingEvents.METRICS_READY)
            metrics.fresh = {}
            media.clear()

    def _complete(self, duration: float) -> None:
        state = self.state
        if state.status == "running":
            state.status = "completed"
            state.reason = state.reason or self.progress.reason_of_end()
        state.times[Events.COMPLETED.name] = duration
        if self.engine.should_terminate != "skip_completed":
            started = time.time()
            self._fire(Events.COMPLETED)
            self._publish()
            duration += time.time() - started
            state.times[Events.COMPLETED.name] = duration
        self._agree(now=True)  # a stop that was requested after the last boundary, in an evaluation for instance
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


class _End:
    """No group: the epoch ends."""


_END = _End()
