"""The parts of a run before anything is attached: task, model, loaders, optimizer, schedule."""

from __future__ import annotations

import hashlib
import inspect
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import ignite.distributed as idist
import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset

import ignite_engine
from ignite_engine import schedules
from ignite_engine.config import Config, ConfigError
from ignite_engine.config.sections import OptimizerSection, ScheduleSection
from ignite_engine.data import Windows, loader
from ignite_engine.errors import did_you_mean, shortened
from ignite_engine.ranks import agreement, mesh
from ignite_engine.run_directory import config_differences
from ignite_engine.schedules import Schedule
from ignite_engine.task import Task, TaskError, build_task, find_task

SCHEDULES: dict[str, Callable[..., Schedule]] = {
    "constant": schedules.warmup_constant,
    "linear": schedules.warmup_linear,
    "cosine": schedules.warmup_cosine,
    "wsd": schedules.warmup_wsd,
    "inverse_sqrt": schedules.warmup_inverse_sqrt,
    "polynomial": schedules.warmup_polynomial,
}


def total_updates_of_windows(config: Config) -> int | None:
    """Updates of the whole run over windows; None where the config does not say, nor needs to.

    Raises:
        ConfigError: the schedule needs to know.
    """
    for key, section in config.schedules.values():
        needed = section.name not in ("constant", "plateau") and section.total is None
        if needed and config.run.max_iterations is None:
            raise config.error(
                f"{key}.total", "windows do not say how many updates there will be: set it, or run.max_iterations."
            )
    totals = [section.total for _, section in config.schedules.values() if section.total is not None]
    return config.run.max_iterations or max(totals, default=None)


