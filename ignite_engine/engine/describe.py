"""``trainer.describe()``: the bus and what a checkpoint holds, as text."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ignite_engine.engine.bus import describe_filter, event_name, name_of

if TYPE_CHECKING:
    from ignite_engine.trainer import Trainer


def describe(trainer: Trainer) -> str:
    """Who listens to which event, in the order in which they run; and the parts of a checkpoint."""
    lines = ["The bus (event: handlers in the order in which they run)"]
    for event in trainer.listened_events():
        lines.append(f"  {event_name(event)}")
        for entry in trainer.plan(event).entries:
            lines.append(f"    {name_of(entry.handler)} {describe_filter(entry.filter)}".rstrip())
    lines.append("In a checkpoint (name: kind)")
    for name, obj in trainer.registry.objects.items():
        kept = "one copy" if name in trainer.registry.shared else "per rank"
        lines.append(f"  {name}: {trainer.registry.kind(name, obj)}, {kept}")
    reasons = trainer.exactness()
    lines.append("Resume is exact." if not reasons else "Resume is approximate:")
    lines.extend(f"  {reason}" for reason in reasons)
    return "\n".join(lines)
