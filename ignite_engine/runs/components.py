"""The parts of a run before anything is attached: task, optimizer, schedule."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CyclicLR, LRScheduler, OneCycleLR, ReduceLROnPlateau
from torch.utils.data import IterableDataset

from ignite_engine import devices
from ignite_engine.checkpoint.retention import mode_of
from ignite_engine.data.source import OwnSource
from ignite_engine.errors import did_you_mean, metric_meant, shortened
from ignite_engine.ranks import agreement, mesh
from ignite_engine.runs.config import Config, ConfigError
from ignite_engine.runs.config.named import named
from ignite_engine.runs.config.sections import Count
from ignite_engine.runs.config.tables import SCHEDULES, USUAL, make_optimizer, optimizer_entry, schedule_entry
from ignite_engine.runs.loaders import is_loader
from ignite_engine.runs.run_directory import config_differences
from ignite_engine.runs.task import Task, TaskError, build_task, find_task
from ignite_engine.schedules import Schedule

logger = logging.getLogger(__name__)


def set_up_torch(config: Config) -> None:
    """Apply the settings of the whole process: precision of matrix products, threads, determinism."""
    devices.set_matmul_precision(config.run.matmul_precision)
    if config.run.threads is not None:
        torch.set_num_threads(config.run.threads)
    if config.run.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # required by cuBLAS for determinism
        torch.use_deterministic_algorithms(True)


def check_configs_agree(config: Config) -> None:
    """Refuse, on all ranks, a run whose ranks were started with other configs; a collective.

    Raises:
        ConfigError: the first rank that differs from rank 0, and the keys.
    """
    configs = agreement.gather_objects(config.to_dict())
    for rank, config_of_rank in enumerate(configs):
        if differences := config_differences(configs[0], config_of_rank):
            raise ConfigError(
                f"rank {rank} was started with another config than rank 0: {shortened(differences)}; "
                "start all ranks with the same file and overrides."
            )


def agreed_task(config: Config) -> Task:
    """The config's task; an error on any rank is raised on all.

    Raises:
        ConfigError: the task cannot be found or built; its own error is the ``__cause__``.
    """
    try:
        build = agreement.together(lambda: find_task(config.task, config.folder))
        return agreement.together(lambda: build_task(build, config.task_options))
    except TaskError as error:
        raise config.error("task", str(error)) from error.__cause__


def check_fit(config: Config, task: Task) -> None:
    """Refuse, in one line, a task that does not fit the config; warn about settings without effect.

    Raises:
        ConfigError: names the key, and what was possibly meant.
    """
    for name, data in {"train_set": task.train_set, **task.val_sets, **task.test_sets}.items():
        if isinstance(data, OwnSource | IterableDataset) or is_loader(data):
            continue
        sized: Any = data
        if isinstance(data, str | bytes | os.PathLike):
            raise config.error("task", f"the data '{name}' is {data!r}, expected samples: read what it names first.")
        size = len(sized) if hasattr(sized, "__len__") and hasattr(sized, "__getitem__") else None
        if size is None:
            raise config.error(
                "task",
                f"the data '{name}' is a {type(data).__name__}, expected __len__ and __getitem__, a DataLoader, or an "
                "IterableDataset.",
            )
        is_evaluated = name != "train_set" and config.update.accumulate != "rank_invariant"
        if size < (1 if is_evaluated and config.distributed.strategy == "ddp" else mesh.data_size()):
            raise config.error("task", f"the data '{name}' has {size} samples for {mesh.data_size()} ranks.")
    limit = config.data.max_read_errors
    shared = {
        "update.global_micro_batches": config.update.global_micro_batches,
        "distributed.tensor_parallel": config.distributed.tensor_parallel > 1,
    }
    for key in (key for key, value in shared.items() if limit and value):
        raise config.error("data.max_read_errors", f"got {limit} with {key}, which share out batches; set it to 0.")
    both = set(task.val_sets) & set(task.test_sets)
    if both:
        raise config.error(
            "task", f"a set cannot be in val_sets and in test_sets: {', '.join(sorted(both))}; rename one."
        )
    sets = [*task.val_sets, *task.test_sets]
    # in a resolved config every key is given
    if not task.val_sets and config.handler("Evaluation").keys() - {"progressive"} - USUAL["Evaluation"].keys():
        config.warn("handlers.Evaluation", "handlers.Evaluation has no effect: the task has no val_sets.")
    for unknown in set(config.handler("EMA").get("evaluate") or ()) - {*sets}:
        near = did_you_mean(unknown, sets)
        raise config.error("handlers.EMA.evaluate", f"got {unknown!r}, expected names of the task's sets{near}")
    if task.optimizer is None:
        _check_groups(config, task.parameter_groups)
    elif task.parameter_groups is not None:
        raise config.error("task", "it gives parameter_groups and makes its own optimizer; give one of them.")
    if task.sampler is not None and (
        isinstance(task.train_set, OwnSource | IterableDataset) or is_loader(task.train_set)
    ):
        kind = type(task.train_set).__name__
        raise config.error("task", f"it gives a sampler, which is of map-style data, and the train_set is a {kind}.")
    optimizers = [config.optimizer, *config.optimizers.values()]
    schedules = [config.schedule, *(entry["schedule"] for entry in optimizers if "schedule" in entry)]
    for key, makes, entries, usual in (
        ("optimizer", task.optimizer, optimizers, optimizer_entry({})),
        ("schedule", task.schedule, schedules, schedule_entry({})),
    ):
        if makes is not None and any("task" not in entry and entry != usual for entry in entries):
            config.warn(key, f"{key} has no effect: the task makes its own.")
        if makes is None and (made := next((entry["task"] for entry in entries if "task" in entry), None)):
            raise config.error(key, f"got the {made} of another task, and this one makes none; give its name.")
    _check_metrics(config, task)


def _check_metrics(config: Config, task: Task) -> None:
    """Refuse metrics that something acts on and nothing writes."""
    followed = {
        "handlers.Checkpoint.best": config.handler("Checkpoint").get("best"),
        "handlers.EarlyStopping.key": config.handler("EarlyStopping").get("key"),
    }
    for optimizer in config.optimizers or ("optimizer",):
        key, entry = config.schedule_of(optimizer)
        followed[f"{key}.metric"] = entry.get("metric")
    entries = [entry for entry in config.handlers.values() if entry is not None]
    if task.handlers or any(":" in entry.get("use", "") for entry in entries):
        return  # a user's handler may write any key
    others = [label for label, entry in config.handlers.items() if entry and entry.get("use") == "Evaluation"]
    sets = [*task.val_sets, *others, *(["progressive"] if config.handler("Evaluation").get("progressive") else [])]
    known = ["loss", *(f"{name}/{metric}" for name in sets for metric in task.metrics or ["loss"])]
    for key, metric in followed.items():
        if metric is None or metric in known:
            continue
        near = metric_meant(metric, known)
        # one of Ignite's metrics may give several values, each with a name of its own
        is_possible = metric.partition("/")[0] in sets and task.metrics
        if not is_possible or not near.startswith("; known"):
            raise config.error(key, f"got {metric!r}, expected a metric of this run{near}")


def _check_groups(config: Config, groups: Any) -> None:
    names = ", ".join(config.optimizers)
    if not isinstance(groups, Mapping):
        if names:
            raise config.error(
                "optimizers",
                f"got {names}, but the task's parameter_groups are not a mapping of these names to parameters.",
            )
    elif set(groups) != set(config.optimizers):
        raise config.error(
            "optimizers" if names else "optimizer",
            f"got {names or 'one optimizer'}, but the task has parameter_groups for {', '.join(groups)}; "
            "expected a section in optimizers for each of them.",
        )


def make_optimizers(config: Config, task: Task, model: nn.Module) -> dict[str, Optimizer]:
    """The config's optimizers by name, each over the task's parameter groups of that name.

    Without ``optimizers`` it is ``optimizer`` alone, over all the groups, or all parameters that require gradients. A
    task may make its own instead.

    Raises:
        ConfigError: an optimizer's options do not fit, or no parameter requires a gradient.
    """
    groups = task.parameter_groups
    if task.optimizer is not None:
        made = task.optimizer(model)
        return dict(made) if isinstance(made, Mapping) else {"optimizer": made}
    if isinstance(groups, Mapping):
        return {
            name: _made(config, f"optimizers.{name}", entry, groups[name]) for name, entry in config.optimizers.items()
        }
    parameters = groups or [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not parameters:
        raise config.error(
            "task",
            "the model has no parameter that requires a gradient, so there is nothing to train: unfreeze what is to be "
            "trained, such as by model.head.requires_grad_(True).",
        )
    return {"optimizer": _made(config, "optimizer", config.optimizer, parameters)}


def _made(config: Config, key: str, entry: Mapping[str, Any], parameters: Iterable[Any]) -> Optimizer:
    with config.at(key):
        return make_optimizer({name: value for name, value in entry.items() if name != "schedule"}, list(parameters))
    raise AssertionError("at() raises what it has caught")


def make_schedules(
    config: Config, task: Task, optimizers: Mapping[str, Optimizer], total: int | None
) -> dict[str, Any]:
    """A schedule for each optimizer, or the scheduler that the task makes for it."""
    made: dict[str, Any] = {}
    if task.schedule is None:
        for name, optimizer in optimizers.items():
            key, entry = config.schedule_of(name)
            if entry["name"] != "none":
                length = {} if entry["name"] == "plateau" else {"total": total}
                with config.at(key):
                    made[name] = named({**length, **entry}, SCHEDULES, optimizer)
        return made
    made = {name: task.schedule(optimizer) for name, optimizer in optimizers.items()}
    for schedule in made.values():
        if isinstance(schedule, ReduceLROnPlateau):
            raise config.error(
                "schedule",
                "got a ReduceLROnPlateau, which follows a metric: give {'name': 'plateau', 'metric': 'val/loss'}, with "
                "factor, patience and min_delta.",
            )
        if isinstance(schedule, Schedule) and schedule.total is None and total is not None:
            schedule.set_total(total)
    return made


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


def steps_per_epoch(task: Task, scheduler: Any) -> bool:
    """Whether a scheduler of the task's own steps once per epoch, and not with the optimizer."""
    if task.schedule_per != "usual" or not isinstance(scheduler, LRScheduler):
        return task.schedule_per == "epoch"
    # transformers has LambdaLR schedules with functions of its own, which count updates
    functions = [getattr(rate, "func", rate) for rate in getattr(scheduler, "lr_lambdas", ())]
    of_updates = any(getattr(function, "__module__", "").startswith("transformers.") for function in functions)
    per_epoch = not (of_updates or isinstance(scheduler, OneCycleLR | CyclicLR))
    if agreement.rank() == 0:
        kind = type(scheduler).__name__
        when, other = ("once per epoch", "step") if per_epoch else ("with the optimizer", "epoch")
        logger.info("%s steps %s; schedule_per=%r changes that.", kind, when, other)
    return per_epoch


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
