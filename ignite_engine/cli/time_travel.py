"""The commands that go back in runs: ``replay``, ``compare-runs`` and ``audit``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException

from ignite_engine import devices
from ignite_engine.errors import ReplayError
from ignite_engine.ext.replay import Moment, bring_to, compare_runs
from ignite_engine.ext.replay import audit as make_audit
from ignite_engine.ranks import agreement
from ignite_engine.ranks.joining import is_launched
from ignite_engine.ranks.launch import Parallel
from ignite_engine.task import TaskError, find_task

DIFFERS = 1


def add_parsers(subparsers: Any, count: Callable[[str], int]) -> None:
    """Add the commands; they take the directories of runs, not a config."""
    text = "bring a run to an iteration again, bit for bit, and say what that iteration was; its folder is only read"
    command = subparsers.add_parser("replay", help=text, description=text, allow_abbrev=False)
    command.add_argument("run", type=Path, metavar="RUN_DIR", help="the directory of a run")
    command.add_argument("--at", type=count, required=True, metavar="N", help="the boundary after this iteration")
    command.add_argument("--until", type=count, metavar="M", help="go on to this one; each is described")
    command.add_argument("--call", metavar="FILE:FUNCTION", help="call function(trainer) there, everything in place")
    command.add_argument("--debug", action="store_true", help="open the debugger before the update of iteration N")
    command.add_argument("--save", type=Path, metavar="DIR", help="make a checkpoint of the last one in this folder")
    _add_shared(command, count)
    text = "the first difference of two runs that should be equal, named: a sample, a weight, a gradient; code 1 if any"
    command = subparsers.add_parser("compare-runs", help=text, description=text, allow_abbrev=False)
    for name in ("first", "second"):
        command.add_argument(name, type=Path, metavar=name.upper(), help="the directory of a run")
    _add_shared(command, count)
    text = "train segments of a run again, and compare them with its logs and checkpoints; code 1 if one is another"
    command = subparsers.add_parser("audit", help=text, description=text, allow_abbrev=False)
    command.add_argument("run", type=Path, metavar="RUN_DIR", help="the directory of a run")
    command.add_argument(
        "--segments", type=count, required=True, metavar="N", help="between checkpoints, drawn at random"
    )
    command.add_argument("--seed", type=int, metavar="S", help="draws the same again; default: one that nobody knows")
    _add_shared(command, count)


def _add_shared(command: Any, count: Callable[[str], int]) -> None:
    command.set_defaults(overrides=[], traceback=False)
    command.add_argument(
        "--build",
        metavar="FILE:FUNCTION",
        help="function(directory) builds a run that no config names: that of fit(), or of a script of one's own",
    )
    command.add_argument("--nproc-per-node", type=count, metavar="N", help="processes to start; as many as the run had")


def replay(options: argparse.Namespace) -> int:
    """Print what the iterations were; code 1 where the run is not what it has logged."""
    return _on_ranks(_replay, options)


def _replay(options: argparse.Namespace) -> int:
    build, call = (None if name is None else _function(name) for name in (options.build, options.call))
    with bring_to(
        options.run, build, at=options.at, until=options.until, save=options.save, debug=options.debug
    ) as moment:
        _print_once(moment)
        if moment.difference is not None:
            return DIFFERS
        if call is not None:
            call(moment.trainer)
    return 0


def compare(options: argparse.Namespace) -> int:
    """Print what differs first; code 1 if anything does."""
    return _on_ranks(_compare, options)


def _compare(options: argparse.Namespace) -> int:
    result = compare_runs(options.first, options.second, None if options.build is None else _function(options.build))
    if agreement.rank() == 0:
        print(*result.lines(), sep="\n")
    return 0 if result.equal else DIFFERS


def audit(options: argparse.Namespace) -> int:
    """Print what was covered and found; code 1 where a segment is not what was saved and logged."""
    return _on_ranks(_audit, options)


def _audit(options: argparse.Namespace) -> int:
    build = None if options.build is None else _function(options.build)
    result = make_audit(options.run, build, segments=options.segments, seed=options.seed)
    if agreement.rank() == 0:
        print(*result.lines(), sep="\n")
    return DIFFERS if result.found else 0


def _print_once(moment: Moment) -> None:
    """On rank 0: the way there, then each iteration; samples of all ranks."""
    lines = [line for iteration in moment.iterations.values() for line in iteration.lines()]
    if agreement.world_size() > 1:
        samples = agreement.gather_objects({number: it.samples for number, it in moment.iterations.items()})
        lines += [
            f"  samples of rank {rank} in iteration {number}: {indices}"
            for rank, of_rank in enumerate(samples)
            for number, indices in of_rank.items()
            if rank
        ]
    if agreement.rank() == 0:
        print(moment.way, *lines, sep="\n")
        if moment.difference is not None:
            print(f"error: {moment.difference}", file=sys.stderr, flush=True)


def _function(name: str) -> Callable[[Any], Any]:
    try:
        return find_task(name)
    except TaskError as error:
        raise ReplayError(str(error)) from error.__cause__


def _on_ranks(work: Callable[[argparse.Namespace], int], options: argparse.Namespace) -> int:
    """Call ``work`` here, on the ranks of a launcher that started this process, or on ranks that are spawned."""
    processes = None if is_launched() else options.nproc_per_node or 1
    if processes == 1:
        return work(options)
    try:
        with Parallel(backend=devices.default_backend(), nproc_per_node=processes) as parallel:
            parallel.run(_rank_main, work, options)
    except (ProcessExitedException, ProcessRaisedException) as error:
        print(f"error: {str(error).strip()}", file=sys.stderr, flush=True)
        return DIFFERS
    return 0


def _rank_main(local_rank: int, work: Callable[[argparse.Namespace], int], options: argparse.Namespace) -> None:
    """One rank of several: an error is printed once, and all ranks exit with its code."""
    try:
        code = work(options)
    except (ReplayError, FileNotFoundError) as error:
        if agreement.rank() == 0:
            print(f"error: {error}", file=sys.stderr, flush=True)
        code = 2
    if code:
        sys.exit(code)


COMMANDS: dict[str, Callable[[argparse.Namespace], int | None]] = {
    "replay": replay,
    "compare-runs": compare,
    "audit": audit,
}
