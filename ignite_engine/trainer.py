"""The Trainer: an Ignite ``Engine`` whose iteration is one optimizer step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ignite.engine import Engine
from ignite.engine.events import EventsList
from torch import nn

from ignite_engine.checkpoint.states.registry import Registry, ResumeState, Stateful
from ignite_engine.errors import Interrupted, NotFinite, RollBack, check_type, is_whole
from ignite_engine.events import EVENT_COUNTERS, TrainingEvents
from ignite_engine.loop import bus, saved_progress, start
from ignite_engine.loop.intervals import Interval, Intervals
from ignite_engine.loop.loop import Loop
from ignite_engine.loop.position import EpochIs, Grouping, Plan, last_iteration
from ignite_engine.loop.progress import Progress
from ignite_engine.loop.requests import COLLECT, END, SAVE, Requests
from ignite_engine.ranks import agreement
from ignite_engine.ranks.ddp import settle_buckets
from ignite_engine.ranks.watch import cause_of, reason_of, watched_run
from ignite_engine.state import Start, TrainingState
from ignite_engine.update.base import update_of
from ignite_engine.update.micro_batches import check_steps
from ignite_engine.update.of_engine import EngineUpdate

if TYPE_CHECKING:
    from ignite_engine.checkpoint.part_names import SaveFilter

attached_to_each: list[Callable[[Trainer], None]] = []
"""Called with each trainer that this process makes; used by the supervisor of the ranks."""


class Trainer(Engine):
    """An Ignite engine that trains: accumulation, exact resume, stops on which all ranks agree.

    Args:
        update: an :class:`~ignite_engine.Update`, or any ``update(engine, batch)``, whose return value (a number, a
            tensor or a mapping) becomes ``state.output``.
        accumulation_steps: batches of the loader in one iteration; the last group of an epoch may be shorter.
            None: no grouping, ``state.batch`` is the loader's batch.
        global_micro_batches: instead of ``accumulation_steps``: micro-batches of one iteration over all ranks, taken in
            the global order of samples. Each rank computes a contiguous share, so an iteration is the same work on any
            number of ranks. ``state.batch`` is the list of this rank's, without the others.
        max_read_errors: batches, over all ranks, that a run may leave out because the data raises in their place; all
            ranks agree on it. ``state.read_errors`` counts them. One more, and by default the first, ends the run.

    Raises:
        ValueError: ``accumulation_steps`` or ``global_micro_batches`` is below 1, both are given, or ``update`` needs
            the latter; ``max_read_errors`` is below 0 or given with ``global_micro_batches``.

    Its parts: ``state`` (what handlers read), ``progress`` (counters and data position), ``requests`` (to stop, to
    save), ``intervals`` (of its handlers), ``registry`` (what a checkpoint holds) and ``resume_state`` (what a
    checkpoint brought). The bus is Ignite's own list of handlers (``loop/bus.py``), the loop is ``loop/loop.py``,
    and ``loop/start.py`` begins a run.
    """

    state: TrainingState

    def __init__(
        self,
        update: Callable[[Engine, Any], Any],
        accumulation_steps: int | None = None,
        *,
        global_micro_batches: int | None = None,
        max_read_errors: int = 0,
    ) -> None:
        self.update = update_of(update)
        if accumulation_steps is not None:
            check_steps(accumulation_steps)
        if global_micro_batches is not None:
            check_steps(global_micro_batches, "global_micro_batches")
            if accumulation_steps is not None:
                raise ValueError(
                    f"Give accumulation_steps (batches of each rank) or global_micro_batches (over all ranks), got "
                    f"both: {accumulation_steps} and {global_micro_batches}."
                )
        elif self.update.rank_invariant:
            raise ValueError(
                "A rank-invariant Update needs the size of an iteration over all ranks: "
                "make it Trainer(update, global_micro_batches=...)."
            )
        if not is_whole(max_read_errors) or max_read_errors < 0:
            raise ValueError(f"max_read_errors must be a whole number of at least 0, got {max_read_errors!r}.")
        if max_read_errors and global_micro_batches is not None:
            raise ValueError(
                f"max_read_errors={max_read_errors} would make an iteration of global_micro_batches other work on "
                "another number of ranks: use accumulation_steps, or max_read_errors=0."
            )
        super().__init__(update)
        self.state = TrainingState()
        self.register_events(*TrainingEvents, event_to_attr=EVENT_COUNTERS)
        self.resume_state = ResumeState()
        self.registry = Registry(self.resume_state)
        self.requests = Requests()
        self.intervals = Intervals()
        self.progress = Progress(
            self.state,
            Grouping(accumulation_steps, global_micro_batches),
            may_be_empty=self.update.rank_invariant,
            weigh=None if self.update.rank_invariant else self.update.weight_fn,
            waiting=self.requests,
            max_read_errors=max_read_errors,
        )
        for name, part in saved_progress.parts(self.progress, self.resume_state, self.update).items():
            self.registry.register(name, part, kind={"trainer": "counters"}.get(name, name))
        for name, obj, shared in self.update.stateful():
            self.registry.register(name, obj, shared=shared)
            self.registry.of_update.append(name)
        self._load_healthy: Callable[[], Path | None] | None = None
        self._at_end: list[Callable[[Trainer], None]] = []
        self._skipped_before = 0
        for attach in attached_to_each:
            attach(self)

    @classmethod
    def of(cls, engine: Engine) -> Trainer:
        """The Trainer that an engine is, or becomes: one of Ignite's own, or of a subclass, is made one in place.

        It keeps its process function, handlers, events, attributes and methods; its loop is the Trainer's. Handlers of
        this package call this when they are attached. Its data is read as it is: a loader of ``loader()`` is resumed
        exactly; what else is read again from the start of the pass, or not at all, stands in ``reproducibility()``.

        Raises:
            TypeError: it is not an engine.
            RuntimeError: it is running.
        """
        if isinstance(engine, Trainer):
            return engine
        check_type("what a handler is attached to", engine, isinstance(engine, Engine), "an Ignite Engine")
        if engine._dataloader_iter is not None:
            raise RuntimeError("A handler of ignite_engine is attached before the engine runs: attach it before run().")
        kind, before = type(engine), dict(vars(engine))
        update = EngineUpdate(engine._process_function, engine)
        own = {name: None for name in before if isinstance(getattr(cls, name, None), property)}  # what it calls so
        engine.__class__ = cls if kind is Engine else type(kind.__name__, (kind, cls), own)
        assert isinstance(engine, Trainer)
        Trainer.__init__(engine, update)
        engine.logger = before["logger"]
        engine.progress.rebuilds_loaders = False
        own_events = [event for event in before["_allowed_events"] if event not in engine._allowed_events]
        engine.register_events(*own_events)
        for name, value in vars(before["state"]).items():
            setattr(engine.state, name, value)
        for event, handlers in before["_event_handlers"].items():
            engine._event_handlers[event] = sorted(
                [*handlers, *engine._event_handlers[event]], key=lambda entry: bus.phase_of(entry[0])
            )
            for handler, args, _ in handlers:
                engine._register_attached(handler, args)
        return engine

    # -- what users call ------------------------------------------------------------------------------------------

    @property
    def accumulation_steps(self) -> int | None:
        """Batches of the loader in one iteration; None: no grouping."""
        return self.progress.grouping.accumulation_steps

    @property
    def global_micro_batches(self) -> int | None:
        """Micro-batches of one iteration over all ranks; None: ranks count their own."""
        return self.progress.grouping.global_micro_batches

    @property
    def last_iteration(self) -> int | None:
        """The iteration at which the run ends by ``max_iters`` or ``max_epochs``, at the latest; None: not known."""
        return last_iteration(self.progress.counted, self.progress.plan)

    def register(self, name: str, obj: Any, *, shared: bool = False, kind: str | None = None) -> None:
        """Save ``obj`` (with ``state_dict`` and ``load_state_dict``) in every checkpoint under ``name``.

        Args:
            shared: its state is the same on every rank (a model, an optimizer): one copy is saved.
            kind: its kind (``schedule``, ``average``, ...), which the checkpoint names.
        """
        self.registry.register(name, obj, shared=shared, kind=kind)

    def describe(
        self,
        data: Iterable[Any] | None = None,
        max_epochs: int | None = None,
        max_iters: int | None = None,
        epoch_length: int | None = None,
        *,
        rates: bool = True,
    ) -> str:
        """What ``run()`` with these arguments would do, as text; nothing runs. On several ranks a collective.

        The model's parts, the learning rates, what a checkpoint holds, and who listens to which event in which order.

        Args:
            rates: with the learning rates.
        """
        from ignite_engine.loop.describe import describe

        state = self.state
        if max_epochs is None and max_iters is None:  # what is not given is as in the last run
            max_epochs, max_iters = state.max_epochs, state.max_iters
        if epoch_length is None:
            epoch_length = state.epoch_length if data is None else self.progress.iterations_of(data)
        plan = Plan(max_epochs, max_iters, epoch_length)
        return describe(self, self.registry, self._models(), plan, self.reproducibility(), rates=rates)

    def reproducibility(self, only: SaveFilter | None = None) -> list[str]:
        """Why a run resumed from a checkpoint made now would not be bit for bit; empty: it would be.

        Args:
            only: of several checkpoint handlers, what this one's filter leaves out; None: what any of them does.
        """
        from ignite_engine.checkpoint.states.reproducibility import reasons_of

        filters = self.registry.filters if only is None else [only]
        return self.update.unsaved() + reasons_of(
            self.update.model, self.update.variables(), self.registry, self.progress.source, self._models(), filters
        )

    def request_stop(self, reason: str, signal: int | None = None) -> None:
        """Ask for a stop at the next step boundary on which all ranks agree; safe in a signal handler.

        Args:
            reason: becomes ``state.reason``.
            signal: ``run()`` then raises :class:`Interrupted` with it; None: ``run()`` returns.
        """
        self.requests.request_stop(reason, signal)

    def finish(self, reason: str) -> None:
        """End the run at this step boundary as completed; every rank calls it, in a handler of the same event.

        Where only some do, at the end of an iteration or epoch or in METRICS_READY, all end at the boundary at which
        the others learn of it.

        Args:
            reason: becomes ``state.reason``, unless a stop was agreed on at this very boundary.
        """
        if self.state.status == "running":
            self.state.reason = reason
        super().terminate()

    def terminate(self, skip_completed: bool = False) -> None:
        """End the run as Ignite does: at once, without the rest of the epoch.

        On several ranks all end at the next step boundary, also if only one calls it; with ``rank_invariant`` so does
        one process.
        """
        at_once = self.requests.single_process and not self.update.rank_invariant
        if at_once or self.state.status != "running":
            super().terminate(skip_completed)
        else:
            self.requests.request_end("skip_completed" if skip_completed else True)

    def request_save(self) -> None:
        """Ask for a checkpoint at the next step boundary on which all ranks agree; safe in a signal handler."""
        self.requests.asked.add(SAVE)

    def report_background_done(self) -> None:
        """Report that the background work of a handler has ended; safe in any thread.

        At the next step boundary on which all ranks agree ``state.background_done`` is set on each of them.
        """
        self.requests.asked.add(COLLECT)

    def call_at_end(self, callback: Callable[[Trainer], None]) -> None:
        """Call ``callback(trainer)`` when this ``run()`` ends in whatever way, an exception included."""
        self._at_end.append(callback)

    def check_while_waiting(self, check: Callable[[], None]) -> None:
        """Call ``check`` now and then while the run waits for a window, without an event; it may request a stop."""
        self.requests.checks.append(check)

    def roll_back_with(self, load: Callable[[], Path | None]) -> None:
        """Let ``load`` bring back the last healthy checkpoint where ``Update(non_finite="rollback")`` asks for it.

        A :class:`~ignite_engine.handlers.Checkpoint` calls this when it is attached; the first one counts.

        Args:
            load: a collective; returns the checkpoint, or None where there is none.
        """
        self._load_healthy = self._load_healthy or load

    @property
    def stop_requested(self) -> bool:
        """Whether this rank has been asked to stop; the others may not know yet."""
        return self.requests.stop is not None

    def run(
        self,
        data: Iterable[Any] | None = None,
        max_epochs: int | None = None,
        max_iters: int | None = None,
        epoch_length: int | None = None,
    ) -> TrainingState:
        """Train; the arguments are Ignite's, in updates: ``epoch_length`` and ``max_iters`` count iterations.

        Give ``max_epochs``, ``max_iters`` or both: the run ends at the first that is reached.
        How it starts (``state.start``) follows from what was done before, see ``loop/start.py``.

        Raises:
            Interrupted: a signal stopped the run, which is saved on every rank.
            PeerFailed: another rank failed; the message names it and its error.
            ValueError: a resumed checkpoint holds names that nothing claims, or the data is unusable.

        An exception of a handler or of the update leaves as it was raised, with the handler named in a note; the
        next ``run()`` then starts over.
        """
        source_before = self.progress.source
        if data is None and self.state.status == "interrupted":
            data = self.progress.user_data
        arguments = start.RunArguments(data, max_epochs, max_iters, epoch_length)
        try:
            loop = self._begin(arguments)
        except BaseException:
            if self.progress.source is not source_before:
                self.progress.close()
            raise
        with watched_run(self._position):
            while True:
                try:
                    loop.run()
                    self._note_ending()
                    break
                except RollBack as request:
                    reason = str(request)
                except BaseException as raised:
                    error = cause_of(raised)
                    self._note_failure(error)
                    if error is not raised:
                        raise error from raised
                    raise
                finally:
                    self._call_at_end()
                try:
                    loop = self._roll_back(reason, arguments)
                except BaseException as failure:
                    self._note_failure(failure)
                    raise
        if self.state.status == "interrupted" and self.requests.stop is not None:
            signal = self.requests.stop[1]
            if signal is not None:
                agreement.wait_for_all()
                raise Interrupted(signal)
        return self.state

    def set_data(self, data: Iterable[Any]) -> None:
        """Refused: a run has its data for good."""
        raise RuntimeError(
            "A Trainer's data cannot change within a run: end the run, and call run() with the other data."
        )

    # -- a run ----------------------------------------------------------------------------------------------------

    def _roll_back(self, reason: str, arguments: start.RunArguments) -> Loop:
        """Resume the last healthy checkpoint, and go on without the iteration that broke the run; a collective.

        What is to be left out stays written down, and what was requested meanwhile is requested still.

        Raises:
            NotFinite: there is no checkpoint.
        """
        state, policy, requests = self.state, self.update.non_finite, self.requests
        assert policy is not None and self._load_healthy is not None  # _begin() has asked for it
        self.progress.close()
        journal, stop, before = policy.journal, requests.stop, requests.asked | requests.agreed
        path = self._load_healthy()
        if path is None:
            raise NotFinite(
                f"{reason}, and there is no healthy checkpoint to go back to: save one before, such as with "
                "Checkpoint.attach(trainer, Events.ITERATION_COMPLETED(every=100)), or use non_finite='skip'."
            )
        policy.journal = policy.journal | journal
        self.logger.info(f"Rolled back to {path.name}.")
        data = state.dataloader if arguments.data is None else arguments.data
        length = state.epoch_length if self.progress.epoch_is is EpochIs.A_LENGTH else None
        loop = self._begin(start.RunArguments(data, state.max_epochs, state.max_iters, length))
        if stop is not None:
            self.requests.request_stop(*stop)
        if END in before:
            self.requests.request_end(True)
        self.request_save()  # a run that is killed from there on knows what to leave out
        return loop

    def _begin(self, arguments: start.RunArguments) -> Loop:
        settings: dict[str, Any] = asdict(self.progress.grouping)
        for name, value in settings.items():
            if arguments.data is None and value is not None:
                raise ValueError(f"{name} needs data to group: give run() a loader.")
        state, policy = self.state, self.update.non_finite
        if policy is not None and policy.action == "rollback" and self._load_healthy is None:
            raise ValueError("non_finite='rollback' needs checkpoints to go back to: attach a Checkpoint before run().")
        settings["max_read_errors"] = self.progress.max_read_errors
        settings["what a checkpoint holds"] = sorted(self.registry.objects)
        start.check_ranks_agree(arguments, settings, self.update.optimizers)
        start.begin(arguments, state, self.progress, self.registry, self.resume_state)
        if (digests := self.registry.rank_digests) is not None:
            digests.watch(self, boundary=TrainingEvents.RESUME_POINT)
        limits = {"max_epochs": state.max_epochs, "max_iters": state.max_iters}
        limit = ", ".join(f"{name}={value}" for name, value in limits.items() if value is not None)
        if state.start is Start.FRESH:
            self.logger.info(f"Engine run starting with {limit}.")
        else:
            where = f"iteration {state.iteration}, epoch {state.epoch}"
            self.logger.info(f"Engine run resuming ({state.start.value}) from {where} with {limit}.")
        self.intervals.begin(self, fresh=state.start is Start.FRESH)
        state.status, state.reason = "running", None
        self._skipped_before = state.skipped_steps
        state.at_boundary()
        self.should_terminate = self.should_terminate_single_epoch = self.should_interrupt = False
        self.requests.begin()
        if (model := self.update.model) is not None:
            by_user = saved_progress.in_eval_mode(self.update) if model.training else []
            saved_progress.set_modes(model, by_user if state.start is Start.FRESH else self.resume_state.in_eval_mode)
        self.update.run_started()
        for model in self._models():
            settle_buckets(model)
        if state.start is Start.FRESH:
            self.registry.begin_anew()
        parts = (self.update, state, self.progress, self.requests, self.registry, self.resume_state)
        return Loop(self, *parts)

    def _models(self) -> list[Any]:
        """The models of the update and of the registry, wrapped as they are, without repetition."""
        models = [getattr(owner, "model", owner) for owner in (self.update, *self.registry.objects.values())]
        return list({id(model): model for model in models if isinstance(model, nn.Module)}.values())

    def _position(self) -> str:
        after = f", after {bus.event_name(self.last_event_name)}" if self.last_event_name is not None else ""
        return f"iteration {self.state.iteration}, epoch {self.state.epoch}{after}"

    def _note_ending(self) -> None:
        state, progress = self.state, self.progress
        if state.status == "interrupted":  # the next run goes on
            self.resume_state.in_eval_mode = saved_progress.in_eval_mode(self.update)
        self.update.run_ended(self)
        all_skipped = state.skipped_steps > self._skipped_before and not state.optimizer_steps
        if all_skipped and state.status == "completed" and agreement.rank() == 0:
            self.logger.warning(
                f"The run made no optimizer step, all {state.skipped_steps} were skipped: return weights above 0 from "
                "weight_fn, or look for losses and gradients that are not finite."
            )
        progress.leave(goes_on=state.status == "interrupted" or progress.is_done())

    def _note_failure(self, error: BaseException) -> None:
        self.progress.fail()
        if isinstance(error, (Interrupted, KeyboardInterrupt)):
            self.state.status, self.state.reason = "interrupted", f"forced: {str(error) or type(error).__name__}"
        else:
            self.state.status, self.state.reason = "failed", reason_of(error)

    def _call_at_end(self) -> None:
        try:
            while self._at_end:
                self._at_end.pop(0)(self)
        finally:
            if self._at_end:  # one raised: the others, such as that which puts signal handlers back, still run
                self._call_at_end()

    # -- Ignite's engine ------------------------------------------------------------------------------------------

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """As Ignite's: epoch or iteration, and how long to train; the whole of a run is in a Checkpoint."""
        super().load_state_dict(state_dict)
        self.progress.left = None

    def add_event_handler(self, event_name: Any, handler: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """As Ignite's, in the order of phases; an object with a state that is attached here is registered, too."""
        handle = super().add_event_handler(event_name, handler, *args, **kwargs)
        if isinstance(interval := getattr(event_name, "filter", None), Interval):
            try:
                self.intervals.add(self, interval)
            except ValueError:
                handle.remove()
                raise
        if not isinstance(event_name, EventsList):  # of a list Ignite calls this for each event
            bus.sort_in_last(self, event_name)
        self._register_attached(handler, args)
        return handle

    def _register_attached(self, handler: Any, args: tuple[Any, ...]) -> None:
        handler = getattr(handler, "_parent", lambda: handler)()  # behind a filter of Ignite's
        owner = handler if isinstance(handler, Stateful) else getattr(handler, "__self__", None)
        if isinstance(owner, Stateful) and not isinstance(owner, Engine):
            self.registry.register_attached(owner, args)

    _fire_event = bus.fire  # type: ignore[assignment]  # Ignite's returns nothing

    def _handler_wrapper(self, handler: Callable[..., Any], event_name: Any, event_filter: Callable[..., Any]) -> Any:
        return bus.Filtered(self, event_name, event_filter, handler)
