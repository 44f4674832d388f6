"""A command on several ranks, and the exit code of what it raises."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import Any

from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException

from ignite_engine import devices
from ignite_engine.errors import (
    CheckpointError,
    LaunchError,
    NotExact,
    NotFinite,
    PeerFailed,
    RanksDiffer,
    ReplayError,
    StateMismatch,
)
from ignite_engine.ranks import agreement
from ignite_engine.ranks.joining import is_launched
from ignite_engine.ranks.launch import Parallel
from ignite_engine.runs.config import ConfigError
from ignite_engine.runs.run_directory import RunDirectoryInUse

FAILED, USAGE_ERROR = 1, 2
USER_ERRORS = (ConfigError, StateMismatch, NotExact, ReplayError, RunDirectoryInUse)
"""What a user can fix, whatever the command: one line and code 2."""
RUN_ERRORS = (CheckpointError, LaunchError, NotFinite, RanksDiffer)
"""What ends a run and needs no traceback: one line and code 1."""
Work = Callable[[argparse.Namespace], int | None]


def one_line_is_enough(error: BaseException, command: str) -> bool:
    """Whether a traceback would add nothing for the user."""
    return isinstance(error, (*USER_ERRORS, *RUN_ERRORS)) or (
        isinstance(error, FileNotFoundError) and command != "train"
    )


def code_of(error: BaseException, command: str) -> int:
    """The exit code of an error that is reported in one line."""
    return FAILED if isinstance(error, RUN_ERRORS) and command == "train" else USAGE_ERROR


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
    except (*USER_ERRORS, *RUN_ERRORS, FileNotFoundError) as error:
        if options.traceback or not one_line_is_enough(error, options.command):
            raise
        if agreement.rank() == 0:
            print(f"error: {error}", file=sys.stderr, flush=True)
        code = code_of(error, options.command)
    except PeerFailed as error:  # which all ranks have logged; the rank that failed prints its traceback
        if options.traceback:
            raise
        code = error.code
    if code:
        sys.exit(code)
