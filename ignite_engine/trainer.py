"""The Trainer: an Ignite ``Engine`` whose iteration is one optimizer step.

The whole loop, as this module runs it (``docs/the_loop.md`` has every event)::

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
from collections.abc import Callable, Generator, Iterable, Mapping
from typing import Any

from ignite.engine import Engine, Events
from ignite.engine.engine import _EngineTerminateException, _EngineTerminateSingleEpochException
from ignite.engine.utils import _to_hours_mins_secs
from torch import nn

from ignite_engine import agreement, rng
from ignite_engine.data import DataSource, resumable
from ignite_engine.describing import describe
from ignite_engine.evaluator import create_evaluator
from ignite_engine.events import EVENT_COUNTERS, TrainingEvents
from ignite_engine.interruption import Interrupted, StopRequested
from ignite_engine.planned_engine import PlannedEngine
from ignite_engine.position import RunPosition
from ignite_engine.registry import Registry, Stateful
from ignite_engine.state import TrainingState

__all__ = ["Trainer", "create_evaluator"]

_STOP, _SAVE, _ATTEND = 1, 2, 4


class Trainer(PlannedEngine):
    """An Ignite engine that trains: accumulation, exact resume, agreed stops, and a bus that is free where quiet.

    Args:
        update: an :class:`~ignite_engine.Update`, or any ``update(engine, batch)``, whose return value (a number, a
            tensor or a mapping) becomes ``state.output``.
        accumulation_steps: batches of the loader in one iteration; the last group of an epoch may be shorter.
            None: no grouping, ``state.batch`` is the loader's batch.

    Raises:
        ValueError: ``accumulation_steps`` is below 1.
    """

    state: TrainingState

    def __init__(self, update: Callable[[Engine, Any], Any], accumulation_steps: int | None = None) -> None:
        if accumulation_steps is not None and accumulation_steps < 1:
            raise ValueError(
                f"accumulation_steps must be at least 1, or None for no grouping, got {accumulation_steps}."
            )
        super().__init__(update)
        self.update = update
        self.accumulation_steps = accumulation_steps
        self.state = TrainingState()
        self.register_events(*TrainingEvents, event_to_attr=EVENT_COUNTERS)
        self.registry = Registry()
        self.position = RunPosition(self)
        self.registry.register("trainer", self.position)
        for name, part in self.position.parts().items():
            self.registry.register(name, part)
        for name, obj, shared in getattr(update, "stateful", lambda: ())():
            self.registry.register(name, obj, shared=shared)
        self._vote = agreement.Vote()
        self._alone = True
        # each only ever assigned: a signal handler or another thread may do it between any two instructions
        self._asked = False
        self._stop: tuple[str, int | None] | None = None
        self._save_wanted = self._attention_wanted = False
        self.failed = self._begun = False
        self.was_terminated = False
        self.fetching = False
        """The process waits for data: the one place where a signal may break in (``StopRequested``)."""
        self._at_end: list[Callable[[Trainer], None]] = []
        self._given: Any = None
        """The user's own object behind ``position.source``."""

    # -- what users call ------------------------------------------------------------------------------------------

    def register(self, name: str, obj: Any, *, shared: bool = False) -> None:
        """Save ``obj`` (with ``state_dict`` and ``load_state_dict``) in every checkpoint under ``name``.

        Args:
            shared: its state is the same on every rank (a model, an optimizer): one copy is saved.
        """
        self.registry.register(name, obj, shared=shared)

    def describe(self) -> str:
        """The bus (who runs when, in order) and what a checkpoint holds, as text."""
        return describe(self)

    def exactness(self) -> list[str]:
        """Why a run resumed from a checkpoint made now would not be bit for bit; empty: it would be."""
        reasons = [f"{name} is attached but not saved" for name in self.registry.unsaved]
        source = self.position.source
        if source is not None and not source.exact:
            reasons.append(f"{type(source.data).__name__} keeps no state: its batches are replayed")
        return reasons

    def request_stop(self, reason: str, signal: int | None = None) -> None:
        """Ask for a stop at the next edge on which all ranks agree; safe in a signal handler.

        Args:
            reason: becomes ``state.reason``.
            signal: ``run()`` then raises :class:`Interrupted` with it; None: ``run()`` returns.
        """
        if self._stop is None:
            self._stop = (reason, signal)
        self._asked = True

    def finish(self, reason: str) -> None:
        """End the run at this edge as completed; every rank calls it, in a handler of the same event.

        Args:
            reason: becomes ``state.reason``, unless a stop was agreed at this very edge.
        """
        if self.state.status == "running":
            self.state.reason = reason
        self.terminate()

    def request_save(self) -> None:
        """Ask for a checkpoint at the next edge on which all ranks agree; safe in a signal handler."""
        self._save_wanted = self._asked = True

    def request_attention(self) -> None:
        """Say that what a handler does in the background has ended; safe in any thread.

        At the next edge on which all ranks agree ``state.attention`` is set on each of them, for RESUME_POINT.
        """
        self._attention_wanted = self._asked = True

    def call_at_end(self, callback: Callable[[Trainer], None]) -> None:
        """Call ``callback(trainer)`` when this ``run()`` ends in whatever way, an exception included."""
        self._at_end.append(callback)

    @property
    def stop_requested(self) -> bool:
        """Whether this rank has been asked to stop; the others may not know yet."""
        return self._stop is not None

    def run(
        self,
        data: Iterable[Any] | None = None,
        max_epochs: int | None = None,
        max_iters: int | None = None,
        epoch_length: int | None = None,
    ) -> TrainingState:
        """Train; the arguments are Ignite's, in updates: ``epoch_length`` and ``max_iters`` count iterations.

        Raises:
            Interrupted: a signal stopped the run, which is saved on every rank.
            ValueError: a resumed checkpoint holds names that nothing claims, or the data is unusable.

        An exception of a handler or of the update leaves as it was raised, with the handler named in a note; the
        next ``run()`` then starts anew.
        """
        state = self.state
        before, self._begun = (state.status, state.reason), self._internal_run_generator is not None
        if not self._begun:
            self._prepare(data, max_epochs, max_iters, epoch_length)
        try:
            if self.position.goes_on and self._is_done(state):
                self._only_complete(data)
            else:
                super().run(data, max_epochs, max_iters, epoch_length)
        except BaseException as error:
            if self._begun:
                self._fail(error)
            else:  # Ignite refused the arguments: everything is as before
                state.status, state.reason = before
            raise
        finally:
            for callback in self._at_end:
                callback(self)
            self._at_end.clear()
        if state.status == "interrupted" and self._stop is not None and self._stop[1] is not None:
            agreement.wait_for_all()
            raise Interrupted(self._stop[1])
        return state

    def _prepare(
        self, data: Iterable[Any] | None, max_epochs: int | None, max_iters: int | None, epoch_length: int | None
    ) -> None:
        state = self.state
        if self.failed:
            self._begin_anew()
        self.position.claim(max_epochs, max_iters, epoch_length)
        if data is not None:
            if not isinstance(data, Iterable):
                raise TypeError("Argument data should be iterable")
            self._take_data(data)
        elif self.accumulation_steps is not None:
            raise ValueError("accumulation_steps needs data to group: give run() a loader.")
        self.position.measured = epoch_length is None and data is not None and self.position.iterations is None
        if self.position.measured:
            state.epoch_length = None
        state.status, state.reason = "running", None
        state.stopping = state.last = False
        self.was_terminated = bool(self.should_terminate)
        self._stop, self._asked = None, False
        self._save_wanted = self._attention_wanted = False
        self._alone = agreement.world_size() == 1
        if hasattr(self.update, "run_starts"):
            self.update.run_starts()
        if isinstance(model := getattr(self.update, "model", None), nn.Module):
            model.train()

    def set_data(self, data: Iterable[Any]) -> None:
        """Go on with other data from its beginning; the epoch's length stays as it is."""
        self.state.dataloader = data
        self._setup_dataloader_iter()

    # -- the loop -------------------------------------------------------------------------------------------------

    def _internal_run_as_gen(self) -> Generator[Any, None, TrainingState]:
        state, self._begun = self.state, True
        self.should_terminate = self.should_terminate_single_epoch = self.should_interrupt = False
        self._init_timers(state)
        started = time.time()
        try:
            try:
                self.position.begin()
                self._vote.restart(state.iteration)
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
        self.should_terminate_single_epoch = False
        self.position.end_epoch()
        self._edge(last=bool(self.should_terminate) or self._is_done(state))
        yield from self._maybe_terminate_or_interrupt()

    def _run_once_on_dataset_as_gen(self) -> Generator[Any, None, float]:
        # Everything here is paid at every iteration: an event that nobody hears is not fired, only noted.
        state, position, heard, started = self.state, self.position, self.heard, time.time()
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
                elif (
                    self.should_terminate
                    or not self._alone
                    or self._asked
                    or state.metrics.fresh
                    or ("RESUME_POINT" in heard)
                ):
                    self._edge(last=bool(self.should_terminate))
                if self.should_terminate or self.should_terminate_single_epoch or self.should_interrupt:
                    yield from self._maybe_terminate_or_interrupt()
        except _EngineTerminateSingleEpochException:
            self._fire_event(Events.TERMINATE_SINGLE_EPOCH, iter_counter=position.epoch_iteration)
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

    def _edge(self, *, last: bool) -> None:
        """The clean edge after an update: publish, save if due, and stop if all ranks agreed to."""
        state = self.state
        self._asked = False
        wanted = (_STOP if self._stop else 0) | (_SAVE if self._save_wanted else 0)
        wanted |= _ATTEND if self._attention_wanted else 0
        requests = self._vote.poll(state.iteration, wanted, now=last)
        if requests & _STOP:
            self._agree_on_stop()
        if requests & _SAVE:
            self._save_wanted = False
        if requests & _ATTEND:
            self._attention_wanted = False
        state.stopping = bool(requests & _STOP)
        state.save_requested = bool(requests & _SAVE)
        state.attention = bool(requests & _ATTEND)
        state.last = last or state.stopping
        self._publish()
        state.last = state.last or bool(self.should_terminate)  # what was measured may have ended the run
        if self.hears(TrainingEvents.RESUME_POINT):  # else `last_event_name` stays Ignite's
            self._fire_event(TrainingEvents.RESUME_POINT)
        state.save_requested = state.attention = False

    def _last_edge(self) -> None:
        """``terminate()`` outside an iteration: the edge before it was not known to be the last."""
        state, position = self.state, self.position
        if not state.last and position.clean:
            # a resumed run that ends before it trains stands in the epoch in which it was saved
            state.epoch = max(state.epoch, position.epochs_completed + int(position.epoch_iteration > 0))
            self._edge(last=True)

    def _agree_on_stop(self) -> None:
        reasons = agreement.gather_objects(self._stop)
        self._stop = next(reason for reason in reasons if reason is not None)
        self.state.status, self.state.reason = "interrupted", self._stop[0]
        self.should_terminate = self.should_terminate or True

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
        self._log_time("Engine run finished.", duration)

    def _log_time(self, what: str, duration: float) -> None:
        hours, minutes, seconds = _to_hours_mins_secs(duration)
        self.logger.info(f"{what} Time taken: {hours:02d}:{minutes:02d}:{seconds:06.3f}")

    def _only_complete(self, data: Any) -> None:
        """A finished run started again: no iteration, but everything that happens at the start and at the end."""
        self.state.dataloader, self._begun = data, True
        self.should_terminate = False
        self._init_timers(self.state)
        self._fire_event(Events.STARTED)
        self.registry.check_all_claimed()
        self.registry.restore_metrics(last=True)
        self._publish()
        self.position.restore_rng()
        self._complete(0.0)

    def _fail(self, error: BaseException) -> None:
        self._internal_run_generator = None
        self._dataloader_iter = None
        if self.registry.waiting:  # nothing was trained yet: once this is mended, the resumed run goes on
            self.position.resumed = True
        else:
            self.failed = True
        if isinstance(error, (Interrupted, KeyboardInterrupt)):
            self.state.status, self.state.reason = "interrupted", f"forced: {error or type(error).__name__}"
        else:
            self.state.status, self.state.reason = "failed", f"{type(error).__name__}: {error}"

    def _begin_anew(self) -> None:
        self.failed = False
        self.state.max_epochs = self.state.max_iters = self.state.epoch_length = None
        self.state.metrics.clear()
        self.state.metrics.fresh = {}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """As Ignite's: epoch or iteration, and how long to go on; the whole of a run is in a Checkpoint."""
        super().load_state_dict(state_dict)
        self.failed = False

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
        elif source.batch:
            # what making an iterator draws was drawn before the position was saved
            with rng.isolated():
                self._dataloader_iter = iter(source)
        else:
            self._dataloader_iter = iter(source)

    def _get_data_length(self, data: Iterable[Any]) -> int | None:
        return self.position.iterations

    @staticmethod
    def _is_done(state: Any) -> bool:
        # not by iterations per epoch, as Ignite: passes differ in length, and a resumed run may group otherwise
        by_epochs = state.max_epochs is not None and state.epoch >= state.max_epochs
        return by_epochs or (state.max_iters is not None and state.iteration >= state.max_iters)

    def add_event_handler(self, event_name: Any, handler: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """As Ignite's; an object with a state that is attached here is registered for checkpoints by itself."""
        handle = super().add_event_handler(event_name, handler, *args, **kwargs)
        owner = handler if isinstance(handler, Stateful) else getattr(handler, "__self__", None)
        if isinstance(owner, Stateful) and not isinstance(owner, Engine):
            self.registry.adopt(owner, args)
        return handle


class _End:
    """No group: the epoch ends."""


_END = _End()
