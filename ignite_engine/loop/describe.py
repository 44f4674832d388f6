"""The text of ``trainer.describe()``: what a run will do.

No training code imports this module; ``Trainer.describe()`` and the recipe import it when they need it.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence, Set
from typing import Any, Protocol, runtime_checkable

from ignite.engine import Engine, Events
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from ignite_engine.checkpoint.states.model_and_optimizer import OptimizerState, clean_name, unwrap
from ignite_engine.checkpoint.states.registry import Registry
from ignite_engine.loop.bus import (
    Filtered,
    describe_filter,
    event_name,
    events_with_handlers,
    handlers_of,
    name_of,
)
from ignite_engine.loop.position import Plan, Position, last_iteration
from ignite_engine.text import in_columns, in_units, short

_HEAD = ("", "", "parameters", "trained", "dtype", "size")


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
        what = repr(scheduler) if isinstance(scheduler, Curve) else type(scheduler).__name__
        lines.append(f"Schedule {getattr(owner, 'name', '')}: {what}")
        by_epoch = event in (Events.EPOCH_STARTED, Events.EPOCH_COMPLETED)
        total = _epochs(plan) if by_epoch else last_iteration(Position(), plan)
        steps = None if type(handler) is Filtered else total
        if isinstance(scheduler, Curve) and steps:
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
            is_schedule = isinstance(getattr(owner, "scheduler", None), Curve | LRScheduler | ReduceLROnPlateau)
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


@runtime_checkable
class Curve(Protocol):
    """A schedule that knows the LR of each parameter group at any step, like those of ``schedules.py``."""

    total: float | None

    def set_total(self, total: float) -> None: ...

    def lrs_at(self, step: int) -> list[float]: ...


def lr_text(schedule: Curve, total: int, *, width: int = 60, height: int = 12, unit: str = "update") -> list[str]:
    """Lines of text: the first group's LR at 11 steps, and a plot of ``width`` by ``height`` characters."""
    steps = sorted({round(share * (total - 1) / 10) for share in range(11)})
    lines = [f"Learning rate by {unit}:", *(f"  {step + 1:>9}  {schedule.lrs_at(step)[0]:.4e}" for step in steps)]
    columns = [schedule.lrs_at(round(column * (total - 1) / max(width - 1, 1)))[0] for column in range(width)]
    peak = max(columns)
    if peak <= 0:
        return lines
    for row in range(height, 0, -1):
        label = short(peak * row / height, 3) if row in (height, height // 2) else ""
        cells = "".join("#" if value >= peak * (row - 0.5) / height else " " for value in columns)
        lines.append(f"  {label:>9} |{cells}".rstrip())
    first, middle, last = "1", short((total + 1) / 2), short(total, 6)
    under = f"{first:<{width // 2}}{middle:<{width - width // 2 - len(last)}}{last}"
    return [*lines, f"  {'0':>9} +{'-' * width}", f"  {unit:>9}  {under}"]


def model_table(model: nn.Module, optimized: Iterable[Tensor]) -> list[str]:
    """A table with a line for each outermost module that has parameters, and one for the whole model.

    Trained are those of ``optimized``, the optimizers' parameters, that require a gradient. A parameter that several
    parts share counts in the first. Of a sharded model the numbers are those of all shards.
    """
    model = unwrap(model)
    seen: set[nn.Parameter] = set()
    trained = {parameter for parameter in optimized if parameter.requires_grad}
    rows: list[tuple[str, ...]] = []
    for name, part in model.named_children():
        own = [parameter for parameter in part.parameters() if parameter not in seen]
        if own:
            rows.append((clean_name(name), type(part).__name__, *_numbers(own, trained)))
            seen.update(own)
    whole = ("", type(model).__name__, *_numbers(model.parameters(), trained))
    return in_columns([_HEAD, *rows, whole] if len(rows) > 1 else [_HEAD, whole])


def _numbers(parameters: Iterable[nn.Parameter], trained: Set[Tensor]) -> tuple[str, ...]:
    held = list(parameters)
    of_trained = sum(parameter.numel() for parameter in held if parameter in trained)
    kinds = dict.fromkeys(str(parameter.dtype).removeprefix("torch.") for parameter in held)
    size = sum(parameter.numel() * parameter.element_size() for parameter in held)
    return f"{sum(parameter.numel() for parameter in held):,}", f"{of_trained:,}", ", ".join(kinds), in_units(size)
