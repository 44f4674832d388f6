"""From a config and a task to a run: the only module that knows the core and the handlers."""

from __future__ import annotations

import inspect
import os
import random
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import ignite.distributed as idist
import numpy as np
import torch
from ignite.engine import Engine, Events
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset

from ignite_engine import Trainer, Update, agreement, create_evaluator, handlers, loader
from ignite_engine.checkpointing import CheckpointError, LoadPlan
from ignite_engine.config import Config, ConfigWarning, Every
from ignite_engine.config_file import did_you_mean
from ignite_engine.mean_loss import mean_loss
from ignite_engine.run import Run
from ignite_engine.run_directory import PhaseTimes, RunDirectory
from ignite_engine.task import Task, TaskError, build_task, find_task

SCHEDULES: dict[str, Callable[..., handlers.Schedule]] = {
    "constant": handlers.warmup_constant,
    "linear": handlers.warmup_linear,
    "cosine": handlers.warmup_cosine,
    "wsd": handlers.warmup_wsd,
    "inverse_sqrt": handlers.warmup_inverse_sqrt,
    "polynomial": handlers.warmup_polynomial,
}


def build_run(config: Config, task: Task | None = None) -> Run:
    """Everything wired up and nothing begun; no file is written. On several ranks a collective.

    Args:
        config: from ``load_config``.
        task: made by the caller; None: the one that the config names, made here under the run's seed, the same on
            every rank. After it each rank draws its own random numbers, from ``run.seed`` + rank.

    Raises:
        ConfigError: the task cannot be found or built, or it and the config do not fit; the same on all ranks.
    """
    startup = PhaseTimes()
    _set_up_torch(config)
    with startup("task"):
        seed_all(config.run.seed)
        task = task or _agreed_task(config)
        _check_fit(config, task)
    with startup("model"):
        model = _on_device(config, task.model)
        seed_all(config.run.seed + idist.get_rank())
    with startup("data"):
        train_loader = _loader(config, task, task.train_set, training=True)
        total = total_updates(config, len(task.train_set))  # type: ignore[arg-type]  # loader() has checked
    with startup("trainer"):
        optimizer = _optimizer(config, task, model)
        update = Update(
            model,
            optimizer,
            task.loss_fn,
            precision=config.update.precision,
            clip_norm=config.update.clip_norm,
            weight_fn=task.weight_fn,
            grad_scaler=config.update.grad_scaler if config.update.precision == "fp16" else None,
            log_grad_norm=config.update.log_grad_norm,
        )
        trainer = Trainer(update, accumulation_steps=config.update.accumulation_steps)
        schedule = _schedule(config, optimizer, total)
        directory = RunDirectory(config.directory)
        length = {"max_iters": config.run.max_iterations, "max_epochs": config.run.max_epochs}
        run = Run(
            trainer,
            train_loader,
            directory,
            schedule,
            total,
            {key: value for key, value in length.items() if value is not None},
            lambda: _evaluations(config, task, model, {**task.val_sets, **task.test_sets}),
            startup,
            config.to_dict(),
            (config.checkpoint.best, config.checkpoint.mode) if config.checkpoint.best else None,
        )
        _attach(config, task, run, _evaluations(config, task, model, task.val_sets, directory.evaluations))
    return run


