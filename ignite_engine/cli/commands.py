"""The commands. Each takes the parsed arguments; ranks are started here."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable

import torch

from ignite_engine.checkpointing import CheckpointError, NotExact
from ignite_engine.cli import checkpoints, pages
from ignite_engine.cli import verify_resume as resume_verification
from ignite_engine.config import Config, ConfigError, load_config
from ignite_engine.errors import NotFinite, RanksDiffer, StateMismatch
from ignite_engine.ranks import agreement
from ignite_engine.ranks.launch import Parallel
from ignite_engine.run_directory import RunDirectory, RunDirectoryInUse, json_values
from ignite_engine.runs import recipe

FAILED, USAGE_ERROR = 1, 2
USER_ERRORS = (ConfigError, StateMismatch, NotExact, RunDirectoryInUse)
"""What a user can fix, whatever the command: one line and code 2."""
RUN_ERRORS = (CheckpointError, NotFinite, RanksDiffer)
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
    """Print the metrics of a checkpoint as one line of JSON."""
    _on_ranks(options, _evaluate)


def describe(options: argparse.Namespace) -> None:
    """Print the schedule, the learning rates and the bus."""
    run = recipe.build_run(load_config(options.config, options.overrides))
    if options.plot is not None:
        run.plot_lr(options.plot)
    print(run.describe())


def verify_resume(options: argparse.Namespace) -> None:
    """Kill a run, resume it, and compare it with one that was not killed."""
    if options.phase is None:
        resume_verification.verify(options, load_config(options.config, options.overrides))
    else:
        _on_ranks(options, resume_verification.run_phase)


COMMANDS: dict[str, Callable[[argparse.Namespace], int | None]] = {
    "train": train,
    "evaluate": evaluate,
    "describe": describe,
    "verify-resume": verify_resume,
    **pages.COMMANDS,
    **checkpoints.COMMANDS,
}


def _on_ranks(options: argparse.Namespace, work: Callable[[Config, argparse.Namespace], None]) -> None:
    """Call ``work`` here, on the ranks of a launcher that started this process, or on ranks that are spawned."""
    config = load_config(options.config, options.overrides)
    timeout = config.distributed.timeout.total_s if config.distributed.timeout else None
    processes = options.nproc_per_node or config.distributed.nproc_per_node
    backend = options.backend or config.distributed.backend or ("nccl" if torch.cuda.is_available() else "gloo")
    if backend == "nccl" and not torch.cuda.is_available():
        raise config.error("distributed.backend", "got 'nccl', but there is no CUDA device; expected gloo.")
    if "RANK" in os.environ or int(os.environ.get("SLURM_NTASKS", "1")) > 1:
        if options.nproc_per_node:
            raise ConfigError("--nproc-per-node: the launcher that started this process sets how many; leave it out.")
        with Parallel(backend=backend, timeout=timeout) as parallel:
            parallel.run(_rank_main, work, config, options)
    elif processes is not None and processes > 1:
        with Parallel(backend=backend, nproc_per_node=processes, timeout=timeout) as parallel:
            parallel.run(_rank_main, work, config, options)
    else:
        work(config, options)


def _rank_main(local_rank: int, work: Callable[..., None], config: Config, options: argparse.Namespace) -> None:
    """One rank of several: a user error is printed once, and all ranks exit with its code."""
    try:
        work(config, options)
    except (*USER_ERRORS, *RUN_ERRORS, FileNotFoundError) as error:
        if options.traceback or not one_line_is_enough(error, options.command):
            raise
        if agreement.rank() == 0:
            print(f"error: {error}", file=sys.stderr, flush=True)
        sys.exit(code_of(error, options.command))


def _train(config: Config, options: argparse.Namespace) -> None:
    above = next(each for each in (config.directory, *config.directory.absolute().parents) if each.exists())
    if not above.is_dir() or not os.access(above, os.W_OK):
        problem = "may not be written to" if above.is_dir() else "is not a folder"
        raise config.error("run.directory", f"got '{config.directory}', but {above} {problem}.")
    with RunDirectory(config.directory).logging_to(agreement.rank()):
        recipe.build_run(config).train()


def _evaluate(config: Config, options: argparse.Namespace) -> None:
    if options.checkpoint == "best" and config.checkpoint.best is None:
        raise config.error(
            "checkpoint.best", "got nothing, so no checkpoint is the best; name a metric, such as val/loss."
        )
    result = recipe.build_run(config).evaluate(options.checkpoint)
    if agreement.rank() == 0:
        print(json.dumps(json_values(result)))
