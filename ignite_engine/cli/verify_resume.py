"""``verify-resume``: train, kill the process, resume in a fresh one, and compare every piece of state at every step."""

from __future__ import annotations

import argparse
import json
import os
import re
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import ignite_engine
from ignite_engine.config import Config, ConfigError
from ignite_engine.ext.replay.rerun import settings_in
from ignite_engine.ext.replay.steps import STEPS
from ignite_engine.ext.replay.verify import Phase, PhaseError
from ignite_engine.ext.replay.verify import verify as compare_runs
from ignite_engine.ranks import agreement
from ignite_engine.run_directory import RunDirectory
from ignite_engine.runs import recipe
from ignite_engine.runs.fit import changed
from ignite_engine.runs.run import Run
from ignite_engine.task import IN_PYTHON

ITERATIONS = 20


def add_arguments(command: argparse.ArgumentParser, count: Callable[[str], int]) -> None:
    """The options of this command alone."""
    command.add_argument(
        "--iterations", type=count, default=ITERATIONS, metavar="N", help=f"compared updates, default {ITERATIONS}"
    )
    command.add_argument(
        "--kill-at", type=count, metavar="K", help="the update in which it is killed; default: past the middle"
    )
    # for the processes that this command starts
    command.add_argument("--phase", type=lambda text: Phase(**json.loads(text)), help=argparse.SUPPRESS)


def is_script(path: Path) -> bool:
    """Whether it is a program that calls ``fit``, not a config."""
    return path.suffix == ".py"


def check_starts(options: argparse.Namespace) -> None:
    """Refuse what cannot be started in another folder.

    Raises:
        ConfigError: one line that says how it is verified.
    """
    path: Path = options.config
    text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
    if not is_script(path):
        if f"task: {IN_PYTHON}\n" in text:
            raise ConfigError(
                f"{path}: this is the config of a run of fit(), and only its program has the model and the data: give "
                "that, verify-resume SCRIPT.py."
            )
        return
    if not path.is_file():
        raise ConfigError(f"{path}: there is no such file; give a config, or a script that calls fit().")
    if options.overrides:
        raise ConfigError(f"{path}: got {options.overrides[0]!r}, and a script has its settings in its call of fit().")
    if (starts := re.search(r"\b(Parallel|spawn|start_processes)\(", text)) is not None:
        raise ConfigError(
            f"{path}: it starts its ranks itself, by {starts[1]}(): call fit() without it, and give --nproc-per-node."
        )


def verify(options: argparse.Namespace) -> None:
    """Print the verdict; exit with code 1 if the resumed run is not equal.

    Raises:
        ConfigError: ``--kill-at`` leaves nothing to compare.
        SystemExit: 1, the resumed run differs, or did not complete.
    """
    kill_at, iterations = options.kill_at, options.iterations
    if iterations < 3 or (kill_at is not None and not 2 <= kill_at < iterations):
        settings = f"--iterations {iterations}" + (f" --kill-at {kill_at}" if kill_at is not None else "")
        raise ConfigError(f"{settings}: expected at least 3 iterations and a kill after the first and before the last.")
    with tempfile.TemporaryDirectory(prefix="verify-resume-", ignore_cleanup_errors=True) as folder:
        try:
            verdict = compare_runs(lambda phase: _start(options, phase), Path(folder), iterations, kill_at)
        except PhaseError as error:
            print(f"error: {error}", file=sys.stderr, flush=True)
            sys.exit(1)
    print(verdict.line, *(f"  {note}" for note in verdict.notes), sep="\n")
    if not verdict.exact:
        sys.exit(1)


def run_phase(config: Config, options: argparse.Namespace) -> None:
    """One start of the run, on one rank, in the process that was started for it."""
    with RunDirectory(config.directory).logging_to(agreement.rank()):
        options.phase.train(recipe.build_run(config))


def run_script(options: argparse.Namespace) -> None:
    """One start of the run, on each rank: the script, up to the end of its first call of ``fit``."""

    def train(run: Run) -> NoReturn:
        options.phase.train(run)
        sys.exit(0)

    script = str(options.config)
    sys.argv = [script]
    sys.path.insert(0, str(options.config.resolve().parent))
    settings = settings_in(Path(options.phase.directory))
    if options.backend is not None:
        settings["distributed"] = {"backend": options.backend}
    with changed(settings, train):
        runpy.run_path(script, run_name="__main__")


def _start(options: argparse.Namespace, phase: Phase) -> None:
    """Train a phase in new processes.

    Raises:
        PhaseError: it was not to be killed, and has not ended with code 0.
    """
    processes, script = options.nproc_per_node, is_script(options.config)
    command = [sys.executable, "-m"]
    if script and processes is not None:
        command += ["torch.distributed.run", "--standalone", f"--nproc-per-node={processes}", "-m"]
    command += ["ignite_engine", "verify-resume", str(options.config), "--phase", str(phase)]
    if not script:
        command += options.overrides
        for section, settings in settings_in(Path(phase.directory)).items():
            command += [f"{section}.{key}={json.dumps(value)}" for key, value in settings.items()]
        command += ["--nproc-per-node", str(processes)] if processes is not None else []
    command += ["--backend", options.backend] if options.backend is not None else []
    home = str(Path(ignite_engine.__file__).resolve().parent.parent)
    path = os.pathsep.join(folder for folder in (home, os.environ.get("PYTHONPATH")) if folder)
    # to a file: loader workers that survive a kill for a moment keep a pipe open
    output = Path(phase.directory).with_name("output.txt")
    with output.open("w") as file:
        code = subprocess.run(command, stdout=file, stderr=file, env={**os.environ, "PYTHONPATH": path}).returncode
    said = [line.strip() for line in output.read_text(errors="replace").splitlines() if line.strip()]
    last = said[-1] if said else "it printed nothing."
    if phase.kill_at is None and code != 0:
        raise PhaseError(f"The {Path(phase.directory).name} run ended with code {code}: {last}")
    if not list(Path(phase.directory).glob(STEPS.format("*"))):
        raise PhaseError(f"{options.config} trained nothing: {last}")
