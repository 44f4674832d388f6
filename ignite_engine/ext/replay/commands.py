"""The commands ``replay``, ``compare-runs``, ``audit`` and ``verify-resume``."""

from __future__ import annotations

import argparse
import bdb
import json
import os
import pdb
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from ignite.engine import Events

from ignite_engine.cli.launch import FAILED, on_ranks, on_ranks_of_config
from ignite_engine.cli.parsing import Parser, takes_backend, takes_config, takes_ranks, whole_number
from ignite_engine.errors import ReplayError, shapes_of
from ignite_engine.ext.replay import audit as audit_run
from ignite_engine.ext.replay import compare as compare_folders
from ignite_engine.ext.replay import compare_runs, rerun
from ignite_engine.ext.replay.rerun import built, moved, start_of
from ignite_engine.ext.replay.steps import rates_of, scalars_of
from ignite_engine.ext.replay.verify import NotProven, Phase, verify
from ignite_engine.handlers.digest_trail import digests_of
from ignite_engine.ranks import agreement
from ignite_engine.runs.config import Config, ConfigError, load_config
from ignite_engine.runs.run_directory import RunDirectory
from ignite_engine.runs.task import IN_PYTHON, find_object
from ignite_engine.trainer import Trainer

ITERATIONS = 20


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
    build, call = (name and find_object(name) for name in (options.build, options.call))
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
    result = compare_runs(options.run, options.second, options.build and find_object(options.build))
    if agreement.rank() == 0:
        print(*result.lines(), sep="\n")
    return 0 if result.files.difference is None else FAILED


def _audit(options: argparse.Namespace) -> int:
    """Print what was covered and found; code 1 where a segment is not what was saved and logged."""
    result = audit_run(
        options.run, options.build and find_object(options.build), segments=options.segments, seed=options.seed
    )
    if agreement.rank() == 0:
        print(*result.lines(), sep="\n")
    return FAILED if result.found else 0


def _on_ranks(work: Callable[[argparse.Namespace], int], options: argparse.Namespace) -> int:
    """On as many ranks as the run had, if nothing else is asked for."""
    processes = options.nproc_per_node or start_of(options.run, getattr(options, "at", 1)).world_size
    return on_ranks(options, work, processes)


# -- verify-resume: train, kill the process, resume in a fresh one, and compare every piece of state at every step ----


def verify_resume(command: Parser) -> None:
    takes_config(command, or_function=True)
    takes_ranks(command)
    takes_backend(command)
    command.add_argument(
        "--iterations",
        type=whole_number,
        default=ITERATIONS,
        metavar="N",
        help=f"compared updates, default {ITERATIONS}",
    )
    command.add_argument(
        "--kill-at", type=whole_number, metavar="K", help="the update in which it is killed; default: past the middle"
    )
    # for the processes that this command starts
    command.add_argument("--phase", type=lambda text: Phase(**json.loads(text)), help=argparse.SUPPRESS)
    command.set_defaults(work=_verify_resume)


def _verify_resume(options: argparse.Namespace) -> int:
    is_built = _is_built(options)
    if options.phase is None:
        if not is_built:
            load_config(options.config, options.overrides)  # a mistake is said once
        return _verify(options)
    if is_built:
        return on_ranks(options, partial(_train_phase, None), options.nproc_per_node, options.backend)
    return on_ranks_of_config(options, _train_phase)


def _is_built(options: argparse.Namespace) -> bool:
    """Whether a function builds the run, and no config."""
    path: Path = options.config
    is_function = ":" in path.name
    if is_function and options.overrides:
        raise ConfigError(f"{path}: got {options.overrides[0]!r}, and a function has its settings itself.")
    if path.suffix == ".py" or (path.is_file() and f"task: {IN_PYTHON}\n" in path.read_text(errors="replace")):
        raise ConfigError(
            f"{path}: only its program has the model and the data of this run: give FILE:FUNCTION, which builds it in "
            "a folder."
        )
    return is_function


def _verify(options: argparse.Namespace) -> int:
    """Print the verdict; 1 if the resumed run is not equal, or did not complete.

    Raises:
        ConfigError: ``--kill-at`` leaves nothing to compare.
    """
    kill_at, iterations = options.kill_at, options.iterations
    if iterations < 3 or (kill_at is not None and not 2 <= kill_at < iterations):
        settings = f"--iterations {iterations}" + (f" --kill-at {kill_at}" if kill_at is not None else "")
        raise ConfigError(f"{settings}: expected at least 3 iterations and a kill after the first and before the last.")
    with tempfile.TemporaryDirectory(prefix="verify-resume-", ignore_cleanup_errors=True) as folder:
        try:
            print(*verify(lambda phase: _start(options, phase), Path(folder), iterations, kill_at), sep="\n")
        except NotProven as error:
            print(f"error: {error}", file=sys.stderr, flush=True)
            return FAILED
    return 0


def _train_phase(config: Config | None, options: argparse.Namespace) -> None:
    """One start of the run, on one rank, in the process that was started for it."""
    folder = Path(options.phase.directory)
    with RunDirectory(folder).logging_to(agreement.rank()):
        build = moved(config.to_dict(), config.source.path, folder) if config else find_object(str(options.config))
        options.phase.train(*built(build, folder))


def _start(options: argparse.Namespace, phase: Phase) -> None:
    """Train a phase in new processes.

    Raises:
        NotProven: it was not to be killed, and has not ended with code 0.
    """
    command = [sys.executable, "-m", "ignite_engine", "verify-resume", str(options.config), "--phase", str(phase)]
    command += options.overrides
    command += ["--nproc-per-node", str(options.nproc_per_node)] if options.nproc_per_node is not None else []
    command += ["--backend", options.backend] if options.backend is not None else []
    # to a file: loader workers that survive a kill for a moment keep a pipe open
    output = Path(phase.directory).with_name("output.txt")
    with output.open("w") as file:
        code = subprocess.run(
            command, stdout=file, stderr=file, env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        ).returncode
    said = [line.strip() for line in output.read_text(errors="replace").splitlines() if line.strip()]
    if phase.kill_at is None and code != 0:
        last = said[-1] if said else "it printed nothing."
        raise NotProven(f"The {Path(phase.directory).name} run ended with code {code}: {last}")
