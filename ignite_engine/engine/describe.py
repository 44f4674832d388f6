"""``trainer.describe()``: the bus and what a checkpoint holds, as text."""

from __future__ import annotations

from collections.abc import Iterable

from ignite.engine import Engine

from ignite_engine.engine.bus import describe_filter, event_name, events_with_handlers, handlers_of, name_of
from ignite_engine.states.registry import Registry


def describe(engine: Engine, registry: Registry, inexact: Iterable[str]) -> str:
    """Who listens to which event, in the order in which they run; and the parts of a checkpoint.

    Args:
        inexact: why a resumed run would have other bits; empty: it would not.
    """
    lines = ["The bus (event: handlers in the order in which they run)"]
    for event in events_with_handlers(engine):
        lines.append(f"  {event_name(event)}")
        lines += [
            f"    {name_of(handler)} {describe_filter(handler)}".rstrip()
            for handler, _, _ in handlers_of(engine, event)
        ]
    lines.append("In a checkpoint (name: kind)")
    for name, obj in registry.objects.items():
        copies = "one copy" if name in registry.shared else "per rank"
        lines.append(f"  {name}: {registry.type_name(name, obj)}, {copies}")
    reasons = list(inexact)
    lines.append("Resume is exact." if not reasons else "Resume is approximate:")
    lines.extend(f"  {reason}" for reason in reasons)
    return "\n".join(lines)
