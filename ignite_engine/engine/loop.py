"""The loop of a :class:`~ignite_engine.Trainer`, with every event at its place.

In short (``docs/the_loop.md`` has all of it)::

    STARTED
    while not done:
        EPOCH_STARTED
        for group in the pass over the data:         GET_BATCH_STARTED, GET_BATCH_COMPLETED
            ITERATION_STARTED
            state.output = update(trainer, group)
            ITERATION_COMPLETED
            edge: METRICS_READY if there is news, RESUME_POINT, stop if all ranks agreed
        EPOCH_COMPLETED
        edge
    COMPLETED
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Generator, Iterable
from typing import Any

from ignite.engine import Engine, Events
from ignite.engine.engine import _EngineTerminateException, _EngineTerminateSingleEpochException

from ignite_engine import rng
from ignite_engine.data import resumable
from ignite_engine.data.source import DataSource
from ignite_engine.engine.edges import EngineWithEdges
from ignite_engine.engine.progress import RunPosition
from ignite_engine.errors import StopRequested
from ignite_engine.state import TrainingState


class TrainingLoop(EngineWithEdges):
    """From STARTED to COMPLETED; what comes before a run and after it is the Trainer's."""

    def __init__(self, update: Callable[[Engine, Any], Any], accumulation_steps: int | None) -> None:
        super().__init__(update)
        self.update, self.accumulation_steps = update, accumulation_steps
        self.position = RunPosition(self)
        self.failed = self.was_terminated = False
        """How the run before ended."""
        self.fetching = False
        """The process waits for data: the one place where a signal may break in (``StopRequested``)."""
        self.begun = False
        """Ignite has accepted the arguments of ``run()``."""
        self._given: Any = None
        """The user's own object behind ``position.source``."""

    def _internal_run_as_gen(self) -> Generator[Any, None, TrainingState]:
        state, self.begun = self.state, True
        self.should_terminate = self.should_terminate_single_epoch = self.should_interrupt = False
        self._init_timers(state)
        started = time.time()
        try:
            try:
                self.position.begin()
                self.requests.iterations_start(state.iteration)
                self._fire_event(Events.STARTED)
                self.registry.check_all_claimed()
                self.registry.restore_metrics(last=self.position.epoch_iteration == 0)
                self._publish()
                self.position.restore_rng()
                yield from self._maybe_terminate_or_interrupt()
                while not self._is_done(state) and not self.should_terminate:
                    yield from self._one_epoch()
            except _EngineTerminateException:
                self._last_edge()
                self._fire_event(Events.TERMINATE)
            except _EngineTerminateSingleEpochException:
                raise RuntimeError(
                    "terminate_epoch() was called on STARTED or EPOCH_STARTED, where no epoch runs yet: "
                    "call it on an event of an iteration."
                ) from None
            self._complete(time.time() - started)
        except BaseException as error:
            self._dataloader_iter = None
            self._handle_exception(error)
        self._dataloader_iter = None
        return state

    def _one_epoch(self) -> Generator[Any, None, None]:
        state, started = self.state, time.time()
        state.epoch += 1
        self._fire_event(Events.EPOCH_STARTED)
        self.registry.restore_metrics(last=True)
        yield from self._maybe_terminate_or_interrupt()
        if self._dataloader_iter is None:
            self._setup_engine()
        yield from self._run_once_on_dataset_as_gen()
        state.times[Events.EPOCH_COMPLETED.name] = time.time() - started
        if self.should_terminate_single_epoch != "skip_epoch_completed":
            self._fire_event(Events.EPOCH_COMPLETED)
            state.times[Events.EPOCH_COMPLETED.name] = time.time() - started
        self._log_time(f"Epoch[{state.epoch}] Complete.", time.time() - started)
        self.position.end_epoch()
        self._edge(last=bool(self.should_terminate) or self._is_done(state))
        self.should_terminate_single_epoch = False
        yield from self._maybe_terminate_or_interrupt()

    def _run_once_on_dataset_as_gen(self) -> Generator[Any, None, float]:
        # Everything here is paid at every iteration: an event that nobody hears is not fired, only noted.
        state, position, started = self.state, self.position, time.time()
        heard, requests = self.heard, self.requests
        has_data = state.dataloader is not None
        try:
            while True:
                state.batch = None
                if has_data:
                    self.last_event_name = Events.GET_BATCH_STARTED
                    if "GET_BATCH_STARTED" in heard:
                        self._fire_event(Events.GET_BATCH_STARTED)
                        yield from self._maybe_terminate_or_interrupt()
                group = self._next(self._dataloader_iter)
                if group is _END:
                    group = yield from self._fetch_from_next_pass()
                    if group is _END:
                        break
                # set anew here, not at the epoch's end: handlers of EPOCH_COMPLETED read the last output
                state.batch, state.output = group, None
                if has_data:
                    self.last_event_name = Events.GET_BATCH_COMPLETED
                    if "GET_BATCH_COMPLETED" in heard:
                        self._fire_event(Events.GET_BATCH_COMPLETED)
                        yield from self._maybe_terminate_or_interrupt()

                position.group_fetched(group)
                state.iteration += 1
                self.last_event_name = Events.ITERATION_STARTED
                if "ITERATION_STARTED" in heard:
                    self._fire_event(Events.ITERATION_STARTED)
                    yield from self._maybe_terminate_or_interrupt()

                state.output = self._process_function(self, state.batch)
                position.group_consumed()
                self.last_event_name = Events.ITERATION_COMPLETED
                if "ITERATION_COMPLETED" in heard:
                    self._fire_event(Events.ITERATION_COMPLETED)

                if position.epoch_iteration == state.epoch_length and not position.measured:
                    if self.should_terminate:
                        self._edge(last=True)
                    yield from self._maybe_terminate_or_interrupt()
                    break
                if state.iteration == state.max_iters:
                    self._edge(last=True)
                    self.should_terminate = self.should_terminate or True
                elif not self.should_terminate_single_epoch and (  # else the epoch's edge follows
                    self.should_terminate
                    or not requests.alone
                    or requests.asked
                    or state.metrics.fresh
                    or ("RESUME_POINT" in heard)
                ):
                    self._edge(last=bool(self.should_terminate), within_epoch=True)
                if self.should_terminate or self.should_terminate_single_epoch or self.should_interrupt:
                    yield from self._maybe_terminate_or_interrupt()
        except _EngineTerminateSingleEpochException:
            self._fire_event(Events.TERMINATE_SINGLE_EPOCH, iter_counter=position.epoch_iteration)
            position.clean = True
            position.end_pass()
            self._setup_dataloader_iter()
        except _EngineTerminateException:
            raise
        except Exception as error:
            self._handle_exception(error)
            position.group_lost()
        return time.time() - started

    def _fetch_from_next_pass(self) -> Generator[Any, None, Any]:
        """The first group of the next pass over the data, or ``_END`` where the epoch ends with this one."""
        state, position = self.state, self.position
        emptied = False
        while True:
            if position.measured and position.epoch_iteration:
                state.epoch_length = position.epoch_iteration
            if emptied or (position.measured and position.source_is_fresh):
                if not self._is_done(state):
                    warnings.warn(
                        "Data iterator can not provide data anymore, but the run is not at its end "
                        f"(iteration {state.iteration}): give data that can be iterated again.",
                        stacklevel=2,
                    )
                    if state.max_epochs is None:  # else epochs without an iteration would follow for ever
                        state.reason, self.should_terminate = "end of data", True
                return _END
            if state.dataloader is not None:
                self._fire_event(Events.DATALOADER_STOP_ITERATION)
                yield from self._maybe_terminate_or_interrupt()
            position.end_pass()
            if position.measured and position.epoch_iteration:
                # made when it is needed: what this draws comes after the position is saved, as in a resumed run
                self._dataloader_iter = None
                return _END
            self._setup_dataloader_iter()
            emptied = True
            if (group := self._next(self._dataloader_iter)) is not _END:
                return group

    def _next(self, iterator: Any) -> Any:
        try:
            self.fetching = True
            try:
                return next(iterator, _END)
            finally:
                self.fetching = False
        except StopRequested:
            # the group was not consumed; on one process nobody waits for this rank
            if self.position.source is not None:
                self.position.source.abandon()
            self._dataloader_iter = None
            self._edge(last=True)
            raise _EngineTerminateException() from None

    def _only_complete(self, data: Any) -> None:
        """A finished run started again: no iteration, but everything that happens at the start and at the end."""
        self.state.dataloader, self.begun = data, True
        self.should_terminate = False
        self._init_timers(self.state)
        self.position.begin()
        # a run may end within an epoch
        self.state.epoch = self.position.epochs_completed + int(self.position.epoch_iteration > 0)
        self._fire_event(Events.STARTED)
        self.registry.check_all_claimed()
        self.registry.restore_metrics(last=True)
        self._publish()
        self.position.restore_rng()
        self._complete(0.0)

    # -- Ignite's seams -------------------------------------------------------------------------------------------

    def _take_data(self, data: Any, *, anew: bool = False) -> None:
        source = DataSource(resumable(data), self.accumulation_steps)
        source.agree_lengths()
        self._given = data
        self.position.take(source, anew=anew)

    def _internal_run_legacy(self) -> TrainingState:
        # `interrupt_resume_enabled = False` makes interrupt() an error there; the loop is this one all the same
        return self._internal_run()  # type: ignore[return-value]  # Ignite's says State

    def _setup_engine(self) -> None:
        self._setup_dataloader_iter()
        self._init_iter = None

    def _setup_dataloader_iter(self) -> None:
        data = self.state.dataloader
        if data is not None and data is not self._given:  # a handler replaced it, as Ignite lets it
            self._take_data(data, anew=True)
        source = self.position.source
        if self.state.dataloader is None or source is None:
            super()._setup_dataloader_iter()
        elif source.was_begun:
            with rng.isolated():
                self._dataloader_iter = iter(source)
        else:
            self._dataloader_iter = iter(source)

    def _get_data_length(self, data: Iterable[Any]) -> int | None:
        return self.position.iterations


class _End:
    """No group: the epoch ends."""


_END = _End()
