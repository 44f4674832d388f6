"""The commands that go back in runs: ``replay``, ``compare-runs`` and ``audit``."""

from __future__ import annotations

import argparse
import bdb
import pdb
import shutil
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from ignite.engine import Events

from ignite_engine.cli.launch import FAILED, on_ranks
from ignite_engine.cli.parsing import Parser, takes_ranks, whole_number
from ignite_engine.errors import ReplayError, shapes_of
from ignite_engine.ext.replay import audit as audit_run
from ignite_engine.ext.replay import compare_runs, rerun
from ignite_engine.ext.replay.compare import compare as compare_folders
from ignite_engine.ext.replay.rerun import start_of
from ignite_engine.ext.replay.steps import rates_of, scalars_of
from ignite_engine.handlers.digest_trail import digests_of
from ignite_engine.ranks import agreement
from ignite_engine.runs.task import TaskError, find_task
from ignite_engine.trainer import Trainer


def replay(command: Parser) -> None:
    _takes_runs(command, "run")
    option = command.add_argument
    option("--at", type=whole_number, required=True, metavar="N", help="the boundary after this iteration")
    option("--call", metavar="FILE:FUNCTION", help="call function(trainer) there, everything in place")
    option("--debug", action="store_true", help="open the debugger before the update of iteration N")
    option("--save", type=Path, metavar="DIR", help="keep the replay, with its checkpoint, as this folder")
    command.set_defaults(work=partial(_on_ranks, _replay))


def compare(command: Parser) -> None:
    _takes_runs(command, "run", "second")
    command.set_defaults(work=partial(_on_ranks, _compare))


def audit(command: Parser) -> None:
    _takes_runs(command, "run")
    option = command.add_argument
    option("--segments", type=whole_number, required=True, metavar="N", help="between checkpoints, drawn at random")
    option("--seed", type=int, metavar="S", help="draws the same again; default: one that nobody knows")
    command.set_defaults(work=partial(_on_ranks, _audit))


def _takes_runs(command: Parser, *runs: str) -> None:
    for run in runs:
        command.add_argument(run, type=Path, metavar=run.upper(), help="the directory of a run")
    text = "function(directory) builds a run that no config names: that of fit(), or of a script of one's own"
    command.add_argument("--build", metavar="FILE:FUNCTION", help=text)
    takes_ranks(command, "as the run had")


def _replay(options: argparse.Namespace) -> int:
    """Print what the iteration was; code 1 where the run is not what it has logged."""
    build, call = (name and function_of(name) for name in (options.build, options.call))
    at, before = options.at, dict[str, Any]()

    def attach(trainer: Trainer) -> None:
        trainer.add_event_handler(Events.STARTED, lambda: before.update(began=trainer.state.iteration))
        trainer.add_event_handler(Events.ITERATION_STARTED(once=at), begin)

    def begin(trainer: Trainer) -> None:
        before.update(samples=trainer.progress.samples_of_group(), rates=rates_of(trainer))
        if options.debug:
            pdb.set_trace()

    def describe(trainer: Trainer) -> None:
        state, digests, samples = trainer.state, digests_of(trainer), agreement.gather_objects(before["samples"])
        if agreement.rank() == 0 and digests is not None:
            print(f"Replayed {at - before['began']} iterations, from iteration {before['began']}.")
            print(f"iteration {at}, epoch {state.epoch}")
            for rank, indices in enumerate(samples):
                known = "their order is the data's own" if indices is None else " ".join(map(str, indices))
                print(f"  samples{f' of rank {rank}' if rank else ''}: {known}")
            print(f"  batch: {shapes_of(state.batch)}")
            rates = {name: ", ".join(map(str, values)) for name, values in before["rates"].items()}
            for name, value in {**scalars_of(state.output), **rates, "weights": digests["all"]}.items():
                print(f"  {name}: {value}")
        if call is not None:
            call(trainer)

    try:
        folder = rerun(options.run, at, build=build, attach=attach, call=describe, folder=options.save)
    except bdb.BdbQuit:
        raise ReplayError("The debugger was left, or has no terminal: the iteration is not made.") from None
    found = agreement.on_rank_0(lambda: compare_folders(options.run, folder, at, since=before["began"]))
    if options.save is None:
        shutil.rmtree(folder, ignore_errors=True)
    if agreement.rank() == 0:
        print(f"Equal in the run: {found}.")
        if found.difference is not None:
            print(f"error: The run is not what it has logged: {found.difference}.", file=sys.stderr, flush=True)
    return 0 if found.difference is None else FAILED


def _compare(options: argparse.Namespace) -> int:
    """Print what differs first; code 1 if anything does."""
    result = compare_runs(options.run, options.second, options.build and function_of(options.build))
    if agreement.rank() == 0:
        print(*result.lines(), sep="\n")
    return 0 if result.files.difference is None else FAILED


def _audit(options: argparse.Namespace) -> int:
    """Print what was covered and found; code 1 where a segment is not what was saved and logged."""
    result = audit_run(
        options.run, options.build and function_of(options.build), segments=options.segments, seed=options.seed
    )
    if agreement.rank() == 0:
        print(*result.lines(), sep="\n")
    return FAILED if result.found else 0


def function_of(name: str) -> Callable[[Any], Any]:
    """The function that an option names.

    Raises:
        ReplayError: one line; there is none.
    """
    try:
        return find_task(name)
    except TaskError as error:
        raise ReplayError(str(error)) from error.__cause__


def _on_ranks(work: Callable[[argparse.Namespace], int], options: argparse.Namespace) -> int:
    """On as many ranks as the run had, if nothing else is asked for."""
    processes = options.nproc_per_node or start_of(options.run, getattr(options, "at", 1)).world_size
    return on_ranks(options, work, processes)
