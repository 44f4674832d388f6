"""What the names in a config stand for, and how an entry of each table is checked when the config is read."""

from __future__ import annotations

from collections.abc import Mapping
from functools import reduce
from operator import or_
from typing import Any

import torch
from ignite.engine import Events

from ignite_engine.checkpoint.sources import LoadSource
from ignite_engine.errors import did_you_mean, is_number, is_there
from ignite_engine.events import TrainingEvents
from ignite_engine.handlers import MODULES
from ignite_engine.loop.intervals import Count, every
from ignite_engine.runs.config.named import (
    Fault,
    Table,
    checked,
    checked_entry,
    fitting,
    for_each,
    lookup,
    parameters_of,
    refusal_of,
)
from ignite_engine.runs.config.yaml_file import display

HANDLERS: Table = {
    **{name: f"ignite_engine.handlers.{module}:{name}" for name, module in MODULES.items() if name != "LRSchedule"},
    "Evaluation": "ignite_engine.runs.evaluations:Evaluations",
    "Report": "ignite_engine.ext.report.handler:Report",
}
"""The handlers that a run may have by name, in the order in which they are attached; then come those of the user."""

SUPPLIED = (
    *("directory", "config", "evaluator", "data", "tokens_fn"),
    *("run", "since", "sources"),
)
"""Arguments of handlers that are the run's where an entry does not give them."""

USUAL: Mapping[str, Mapping[str, Any]] = {
    "Evaluation": {"every": {"epochs": 1}},
    "MetricLogger": {},
    "Progress": {},
    "Checkpoint": {"every": {"epochs": 1}},
    "GracefulStop": {},
    "StopFile": {},
    "Report": {},
}
"""Those that a run has without being asked, if they are installed, with the settings that they have then."""

SCHEDULES: Table = {
    "constant": "ignite_engine.schedules:warmup_constant",
    "linear": "ignite_engine.schedules:warmup_linear",
    "cosine": "ignite_engine.schedules:warmup_cosine",
    "wsd": "ignite_engine.schedules:warmup_wsd",
    "inverse_sqrt": "ignite_engine.schedules:warmup_inverse_sqrt",
    "polynomial": "ignite_engine.schedules:warmup_polynomial",
    "plateau": "ignite_engine.runs.components:plateau",
}


def table_of_optimizers() -> Table:
    """The optimizers of torch that step without a closure, and our own."""
    kinds = {name: kind for name, kind in vars(torch.optim).items() if isinstance(kind, type)}
    for other in ("Optimizer", "LBFGS"):
        del kinds[other]
    return {**kinds, "RowwiseAdagrad": "ignite_engine.ext.sparse.rowwise_adagrad:RowwiseAdagrad"}


def optimizer_entry(given: Any) -> dict[str, Any]:
    """An optimizer's name, its rate and options; or what a task has made, by ``task``."""
    entry = dict(fitting(given, Mapping))
    if "task" not in entry:
        entry = {"name": "AdamW", "lr": 1e-3, **entry}
        checked_entry(entry, table_of_optimizers(), skip=1)
    return entry


def schedule_entry(given: Any) -> dict[str, Any]:
    """A schedule's name and options; or what a task has made, by ``task``."""
    entry = dict(fitting(given, Mapping))
    if "task" not in entry:
        entry = {"name": "constant", **entry}
        if entry["name"] != "none":
            checked_entry(entry, SCHEDULES, skip=1)
    return entry


def optimizer_entries(given: Any) -> dict[str, Any]:
    """Optimizers by name, each of which may have a schedule."""

    def check(name: str, entry: Any) -> dict[str, Any]:
        options = {key: value for key, value in fitting(entry, Mapping).items() if key != "schedule"}
        own = {"schedule": entry["schedule"]} if "schedule" in entry else {}
        return {**optimizer_entry(options), **for_each(own.items(), lambda _, value: schedule_entry(value))}

    return for_each(fitting(given, Mapping).items(), check)


def load_source(given: Any) -> LoadSource:
    """What a run begins from."""
    arguments = checked(LoadSource, fitting(given, Mapping))
    try:
        return LoadSource(**arguments)
    except (TypeError, ValueError) as error:
        raise refusal_of(error, "load", arguments) from None


def load_entries(given: Any) -> list[dict[str, Any]]:
    """The sources in their order, each of which could be made."""
    entries = {str(place): entry for place, entry in enumerate(fitting(given, list))}
    for_each(entries.items(), lambda _, entry: load_source(entry))
    return [*given]


