"""From a config and a task to a run: the only module that knows the core and the handlers."""

from __future__ import annotations

import importlib
import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import Any

import torch
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException

from ignite_engine import devices, handlers
from ignite_engine.errors import (
    CheckpointError,
    LaunchError,
    NotExact,
    NotFinite,
    RanksDiffer,
    ReplayError,
    StateMismatch,
    shortened,
)
from ignite_engine.loop.position import Plan, Position, last_iteration
from ignite_engine.ranks import agreement, attempt, mesh
from ignite_engine.rng import seed_everything
from ignite_engine.runs.attach import attach_handlers
from ignite_engine.runs.components import check_fit, make_optimizers, make_schedules, settings_of
from ignite_engine.runs.config import Config, ConfigError, ConfigWarning
from ignite_engine.runs.loaders import data_loader
from ignite_engine.runs.run import Run
from ignite_engine.runs.run_directory import (
    PhaseTimes,
    RunDirectory,
    RunDirectoryInUse,
    config_differences,
    installed_packages,
)
from ignite_engine.runs.task import Task, TaskError, build_task, find_task
from ignite_engine.runs.wrapping import declare_mesh, wrap
from ignite_engine.trainer import Trainer
from ignite_engine.update import Update

logger = logging.getLogger(__name__)

USER_ERRORS = (ConfigError, StateMismatch, NotExact, ReplayError, RunDirectoryInUse, TaskError)
"""What a user can fix, whatever is called: one line, and of a command code 2."""
RUN_ERRORS = (CheckpointError, LaunchError, NotFinite, RanksDiffer)
"""What ends a run and needs no traceback: one line, and of ``train`` code 1."""
_STARTED_AGAIN = ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")
"""Counts of launchers that start a rank that has died, or a job that was taken off its machine, again."""


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
    with RunDirectory(config.directory).logging_to(agreement.rank(), console=console):
        if attempt.current.reason is not None:
            logger.warning("%s", attempt.current.reason, extra={"console": False})  # the parent has shown it
        if attempt.current.is_known:
            warnings.simplefilter("ignore", ConfigWarning)
        yield


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
    _check_configs_agree(config)
    # torchrun's agents count apart: one that joined later has counted none
    if any(agreement.gather_objects(any(int(os.environ.get(count) or 0) for count in _STARTED_AGAIN))):
        config = config.changed(run=replace(config.run, restart=False))
    devices.set_up_torch(config.run.matmul_precision, config.run.threads, config.run.deterministic)
    arranged = declare_mesh(config)
    with startup("task"):
        seed_everything(config.run.seed)
        task = task or _agreed_task(config)
        check_fit(config, task)
    with startup("model"):
        task = wrap(config, task, arranged)
        seed_everything(config.run.seed + mesh.data_rank())
    with startup("trainer"):
        optimizers = make_optimizers(config, task)
        trainer = _make_trainer(config, task, optimizers)
    with startup("data"):
        loader = data_loader(config, task, task.train_set, training=True)
        total = _updates_of(config, trainer, loader)
        schedules = make_schedules(config, task, optimizers, total)
        settings = settings_of(config, task, optimizers, schedules)
        run = Run(trainer, loader, RunDirectory(config.directory), config, task, schedules, startup, settings)
        attach_handlers(run, total)
    return run


def _updates_of(config: Config, trainer: Trainer, loader: Any) -> int | None:
    """Updates of the whole run; None: its data does not say."""
    try:
        epoch_length = trainer.progress.iterations_of(loader)
    except ValueError as error:
        raise config.error("data", str(error)) from error
    if epoch_length == 0:
        raise config.error("data", f"drop_last leaves no batch of batch_size {config.data.batch_size}.")
    return last_iteration(Position(), Plan(config.run.max_epochs, config.run.max_iterations, epoch_length))


def _check_configs_agree(config: Config) -> None:
    configs = agreement.gather_objects(config.to_dict())
    for rank, config_of_rank in enumerate(configs):
        if differences := config_differences(configs[0], config_of_rank):
            raise ConfigError(
                f"rank {rank} was started with another config than rank 0: {shortened(differences)}; "
                "start all ranks with the same file and overrides."
            )


def _agreed_task(config: Config) -> Task:
    """The config's task; an error on any rank is raised on all."""
    try:
        build = agreement.together(lambda: find_task(config.task, config.folder))
        return agreement.together(lambda: build_task(build, config.task_options))
    except TaskError as error:
        raise config.error("task", str(error)) from error.__cause__


def _make_trainer(config: Config, task: Task, optimizers: dict[str, torch.optim.Optimizer]) -> Trainer:
    section = asdict(config.update)
    groups = {name: section.pop(name) for name in ("accumulation_steps", "global_micro_batches")}
    if section["precision"] != "fp16":
        section["grad_scaler"] = None
    task.model.train()
    try:
        update = Update(
            task.model,
            optimizers,
            task.loss_fn,
            weight_fn=task.weight_fn,
            reduce_each_micro_batch=config.distributed.reduce_each_micro_batch,
            loss_parallel=config.distributed.loss_parallel,
            **section,
        )
        update.accumulation.check()
        return Trainer(update, max_read_errors=config.data.max_read_errors, **groups)
    except (TypeError, ValueError) as error:
        raise config.error("update", str(error)) from error
