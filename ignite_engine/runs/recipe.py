"""From a config and a task to a run: the only module that knows the core and the handlers."""

from __future__ import annotations

import copy
import importlib
import inspect
import logging
import os
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from ignite.engine import CallableEventWithFilter, Engine, Events
from torch import nn
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException

from ignite_engine import every, handlers
from ignite_engine.checkpointing import CheckpointError, LoadSource, SaveOptions
from ignite_engine.config import Config, ConfigWarning, Every
from ignite_engine.config.sections import LoadSection, ScheduleSection
from ignite_engine.errors import check_type, one_line
from ignite_engine.evaluator import create_evaluator
from ignite_engine.events import TrainingEvents
from ignite_engine.ext.windows import Windows
from ignite_engine.handlers.evaluation.batches import loader_of
from ignite_engine.handlers.evaluation.sanity import SanityCheck, Trial
from ignite_engine.ranks import agreement, attempt, mesh
from ignite_engine.rng import seed_everything
from ignite_engine.run_directory import PhaseTimes, RunDirectory, installed_packages
from ignite_engine.runs.components import (
    agreed_task,
    check_configs_agree,
    check_fit,
    make_optimizers,
    make_schedules,
    set_up_torch,
    settings_of,
    steps_per_epoch,
)
from ignite_engine.runs.loaders import data_loader, is_loader, say_how_it_resumes, updates_of
from ignite_engine.runs.mean_loss import mean_loss
from ignite_engine.runs.run import Run
from ignite_engine.runs.wrapping import declare_mesh, wrap
from ignite_engine.schedules import Schedule
from ignite_engine.state import Start
from ignite_engine.states.tiers import TIERS
from ignite_engine.task import Data, Task
from ignite_engine.trainer import Trainer
from ignite_engine.update import Update

logger = logging.getLogger(__name__)


def prepare_ranks() -> None:
    """Import and read what every run needs, once, in a process that forks the ranks."""
    for name in handlers.__all__:
        getattr(handlers, name)
    for module in ("torch.utils.flop_counter", "torch.profiler", "torch.utils.serialization.config", "encodings.idna"):
        importlib.import_module(module)
    installed_packages()


def note_failure(config: Config, error: ProcessRaisedException | ProcessExitedException) -> None:
    """All ranks have ended: write into the run's folder which failed first, and why."""
    reason = str(error).strip().splitlines()[-1]  # of a traceback: the error
    killed = isinstance(error, ProcessExitedException) and error.signal_name is not None
    RunDirectory(config.directory).note_failure(reason, error.error_index, killed=killed)


def build_run(config: Config, task: Task | None = None) -> Run:
    """Build the run; nothing is trained and no file is written. On several ranks a collective.

    Args:
        config: from ``load_config``.
        task: made by the caller; None: the one that the config names, built here under the run's seed, the same on
            every rank. Afterwards each rank is seeded with ``run.seed`` + its data-parallel rank.

    Raises:
        ConfigError: the task cannot be found or built, or it and the config do not fit; raised on all ranks.
    """
    startup = PhaseTimes()
    check_configs_agree(config)
    set_up_torch(config)
    arranged = declare_mesh(config)
    with startup("task"):
        seed_everything(config.run.seed)
        task = task or agreed_task(config)
        check_fit(config, task)
    with startup("model"):
        task = wrap(config, task, arranged)
        model = task.model
        seed_everything(config.run.seed + mesh.data_rank())
    with startup("data"):
        train_loader = data_loader(config, task, task.train_set, training=True)
        total = updates_of(config, train_loader)
    with startup("trainer"):
        optimizers = make_optimizers(config, task, model)
        update = Update(
            model,
            optimizers,
            task.loss_fn,
            precision=config.update.precision,
            clip_norm=config.update.clip_norm,
            weight_fn=task.weight_fn,
            grad_scaler=config.update.grad_scaler if config.update.precision == "fp16" else None,
            log_grad_norm=config.update.log_grad_norm,
            non_finite=config.update.non_finite,
            max_skips=config.update.max_skips,
            accumulate=config.update.accumulate,
            reduce_each_micro_batch=config.distributed.reduce_each_micro_batch,
            loss_parallel=config.distributed.loss_parallel,
        )
        model.train()
        try:
            update.accumulation.check()
        except ValueError as error:
            raise config.error("update.accumulate", str(error)) from None
        trainer = Trainer(
            update,
            accumulation_steps=config.update.accumulation_steps,
            global_micro_batches=config.update.global_micro_batches,
            max_read_errors=config.data.max_read_errors,
        )
        schedules = make_schedules(config, task, optimizers, total)
        directory = RunDirectory(config.directory)
        length = {"max_iters": config.run.max_iterations, "max_epochs": config.run.max_epochs}
        run = Run(
            trainer,
            train_loader,
            directory,
            {name: schedule for name, schedule in schedules.items() if isinstance(schedule, Schedule)},
            total,
            {key: value for key, value in length.items() if value is not None},
            lambda: _evaluations(config, task, model, {**task.val_sets, **task.test_sets}),
            startup,
            settings_of(config, task, optimizers, schedules),
            (config.checkpoint.best, config.checkpoint.mode) if config.checkpoint.best else None,
        )
        _attach(config, task, run, schedules, _evaluations(config, task, model, task.val_sets))
    return run