# -- handlers ---------------------------------------------------------------------------------------------------------


def handler_entries(given: Any) -> dict[str, Any]:
    """The handlers of a run by label, with the usual ones; None: not this one."""
    merged: dict[str, Any] = {label: {**entry} for label, entry in USUAL.items() if is_there(HANDLERS[label])}
    for label, entry in fitting(given, Mapping).items():
        if isinstance(entry, Mapping):
            usual = USUAL.get(str(entry.get("use", label)), {}) if "at" not in entry else {}
            entry = {**usual, **entry}
        merged[label] = entry
    return for_each(merged.items(), _handler_entry)


def _handler_entry(label: str, entry: Any) -> dict[str, Any] | None:
    if entry is None:
        return None
    if not isinstance(entry, Mapping):
        raise Fault(("", f"got {display(entry)}, expected a mapping of the handler's settings, or null."))
    kind = fitting(entry.get("use", label), str, "use")
    if kind in HANDLERS:
        make = lookup(kind, HANDLERS, key="use")
        arguments_of(make, entry)
        event_of(when_of(make, entry), count=len)  # anything may count tokens
    elif ":" in kind:  # the user's own code is imported when the run is built
        event_of(entry, count=len)
    else:
        near = did_you_mean(kind, HANDLERS, limit=40)
        own = "" if "did you mean" in near else " One of your own is named by use: FILE.py:CLASS."
        raise Fault(("use" if "use" in entry else "", f"got {display(kind)}, which is not a handler{near}{own}"))
    return dict(entry)


def when_of(make: Any, entry: Mapping[str, Any]) -> dict[str, Any]:
    """``every`` or ``at`` of an entry; not an ``every`` that is an argument of what it makes."""
    own = parameters_of(make)[0]
    return {key: value for key, value in entry.items() if key in ("every", "at") and key not in own}


def arguments_of(make: Any, entry: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of an entry, of a function those after the trainer.

    Raises:
        Fault: one is not known, or of another type; also of the ``resume`` of what it makes, under that name.
    """
    rest = {key: value for key, value in entry.items() if key not in ("use", "at", *when_of(make, entry))}
    if hasattr(make, "resume") and (options := rest.pop("resume", None)) is not None:
        for_each([("resume", options)], lambda _, value: checked(make.resume, fitting(value, Mapping), skip=1))
    skip = 0 if isinstance(make, type) else 1
    return checked(make, rest, skip=skip, given=SUPPLIED, beside=("use", "every", "at"))


def event_of(entry: Mapping[str, Any], *, count: Count | None = None, has_length: bool = True) -> Any:
    """The event that ``every`` or ``at`` of an entry names; None: it names none.

    Args:
        count: what counts tokens.
        has_length: whether an epoch has a length.

    Raises:
        Fault: it is no interval, or no event.
    """
    name, given = entry.get("at"), entry.get("every")
    if name is not None and given is not None:
        raise Fault(("at", f"got {display(name)} with every {display(given)}; give one of them."))
    if name is not None:
        events = {event.name: event for kind in (Events, TrainingEvents) for event in kind}
        if name not in events:
            near = did_you_mean(str(name), events, limit=40)
            raise Fault(("at", f"got {display(name)}, which is not an event{near}"))
        return events[name]
    if given is None:
        return None
    try:
        intervals = given if isinstance(given, list) and given else [given]
        return reduce(or_, [_interval(each, count, has_length) for each in intervals])
    except Fault as fault:
        raise fault.inside("every") from None


def _interval(given: Any, count: Count | None, has_length: bool) -> Any:
    units = {"iterations": given} if is_number(given) else given
    if not isinstance(units, Mapping) or len(units) != 1:
        raise Fault(("", f"got {display(given)}, expected {_INTERVAL}."))
    checked(every, units)
    if "tokens" in units and count is None:
        raise Fault(("", f"got {units['tokens']} tokens, but the task has no tokens_fn to count them."))
    if units.get("epochs", 1) % 1 and not has_length:
        raise Fault(("", f"got {units['epochs']} epochs, but its data has no known epoch length."))
    try:
        return every(**units, count=count if "tokens" in units else None)
    except (TypeError, ValueError) as error:
        raise Fault(("", f"got {display(given)}, expected {_INTERVAL}: {error}")) from None


_INTERVAL = (
    "a number of iterations, such as 500, {epochs: 1}, {windows: 1}, {samples: 50000}, {tokens: 1e6} or {minutes: 10}"
)
