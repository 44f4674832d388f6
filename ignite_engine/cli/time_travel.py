"""The commands that go back in runs: ``replay``, ``compare-runs`` and ``audit``."""

from __future__ import annotations

import argparse
import bdb
import pdb
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ignite.engine import Events
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException

from ignite_engine import devices
from ignite_engine.errors import ReplayError, shapes_of
from ignite_engine.events import Phase
from ignite_engine.ext.replay import audit as make_audit
from ignite_engine.ext.replay import compare_runs, rerun
from ignite_engine.ext.replay.compare import compare as compare_folders
from ignite_engine.ext.replay.rerun import environment_of
from ignite_engine.ext.replay.steps import rates_of, scalars_of
from ignite_engine.handlers.digest_trail import digests_of
from ignite_engine.ranks import agreement
from ignite_engine.ranks.joining import is_launched
from ignite_engine.ranks.launch import Parallel
from ignite_engine.task import TaskError, find_task
from ignite_engine.trainer import Trainer

DIFFERS = 1


def add_parsers(subparsers: Any, count: Callable[[str], int]) -> None:
    """Add the commands; they take the directories of runs, not a config."""
    text = "bring a run to an iteration again, bit for bit, and say what that iteration was; its folder is only read"
    command = subparsers.add_parser("replay", help=text, description=text, allow_abbrev=False)
    command.add_argument("run", type=Path, metavar="RUN_DIR", help="the directory of a run")
    command.add_argument("--at", type=count, required=True, metavar="N", help="the boundary after this iteration")
    command.add_argument("--call", metavar="FILE:FUNCTION", help="call function(trainer) there, everything in place")
    command.add_argument("--debug", action="store_true", help="open the debugger before the update of iteration N")
    command.add_argument(
        "--save", type=Path, metavar="DIR", help="keep the replay, with its checkpoint, as this folder"
    )
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
    command.add_argument(
        "--nproc-per-node", type=count, metavar="N", help="processes to start; default: as the run had"
    )


def replay(options: argparse.Namespace) -> int:
    """Print what the iteration was; code 1 where the run is not what it has logged."""
    return _on_ranks(_replay, options, options.run)


def _replay(options: argparse.Namespace) -> int:
    build, call = (None if name is None else _function(name) for name in (options.build, options.call))
    said = _Description(options.at, debug=options.debug)

    def at_the_moment(trainer: Trainer) -> None:
        said.print(trainer)
        if call is not None:
            call(trainer)

    try:
        folder = rerun(
            options.run, options.at, build=build, attach=said.attach, call=at_the_moment, folder=options.save
        )
    except bdb.BdbQuit:
        raise ReplayError("The debugger was left, or has no terminal: the iteration is not made.") from None
    found = agreement.on_rank_0(lambda: compare_folders(options.run, folder, options.at, since=said.began))
    if agreement.rank() == 0:
        if options.save is None:
            shutil.rmtree(folder, ignore_errors=True)
        print(f"Compared with the run: {found}{' are equal' if found.difference is None else ''}.")
        if found.difference is not None:
            print(f"error: The run is not what it has logged: {found.difference}.", file=sys.stderr, flush=True)
    return 0 if found.difference is None else DIFFERS


class _Description:
    """What iteration ``at`` was: its samples and their batch, outputs, rates and weights."""

    def __init__(self, at: int, *, debug: bool) -> None:
        self.at, self.debug = at, debug
        self.began = 0
        self.samples: list[int] | None = None
        self.rates: dict[str, float] = {}

    def attach(self, trainer: Trainer) -> None:
        trainer.add_event_handler(Events.STARTED, self._start)
        trainer.add_event_handler(Events.ITERATION_STARTED(once=self.at), self._begin)

    def _start(self, trainer: Trainer) -> None:
        self.began = trainer.state.iteration

    def _begin(self, trainer: Trainer) -> None:
        self.samples, self.rates = trainer.progress.samples_of_group(), rates_of(trainer)
        if self.debug:
            pdb.set_trace()

    def print(self, trainer: Trainer) -> None:
        """On rank 0; samples of all ranks."""
        state, digests = trainer.state, digests_of(trainer)
        samples = agreement.gather_objects(self.samples)
        if agreement.rank() or digests is None:
            return
        print(f"Replayed {self.at - self.began} iterations, from iteration {self.began}.")
        print(f"iteration {self.at}, epoch {state.epoch}")
        for rank, indices in enumerate(samples):
            known = "not known, as the order of the data is its own" if indices is None else " ".join(map(str, indices))
            print(f"  samples{f' of rank {rank}' if rank else ''}: {known}")
        print(f"  batch: {shapes_of(state.batch)}")
        for name, value in {**scalars_of(state.output), **self.rates, "weights": digests["all"]}.items():
            print(f"  {name}: {value}")

    _begin.phase = Phase.LAST  # type: ignore[attr-defined]  # read by the Trainer


def compare(options: argparse.Namespace) -> int:
    """Print what differs first; code 1 if anything does."""
    return _on_ranks(_compare, options, options.first)


def _compare(options: argparse.Namespace) -> int:
    result = compare_runs(options.first, options.second, None if options.build is None else _function(options.build))
    if agreement.rank() == 0:
        print(*result.lines(), sep="\n")
    return 0 if result.files.difference is None else DIFFERS


def audit(options: argparse.Namespace) -> int:
    """Print what was covered and found; code 1 where a segment is not what was saved and logged."""
    return _on_ranks(_audit, options, options.run)


def _audit(options: argparse.Namespace) -> int:
    build = None if options.build is None else _function(options.build)
    result = make_audit(options.run, build, segments=options.segments, seed=options.seed)
    if agreement.rank() == 0:
        print(*result.lines(), sep="\n")
    return DIFFERS if result.found else 0


def _function(name: str) -> Callable[[Any], Any]:
    try:
        return find_task(name)
    except TaskError as error:
        raise ReplayError(str(error)) from error.__cause__


def _on_ranks(work: Callable[[argparse.Namespace], int], options: argparse.Namespace, run: Path) -> int:
    """Call ``work`` here, on the ranks of a launcher that started this process, or on as many as the run had."""
    processes = None if is_launched() else options.nproc_per_node or environment_of(run).get("world_size", 1)
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
