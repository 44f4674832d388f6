"""The parts of a run before anything is attached: whether its task fits, its optimizers and schedules."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Literal

from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import IterableDataset

from ignite_engine.checkpoint.retention import mode_of
from ignite_engine.data.source import OwnSource
from ignite_engine.errors import did_you_mean, metric_meant
from ignite_engine.runs.config import Config
from ignite_engine.runs.config.named import Fault, named
from ignite_engine.runs.config.sections import Count
from ignite_engine.runs.config.tables import SCHEDULES, optimizer_entry, schedule_entry, table_of_optimizers
from ignite_engine.runs.loaders import is_loader
from ignite_engine.runs.task import Task
from ignite_engine.schedules import Schedule


def check_fit(config: Config, task: Task) -> None:
    """Refuse, in one line, a task that does not fit the config; warn about settings without effect.

    Raises:
        ConfigError: names the key, and what was possibly meant.
    """
    sets = {**task.val_sets, **task.test_sets}
    for name, data in {"train_set": task.train_set, **sets}.items():
        _check_data(config, name, data)
    for unknown in set(config.handler("EMA").get("evaluate") or ()) - sets.keys():
        near = did_you_mean(unknown, sets)
        raise config.error("handlers.EMA.evaluate", f"got {unknown!r}, expected names of the task's sets{near}")
    for key, made, usual in (
        ("optimizer", task.optimizer, optimizer_entry({})),
        ("schedule", task.schedule, schedule_entry({})),
    ):
        entry = getattr(config, key)
        if made is not None and "task" not in entry and entry != usual:
            config.warn(key, "it has no effect: the task makes its own.")
    _check_metrics(config, task)


def _check_data(config: Config, name: str, data: Any) -> None:
    if isinstance(data, OwnSource | IterableDataset) or is_loader(data):
        return
    if isinstance(data, str | os.PathLike) or not (hasattr(data, "__len__") and hasattr(data, "__getitem__")):
        shown = repr(data) if isinstance(data, str) else f"a {type(data).__name__}"
        expected = "__len__ and __getitem__, a DataLoader, or an IterableDataset; a file is read first"
        raise config.error("task", f"the data '{name}' is {shown}, expected {expected}.")
    if not len(data):
        raise config.error("task", f"the data '{name}' has 0 samples.")


def _check_metrics(config: Config, task: Task) -> None:
    """Refuse metrics that something acts on and nothing writes."""
    entries = {label: entry for label, entry in config.handlers.items() if entry is not None}
    if task.handlers or any(":" in entry.get("use", "") for entry in entries.values()):
        return  # a user's handler may write any key
    schedules = dict(config.schedule_of(optimizer) for optimizer in config.optimizers or ("optimizer",))
    acted_on = {
        "handlers.Checkpoint.best": config.handler("Checkpoint").get("best"),
        "handlers.EarlyStopping.key": config.handler("EarlyStopping").get("key"),
        **{f"{key}.metric": entry.get("metric") for key, entry in schedules.items()},
    }
    sets = [*task.val_sets, *(label for label, entry in entries.items() if entry.get("use") == "Evaluation")]
    sets += ["progressive"] if config.handler("Evaluation").get("progressive") else []
    known = ["loss", *(f"{name}/{metric}" for name in sets for metric in task.metrics or ["loss"])]
    for key, metric in acted_on.items():
        if metric is None or metric in known:
            continue
        near = metric_meant(metric, known)
        # one of Ignite's metrics may give several values, each with a name of its own
        is_possible = metric.partition("/")[0] in sets and task.metrics
        if not is_possible or not near.startswith("; known"):
            raise config.error(key, f"got {metric!r}, expected a metric of this run{near}")


def make_optimizers(config: Config, task: Task) -> dict[str, Optimizer]:
    """The config's optimizers by name, each over the task's parameter groups of that name.

    Without ``optimizers`` it is ``optimizer`` alone, over all the groups, or all parameters that require gradients. A
    task may make its own instead.

    Raises:
        ConfigError: an optimizer's options do not fit, or no parameter requires a gradient.
    """
    if task.optimizer is not None:
        own = task.optimizer(task.model)
        return dict(own) if isinstance(own, Mapping) else {"optimizer": own}
    groups: Any = task.parameter_groups
    if not config.optimizers and not isinstance(groups, Mapping):
        groups = {"optimizer": groups or [each for each in task.model.parameters() if each.requires_grad]}
    entries = config.optimizers or {"optimizer": config.optimizer}
    if not isinstance(groups, Mapping) or groups.keys() != entries.keys():
        found = ", ".join(groups) if isinstance(groups, Mapping) else "no mapping"
        complaint = f"got {', '.join(entries)}, but the task's parameter_groups are {found}; expected one for each."
        raise config.error("optimizers" if config.optimizers else "optimizer", complaint)
    made: dict[str, Optimizer] = {}
    for name, entry in entries.items():
        options = {key: value for key, value in entry.items() if key != "schedule"}
        with config.at(f"optimizers.{name}" if config.optimizers else name):
            made[name] = named(options, table_of_optimizers(), [*groups[name]])
    return made


def make_schedules(
    config: Config, task: Task, optimizers: Mapping[str, Optimizer], total: int | None
) -> dict[str, Any]:
    """A schedule for each optimizer, or the scheduler that the task makes for it.

    Args:
        total: updates of the run; None: its data does not say.
    """
    made: dict[str, Any] = {}
    for name, optimizer in optimizers.items():
        key, entry = config.schedule_of(name)
        if task.schedule is None and entry["name"] == "none":
            continue
        with config.at(key):
            schedule = named(entry, SCHEDULES, optimizer) if task.schedule is None else task.schedule(optimizer)
            if isinstance(schedule, Schedule) and schedule.total is None:
                _span(schedule, total)
        made[name] = schedule
    return made


def _span(schedule: Schedule, total: int | None) -> None:
    if total is None:
        raise Fault(("total", "the data does not say how many updates there will be: set it, or run.max_iterations."))
    try:
        schedule.set_total(total)
    except ValueError as error:
        raise Fault(("", str(error))) from None


def plateau(
    optimizer: Optimizer,
    *,
    metric: str,
    mode: Literal["min", "max"] | None = None,
    factor: float = 0.1,
    patience: Count = 5,
    min_delta: float = 0.0,
    min_ratio: float = 0.0,
) -> ReduceLROnPlateau:
    """A rate that is multiplied by ``factor`` after ``patience`` values of a metric in a row without improvement."""
    return ReduceLROnPlateau(
        optimizer,
        mode=mode_of(metric, mode, "metric"),
        factor=factor,
        patience=patience - 1,  # torch counts the values that are tolerated
        threshold=min_delta,
        threshold_mode="abs",
        min_lr=[group["lr"] * min_ratio for group in optimizer.param_groups],
    )


def settings_of(
    config: Config, task: Task, optimizers: Mapping[str, Optimizer], schedules: Mapping[str, Any]
) -> dict[str, Any]:
    """The resolved config; ``task`` names what the task has made in the place of an entry."""
    values = config.to_dict()
    values["run"]["restart"] = False  # it is of one start
    if task.optimizer is not None:
        made = {name: _options_of(optimizer) for name, optimizer in optimizers.items()}
        values |= made if set(made) == {"optimizer"} else {"optimizers": made}
    if task.schedule is not None:
        names = [str(it) if isinstance(it, Schedule) else type(it).__name__ for it in schedules.values()]
        values["schedule"] = {"task": ", ".join(dict.fromkeys(names))}
    return values


def _options_of(optimizer: Optimizer) -> dict[str, Any]:
    options = {
        key: list(value) if isinstance(value, tuple) else value
        for key, value in getattr(optimizer, "defaults", {}).items()
        if isinstance(value, bool | int | float | str | tuple | None)
    }
    return {"task": type(optimizer).__name__, **options}