_STARTED_AGAIN = ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")
"""Counts of launchers that start a rank that has died, or a job that was taken off its machine, again."""


def _is_started_again() -> bool:
    # torchrun's agents count apart: one that joined later has counted none
    return any(agreement.gather_objects(any(int(os.environ.get(count) or 0) for count in _STARTED_AGAIN)))


@contextmanager
def logged(config: Config, *, console: bool = True) -> Iterator[None]:
    """Write what is logged within it into the run's folder, and with ``console`` to stderr.

    Raises:
        ConfigError: the folder cannot be written to.
    """
    above = next(folder for folder in (config.directory, *config.directory.absolute().parents) if folder.exists())
    if not above.is_dir() or not os.access(above, os.W_OK):
        problem = "may not be written to" if above.is_dir() else "is not a folder"
        raise config.error("run.directory", f"got '{config.directory}', but {above} {problem}.")
    again = _is_started_again()
    aside = agreement.on_rank_0(lambda: _move_aside(config) if config.run.restart and not again else None)
    must_be_new = config.run.must_be_new and not again
    held = agreement.on_rank_0(RunDirectory(config.directory).files_of_a_run) if must_be_new else []
    if held:
        raise config.error(
            "run.must_be_new",
            f"got true, but {config.directory} holds a run ({', '.join(held)}); give another run.directory, or set it "
            "to false to resume.",
        )
    directory = RunDirectory(config.directory)
    try:
        with directory.logging_to(agreement.rank(), console=console):
            if aside is not None and agreement.rank() == 0:
                logger.info("The run that was in %s is now in %s.", config.directory, aside)
            if attempt.current.reason is not None:
                logger.warning("%s", attempt.current.reason, extra={"console": False})  # the parent has shown it
            if attempt.current.is_known:
                warnings.simplefilter("ignore", ConfigWarning)
            yield
    except BaseException as error:
        named = error.filename if isinstance(error, OSError) and not directory.path.exists() else None
        if named is not None and directory.path.absolute().is_relative_to(Path(named).absolute()):
            problem = f"got '{config.directory}', but it cannot be made: {one_line(error)}."  # as in /proc
            raise config.error("run.directory", problem) from None
        if aside is not None and agreement.rank() == 0 and not directory.files_of_a_run():  # it was refused
            directory.put_back(aside)
            logger.warning("The run that was moved aside to %s is in %s again.", aside, config.directory)
        raise


def _move_aside(config: Config) -> Path | None:
    try:
        return RunDirectory(config.directory).move_aside()
    except (OSError, ValueError) as error:
        problem = str(error) if isinstance(error, ValueError) else one_line(error)
        raise config.error("run.restart", f"got true, but {problem}.") from None


def _lr_schedule(section: ScheduleSection, schedule: Schedule, name: str) -> handlers.LRSchedule:
    if section.name != "plateau":
        return handlers.LRSchedule(schedule, name=name)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(
        schedule.optimizer,
        mode=section.mode or "min",
        factor=section.factor or 0.1,
        patience=(section.patience or 5) - 1,  # torch counts the values that are tolerated
        threshold=section.min_delta or 0.0,
        threshold_mode="abs",
        min_lr=[group["lr"] * (section.min_ratio or 0.0) for group in schedule.optimizer.param_groups],
    )
    return handlers.LRSchedule(plateau, metric=section.metric, name=name)