def total_updates(config: Config, samples: int) -> int:
    """Updates of the whole run over ``samples`` samples, on the longest rank.

    Raises:
        ConfigError: an epoch has no update.
    """
    data = config.data
    shard = -(-samples // idist.get_world_size())
    batches = shard // data.batch_size if data.drop_last else -(-shard // data.batch_size)
    if not batches:
        raise config.error(
            "data.batch_size", f"got {data.batch_size}, but a rank has {shard} samples; drop_last leaves none."
        )
    per_epoch = -(-batches // (config.update.accumulation_steps or 1))
    return config.run.max_iterations or (config.run.max_epochs or 0) * per_epoch


def seed_all(seed: int) -> None:
    """Seed Python, NumPy, torch and its devices."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def _set_up_torch(config: Config) -> None:
    torch.set_float32_matmul_precision(config.run.matmul_precision)
    if config.run.threads is not None:
        torch.set_num_threads(config.run.threads)
    if config.run.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS refuses to be deterministic without it
        torch.use_deterministic_algorithms(True)


def _agreed_task(config: Config) -> Task:
    """The config's task. An error on any rank is raised on all, or the others would wait for it."""
    task, complaint, cause = None, None, None
    try:
        task = build_task(find_task(config.task, config.folder), config.task_options)
    except TaskError as error:
        complaint, cause = str(error), error
    first = next((each for each in agreement.gather_objects(complaint) if each is not None), None)
    if first is not None:
        raise config.error("task", first) from (cause.__cause__ if cause else None)
    assert task is not None
    return task


def _check_fit(config: Config, task: Task) -> None:
    for name, data in {"train_set": task.train_set, **task.val_sets, **task.test_sets}.items():
        size = len(data) if hasattr(data, "__len__") else None
        if size is None:
            raise config.error(
                "task", f"the data '{name}' is a {type(data).__name__}, expected __len__ and __getitem__."
            )
        if size < idist.get_world_size():
            raise config.error("task", f"the data '{name}' has {size} samples for {idist.get_world_size()} ranks.")
    both = set(task.val_sets) & set(task.test_sets)
    if both:
        raise config.error(
            "task", f"a set cannot be in val_sets and in test_sets: {', '.join(sorted(both))}; rename one."
        )
    if not task.val_sets and config.evaluation.model_fields_set:
        place = config.place("evaluation")
        warnings.warn(f"{place}: evaluation has no effect: the task has no val_sets.", ConfigWarning, stacklevel=3)
    for unknown in set(config.ema.evaluate or ()) - {*task.val_sets, *task.test_sets}:
        near = did_you_mean(unknown, [*task.val_sets, *task.test_sets])
        raise config.error("ema.evaluate", f"got {unknown!r}, expected names of the task's sets{near}")
    known = ["loss", *(f"{name}/{metric}" for name in task.val_sets for metric in task.metrics or ["loss"])]
    named = {
        "checkpoint.best": config.checkpoint.best,
        "early_stopping.metric": config.early_stopping.metric,
        "schedule.metric": config.schedule.metric,
    }
    for key, metric in named.items():
        if metric is None or metric in known or task.handlers:  # a user's handler may write any key
            continue
        near = did_you_mean(metric, known)
        if metric.partition("/")[0] not in task.val_sets or not near.startswith("; known"):
            raise config.error(key, f"got {metric!r}, expected a metric of this run{near}")


def _on_device(config: Config, model: nn.Module) -> nn.Module:
    if idist.get_world_size() == 1:
        return model.to(idist.device())  # auto_model would make a DataParallel where there are several GPUs
    section = config.distributed
    if section.sync_batchnorm and idist.device().type != "cuda":
        raise config.error(
            "distributed.sync_batchnorm", f"got true on {idist.device().type}; torch has it on CUDA only."
        )
    options = {"gradient_as_bucket_view": section.gradient_as_bucket_view}
    wrapped: nn.Module = idist.auto_model(
        model, sync_bn=section.sync_batchnorm, find_unused_parameters=section.find_unused_parameters, **options
    )
    return wrapped


def _loader(config: Config, task: Task, dataset: Dataset[Any], *, training: bool) -> DataLoader[Any]:
    data = config.data
    options: dict[str, Any] = {"num_workers": data.num_workers, "collate_fn": task.collate_fn}
    options["pin_memory"] = idist.device().type == "cuda" if data.pin_memory is None else data.pin_memory
    if data.num_workers:
        options |= {"persistent_workers": data.persistent_workers, "prefetch_factor": data.prefetch_factor}
    if training:
        size = data.batch_size
        return loader(dataset, size, shuffle=data.shuffle, seed=config.run.seed, drop_last=data.drop_last, **options)
    return loader(dataset, data.eval_batch_size or data.batch_size, seed=config.run.seed, **options)


def _optimizer(config: Config, task: Task, model: nn.Module) -> Optimizer:
    section = config.optimizer
    parameters: list[Any] = list(task.parameter_groups or (each for each in model.parameters() if each.requires_grad))
    try:
        return section.type(parameters, **section.options)
    except (ValueError, TypeError, RuntimeError) as error:
        raise config.error("optimizer", f"{section.type.__name__} says: {' '.join(str(error).split())}") from error


def _schedule(config: Config, optimizer: Optimizer, total: int) -> handlers.Schedule:
    section = config.schedule
    if section.name == "plateau":
        what = f"plateau: as below, until {section.metric} gets no better"
        return handlers.Schedule(optimizer, lambda step: 1.0, what)
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
        raise config.error("schedule", str(error)) from None


def _lr_schedule(config: Config, run: Run, optimizer: Optimizer) -> handlers.LRSchedule:
    section = config.schedule
    if section.name != "plateau":
        return handlers.LRSchedule(run.schedule)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(
        optimizer,
        mode=section.mode or "min",
        factor=section.factor or 0.1,
        patience=(section.patience or 5) - 1,  # torch's are the values that are still borne
        threshold=section.min_delta or 0.0,
        threshold_mode="abs",
        min_lr=[group["lr"] * (section.min_ratio or 0.0) for group in optimizer.param_groups],
    )
    return handlers.LRSchedule(plateau, metric=section.metric)


def _evaluations(
    config: Config,
    task: Task,
    model: nn.Module,
    sets: Mapping[str, Dataset[Any]],
    progress: Path | None = None,
) -> list[handlers.Evaluation]:
    section = config.evaluation
    options: dict[str, Any] = {"limit": section.limit}
    if progress is not None and section.progress_every is not None:
        options |= {"progress": progress, "progress_every": section.progress_every}
    precision = section.precision or config.update.precision
    made = []
    for name, dataset in sets.items():
        predict, metrics = (
            (task.predict, task.metrics) if task.predict is not None else mean_loss(task.loss_fn, task.weight_fn)
        )
        evaluator = create_evaluator(model, predict, metrics, precision=precision)
        data = _loader(config, task, dataset, training=False)
        made.append(handlers.Evaluation(evaluator, data, name=name, **options))
    return made


def _attach(config: Config, task: Task, run: Run, evaluations: Sequence[handlers.Evaluation]) -> None:
    trainer, evaluation, logging = run.trainer, config.evaluation, config.logging

    def before_the_first_update(engine: Engine, count: int) -> bool:
        return engine.state.iteration == 0

    def after_the_last_update(engine: Engine, count: int) -> bool:
        return engine.state.iteration == run.total

    def already_finished(engine: Engine, count: int) -> bool:
        return run.trained_nothing

    _lr_schedule(config, run, trainer.update.optimizers["optimizer"]).attach(trainer)  # type: ignore[attr-defined]
    if config.ema.decay is not None:
        handlers.EMA(config.ema.decay, warmup=config.ema.warmup, evaluate=config.ema.evaluate).attach(trainer)
    for each in evaluations:
        if evaluation.at_start:
            each.attach(trainer, Events.STARTED(event_filter=before_the_first_update))
        if evaluation.every is not None:
            each.attach(trainer, pace(evaluation.every))
        if evaluation.at_end:  # before the last checkpoint, which it may make the best
            each.attach(trainer, Events.ITERATION_COMPLETED(event_filter=after_the_last_update))
        each.attach(trainer, Events.COMPLETED(event_filter=already_finished))
    if logging.memory:
        handlers.MemoryLogger().attach(trainer, pace(logging.every))
    if logging.throughput:
        handlers.Throughput(task.tokens_fn).attach(trainer, pace(logging.every))
    _metric_logger(config, run).attach(trainer, pace(logging.every))
    if logging.progress:
        handlers.Progress().attach(trainer)
    stopping = config.early_stopping
    if stopping.metric is not None:
        handlers.EarlyStopping(
            stopping.metric, mode=stopping.mode, patience=stopping.patience, min_delta=stopping.min_delta
        ).attach(trainer)
    section = config.checkpoint
    run.checkpoint = handlers.Checkpoint(
        run.directory.checkpoints,
        keep_last=section.keep_last,
        best=section.best,
        keep_best=section.keep_best,
        keep_every=section.keep_every,
        mode=section.mode,
        config=run.config,
        background=section.background,
        on_exception=section.on_exception,
        strict=section.strict,
        labels=section.labels or (),
        exclude=section.exclude or (),
    )
    if section.load.path is not None:
        run.load, run.always_load = _loading(config, run.checkpoint, section.load.path), bool(section.exclude)
    # it always saves at the end; after COMPLETED nothing more is saved
    minutes = section.every.minutes if section.every else None
    run.checkpoint.attach(trainer, pace(section.every) if section.every and minutes is None else Events.COMPLETED)
    if minutes is not None:
        handlers.SaveEvery(minutes=minutes).attach(trainer)
    _attach_stops(config, run)
    for users_own in task.handlers:
        users_own.attach(trainer)


def _loading(config: Config, checkpoint: handlers.Checkpoint, path: str) -> Callable[[], object]:
    """Loads what the config says that the run begins with.

    Raises:
        ConfigError: (now) the settings are no plan; (when called) there is nothing to load, or it does not fit.
    """
    section = config.checkpoint.load
    given = {"parts": section.parts, "include": section.include, "ignore": section.ignore, "rename": section.rename}
    preset = {"fine_tune": LoadPlan.fine_tune, "warm_start": LoadPlan.warm_start, "resume": LoadPlan.resume}
    settings = {key: value for key, value in given.items() if value is not None}
    try:
        plan = preset[section.plan](**settings, weights=section.weights, strict=section.strict)
    except ValueError as error:
        raise config.error("checkpoint.load", str(error)) from None

    def load() -> object:
        try:
            return checkpoint.load(path, plan)
        except CheckpointError as error:
            raise config.error("checkpoint.load.path", str(error)) from error
        except ValueError as error:
            raise config.error("checkpoint.load", str(error)) from error

    return load


def _attach_stops(config: Config, run: Run) -> None:
    handlers.GracefulStop().attach(run.trainer)
    limit, path = config.run.time_limit, config.run.stop_file
    if limit is not None:  # the start-up counts, too
        since = time.monotonic() - (time.perf_counter() - run.startup.began)
        handlers.WallClockLimit(seconds=limit.total_s, since=since).attach(run.trainer)
    if path is not None:
        handlers.StopFile(run.directory.path / path).attach(run.trainer)


def _metric_logger(config: Config, run: Run) -> handlers.MetricLogger:
    logging, path = config.logging, run.directory.path
    sinks: list[Any] = []
    if logging.clearml:
        project, task = logging.clearml_project, config.name
        sinks.append(handlers.ClearMLLogger(path, project=project, task=task, config=run.config))
    if logging.tensorboard:
        sinks.append(handlers.TensorBoardSink(path))
    run.log_states = frozenset({"clearml", "tensorboard"})
    return handlers.MetricLogger(path, sinks=sinks, console=logging.console)


def pace(every: Every) -> Any:
    """The event of a config's ``every``, in iterations or epochs."""
    if every.epochs is not None:
        return Events.EPOCH_COMPLETED(every=every.epochs)
    return Events.ITERATION_COMPLETED(every=every.iterations)
