"""``trainer.describe()`` as text."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from ignite.engine import Engine, Events
from torch import nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from ignite_engine.describe.lr_text import lr_text
from ignite_engine.describe.model_table import model_table
from ignite_engine.engine.bus import (
    Filtered,
    describe_filter,
    event_name,
    events_with_handlers,
    handlers_of,
    name_of,
)
from ignite_engine.engine.position import Plan, Position, last_iteration
from ignite_engine.schedules import Schedule
from ignite_engine.states.model_and_optimizer import OptimizerState
from ignite_engine.states.registry import Registry


def describe(
    engine: Engine,
    registry: Registry,
    models: Sequence[nn.Module],
    plan: Plan,
    inexact: Iterable[str],
    *,
    rates: bool = True,
) -> str:
    """What a run from its beginning on trains, at which rates, what a checkpoint holds, and who listens to what.

    Args:
        models: those that are trained.
        inexact: why a resumed run would not be bit-exact; empty: it would be.
        rates: also the learning rates of its schedules.
    """
    optimizers = [obj.optimizer for obj in registry.objects.values() if isinstance(obj, OptimizerState)]
    optimized = [each for optimizer in optimizers for group in optimizer.param_groups for each in group["params"]]
    reasons = list(inexact)
    lines = [
        f"Trains for {_length(plan)}",
        *(line for model in models for line in model_table(model, optimized)),
        *(_rates(engine, plan) if rates else ()),
        *_contents(registry),
        "The bus (event: handlers in the order in which they run)",
        *_bus(engine),
        *(["Resume is exact."] if not reasons else ["Resume is approximate:", *(f"  {reason}" for reason in reasons)]),
    ]
    return "\n".join(lines)


def _length(plan: Plan) -> str:
    iterations, epochs = last_iteration(Position(), plan), _epochs(plan)
    if iterations is None:
        return f"{epochs:,} epochs" if epochs else "a run whose length is not known before"
    of_epochs = f", {epochs:,} epochs of {plan.epoch_length:,}" if epochs and plan.epoch_length else ""
    return f"{iterations:,} iterations{of_epochs}"


def _epochs(plan: Plan) -> int | None:
    iterations = last_iteration(Position(), plan)
    return iterations // plan.epoch_length if iterations is not None and plan.epoch_length else plan.max_epochs


def _rates(engine: Engine, plan: Plan) -> list[str]:
    lines: list[str] = []
    for event, handler, owner in _schedules(engine):
        scheduler = owner.scheduler
        what = repr(scheduler) if isinstance(scheduler, Schedule) else type(scheduler).__name__
        lines.append(f"Schedule {getattr(owner, 'name', '')}: {what}")
        by_epoch = event in (Events.EPOCH_STARTED, Events.EPOCH_COMPLETED)
        total = _epochs(plan) if by_epoch else last_iteration(Position(), plan)
        steps = None if type(handler) is Filtered else total
        if isinstance(scheduler, Schedule) and steps:
            if scheduler.total is None:
                scheduler = copy.copy(scheduler)
                scheduler.set_total(steps)
            lines += lr_text(scheduler, steps, unit="epoch" if by_epoch else "update")
        else:
            first = ", ".join(f"{float(group['lr']):g}" for group in scheduler.optimizer.param_groups)
            lines.append(f"  from {first}")
    return lines


def _schedules(engine: Engine) -> Iterator[tuple[Any, Any, Any]]:
    """Event, handler and owner of each handler that steps a schedule, recognized by its attributes."""
    for event in events_with_handlers(engine):
        for handler, _, _ in handlers_of(engine, event):
            owner = getattr(handler.handler if type(handler) is Filtered else handler, "__self__", handler)
            is_schedule = isinstance(getattr(owner, "scheduler", None), Schedule | LRScheduler | ReduceLROnPlateau)
            if is_schedule and not name_of(handler).rpartition(".")[2].startswith("_"):  # its bookkeeping
                yield event, handler, owner


def _contents(registry: Registry) -> list[str]:
    lines = ["In a checkpoint (name: kind)"]
    for name, obj in registry.objects.items():
        copies = "one copy" if name in registry.shared else "per rank"
        lines.append(f"  {name}: {registry.type_name(name, obj)}, {copies}")
    return lines


def _bus(engine: Engine) -> list[str]:
    lines = []
    for event in events_with_handlers(engine):
        lines.append(f"  {event_name(event)}")
        lines += [
            f"    {name_of(handler)} {describe_filter(handler)}".rstrip()
            for handler, _, _ in handlers_of(engine, event)
        ]
    return lines