def _evaluations(
    config: Config,
    task: Task,
    model: nn.Module,
    sets: Mapping[str, Data],
) -> list[handlers.Evaluation]:
    section = config.evaluation
    options: dict[str, Any] = {"limit": section.limit, "resumes": section.resumes}
    return [
        handlers.Evaluation(
            _evaluator(config, task, model), data_loader(config, task, dataset, training=False), name=name, **options
        )
        for name, dataset in sets.items()
    ]


def _evaluator(config: Config, task: Task, model: nn.Module) -> Engine:
    predict, metrics = (
        (task.predict, task.metrics) if task.predict is not None else mean_loss(task.loss_fn, task.weight_fn)
    )
    precision = config.evaluation.precision or config.update.precision
    return create_evaluator(model, predict, metrics, precision=precision)


def _sanity_check(config: Config, task: Task, model: nn.Module) -> SanityCheck:
    """The sanity check of each validation set that is not a stream of windows."""
    section, batches = config.evaluation, config.evaluation.sanity_batches
    # of the run's workers one is enough; what a dataset opens, it opens there
    data = config.data.model_copy(
        update={"num_workers": min(1, config.data.num_workers), "persistent_workers": False, "prefetch_factor": None}
    )
    few = config.model_copy(update={"data": data})
    try:
        own = replace(task, metrics=copy.deepcopy(dict(task.metrics)))
    except Exception:  # one that cannot be copied is reset by each evaluation, as it would be without a check
        own = task
    trials = {
        name: Trial(
            _evaluator(config, own, model),
            loader_of(dataset) if is_loader(dataset) else data_loader(few, task, dataset, training=False),
            min(batches, section.limit or batches),
        )
        for name, dataset in task.val_sets.items()
        if not isinstance(dataset, Windows)
    }
    return SanityCheck(trials, error=config.error)


def _progressive(config: Config, task: Task, run: Run) -> handlers.Evaluation:
    """Evaluates each window before it is trained on."""
    trained, evaluated = run.loader, data_loader(config, task, task.train_set, training=False)
    assert isinstance(trained, Windows) and isinstance(evaluated, Windows), "check_fit has seen it"
    evaluator = _evaluator(config, task, run.trainer.update.model)
    return handlers.Evaluation(
        evaluator, lambda: evaluated.loader_of(trained.present), name="progressive", limit=config.evaluation.limit
    )


