"""Fires events: finds the handlers of an event and calls them.

Ignite keeps the handlers of each event in a list, and that list is the bus: it is in the order in which they run, first
by :class:`~ignite_engine.events.Phase`, then by attachment. :func:`fire` walks it and asks each handler's filter.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable
from typing import Any

from ignite.engine import Engine, Events
from ignite.engine.events import CallableEventWithFilter

from ignite_engine.events import Phase, TrainingEvents

Filter = Callable[[Engine, int], bool]
Registered = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]
"""An entry of Ignite's list: the handler, its arguments (first a reference to the engine, if it takes it), its
options."""


_IN_ORDER = (
    Events.STARTED,
    Events.EPOCH_STARTED,
    Events.GET_BATCH_STARTED,
    Events.GET_BATCH_COMPLETED,
    TrainingEvents.WINDOW_STARTED,
    Events.ITERATION_STARTED,
    TrainingEvents.FORWARD_STARTED,
    TrainingEvents.FORWARD_COMPLETED,
    TrainingEvents.BACKWARD_COMPLETED,
    TrainingEvents.OPTIMIZER_STEP_STARTED,
    TrainingEvents.OPTIMIZER_STEP_COMPLETED,
    TrainingEvents.OPTIMIZER_STEP_SKIPPED,
    Events.ITERATION_COMPLETED,
    TrainingEvents.WINDOW_COMPLETED,
    Events.EPOCH_COMPLETED,
    TrainingEvents.EVALUATION_STARTED,
    TrainingEvents.EVALUATION_COMPLETED,
    TrainingEvents.METRICS_READY,
    TrainingEvents.RESUME_POINT,
    TrainingEvents.CHECKPOINT_SAVED,
    TrainingEvents.CHECKPOINT_FAILED,
    Events.TERMINATE,
    Events.COMPLETED,
)
"""The events of an iteration, an epoch and a run in the order in which they occur; some occur only at times."""
_EVERY = f"{CallableEventWithFilter.every_event_filter.__qualname__}.<locals>."


class Filtered:
    """A handler behind one of Ignite's filters (``every=``, ``once=``, ``event_filter=``, ...).

    It is callable: code that wraps an entry of the list, as Ignite's profilers do, keeps the filter.
    """

    def __init__(self, engine: Engine, event: Any, event_filter: Filter, handler: Callable[..., Any]) -> None:
        functools.update_wrapper(self, handler)  # first: it copies the handler's own attributes
        self.handler, self.filter, self.period = handler, event_filter, _period_of(event_filter)
        self._engine, self._event = weakref.ref(engine), event
        self._parent = weakref.ref(handler)  # Ignite finds a handler behind its filter by this

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        engine = self._engine()
        if engine is not None and self.filter(engine, count_of(engine, self._event)):
            return self.handler(*args, **kwargs)

    def __repr__(self) -> str:
        return repr(self.handler)  # Ignite's profilers know their own handlers by it


def _period_of(event_filter: Filter) -> int:
    """n of Ignite's filter of ``every=n``, which :func:`fire` applies without a call; 0: a filter that it calls."""
    if getattr(event_filter, "__qualname__", "").startswith(_EVERY):
        period = inspect.getclosurevars(event_filter).nonlocals.get("every")
        if isinstance(period, int):
            return period
    return 0


def handlers_of(engine: Engine, event: Any) -> list[Registered]:
    """The handlers of ``event`` in the order in which they run."""
    return engine._event_handlers.get(event) or []


def filtered(engine: Engine) -> list[tuple[Any, Filtered]]:
    """The handlers behind a filter, each with its event."""
    return [
        (event, handler)
        for event, handlers in engine._event_handlers.items()
        for handler, *_ in handlers
        if type(handler) is Filtered
    ]


def events_with_handlers(engine: Engine) -> list[Any]:
    """The events that have a handler, in the order in which they occur, then those registered later."""
    known = [*_IN_ORDER, *Events, *TrainingEvents]
    events = [event for event, handlers in engine._event_handlers.items() if handlers]
    return sorted(events, key=lambda event: known.index(event) if event in known else len(known))


