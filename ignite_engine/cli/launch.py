"""A command on several ranks, and the exit code of what it raises."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException

from ignite_engine import devices
from ignite_engine.cli.parsing import USAGE_ERROR
from ignite_engine.errors import (
    PeerFailed,
)
from ignite_engine.ranks import agreement
from ignite_engine.ranks.joining import is_launched
from ignite_engine.ranks.launch import Parallel
from ignite_engine.runs import recipe
from ignite_engine.runs.config import Config, ConfigError, load_config
from ignite_engine.runs.task import TaskError, find_task

FAILED = 1
Work = Callable[[argparse.Namespace], int | None]


def one_line_is_enough(error: BaseException, command: str) -> bool:
    """Whether a traceback would add nothing for the user."""
    return isinstance(error, (*recipe.USER_ERRORS, *recipe.RUN_ERRORS)) or (
        isinstance(error, FileNotFoundError) and command != "train"
    )


def code_of(error: BaseException, command: str) -> int:
    """The exit code of an error that is reported in one line."""
    return FAILED if isinstance(error, recipe.RUN_ERRORS) and command == "train" else USAGE_ERROR


def on_ranks(
    options: argparse.Namespace,
    work: Work,
    processes: int | None,
    backend: str | None = None,
    failed: Callable[[Exception], object] | None = None,
    **how: Any,
) -> int:
    """Call ``work`` here, on the ranks of a launcher that started this process, or on ranks that are started here.

    Args:
        processes: how many are started; None: none, unless they are to be restarted.
        failed: called where ranks that were started here have failed.
        how: further arguments of ``Parallel``.

    Returns:
        The exit code.
    """
    several = processes is not None and processes > 1 and not is_launched()
    if not (several or is_launched() or how.get("restarts")):
        return work(options) or 0
    ranks: dict[str, Any] = {"nproc_per_node": processes} if several else {}
    if several or is_launched():
        ranks["backend"] = backend or devices.default_backend()
    try:
        with Parallel(**ranks, **how) as parallel:
            parallel.run(_rank_main, work, options)
    except (ProcessRaisedException, ProcessExitedException) as error:
        if failed is not None:
            failed(error)
        print(f"error: {str(error).strip()}", file=sys.stderr, flush=True)
        return FAILED
    return 0


def _rank_main(local_rank: int, work: Work, options: argparse.Namespace) -> None:
    """One rank of several: a user error is printed once, and all ranks exit with its code."""
    try:
        code = work(options)
    except (*recipe.USER_ERRORS, *recipe.RUN_ERRORS, FileNotFoundError) as error:
        if options.traceback or not one_line_is_enough(error, options.command):
            raise
        if agreement.rank() == 0:
            print(f"error: {error}", file=sys.stderr, flush=True)
        code = code_of(error, options.command)
    except PeerFailed:  # which all ranks have logged; the rank that failed prints its traceback
        if options.traceback:
            raise
        code = FAILED
    if code:
        sys.exit(code)


def on_ranks_of_config(
    options: argparse.Namespace,
    work: Callable[[Config, argparse.Namespace], int | None],
    note_failure: Callable[[Config, Any], object] | None = None,
) -> int:
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
    failed = None if note_failure is None else partial(note_failure, config)
    processes = options.nproc_per_node or section.nproc_per_node
    return on_ranks(options, partial(_configured, work, config), processes, _backend(options, config), failed, **how)


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
