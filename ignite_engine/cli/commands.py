"""The commands. Each takes the parsed arguments; ranks are started here."""

from __future__ import annotations

import argparse
import contextlib
import json
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from ignite_engine import devices
from ignite_engine.checkpoint.sources import followed
from ignite_engine.checkpoint.store import CheckpointStore
from ignite_engine.cli import checkpoints, doctor, pages, time_travel
from ignite_engine.cli import verify_resume as resume_verification
from ignite_engine.cli.launch import on_ranks
from ignite_engine.ext.follow.follow import follow_with
from ignite_engine.ranks import agreement
from ignite_engine.ranks.joining import is_launched
from ignite_engine.runs import recipe
from ignite_engine.runs.config import Config, ConfigError, load_config
from ignite_engine.runs.run_directory import RunDirectory
from ignite_engine.runs.task import TaskError, find_task
from ignite_engine.text import json_values


def train(options: argparse.Namespace) -> int:
    """Run to the end, resuming if there is something to resume."""
    return _on_ranks(options, _train)


def evaluate(options: argparse.Namespace) -> int:
    """Print the metrics of a checkpoint as one line of JSON; of a run that is followed a line for each checkpoint."""
    if options.follow and options.checkpoint is not None:
        raise ConfigError("--checkpoint: --follow evaluates all that the run saves; leave one of them out.")
    if not options.follow and (options.all or options.wait is not None):
        raise ConfigError(f"--{'all' if options.all else 'wait'}: it belongs to --follow, which is not given.")
    return _on_ranks(options, _follow if options.follow else _evaluate)


def describe(options: argparse.Namespace) -> None:
    """Print the schedule, the learning rates and the bus."""
    run = recipe.build_run(load_config(options.config, options.overrides))
    print(run.describe())


def verify_resume(options: argparse.Namespace) -> int:
    """Kill a run, resume it, and compare it with one that was not killed."""
    is_built = resume_verification.is_built(options)
    if options.phase is None:
        if not is_built:
            load_config(options.config, options.overrides)  # a mistake is said once
        return resume_verification.verify(options)
    if is_built:
        work = partial(resume_verification.train_phase, None)
        return on_ranks(options, work, options.nproc_per_node, options.backend)
    return _on_ranks(options, resume_verification.train_phase)


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


def _on_ranks(options: argparse.Namespace, work: Callable[[Config, argparse.Namespace], int | None]) -> int:
    """Call ``work`` with the config, on as many ranks as it or the options say."""
    launched, restarts = is_launched(), getattr(options, "restarts", None)
    if restarts is not None:
        devices.look_without_using()
    try:
        config = _checked(options, launched=launched)
    except ConfigError as error:
        if not launched:
            raise
        # the peers wait for this rank: it is said there, once
        return on_ranks(options, partial(_configured, work, error), None, options.backend)
    section = config.distributed
    how: dict[str, Any] = {
        "timeout": section.timeout,
        "heartbeat_timeout": section.heartbeat_timeout,
    }
    if restarts is not None:
        how["restarts"] = restarts
        recipe.prepare_ranks()
        with contextlib.suppress(TaskError):  # each rank says so
            find_task(config.task, config.folder)  # imported once, here
    note_failure = partial(recipe.note_failure, config) if options.command == "train" else None
    processes = options.nproc_per_node or section.nproc_per_node
    return on_ranks(
        options, partial(_configured, work, config), processes, _backend(options, config), note_failure, **how
    )


def _configured(
    work: Callable[[Config, argparse.Namespace], int | None], loaded: Config | ConfigError, options: argparse.Namespace
) -> int | None:
    def config() -> Config:
        if isinstance(loaded, ConfigError):
            raise loaded
        return loaded

    return work(agreement.together(config), options)


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


def _train(config: Config, options: argparse.Namespace) -> None:
    with recipe.logged(config):
        recipe.build_run(config).train()


def _evaluate(config: Config, options: argparse.Namespace) -> None:
    saved = RunDirectory(config.directory).checkpoints
    if options.checkpoint == "best" and not (
        config.handler("Checkpoint").get("best") or followed(CheckpointStore(saved).checkpoints())
    ):
        raise config.error(
            "handlers.Checkpoint.best", "got nothing, so no checkpoint is the best; name a metric, such as val/loss."
        )
    result = recipe.build_run(config).evaluate(options.checkpoint)
    if agreement.rank() == 0:
        print(json.dumps(json_values(result)))


def _follow(config: Config, options: argparse.Namespace) -> None:
    run = recipe.build_run(config)
    if run.load is not None and run.always_load:
        run.load()
    evaluations: list[Any] = list(run.evaluations)
    during_the_run = [evaluation for evaluation in evaluations if evaluation.name in run.trainer.registry.objects]

    settings: dict[str, Any] = {"every_checkpoint": options.all}
    if options.wait is not None:
        settings["wait_s"] = options.wait

    def announce(values: Mapping[str, Any]) -> None:
        print(json.dumps(json_values(values)), flush=True)

    follow_with(config.directory, run.trainer, during_the_run, announce=announce, **settings)
