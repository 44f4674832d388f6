"""The Trainer: an Ignite ``Engine`` whose iteration is one optimizer step; ``loop.py`` has the loop itself."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ignite.engine import Engine
from torch import nn

from ignite_engine.checkpointing import SaveFilter
from ignite_engine.engine.describe import describe
from ignite_engine.engine.loop import TrainingLoop
from ignite_engine.errors import Interrupted
from ignite_engine.evaluator import create_evaluator
from ignite_engine.events import EVENT_COUNTERS, TrainingEvents
from ignite_engine.ranks import agreement
from ignite_engine.ranks.ddp_buffers import unshared_statistics
from ignite_engine.state import TrainingState
from ignite_engine.states.registry import Registry, Stateful

__all__ = ["Trainer", "create_evaluator"]


class Trainer(TrainingLoop):
    """An Ignite engine that trains: accumulation, exact resume, agreed stops, and a bus that is free where quiet.

    Args:
        update: an :class:`~ignite_engine.Update`, or any ``update(engine, batch)``, whose return value (a number, a
            tensor or a mapping) becomes ``state.output``.
        accumulation_steps: batches of the loader in one iteration; the last group of an epoch may be shorter.
            None: no grouping, ``state.batch`` is the loader's batch.

    Raises:
        ValueError: ``accumulation_steps`` is below 1.
    """

    def __init__(self, update: Callable[[Engine, Any], Any], accumulation_steps: int | None = None) -> None:
        if accumulation_steps is not None and accumulation_steps < 1:
            raise ValueError(
                f"accumulation_steps must be at least 1, or None for no grouping, got {accumulation_steps}."
            )
        super().__init__(update, accumulation_steps)
        self.state = TrainingState()
        self.register_events(*TrainingEvents, event_to_attr=EVENT_COUNTERS)
        self.registry = Registry()
        self.registry.register("trainer", self.position)
        for name, part in self.position.parts().items():
            self.registry.register(name, part)
        for name, obj, shared in getattr(update, "stateful", lambda: ())():
            self.registry.register(name, obj, shared=shared)
        self._at_end: list[Callable[[Trainer], None]] = []

    # -- what users call ------------------------------------------------------------------------------------------

    def register(self, name: str, obj: Any, *, shared: bool = False) -> None:
        """Save ``obj`` (with ``state_dict`` and ``load_state_dict``) in every checkpoint under ``name``.

        Args:
            shared: its state is the same on every rank (a model, an optimizer): one copy is saved.
        """
        self.registry.register(name, obj, shared=shared)

    def describe(self) -> str:
        """The bus (who runs when, in order) and what a checkpoint holds, as text."""
        return describe(self, self.registry, self.exactness())

    def exactness(self, only: SaveFilter | None = None) -> list[str]:
        """Why a run resumed from a checkpoint made now would not be bit for bit; empty: it would be.

        Args:
            only: of several checkpoint handlers, what this one's filter leaves out; None: what any of them does.
        """
        reasons = self.registry.problems()
        source = self.position.source
        if source is not None and source.inexact is not None:
            reasons.append(source.inexact)
        if (module := unshared_statistics(getattr(self.update, "model", None))) is not None:
            reasons.append(f"{module} keeps statistics of each rank's own, and those of rank 0 alone are saved")
        filters = self.registry.filters if only is None else [only]
        return reasons + [reason for each in filters for reason in each.reasons(self.registry.capture)]

    def request_stop(self, reason: str, signal: int | None = None) -> None:
        """Ask for a stop at the next edge on which all ranks agree; safe in a signal handler.

        Args:
            reason: becomes ``state.reason``.
            signal: ``run()`` then raises :class:`Interrupted` with it; None: ``run()`` returns.
        """
        self.requests.ask_to_stop(reason, signal)

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
        self.requests.ask_to_save()

    def request_attention(self) -> None:
        """Say that what a handler does in the background has ended; safe in any thread.

        At the next edge on which all ranks agree ``state.attention`` is set on each of them, for RESUME_POINT.
        """
        self.requests.ask_to_attend()

    def agree_at_next_edge(self) -> None:
        """Hear at the next edge what any rank has asked for; every rank calls it, in a handler of the same event."""
        self.requests.agree_at_next_edge()

    def call_at_end(self, callback: Callable[[Trainer], None]) -> None:
        """Call ``callback(trainer)`` when this ``run()`` ends in whatever way, an exception included."""
        self._at_end.append(callback)

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

        Raises:
            Interrupted: a signal stopped the run, which is saved on every rank.
            ValueError: a resumed checkpoint holds names that nothing claims, or the data is unusable.

        An exception of a handler or of the update leaves as it was raised, with the handler named in a note; the
        next ``run()`` then starts anew.
        """
        state = self.state
        before, self.begun = (state.status, state.reason), self._internal_run_generator is not None
        if not self.begun:
            self._prepare(data, max_epochs, max_iters, epoch_length)
        try:
            if self.position.goes_on and self._is_done(state):
                self._only_complete(data)
            else:
                super().run(data, max_epochs, max_iters, epoch_length)
        except BaseException as error:
            if self.begun:
                self._fail(error)
            else:  # Ignite refused the arguments: everything is as before
                state.status, state.reason = before
            raise
        finally:
            self._call_at_end()
        if state.status == "interrupted" and self.requests.stop is not None:
            signal = self.requests.stop[1]
            if signal is not None:
                agreement.wait_for_all()
                raise Interrupted(signal)
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
        self.requests.run_starts()
        if hasattr(self.update, "run_starts"):
            self.update.run_starts()
        if isinstance(model := getattr(self.update, "model", None), nn.Module):
            model.train()

    def set_data(self, data: Iterable[Any]) -> None:
        """Go on with other data from its beginning; the epoch's length stays as it is."""
        self.state.dataloader = data
        self._setup_dataloader_iter()

    def _call_at_end(self) -> None:
        try:
            while self._at_end:
                self._at_end.pop(0)(self)
        finally:
            if self._at_end:  # one raised: the others, such as that which puts signal handlers back, still run
                self._call_at_end()

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

    def add_event_handler(self, event_name: Any, handler: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """As Ignite's; an object with a state that is attached here is registered for checkpoints by itself."""
        handle = super().add_event_handler(event_name, handler, *args, **kwargs)
        owner = handler if isinstance(handler, Stateful) else getattr(handler, "__self__", None)
        if isinstance(owner, Stateful) and not isinstance(owner, Engine):
            self.registry.adopt(owner, args)
        return handle
