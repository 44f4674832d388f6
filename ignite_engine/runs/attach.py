"""Attaches the handlers of a run: those of the table in its order, then those of the user."""

from __future__ import annotations

import inspect
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from ignite.engine import Events
from torch.optim.lr_scheduler import CyclicLR, LRScheduler, OneCycleLR, ReduceLROnPlateau

from ignite_engine.checkpoint.sources import LoadSource
from ignite_engine.data.source import OwnSource
from ignite_engine.errors import CheckpointError
from ignite_engine.handlers import LRSchedule
from ignite_engine.handlers.model_bank import ModelBank
from ignite_engine.ranks import agreement
from ignite_engine.runs.config.named import Fault, fitting, lookup, named, parameters_of, refusal_of
from ignite_engine.runs.config.tables import HANDLERS, arguments_of, event_of, load_source, when_of
from ignite_engine.runs.evaluations import Evaluations
from ignite_engine.runs.loaders import data_loader
from ignite_engine.runs.run import Run
from ignite_engine.runs.task import Task
from ignite_engine.trainer import Trainer

logger = logging.getLogger(__name__)

_AT_LOG_POINTS = ("MemoryLogger", "Throughput", "StepTimes", "MetricLogger")
"""Handlers that write values; their event is the logger's where none is given."""


