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
    WrongType,
    checked,
    checked_entry,
    fitted,
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
    """The optimizers of torch, and our own."""
    kinds = {
        name: kind
        for name, kind in vars(torch.optim).items()
        if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer
    }
    return {**kinds, "RowwiseAdagrad": "ignite_engine.ext.sparse.rowwise_adagrad:RowwiseAdagrad"}


def optimizer_entry(given: Mapping[str, Any]) -> dict[str, Any]:
    """An optimizer's name, in any case, its rate and options; or what a task has made, by ``task``."""
    if "task" in given:
        return dict(given)
    entry = {"name": "AdamW", "lr": 1e-3, **given}
    table = table_of_optimizers()
    if isinstance(entry["name"], str):
        entry["name"] = next((name for name in table if name.lower() == entry["name"].lower()), entry["name"])
    if entry["name"] == "LBFGS":
        complaint = (
            "got 'LBFGS', which needs a closure; expected an optimizer that steps without one, or for LBFGS: give "
            "Trainer an update of your own, as examples/own_update.py does."
        )
        raise Fault(("name", complaint))
    checked_entry(entry, table, skip=1)
    return entry


def named_optimizer(given: Mapping[str, Any]) -> dict[str, Any]:
    """One of several optimizers, which may have a schedule."""
    options = {key: value for key, value in given.items() if key != "schedule"}
    schedules = {key: value for key, value in given.items() if key == "schedule"}
    return {
        **optimizer_entry(options),
        **for_each(schedules.items(), lambda _, value: schedule_entry(fitted(value, dict))),
    }


def schedule_entry(given: Mapping[str, Any]) -> dict[str, Any]:
    """A schedule's name and options; or what a task has made, by ``task``."""
    entry = given if "task" in given else {"name": "constant", **given}
    if entry.get("name", "none") != "none":
        checked_entry(entry, SCHEDULES, skip=1)
    return dict(entry)


def load_source(given: Mapping[str, Any]) -> LoadSource:
    """What a run begins from."""
    arguments = checked(LoadSource, given)
    try:
        return LoadSource(**arguments)
    except (TypeError, ValueError) as error:
        raise refusal_of(error, "load", arguments) from None


def load_entries(given: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The sources in their order, each of which could be made."""
    for_each(((str(place), entry) for place, entry in enumerate(given)), lambda _, entry: load_source(entry))
    return given


def handler_entries(given: Mapping[str, Any]) -> dict[str, Any]:
    """The handlers of a run by label, with the usual ones; None: not this one."""
    merged: dict[str, Any] = {label: {**entry} for label, entry in USUAL.items() if is_there(HANDLERS[label])}
    for label, entry in given.items():
        if not isinstance(entry, Mapping | None):
            raise WrongType(entry, "a mapping of the handler's settings, or null").inside(label)
        if entry is not None:
            usual = USUAL.get(str(entry.get("use", label)), {}) if "at" not in entry else {}
            entry = {**usual, **entry}
        merged[label] = entry
    return for_each(merged.items(), _handler_entry)


def _handler_entry(label: str, entry: dict[str, Any] | None) -> dict[str, Any] | None:
    if entry is None:
        return None
    kind = entry.get("use", label)
    if not isinstance(kind, str):
        raise WrongType(kind, "text").inside("use")
    if kind not in HANDLERS and ":" not in kind:
        known = did_you_mean(kind, HANDLERS, limit=40)
        own = "" if "did you mean" in known else " One of your own is named by use: FILE.py:CLASS."
        raise Fault(("use" if "use" in entry else "", f"got {display(kind)}, which is not a handler{known}{own}"))
    if kind in HANDLERS:  # the user's own code is imported when the run is built
        make = lookup(kind, HANDLERS, key="use")
        arguments_of(make, entry)
        entry_event = when_of(make, entry)
    else:
        entry_event = entry
    event_of(entry_event, count=len)  # anything may count tokens
    return entry


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
        for_each([("resume", options)], lambda _, value: checked(make.resume, fitted(value, dict), skip=1))
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
    if "at" in entry and entry.get("every") is not None:
        raise Fault(("at", f"got {display(entry['at'])} with every {display(entry['every'])}; give one of them."))
    if "at" in entry:
        events = {event.name: event for kind in (Events, TrainingEvents) for event in kind}
        name = entry["at"]
        if name not in events:
            raise Fault(
                ("at", f"got {display(name)}, which is not an event{did_you_mean(str(name), events, limit=40)}")
            )
        return events[name]
    if (given := entry.get("every")) is None:
        return None
    intervals = given if isinstance(given, list | tuple) and given else [given]
    try:
        return reduce(or_, [_interval(each, count, has_length) for each in intervals])
    except Fault as fault:
        raise fault.inside("every") from None


def _interval(given: Any, count: Count | None, has_length: bool) -> Any:
    units = "{epochs: 1}, {windows: 1}, {samples: 50000}, {tokens: 1e6} or {minutes: 10}"
    expected = f"a number of iterations, such as 500, {units}"
    if is_number(given):
        given = {"iterations": given}
    if not isinstance(given, Mapping) or len(given) != 1:
        raise WrongType(given, expected)
    checked(every, given)
    ((unit, number),) = given.items()
    if unit == "tokens" and count is None:
        raise Fault(("", f"got {number} tokens, but the task has no tokens_fn to count them."))
    if unit == "epochs" and number != int(number) and not has_length:
        raise Fault(("", f"got {number} epochs, but its data has no known epoch length."))
    try:
        return every(**given, count=count if unit == "tokens" else None)
    except (TypeError, ValueError) as error:
        raise Fault(("", f"got {display(number)} {unit}, expected {expected}: {error}")) from None
