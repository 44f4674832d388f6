"""The commands. Each takes the parsed arguments; ranks are started here."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Callable, Mapping
from typing import Any

from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException

from ignite_engine import devices
from ignite_engine.checkpointing import CheckpointError, CheckpointStore, NotExact
from ignite_engine.checkpointing.naming import followed
from ignite_engine.cli import checkpoints, doctor, pages, time_travel
from ignite_engine.cli import verify_resume as resume_verification
from ignite_engine.config import Config, ConfigError, load_config
from ignite_engine.config.load import default_values
from ignite_engine.errors import LaunchError, NotFinite, PeerFailed, RanksDiffer, ReplayError, StateMismatch
from ignite_engine.ext.follow.follow import follow_with
from ignite_engine.ext.recovery.parallel import Parallel
from ignite_engine.ranks import agreement
from ignite_engine.ranks.joining import is_launched
from ignite_engine.run_directory import RunDirectory, RunDirectoryInUse, json_values
from ignite_engine.runs import recipe
from ignite_engine.task import TaskError, find_task

FAILED, USAGE_ERROR = 1, 2
USER_ERRORS = (ConfigError, StateMismatch, NotExact, ReplayError, RunDirectoryInUse)
"""What a user can fix, whatever the command: one line and code 2."""
RUN_ERRORS = (CheckpointError, LaunchError, NotFinite, RanksDiffer)
"""What ends a run and needs no traceback: one line and code 1."""


def one_line_is_enough(error: BaseException, command: str) -> bool:
    """Whether a traceback would add nothing for the user."""
    return isinstance(error, (*USER_ERRORS, *RUN_ERRORS)) or (
        isinstance(error, FileNotFoundError) and command != "train"
    )


def code_of(error: BaseException, command: str) -> int:
    """The exit code of an error that is reported in one line."""
    return FAILED if isinstance(error, RUN_ERRORS) and command == "train" else USAGE_ERROR


def train(options: argparse.Namespace) -> None:
    """Run to the end, resuming if there is something to resume."""
    _on_ranks(options, _train)


def evaluate(options: argparse.Namespace) -> None:
    """Print the metrics of a checkpoint as one line of JSON; of a run that is followed a line for each checkpoint."""
    if options.follow and options.checkpoint is not None:
        raise ConfigError("--checkpoint: --follow evaluates all that the run saves; leave one of them out.")
    if not options.follow and (options.all or options.wait is not None):
        raise ConfigError(f"--{'all' if options.all else 'wait'}: it belongs to --follow, which is not given.")
    _on_ranks(options, _follow if options.follow else _evaluate)


def describe(options: argparse.Namespace) -> None:
    """Print the schedule, the learning rates and the bus."""
    run = recipe.build_run(load_config(options.config, options.overrides))
    print(run.describe())


def verify_resume(options: argparse.Namespace) -> None:
    """Kill a run, resume it, and compare it with one that was not killed."""
    script = resume_verification.is_script(options.config)
    if options.phase is None:
        resume_verification.check_starts(options)
        if not script:
            load_config(options.config, options.overrides)  # a mistake is said once
        resume_verification.verify(options)
    elif script:
        resume_verification.run_script(options)
    else:
        _on_ranks(options, resume_verification.run_phase)


COMMANDS: dict[str, Callable[[argparse.Namespace], int | None]] = {
    "train": train,
    "evaluate": evaluate,
    "describe": describe,
    "verify-resume": verify_resume,
    "doctor": doctor.doctor,
    **pages.COMMANDS,
    **checkpoints.COMMANDS,
    **time_travel.COMMANDS,
}


def _on_ranks(options: argparse.Namespace, work: Callable[[Config, argparse.Namespace], None]) -> None:
    """Call ``work`` here, on the ranks of a launcher that started this process, or on ranks that are spawned."""
    launched = is_launched()
    restarts = getattr(options, "restarts", None)
    if restarts is not None:
        devices.look_without_using()
    try:
        config = _checked(options, launched=launched)
    except ConfigError as error:
        if not launched:
            raise
        backend = options.backend or devices.default_backend()
        with Parallel(backend=backend) as parallel:  # the peers wait for this rank: say it there, once
            parallel.run(_rank_main, work, error, options)
        return
    section = config.distributed
    waits: dict[str, Any] = {
        "timeout": section.timeout.total_s if section.timeout else None,
        "heartbeat_timeout": section.heartbeat_timeout,
    }
    processes = options.nproc_per_node or config.distributed.nproc_per_node
    if restarts is not None:
        waits["restarts"] = restarts
        recipe.prepare_ranks()
        with contextlib.suppress(TaskError):  # each rank says so
            find_task(config.task, config.folder)  # imported once, here
    if launched:
        with Parallel(backend=_backend(options, config), **waits) as parallel:
            parallel.run(_rank_main, work, config, options)
    elif restarts is not None or (processes is not None and processes > 1):
        several = processes is not None and processes > 1
        ranks: dict[str, Any] = {"backend": _backend(options, config), "nproc_per_node": processes} if several else {}
        try:
            with Parallel(**ranks, **waits) as parallel:
                parallel.run(_rank_main, work, config, options)
        except (ProcessRaisedException, ProcessExitedException) as error:
            if options.command == "train":
                recipe.note_failure(config, error)
            print(f"error: {str(error).strip()}", file=sys.stderr, flush=True)
            sys.exit(FAILED)
    else:
        work(config, options)


def _checked(options: argparse.Namespace, *, launched: bool) -> Config:
    config = load_config(options.config, options.overrides)
    if not devices.backend_is_usable(_backend(options, config)):
        raise config.error("distributed.backend", "got 'nccl', but there is no CUDA device; expected gloo.")
    if launched and options.nproc_per_node:
        raise ConfigError("--nproc-per-node: the launcher that started this process sets how many; leave it out.")
    if launched and getattr(options, "restarts", None) is not None:
        raise ConfigError("--restarts: the launcher that started this process restarts its ranks itself; leave it out.")
    return config


def _backend(options: argparse.Namespace, config: Config) -> str:
    return options.backend or config.distributed.backend or devices.default_backend()


def _rank_main(
    local_rank: int, work: Callable[..., None], loaded: Config | ConfigError, options: argparse.Namespace
) -> None:
    """One rank of several: a user error is printed once, and all ranks exit with its code."""

    def config() -> Config:
        if isinstance(loaded, ConfigError):
            raise loaded
        return loaded

    try:
        work(agreement.together(config), options)
    except (*USER_ERRORS, *RUN_ERRORS, FileNotFoundError) as error:
        if options.traceback or not one_line_is_enough(error, options.command):
            raise
        if agreement.rank() == 0:
            print(f"error: {error}", file=sys.stderr, flush=True)
        sys.exit(code_of(error, options.command))
    except PeerFailed as error:  # which all ranks have logged; the rank that failed prints its traceback
        if options.traceback:
            raise
        sys.exit(error.code)


def _train(config: Config, options: argparse.Namespace) -> None:
    with recipe.logged(config):
        recipe.build_run(config).train()


def _evaluate(config: Config, options: argparse.Namespace) -> None:
    saved = RunDirectory(config.directory).checkpoints
    if options.checkpoint == "best" and not (config.checkpoint.best or followed(CheckpointStore(saved).checkpoints())):
        raise config.error(
            "checkpoint.best", "got nothing, so no checkpoint is the best; name a metric, such as val/loss."
        )
    result = recipe.build_run(config).evaluate(options.checkpoint)
    if agreement.rank() == 0:
        print(json.dumps(json_values(result)))


def _follow(config: Config, options: argparse.Namespace) -> None:
    run = recipe.build_run(config)
    if run.load is not None and run.always_load:
        run.load()
    evaluations: list[Any] = list(run.evaluations())
    during_the_run = [evaluation for evaluation in evaluations if evaluation.name in run.trainer.registry.objects]

    settings: dict[str, Any] = {"every_checkpoint": options.all, "defaults": default_values()}
    if options.wait is not None:
        settings["wait_s"] = options.wait

    def announce(values: Mapping[str, Any]) -> None:
        print(json.dumps(json_values(values)), flush=True)

    follow_with(config.directory, run.trainer, during_the_run, announce=announce, **settings)