def attach_handlers(run: Run, total: int | None) -> None:
    """Attach all handlers of the run's config, and those of its task.

    Args:
        total: updates of the run; a short one is logged ten times.

    Raises:
        ConfigError: a setting does not fit.
    """
    config, trainer = run.settings, run.trainer
    trainer.add_event_handler(Events.STARTED, run.started)
    _attach_schedules(run)
    sources = [load_source(entry) for entry in config.load]
    entries = {label: entry for label, entry in config.handlers.items() if entry is not None}
    if sources and ("Checkpoint" not in entries or any(source.dynamic for source in sources)):
        entries.setdefault("ModelBank", {})
    kinds = {label: entry.get("use", label) for label, entry in entries.items()}
    log_point = _event_given(entries.get("MetricLogger", {})) or {"every": max(1, min(50, (total or 500) // 10))}
    supplied = _supplied(run, sources)
    events: dict[str, Any] = {}
    made: dict[str, Any] = {}
    order = [*HANDLERS]
    for label in sorted(entries, key=lambda label: order.index(kinds[label]) if kinds[label] in order else len(order)):
        entry = entries[label]
        if kinds[label] in _AT_LOG_POINTS and not _event_given(entry):
            entry = {**entry, **log_point}
        with config.at(f"handlers.{label}"):
            made[label] = _attach_entry(run, label, entry, supplied, events)
    run.checkpoint = made.get("Checkpoint")
    if run.checkpoint is not None:
        run.checkpoint.announces_best = False  # the run's last line does
        run.checkpoint.asks_tiers = not config.run.restart
    if sources:
        run.load = partial(_load, run, sources, made.get("ModelBank"))
    own = run.task.handlers
    with config.at("handlers"):
        fitting(own, list[Any] | dict[str, Any])
    for key, handler in own.items() if isinstance(own, Mapping) else enumerate(own):
        with config.at(f"handlers[{key!r}]"):
            _attach_one(trainer, *(handler if isinstance(handler, tuple) else (handler,)), label=key)


def _event_given(entry: Mapping[str, Any]) -> dict[str, Any]:
    return {key: entry[key] for key in ("every", "at") if entry.get(key) is not None}


def _supplied(run: Run, sources: Sequence[LoadSource]) -> dict[str, Callable[[], Any]]:
    """What a handler gets for arguments of these names."""
    config, task = run.settings, run.task
    return {
        "directory": lambda: run.directory.path,
        "config": lambda: run.config,
        "evaluator": lambda: Evaluations(run).evaluator(),
        "data": lambda: data_loader(config, task, next(iter(task.val_sets.values()), task.train_set), training=False),
        "run": lambda: run,
        "since": lambda: time.monotonic() - (time.perf_counter() - run.startup.began),  # the start-up counts as well
        "sources": lambda: sources,
        "tokens_fn": lambda: task.tokens_fn,
    }


def _attach_entry(
    run: Run, label: str, entry: Mapping[str, Any], supplied: Mapping[str, Callable[[], Any]], events: dict[str, Any]
) -> Any:
    """Make and attach the handler of an entry.

    Args:
        events: those of the entries before; handlers of one clock share it and act together.

    Raises:
        Fault: a setting does not fit.
    """
    config, task = run.settings, run.task
    kind = entry.get("use", label)
    make = lookup(kind, HANDLERS, key="use", folder=config.folder)
    arguments, supplied = dict(entry), dict(supplied)
    if kind == "Evaluation":
        del supplied["data"]  # it takes names
    elif "data" in parameters_of(make)[0] and isinstance(name := arguments.get("data"), str):
        supplied["data"] = partial(data_loader, config, task, Evaluations(run, name).sets[name], training=False)
        del arguments["data"]
    if kind == "Checkpoint":
        supplied["directory"] = lambda: run.directory.checkpoints
    if kind != label:
        supplied["name"] = lambda: label
    arguments = arguments_of(make, arguments)
    arguments.pop("resume", None)
    if isinstance(make, type):
        handler = named({**arguments, "use": kind}, {kind: make}, key="use", given=supplied)
    else:
        handler = partial(make, **arguments)
    when = when_of(make, entry)
    if (key := repr(when)) not in events:
        has_length = not isinstance(task.train_set, OwnSource) and hasattr(task.train_set, "__len__")
        events[key] = event_of(when, count=task.tokens_fn or task.weight_fn, has_length=has_length)
    try:
        _attach_one(run.trainer, handler, *filter(None, [events[key]]), label=None if kind in HANDLERS else label)
    except (TypeError, ValueError) as error:
        raise refusal_of(error, label, entry) from error
    return handler


def _attach_one(trainer: Trainer, handler: Any, *events: Any, label: Any) -> None:
    """Attach an object with ``attach``, or a function, at its event if it has one.

    Args:
        label: a text: its state is in checkpoints, under this name unless it has named itself.

    Raises:
        Fault: it is neither, or takes no event, or needs one.
    """
    name = getattr(handler, "__name__", type(handler).__name__)
    if isinstance(handler, type):
        raise Fault(("", f"is the class {name}: give an object of it, {name}(...)."))
    if hasattr(handler, "attach"):
        try:
            inspect.signature(handler.attach).bind(trainer, *events)
        except TypeError as error:
            remedy = "has events of its own: leave it out" if events else "takes an event: give the pair of them"
            raise Fault(("", f"is a {name}, whose attach {remedy} ({error}).")) from None
        handler.attach(trainer, *events)
    else:
        try:
            trainer.add_event_handler(*events, handler)
        except (TypeError, ValueError) as error:
            expected = "an object with attach(trainer), or a function with its event, in this order"
            raise Fault(("", f"must be {expected}, got {name}: {error}")) from None
    has_state = hasattr(handler, "state_dict") and hasattr(handler, "load_state_dict")
    names = [name for name, known in trainer.registry.objects.items() if known is handler]
    # one that was attached without a name is known by its class
    if isinstance(label, str) and has_state and all(name.endswith(type(handler).__name__) for name in names):
        trainer.register(label, handler)


def _attach_schedules(run: Run) -> None:
    config, task = run.settings, run.task
    for name, schedule in run.schedules.items():
        key, entry = config.schedule_of(name)
        metric = entry.get("metric") if task.schedule is None else None
        if isinstance(schedule, ReduceLROnPlateau) and metric is None:
            remedy = "give {'name': 'plateau', 'metric': 'val/loss'}, with factor, patience and min_delta"
            raise config.error(key, f"got a ReduceLROnPlateau, which follows a metric: {remedy}.")
        label = "lr_schedule" if [*run.schedules] == ["optimizer"] else f"lr_schedule/{name}"
        handler = LRSchedule(schedule, metric=metric, name=label)
        per_epoch = task.schedule is not None and _steps_per_epoch(task, schedule)
        handler.attach(run.trainer, *([Events.EPOCH_COMPLETED] if per_epoch else []))


def _steps_per_epoch(task: Task, scheduler: Any) -> bool:
    """Whether a scheduler of the task's own steps once per epoch, and not with the optimizer."""
    if task.schedule_per is not None or not isinstance(scheduler, LRScheduler):
        return task.schedule_per == "epoch"
    # transformers has LambdaLR schedules with functions of its own, which count updates
    functions = [getattr(rate, "func", rate) for rate in getattr(scheduler, "lr_lambdas", ())]
    of_updates = any(getattr(function, "__module__", "").startswith("transformers.") for function in functions)
    per_epoch = not (of_updates or isinstance(scheduler, OneCycleLR | CyclicLR))
    if agreement.rank() == 0:
        when, other = ("once per epoch", "step") if per_epoch else ("with the optimizer", "epoch")
        logger.info("%s steps %s; schedule_per=%r changes that.", type(scheduler).__name__, when, other)
    return per_epoch


def _load(run: Run, sources: Sequence[LoadSource], bank: ModelBank | None) -> object:
    """Load what a run begins from; errors say where the sources are written."""
    assert bank is not None or run.checkpoint is not None
    try:
        return bank.load() if bank is not None else run.checkpoint.load(sources)  # type: ignore[union-attr]
    except (CheckpointError, ValueError) as error:
        raise run.settings.error("load", str(error)) from error
