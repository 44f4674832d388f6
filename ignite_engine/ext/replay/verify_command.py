"""``verify-resume``: train, kill the process, resume in a fresh one, and compare every piece of state at every step."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

import ignite_engine
from ignite_engine.cli.launch import FAILED, on_ranks, on_ranks_of_config
from ignite_engine.cli.parsing import Parser, takes_backend, takes_config, takes_ranks, whole_number
from ignite_engine.ext.replay.commands import function_of
from ignite_engine.ext.replay.rerun import built, moved
from ignite_engine.ext.replay.verify import NotProven, Phase
from ignite_engine.ext.replay.verify import verify as compare_runs
from ignite_engine.ranks import agreement
from ignite_engine.runs.config import Config, ConfigError, load_config
from ignite_engine.runs.run_directory import RunDirectory
from ignite_engine.runs.task import IN_PYTHON

ITERATIONS = 20


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
    """Whether a function builds the run, and no config.

    Raises:
        ConfigError: one line; it is neither.
    """
    path: Path = options.config
    if ":" in path.name:
        if options.overrides:
            raise ConfigError(f"{path}: got {options.overrides[0]!r}, and a function has its settings itself.")
        return True
    text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
    if path.suffix == ".py" or f"task: {IN_PYTHON}\n" in text:
        raise ConfigError(
            f"{path}: only its program has the model and the data of this run: give the function that builds it in a "
            "folder, verify-resume FILE:FUNCTION."
        )
    return False


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
            print(*compare_runs(lambda phase: _start(options, phase), Path(folder), iterations, kill_at), sep="\n")
        except NotProven as error:
            print(f"error: {error}", file=sys.stderr, flush=True)
            return FAILED
    return 0


def _train_phase(config: Config | None, options: argparse.Namespace) -> None:
    """One start of the run, on one rank, in the process that was started for it."""
    folder = Path(options.phase.directory)
    with RunDirectory(folder).logging_to(agreement.rank()):
        build = moved(config.to_dict(), config.source.path, folder) if config else function_of(str(options.config))
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
    home = str(Path(ignite_engine.__file__).resolve().parent.parent)
    path = os.pathsep.join(folder for folder in (home, os.environ.get("PYTHONPATH")) if folder)
    # to a file: loader workers that survive a kill for a moment keep a pipe open
    output = Path(phase.directory).with_name("output.txt")
    with output.open("w") as file:
        code = subprocess.run(command, stdout=file, stderr=file, env={**os.environ, "PYTHONPATH": path}).returncode
    said = [line.strip() for line in output.read_text(errors="replace").splitlines() if line.strip()]
    if phase.kill_at is None and code != 0:
        last = said[-1] if said else "it printed nothing."
        raise NotProven(f"The {Path(phase.directory).name} run ended with code {code}: {last}")
