"""``trainer.describe()``: the bus and what a checkpoint holds, as text."""

from __future__ import annotations

from collections.abc import Iterable

from ignite_engine.engine.bus import describe_filter, event_name, name_of
from ignite_engine.engine.planned_engine import PlannedEngine
from ignite_engine.states.registry import Registry


def describe(engine: PlannedEngine, registry: Registry, inexact: Iterable[str]) -> str:
    """Who listens to which event, in the order in which they run; and the parts of a checkpoint.

    Args:
        inexact: why a resumed run would have other bits; empty: it would not.
    """
    lines = ["The bus (event: handlers in the order in which they run)"]
    for event in engine.listened_events():
        lines.append(f"  {event_name(event)}")
        for entry in engine.plan(event).entries:
            lines.append(f"    {name_of(entry.handler)} {describe_filter(entry.filter)}".rstrip())
    lines.append("In a checkpoint (name: kind)")
    for name, obj in registry.objects.items():
        kept = "one copy" if name in registry.shared else "per rank"
        lines.append(f"  {name}: {registry.kind(name, obj)}, {kept}")
    reasons = list(inexact)
    lines.append("Resume is exact." if not reasons else "Resume is approximate:")
    lines.extend(f"  {reason}" for reason in reasons)
    return "\n".join(lines)