def count_of(engine: Engine, event: Any) -> int:
    """The counter on which ``every=``, ``once=`` and other filters of ``event`` act."""
    counter = engine.state.event_to_attr.get(event)
    if counter is None:
        return engine.state.get_event_attrib_value(event)  # raises, and says how to register a counter
    count: int = getattr(engine.state, counter)
    return count


def fire(engine: Engine, event: Any, *args: Any, **kwargs: Any) -> bool:
    """Run the handlers of ``event`` that are due; returns whether it has any.

    An exception of a handler leaves with a note that names the handler and the event.
    """
    engine.last_event_name = event
    handlers = engine._event_handlers.get(event)
    if not handlers:
        return False
    count = None
    for function, own_args, own_kwargs in handlers:  # Ignite's list itself: one added by a handler runs, too
        handler = function
        if type(function) is Filtered:
            if count is None:
                count = count_of(engine, event)
            if count % function.period if function.period else not function.filter(engine, count):
                continue
            handler = function.handler
        try:
            extra = {**own_kwargs, **kwargs} if kwargs else own_kwargs
            if own_args and type(own_args[0]) is weakref.ref:
                handler(engine, *args, *own_args[1:], **extra)
            else:
                handler(*args, *own_args, **extra)
        except Exception as error:
            name_in(error, handler, event)
            raise
    return True


def name_in(error: Exception, handler: Callable[..., Any], event: Any) -> None:
    """Add a note to ``error`` with the handler that raised it."""
    error.add_note(f"Raised by handler {name_of(handler)} on {event_name(event)}.")


def sort_in_last(engine: Engine, event: Any) -> None:
    """Move the handler of ``event`` that was added last before those of later phases."""
    *handlers, added = engine._event_handlers[event]
    index, phase = len(handlers), phase_of(added[0])
    while index and phase_of(handlers[index - 1][0]) > phase:
        index -= 1
    if index < len(handlers):  # a new list, as the event may be iterating over the old one
        engine._event_handlers[event] = [*handlers[:index], added, *handlers[index:]]


def phase_of(handler: Any) -> int:
    """The phase that a handler declares, or its object, or the handler that it wraps."""
    while handler is not None:
        owner = getattr(handler, "__self__", handler)
        phase = getattr(handler, "phase", getattr(owner, "phase", None))
        if isinstance(phase, int):
            return int(phase)
        handler = getattr(handler, "__dict__", {}).get("__wrapped__")  # a mock or a proxy answers every getattr
    return Phase.OTHER


def name_of(handler: Callable[..., Any]) -> str:
    """The name of a handler, as a person would write it."""
    if type(handler) is Filtered:
        handler = handler.handler
    owner = getattr(handler, "__self__", None)
    if owner is not None and not isinstance(owner, type):
        return f"{type(owner).__name__}.{handler.__name__}"
    return getattr(handler, "__qualname__", None) or type(handler).__name__


def event_name(event: Any) -> str:
    """``ITERATION_COMPLETED`` for an event, the string itself for an event that is one."""
    return str(event.name) if isinstance(event, CallableEventWithFilter) else str(event)


def filter_options(handler: Callable[..., Any]) -> dict[str, Any] | None:
    """``{"every": 3}`` of one of Ignite's filters, empty without a filter, None of an ``event_filter``."""
    if type(handler) is not Filtered:
        return {}
    if not getattr(handler.filter, "__qualname__", "").startswith("CallableEventWithFilter."):
        return None
    options = inspect.getclosurevars(handler.filter).nonlocals  # only for printing: names private to Ignite
    return {name.rstrip("_"): value for name, value in options.items() if value not in (0, float("inf"))}


def describe_filter(handler: Callable[..., Any]) -> str:
    """``(every=3)`` for a handler behind one of Ignite's filters, empty without a filter."""
    given = filter_options(handler)
    if given is None:
        chosen = handler.filter  # type: ignore[attr-defined]  # it is behind a filter
        return f"(event_filter={chosen if '__str__' in vars(type(chosen)) else name_of(chosen)})"
    return f"({', '.join(f'{name}={value}' for name, value in sorted(given.items()))})" if given else ""
