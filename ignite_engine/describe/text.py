"""``trainer.describe()`` as text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ignite.engine import Engine
from torch import nn

from ignite_engine.describe.attached import Attached, attached_to, options_of, owners, scheduler_of
from ignite_engine.describe.conflicts import conflicts_of
from ignite_engine.describe.contents import (
    Size,
    free_bytes,
    kept_at_once,
    memory_of,
    part_sizes,
)
from ignite_engine.describe.lr_text import lr_text
from ignite_engine.describe.timetable import times_of, timetable
from ignite_engine.engine.bus import describe_filter, event_name, events_with_handlers, handlers_of, name_of
from ignite_engine.engine.length import Length
from ignite_engine.ranks import agreement
from ignite_engine.schedules import Schedule
from ignite_engine.states.registry import Registry
from ignite_engine.text import in_units


def describe(
    engine: Engine,
    registry: Registry,
    models: Sequence[nn.Module],
    length: Length,
    inexact: Iterable[str],
    *,
    rates: bool = True,
) -> str:
    """What a run of this length does and when, what a checkpoint holds, who listens to what, and what contradicts it.

    Args:
        models: those that are trained.
        inexact: why a resumed run would not be bit-exact; empty: it would be.
        rates: also the learning rates of its schedules.
    """
    entries = attached_to(engine)
    reasons = list(inexact)
    disk, too_large = _disk(registry, entries, length)
    conflicts = [*(conflict.text for conflict in conflicts_of(engine, length)), *too_large]
    lines = [
        *timetable(engine, entries, length),
        *(_rates(entries, length) if rates else ()),
        *_memory_lines(registry, models),
        *_contents(registry),
        *disk,
        "The bus (event: handlers in the order in which they run)",
        *_bus(engine),
        *(["Resume is exact."] if not reasons else ["Resume is approximate:", *(f"  {reason}" for reason in reasons)]),
        *(["No conflicts."] if not conflicts else ["Conflicts:", *(f"  {conflict}" for conflict in conflicts)]),
    ]
    return "\n".join(lines)


def _rates(entries: Sequence[Attached], length: Length) -> list[str]:
    lines: list[str] = []
    for owner in owners(entries):
        scheduler = scheduler_of(owner)
        if scheduler is None:
            continue
        what = repr(scheduler) if isinstance(scheduler, Schedule) else type(scheduler).__name__
        lines.append(f"Schedule {getattr(owner, 'name', '')}: {what}")
        acting = next((times_of(entry, length) for entry in entries if entry.owner is owner and entry.acts), None)
        steps = 0 if acting is None or acting.counts is None else len(acting.counts)
        if isinstance(scheduler, Schedule) and steps and acting is not None:
            lines += lr_text(over(scheduler, steps), steps, unit="epoch" if acting.unit == "epoch" else "update")
        else:
            first = ", ".join(f"{float(group['lr']):g}" for group in scheduler.optimizer.param_groups)
            lines.append(f"  from {first}")
    return lines


def over(schedule: Schedule, steps: int) -> Schedule:
    """The schedule itself, or a copy over ``steps`` if its length is that of its run."""
    if schedule.is_known or schedule.shape is None:
        return schedule
    known = Schedule(schedule.optimizer, schedule.shape(steps), schedule.description)
    known.base_lrs = schedule.base_lrs
    return known


def _memory_lines(registry: Registry, models: Sequence[nn.Module]) -> list[str]:
    if not models:
        return []
    found = memory_of(registry, models)
    parts = [f"weights {in_units(found.weights)}", f"gradients {in_units(found.gradients)}"]
    known = found.optimizer.later is not None
    parts.append(f"optimizer state {in_units(found.optimizer.whole) if known else 'known after the first step'}")
    if found.averages:
        parts.append(f"averages {in_units(found.averages)}")
    total = found.weights + found.gradients + found.optimizer.whole + found.averages
    return [
        "Parameters and memory",
        f"  {found.parameters:,} parameters: {found.trained:,} trained, {found.parameters - found.trained:,} frozen",
        f"  {', '.join(parts)}: {in_units(total)}{' of each rank' if agreement.world_size() > 1 else ''}, and what the "
        "forward pass keeps",
    ]


def _contents(registry: Registry) -> list[str]:
    sizes = part_sizes(registry)
    lines = ["In a checkpoint (name: kind)"]
    for name, obj in registry.objects.items():
        copies = "one copy" if name in registry.shared else "per rank"
        size = f", {sizes[name]}" if name in sizes else ""
        lines.append(f"  {name}: {registry.type_name(name, obj)}, {copies}{size}")
    return lines


def _disk(registry: Registry, entries: Sequence[Attached], length: Length) -> tuple[list[str], list[str]]:
    """What each checkpoint handler needs, and which of them need more than there is."""
    lines, too_large = [], []
    for owner in owners(entries):
        if (found := options_of(owner)) is None:
            continue
        options, store = found
        sizes = part_sizes(registry, options)
        size, more = checkpoint_bytes(registry, sizes), any(part.later is None for part in sizes.values())
        count, named = kept_at_once(options, _saves(entries, owner, length), length.iterations)
        free = free_bytes(store.directory)
        needed = f"{in_units(count * size)} for {count:,} ({', '.join(named)})"
        room = "" if free is None else f"; {in_units(free)} are free"
        if free is not None and free < count * size:
            too_large.append(
                f"The checkpoints in {store.directory} need {needed}, and {in_units(free)} are free: make room, keep "
                "fewer, or leave parts out (exclude)."
            )
        lines.append(
            f"Disk: a checkpoint has {size:,} bytes of tensors{' and more after the first step' if more else ''}"
            f"; in {store.directory} at most {needed}{room}."
        )
    return lines, too_large


def checkpoint_bytes(registry: Registry, sizes: dict[str, Size]) -> int:
    """Bytes of the tensors of all ranks in one checkpoint."""
    ranks = agreement.world_size()
    return sum(size.whole * (1 if name in registry.shared else ranks) for name, size in sizes.items())


def _saves(entries: Sequence[Attached], owner: object, length: Length) -> int | None:
    times = [times_of(entry, length) for entry in entries if entry.owner is owner and entry.acts]
    counts = [None if acting.counts is None else len(acting.counts) for acting in times]
    return None if None in counts else sum(count or 0 for count in counts) + 1


def _bus(engine: Engine) -> list[str]:
    lines = []
    for event in events_with_handlers(engine):
        lines.append(f"  {event_name(event)}")
        lines += [
            f"    {name_of(handler)} {describe_filter(handler)}".rstrip()
            for handler, _, _ in handlers_of(engine, event)
        ]
    return lines
