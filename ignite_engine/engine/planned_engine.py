"""An Ignite engine whose events go by compiled plans: everything public is Ignite's, a quiet event costs little."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from ignite.engine import Engine, Events

from ignite_engine.engine.bus import HandlersByEvent, Plan, compile_plan


class PlannedEngine(Engine):
    """Fires events from plans instead of asking every handler's filter every time.

    The handlers stand in Ignite's own list; a plan is thrown away whenever that list changes.
    """

    def __init__(self, process_function: Callable[[Engine, Any], Any]) -> None:
        self._plans: dict[str, Plan] = {}
        self.heard: set[str] = set()
        """Names of the events that somebody listens to; the others need not be fired."""
        super().__init__(process_function)
        this = weakref.ref(self)

        def changed() -> None:
            engine = this()
            if engine is not None:
                engine._handlers_changed()

        self._event_handlers = HandlersByEvent(changed)

    def hears(self, event: Any) -> bool:
        """Whether anybody listens to ``event``."""
        return _name(event) in self.heard

    def fire_event(self, event_name: Any) -> None:
        if getattr(event_name, "_name_", event_name) not in self._plans:
            self._assert_allowed_event(event_name)
        self._fire_event(event_name)

    def _fire_event(self, event_name: Any, *event_args: Any, **event_kwargs: Any) -> None:
        self.last_event_name = event_name
        plan = self._plans.get(_name(event_name))
        if plan is None:
            plan = self.plan(event_name)
        if plan.entries:
            plan.fire(self, event_name, event_args, event_kwargs)

    def plan(self, event: Any) -> Plan:
        """The compiled handlers of ``event``."""
        key = _name(event)
        if key in self._plans:
            return self._plans[key]
        counter = self.state.event_to_attr.get(event)
        plan = compile_plan(self._event_handlers.get(event, ()), counter)
        self._plans[key] = plan
        return plan

    def listened_events(self) -> list[Any]:
        """The events that somebody listens to, in the order in which they were registered."""
        return [event for event in self._allowed_events if self._event_handlers.get(event)]

    def _handler_wrapper(self, handler: Callable[..., Any], event_name: Any, event_filter: Callable[..., Any]) -> Any:
        wrapper = super()._handler_wrapper(handler, event_name, event_filter)
        wrapper.bus_handler, wrapper.bus_filter = handler, event_filter  # type: ignore[attr-defined]
        return wrapper

    def _handlers_changed(self) -> None:
        self._plans.clear()
        self.heard.clear()
        self.heard.update(_name(event) for event, handlers in self._event_handlers.items() if handlers)

    def _handle_exception(self, e: BaseException) -> None:
        if self._event_handlers.get(Events.EXCEPTION_RAISED):
            self._fire_event(Events.EXCEPTION_RAISED, e)
        else:
            raise e


def _name(event: Any) -> str:
    name: str = event if type(event) is str else event._name_
    return name
