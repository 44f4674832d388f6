"""How an event reaches its handlers: the order, and when nothing is due.

Ignite keeps the handlers (``add_event_handler`` and all that belongs to it are untouched); a :class:`Plan` is compiled
from its list. A plan knows the next count at which any of its filters can say yes, so a quiet iteration costs two
comparisons however many handlers are attached.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, MutableSequence, Sequence
from dataclasses import dataclass, field
from typing import Any

from ignite.engine import Engine
from ignite.engine.events import CallableEventWithFilter

from ignite_engine.events import Phase

NEVER = float("inf")
Filter = Callable[[Engine, int], bool]
Registered = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class Entry:
    """One handler of one event."""

    handler: Callable[..., Any]
    takes_engine: bool
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    filter: Filter | None
    phase: int

    cells: dict[str, Any] = field(init=False)
    """What one of Ignite's own filters was made with; empty for no filter, and for a user's own."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "cells", _closure(self.filter) if self.filter is not None else {})

    def next_due(self, count: int) -> float:
        """The smallest count above ``count`` at which one of Ignite's own filters may say yes."""
        cells = self.cells
        if "after_" in cells or "before_" in cells:
            return NEVER if count + 1 >= cells["before_"] else max(count, cells["after_"]) + 1
        if "every" in cells:
            every: int = cells["every"]
            return (count // every + 1) * every
        return min((once for once in cells["once"] if once > count), default=NEVER)


class Plan:
    """The handlers of one event in the order in which they run, and when the next of them is due.

    Those without a filter, or with a user's own, are asked every time. The others are not even looked at before the
    next count at which one of them can be due.
    """

    def __init__(self, entries: Sequence[Entry], counter: str | None) -> None:
        self.entries = tuple(sorted(entries, key=lambda entry: entry.phase))  # stable: else by attachment
        self.counter = counter
        self._asked = tuple(entry for entry in self.entries if not entry.cells)
        self._dues: list[float] = []
        """For each entry the next count at which it can be due; those that are asked every time: always."""
        self._quiet_from: float = NEVER
        self._due: float = NEVER

    def fire(self, engine: Engine, event: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Run what is due at the event's present count."""
        count = getattr(engine.state, self.counter) if self.counter is not None else 0
        quiet = self._quiet_from <= count < self._due
        due: Sequence[Entry] = self._asked
        if not quiet:
            if count < self._quiet_from:  # the first time, or counted from the beginning again
                self._dues = [-NEVER] * len(self.entries)
            due = [entry for entry, at in zip(self.entries, self._dues, strict=True) if at <= count]
        for entry in due:
            if entry.filter is None or entry.filter(engine, count):
                try:
                    extra = {**entry.kwargs, **kwargs} if kwargs else entry.kwargs
                    if entry.takes_engine:
                        entry.handler(engine, *args, *entry.args, **extra)
                    else:
                        entry.handler(*args, *entry.args, **extra)
                except Exception as error:
                    error.add_note(f"Raised by handler {name_of(entry.handler)} on {event_name(event)}.")
                    raise
        if not quiet and self.counter is not None:
            # from count + 1: an event may fire again at the same count
            self._quiet_from = count + 1
            self._dues = [
                entry.next_due(count) if entry.cells and at <= count else at
                for entry, at in zip(self.entries, self._dues, strict=True)
            ]
            self._due = min((at for at in self._dues if at > count), default=NEVER)


class ProfiledPlan(Plan):
    """A plan with handlers at its front, put there before all phases: they may change what follows in this very fire.

    Args:
        first: how many they are.
    """

    def __init__(self, entries: Sequence[Entry], counter: str | None, first: int) -> None:
        super().__init__(entries, counter)
        self._front, self._rest = Plan(self.entries[:first], counter), Plan(self.entries[first:], counter)

    def fire(self, engine: Any, event: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._front.fire(engine, event, args, kwargs)
        now = engine.plan(event)
        rest = now._rest if isinstance(now, ProfiledPlan) else now
        rest.fire(engine, event, args, kwargs)


class HandlerList(MutableSequence[Registered]):
    """Ignite's handlers of one event; tells of each change, also where a profiler writes here past the engine.

    Args:
        changed: called after each change.
    """

    def __init__(self, changed: Callable[[], None], handlers: Iterable[Registered] = ()) -> None:
        self._handlers, self._changed = list(handlers), changed
        self.first = 0
        """So many were put at the front on purpose: they run before all phases."""

    def __len__(self) -> int:
        return len(self._handlers)

    def __getitem__(self, index: Any) -> Any:
        return self._handlers[index]

    def __setitem__(self, index: Any, handler: Any) -> None:
        self._handlers[index] = handler
        self._changed()

    def __delitem__(self, index: Any) -> None:
        del self._handlers[index]
        self._changed()

    def insert(self, index: int, handler: Registered) -> None:
        self._handlers.insert(index, handler)
        self.first += index == 0
        self._changed()

    def append(self, handler: Registered) -> None:
        self._handlers.append(handler)
        self._changed()


class HandlersByEvent(dict[Any, Any]):
    """What Ignite keeps as ``_event_handlers``: a :class:`HandlerList` for each event."""

    def __init__(self, changed: Callable[[], None]) -> None:
        super().__init__()
        self._changed = changed

    def __missing__(self, event: Any) -> HandlerList:
        handlers = HandlerList(self._changed)
        super().__setitem__(event, handlers)
        return handlers

    def __setitem__(self, event: Any, handlers: Iterable[Registered]) -> None:
        """Put Ignite's new list, from which it left out what was removed, in the place of the old one."""
        before, now = self[event], HandlerList(self._changed, handlers)
        left = [handler for handler, _, _ in now]
        now.first = sum(any(handler is each for each in left) for handler, _, _ in before[: before.first])
        super().__setitem__(event, now)
        self._changed()


def compile_plan(handlers: Sequence[Registered], counter: str | None) -> Plan:
    """A plan for Ignite's list of ``(handler, args, kwargs)``."""
    entries, first = list[Entry](), getattr(handlers, "first", 0)
    for index, (function, args, kwargs) in enumerate(handlers):
        takes_engine = bool(args) and isinstance(args[0], weakref.ref)
        # from __dict__: a handler may answer every getattr, as mocks and proxies do
        wrapped = getattr(function, "__dict__", {})
        handler = wrapped.get("bus_handler", function)
        if wrapped.get("__wrapped__") is not handler:  # a wrapper around ours carries its attributes
            handler, wrapped = function, {}
        entries.append(
            Entry(
                handler,
                takes_engine,
                args[1:] if takes_engine else args,
                kwargs,
                wrapped.get("bus_filter"),
                -1 if index < first else _phase_of(handler),
            )
        )
    return ProfiledPlan(entries, counter, first) if first else Plan(entries, counter)


def _phase_of(handler: Any) -> int:
    """What the handler declares, or the object it is a method of, or the handler that it wraps."""
    while handler is not None:
        owner = getattr(handler, "__self__", handler)
        phase = getattr(handler, "phase", getattr(owner, "phase", None))
        if isinstance(phase, int):
            return int(phase)
        handler = getattr(handler, "__dict__", {}).get("__wrapped__")
    return Phase.OTHER


def _closure(function: Filter) -> dict[str, Any]:
    """The variables of one of Ignite's own filters; empty for a user's filter, which is asked every time."""
    if not getattr(function, "__qualname__", "").startswith("CallableEventWithFilter."):
        return {}
    cells = function.__closure__ or ()
    return {name: cell.cell_contents for name, cell in zip(function.__code__.co_freevars, cells, strict=True)}


def name_of(handler: Callable[..., Any]) -> str:
    """What a person calls this handler."""
    owner = getattr(handler, "__self__", None)
    if owner is not None and not isinstance(owner, type):
        return f"{type(owner).__name__}.{handler.__name__}"
    return getattr(handler, "__qualname__", None) or type(handler).__name__


def event_name(event: Any) -> str:
    """``ITERATION_COMPLETED`` for an event, the string itself for an event that is one."""
    return str(event.name) if isinstance(event, CallableEventWithFilter) else str(event)


def describe_filter(function: Filter | None) -> str:
    """``(every=3)`` for one of Ignite's filters, empty for none."""
    if function is None:
        return ""
    cells = _closure(function)
    if not cells:
        return f"(event_filter={name_of(function)})"
    said = {name.rstrip("_"): value for name, value in cells.items() if value not in (NEVER, 0)}
    return (
        "("
        + ", ".join(f"{name}={value}" for name, value in sorted(said.items(), key=lambda item: item[0] != "every"))
        + ")"
    )
