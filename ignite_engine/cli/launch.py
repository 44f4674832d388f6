"""A command on several ranks, and the exit code of what it raises."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException

from ignite_engine import devices
from ignite_engine.cli.parsing import USAGE_ERROR
from ignite_engine.errors import PeerFailed
from ignite_engine.ranks.joining import is_launched
from ignite_engine.ranks.launch import Parallel
from ignite_engine.runs import recipe
from ignite_engine.runs.config import Config, load_config
from ignite_engine.runs.task import TaskError, find_task

FAILED = 1
Work = Callable[[argparse.Namespace], int | None]


def exit_code(work: Work, options: argparse.Namespace) -> int:
    """What a command ends with; an error that needs no traceback is one line."""
    try:
        return work(options) or 0
    except (*recipe.USER_ERRORS, *recipe.RUN_ERRORS, FileNotFoundError) as error:
        is_train = options.command == "train"
        if options.traceback or (is_train and isinstance(error, FileNotFoundError)):  # of the task
            raise
        print_line(f"error: {error}")
        return FAILED if is_train and isinstance(error, recipe.RUN_ERRORS) else USAGE_ERROR


def print_line(line: str) -> None:
    """One line on stderr, by the first rank of each machine."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        print(line, file=sys.stderr, flush=True)


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
    """One rank of several: all exit with the code of a user error."""
    try:
        code = exit_code(work, options)
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
    how: dict[str, Any] = {}
    if (restarts := getattr(options, "restarts", None)) is not None:
        devices.look_without_using()
    config = load_config(options.config, options.overrides)
    if restarts is not None:
        how["restarts"] = restarts
        recipe.prepare_ranks()
        with contextlib.suppress(TaskError):  # each rank says so
            find_task(config.task, config.folder)  # imported once, here
    section = config.distributed
    how |= {"timeout": section.timeout, "heartbeat_timeout": section.heartbeat_timeout}
    failed = None if note_failure is None else partial(note_failure, config)
    processes, backend = options.nproc_per_node or section.nproc_per_node, options.backend or section.backend
    return on_ranks(options, partial(work, config), processes, backend, failed, **how)