def total_updates(config: Config, samples: int) -> int:
    """Updates of the whole run over ``samples`` samples, on the longest rank.

    Raises:
        ConfigError: an epoch has no update, or a rank has no micro-batch in one.
    """
    data, ranks, in_all = config.data, mesh.data_size(), config.update.global_micro_batches
    if in_all is not None and in_all < ranks:
        raise config.error(
            "update.global_micro_batches", f"got {in_all} on {ranks} ranks, expected at least one for each."
        )
    shard = samples if in_all is not None else -(-samples // ranks)
    batches = shard // data.batch_size if data.drop_last else -(-shard // data.batch_size)
    if not batches:
        raise config.error(
            "data.batch_size", f"got {data.batch_size}, but a rank has {shard} samples; drop_last leaves none."
        )
    per_epoch = -(-batches // (in_all or config.update.accumulation_steps or 1))
    return config.run.max_iterations or (config.run.max_epochs or 0) * per_epoch


def set_up_torch(config: Config) -> None:
    """Apply the settings of the whole process: precision of matrix products, threads, determinism."""
    torch.set_float32_matmul_precision(config.run.matmul_precision)
    if config.run.threads is not None:
        torch.set_num_threads(config.run.threads)
    if config.run.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # required by cuBLAS for determinism
        torch.use_deterministic_algorithms(True)


def check_ranks_agree(config: Config) -> None:
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
        ConfigError: the task cannot be found or built; its own error is the ``__cause__``. Or ranks have other code.
    """
    try:
        build = agreement.together(lambda: find_task(config.task, config.folder))
        if agreement.world_size() > 1:
            check_code_agrees(code_version(build))
        return agreement.together(lambda: build_task(build, config.task_options))
    except TaskError as error:
        raise config.error("task", str(error)) from error.__cause__


def code_version(build: Callable[..., Any]) -> dict[str, str]:
    """Versions of engine and torch, and digests of the engine's source and of the task's file."""
    package = Path(ignite_engine.__file__).parent
    engine = hashlib.sha256()
    for file in sorted(package.rglob("*.py")):
        engine.update(file.read_bytes())
    source = inspect.getsourcefile(inspect.unwrap(build)) if inspect.isfunction(inspect.unwrap(build)) else None
    return {
        "ignite_engine": f"{ignite_engine.__version__} ({engine.hexdigest()[:12]})",
        "torch": torch.__version__,
        "the task's file": hashlib.sha256(Path(source).read_bytes()).hexdigest()[:12] if source else "unknown",
    }


def check_code_agrees(code: Mapping[str, str]) -> None:
    """Refuse, on all ranks, a run whose ranks have other code; a collective.

    Raises:
        ConfigError: what differs, both versions, and their ranks.
    """
    if difference := agreement.first_difference(code):
        raise ConfigError(f"the ranks run other code: {difference}; start all ranks from the same files and packages.")


def check_fit(config: Config, task: Task) -> None:
    """Refuse, in one line, a task that does not fit the config; warn about settings without effect.

    Raises:
        ConfigError: names the key, and what was possibly meant.
    """
    of_windows = {"run.max_windows": config.run.max_windows, "evaluation.progressive": config.evaluation.progressive}
    for key, given in of_windows.items():
        if given and not isinstance(task.train_set, Windows):
            raise config.error(key, f"got {given}, but the task's train_set is not a Windows object.")
    for name, data in {"train_set": task.train_set, **task.val_sets, **task.test_sets}.items():
        if isinstance(data, Windows):
            continue
        size = len(data) if hasattr(data, "__len__") else None
        if size is None:
            raise config.error(
                "task", f"the data '{name}' is a {type(data).__name__}, expected __len__ and __getitem__."
            )
        evaluated = name != "train_set" and config.distributed.strategy == "ddp" and not config.update.rank_invariant
        if size < (1 if evaluated else mesh.data_size()):
            raise config.error("task", f"the data '{name}' has {size} samples for {mesh.data_size()} ranks.")
    limit = config.data.max_read_errors
    shared = {
        "update.global_micro_batches": config.update.global_micro_batches,
        "distributed.tensor_parallel": config.distributed.tensor_parallel > 1,
    }
    for key in (key for key, value in shared.items() if limit and value):
        raise config.error("data.max_read_errors", f"got {limit} with {key}, which share out batches; set it to 0.")
    for key, interval in config.intervals.items():
        if interval.tokens is not None and task.tokens_fn is None and task.weight_fn is None:
            raise config.error(key, f"got {interval.tokens} tokens, but the task has no tokens_fn to count them.")
        if (
            isinstance(interval.epochs, float)
            and not interval.epochs.is_integer()
            and isinstance(task.train_set, Windows)
        ):
            raise config.error(key, f"got {interval.epochs} epochs, but windows have no known epoch length.")
    both = set(task.val_sets) & set(task.test_sets)
    if both:
        raise config.error(
            "task", f"a set cannot be in val_sets and in test_sets: {', '.join(sorted(both))}; rename one."
        )
    if not task.val_sets and config.evaluation.model_fields_set - {"progressive"}:
        config.warn("evaluation", "evaluation has no effect: the task has no val_sets.")
    for unknown in set(config.ema.evaluate or ()) - {*task.val_sets, *task.test_sets}:
        near = did_you_mean(unknown, [*task.val_sets, *task.test_sets])
        raise config.error("ema.evaluate", f"got {unknown!r}, expected names of the task's sets{near}")
    sets = [*task.val_sets, *(["progressive"] if config.evaluation.progressive else [])]
    known = ["loss", *(f"{name}/{metric}" for name in sets for metric in task.metrics or ["loss"])]
    if task.optimizer is None:
        _check_groups(config, task.parameter_groups)
    elif task.parameter_groups is not None:
        raise config.error("task", "it gives parameter_groups and makes its own optimizer; give one of them.")
    own = {
        "optimizer": task.optimizer is not None and (config.optimizer != OptimizerSection() or bool(config.optimizers)),
        "schedule": task.schedule is not None and config.schedule != ScheduleSection(),
    }
    for key in (key for key, has_no_effect in own.items() if has_no_effect):
        config.warn(key, f"{key} has no effect: the task makes its own.")
    for key, metric in followed_metrics(config).items():
        if metric is None or metric in known or task.handlers:  # a user's handler may write any key
            continue
        near = did_you_mean(metric, known)
        # one of Ignite's metrics may give several values, each with a name of its own
        is_possible = metric.partition("/")[0] in sets and task.metrics
        if not is_possible or not near.startswith("; known"):
            raise config.error(key, f"got {metric!r}, expected a metric of this run{near}")


def followed_metrics(config: Config) -> dict[str, str | None]:
    """The metrics that something acts on, by the setting that names each."""
    return {
        "checkpoint.best": config.checkpoint.best,
        "early_stopping.metric": config.early_stopping.metric,
        **{f"{key}.metric": section.metric for key, section in config.schedules.values()},
    }


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


def data_loader(
    config: Config, task: Task, dataset: Dataset[Any] | Windows, *, training: bool
) -> DataLoader[Any] | Windows:
    """The loader of this rank's share of one set; only that of training shuffles or drops a last batch.

    Of windows each that holds a dataset gets one.
    """
    if isinstance(dataset, Windows):
        limit = config.run.max_windows if training else None
        return dataset.opened_by(lambda window: data_loader(config, task, window, training=training), limit=limit)
    data = config.data
    options: dict[str, Any] = {"num_workers": data.num_workers, "collate_fn": task.collate_fn}
    options["pin_memory"] = idist.device().type == "cuda" if data.pin_memory is None else data.pin_memory
    if data.num_workers:
        options |= {"persistent_workers": data.persistent_workers, "prefetch_factor": data.prefetch_factor}
    if training:
        size = data.batch_size
        return loader(dataset, size, shuffle=data.shuffle, seed=config.run.seed, drop_last=data.drop_last, **options)
    return loader(dataset, data.eval_batch_size or data.batch_size, seed=config.run.seed, **options)


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
            name: _made(config, f"optimizers.{name}", section, groups[name])
            for name, section in config.optimizers.items()
        }
    parameters = groups or [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not parameters:
        raise config.error(
            "task",
            "the model has no parameter that requires a gradient, so there is nothing to train: unfreeze what is to be "
            "trained, such as by model.head.requires_grad_(True).",
        )
    return {"optimizer": _made(config, "optimizer", config.optimizer, parameters)}


def _made(config: Config, key: str, section: OptimizerSection, parameters: Iterable[Any]) -> Optimizer:
    try:
        return section.type(list(parameters), **section.options)
    except (ValueError, TypeError, RuntimeError) as error:
        raise config.error(key, f"{section.type.__name__} says: {' '.join(str(error).split())}") from error


def make_schedules(
    config: Config, task: Task, optimizers: Mapping[str, Optimizer], total: int | None
) -> dict[str, Any]:
    """A schedule for each optimizer, or the scheduler that the task makes for it."""
    if task.schedule is None:
        return {
            name: make_schedule(config, *config.schedule_of(name), optimizer, total)
            for name, optimizer in optimizers.items()
        }
    made = {name: task.schedule(optimizer) for name, optimizer in optimizers.items()}
    for schedule in made.values():
        if isinstance(schedule, Schedule) and not schedule.is_known and total is not None:
            schedule.set_total(total)
    return made


def settings_of(
    config: Config, task: Task, optimizers: Mapping[str, Optimizer], schedules: Mapping[str, Any]
) -> dict[str, Any]:
    """The resolved config, with what the task has made in the place of a section."""
    values = config.to_dict()
    if task.optimizer is not None:
        made = {name: _options_of(optimizer) for name, optimizer in optimizers.items()}
        values |= made if set(made) == {"optimizer"} else {"optimizers": made}
    if task.schedule is not None:
        values["schedule"] = {"name": ", ".join(dict.fromkeys(_name_of(schedule) for schedule in schedules.values()))}
    return values


def _options_of(optimizer: Optimizer) -> dict[str, Any]:
    options = {
        key: list(value) if isinstance(value, tuple) else value
        for key, value in getattr(optimizer, "defaults", {}).items()
        if isinstance(value, bool | int | float | str | tuple | None)
    }
    return {"name": type(optimizer).__name__, **options}


def _name_of(scheduler: Any) -> str:
    return str(scheduler) if isinstance(scheduler, Schedule) else type(scheduler).__name__


def make_schedule(
    config: Config, key: str, section: ScheduleSection, optimizer: Optimizer, total: int | None
) -> Schedule:
    """A section's schedule over the run; for a plateau, whose rates are not known ahead, a constant one.

    Args:
        key: the section's dotted name.

    Raises:
        ConfigError: its settings do not fit the run's length.
    """
    if section.name == "plateau":
        what = f"plateau: as below, until {section.metric} stops improving"
        return Schedule(optimizer, lambda step: 1.0, what)
    factory = SCHEDULES[section.name]
    given = {
        "min_ratio": section.min_ratio,
        "decay": section.decay,
        "decay_shape": section.decay_shape,
        "power": section.power,
    }
    taken = inspect.signature(factory).parameters
    options = {key: value for key, value in given.items() if value is not None and key in taken}
    try:
        return factory(optimizer, section.warmup, total=section.total or total, **options)
    except ValueError as error:
        raise config.error(key, str(error)) from None