def _attach(
    config: Config,
    task: Task,
    run: Run,
    schedules: Mapping[str, Any],
    evaluations: Sequence[handlers.Evaluation],
) -> None:
    trainer, evaluation, logging = run.trainer, config.evaluation, config.logging

    def is_fresh(engine: Engine, count: int) -> bool:
        return trainer.state.start is Start.FRESH

    def after_the_last_update(engine: Engine, count: int) -> bool:
        state = trainer.state
        at_end_of_epoch = trainer.progress.epoch_iteration == state.epoch_length
        return state.iteration == state.max_iters or (state.epoch == state.max_epochs and at_end_of_epoch)

    def last_epoch(engine: Engine, count: int) -> bool:
        return trainer.state.epoch == trainer.state.max_epochs

    def already_finished(engine: Engine, count: int) -> bool:
        state = trainer.state
        return state.start is not Start.FRESH and 0 < state.iteration == run.first_iteration

    # or as often as gives a short run ten points
    usual = Every(iterations=50 if run.total is None else max(1, min(50, run.total // 10)))
    log_point = interval_event(logging.every or usual, task)
    trainer.add_event_handler(Events.STARTED, run.log_length)
    trainer.add_event_handler(Events.STARTED, run.keep_record)
    say_how_it_resumes(run.loader)
    metric_logger = _metric_logger(config, task, run)
    if evaluation.sanity_batches and evaluations:
        model = trainer.update.model
        _sanity_check(config, task, model).attach(trainer)
    for name, schedule in schedules.items():
        handler_name = run.schedule_name(name)
        if task.schedule is not None:
            per = (Events.EPOCH_COMPLETED,) if steps_per_epoch(task, schedule) else ()
            handlers.LRSchedule(schedule, name=handler_name).attach(trainer, *per)
        else:
            _lr_schedule(config.schedule_of(name)[1], schedule, handler_name).attach(trainer)
    if config.ema.decay is not None:
        handlers.EMA(config.ema.decay, warmup=config.ema.warmup, evaluate=config.ema.evaluate).attach(trainer)
    for handler in evaluations:
        if evaluation.at_start:
            handler.attach(trainer, Events.STARTED(event_filter=is_fresh))
        if evaluation.every is not None:
            handler.attach(trainer, interval_event(evaluation.every, task))
        if evaluation.at_end:  # before the last checkpoint, which it may make the best
            handler.attach(trainer, Events.ITERATION_COMPLETED(event_filter=after_the_last_update))
            # the last epoch may have been cut short
            handler.attach(trainer, Events.EPOCH_COMPLETED(event_filter=last_epoch))
        handler.attach(trainer, Events.COMPLETED(event_filter=already_finished))
    if evaluation.progressive:
        _progressive(config, task, run).attach(trainer, TrainingEvents.WINDOW_STARTED)
    if logging.memory:
        handlers.MemoryLogger().attach(trainer, log_point)
    if logging.throughput:
        throughput = handlers.Throughput(task.tokens_fn, flops=logging.flops, peak_flops=logging.peak_flops)
        throughput.attach(trainer, log_point)
        handlers.StepTimes().attach(trainer, log_point)
    metric_logger.attach(trainer, log_point)
    if logging.trail is not None:
        trail = handlers.DigestTrail(run.directory.path, every=logging.trail, compare_ranks=logging.compare_ranks)
        trail.attach(trainer)
    profile = config.profiler
    if profile.active is not None:
        numbers = {"wait": profile.wait, "warmup": profile.warmup, "active": profile.active, "repeat": profile.repeat}
        handlers.Profiler(run.directory.path, ranks=profile.ranks, **numbers).attach(trainer)
    if logging.progress:
        handlers.Progress(logging.console if isinstance(logging.console, list) else None).attach(trainer)
    stopping = config.early_stopping
    if stopping.metric is not None:
        handlers.EarlyStopping(
            stopping.metric,
            mode=stopping.mode,
            patience=stopping.patience,
            min_delta=stopping.min_delta,
            stopping_threshold=stopping.stopping_threshold,
            divergence_threshold=stopping.divergence_threshold,
        ).attach(trainer)
    section = config.checkpoint
    names = [option.name for option in fields(SaveOptions) if option.name not in ("config", "keep_fn")] + [*TIERS]
    values = {name: getattr(section, name) for name in names}
    options = {name: value for name, value in values.items() if value is not None}
    run.checkpoint = handlers.Checkpoint(
        run.directory.checkpoints,
        must_be_new=config.run.must_be_new and not _is_started_again(),
        config=run.config,
        **options,
    )
    run.checkpoint.announces_best = False  # the run's last line does
    run.checkpoint.asks_tiers = not config.run.restart or _is_started_again()
    run.ignore, run.resume_lr = section.ignore or (), section.resume.lr
    if section.sources:
        run.load, run.always_load = _loading(config, task, run), bool(section.exclude)
    # it always saves at the end; after COMPLETED nothing more is saved
    unit, number = section.every.given if section.every else ("", 0)
    by_clock = unit in ("seconds", "minutes")
    run.checkpoint.attach(
        trainer, interval_event(section.every, task) if section.every and not by_clock else Events.COMPLETED
    )
    if by_clock:
        handlers.SaveEvery(**{unit: number}).attach(trainer)
    _attach_stops(config, run)
    check_type("handlers", task.handlers, isinstance(task.handlers, list | tuple), "a list of handlers")
    for place, users_own in enumerate(task.handlers):
        handler, *events = users_own if isinstance(users_own, tuple) else (users_own,)
        name = getattr(handler, "__name__", type(handler).__name__)
        if isinstance(handler, type):
            raise TypeError(f"handlers[{place}] is the class {name}: give an object of it, {name}(...).")
        if hasattr(handler, "attach"):
            if not _takes(handler.attach, trainer, *events):
                raise TypeError(f"handlers[{place}] is a {name}, whose attach takes an event: give the pair of them.")
            handler.attach(trainer, *events)
        elif not callable(handler) or not events or isinstance(handler, CallableEventWithFilter):
            raise TypeError(
                f"handlers[{place}] must be an object with attach(trainer), or a pair of one or of a function and its "
                f"event, in this order, got {handler!r}."
            )
        else:
            try:
                trainer.add_event_handler(*events, handler)
            except ValueError:
                if _takes(handler, trainer) or _takes(handler):
                    raise
                raise TypeError(
                    f"handlers[{place}] must be a function of the trainer, or of nothing, got "
                    f"{name}{inspect.signature(handler)}: trainer.state has what else it needs."
                ) from None


def _takes(function: Callable[..., Any], *arguments: Any) -> bool:
    try:
        inspect.signature(function).bind(*arguments)
    except TypeError:
        return False
    except ValueError:  # one of C, which says nothing of itself
        return True
    return True


def _loading(config: Config, task: Task, run: Run) -> Callable[[], object]:
    """The function that loads the config's ``checkpoint.load``; attaches the bank that loads dynamic sources again.

    Raises:
        ConfigError: (now) the settings make no source; (when called) there is nothing to load, or it does not fit.
    """
    sources = [_source(config, key, section) for key, section in config.checkpoint.sources.items()]
    checkpoint = run.checkpoint
    assert checkpoint is not None
    begin: Callable[[], object] = partial(checkpoint.load, sources)
    if any(load_source.dynamic for load_source in sources):
        bank = handlers.ModelBank(sources)
        bank.attach(run.trainer, interval_event(config.checkpoint.reload_every, task))
        begin = bank.load

    def load() -> object:
        try:
            return begin()
        except CheckpointError as error:
            key = "checkpoint.load.path" if isinstance(config.checkpoint.load, LoadSection) else "checkpoint.load"
            raise config.error(key, str(error)) from error
        except ValueError as error:
            raise config.error("checkpoint.load", str(error)) from error

    return load


def _source(config: Config, key: str, section: LoadSection) -> LoadSource:
    try:
        return LoadSource(**section.model_dump())
    except ValueError as error:
        raise config.error(key, str(error)) from None


def _attach_stops(config: Config, run: Run) -> None:
    handlers.GracefulStop().attach(run.trainer)
    limit, path = config.run.time_limit, config.run.stop_file
    if limit is not None:  # the start-up counts as well
        since = time.monotonic() - (time.perf_counter() - run.startup.began)
        handlers.WallClockLimit(seconds=limit.total_s, since=since).attach(run.trainer)
    if path is not None:
        handlers.StopFile(run.directory.path / path).attach(run.trainer)


def _metric_logger(config: Config, task: Task, run: Run) -> handlers.MetricLogger:
    logging, path = config.logging, run.directory.path
    sinks: list[Any] = []
    if logging.clearml:
        sinks.append(handlers.ClearMLLogger(path, project=logging.project, task=config.name, config=run.config))
    if logging.tensorboard:
        sinks.append(handlers.TensorBoardSink(path, config=run.config))
    if logging.wandb:
        sinks.append(handlers.WandBSink(path, project=logging.project, run_name=config.name, config=run.config))
    if logging.mlflow:
        sinks.append(handlers.MLflowSink(path, experiment=logging.project, run_name=config.name, config=run.config))
    run.log_states = frozenset({"clearml", "mlflow", "tensorboard", "wandb"})
    metric_logger = handlers.MetricLogger(path, sinks=sinks, console=logging.console)
    for sink in metric_logger.sinks:
        if isinstance(sink, handlers.ConsoleSink) and logging.throughput:  # so that its first heading has it
            sink.columns.rate = f"throughput/{'samples' if task.tokens_fn is None else 'tokens'}_per_s"
    assert metric_logger.history is not None, "it was given a folder"
    metric_logger.history.config = run.config
    return metric_logger


def interval_event(interval: Every, task: Task) -> Any:
    """The event of a config's ``every``; those of one clock are one event, as handlers that share it act together."""
    unit, number = interval.given
    count = (task.tokens_fn or task.weight_fn) if unit == "tokens" else None
    return every(**{unit: number}, count=count)  # type: ignore[arg-type]  # the config has checked which are whole
