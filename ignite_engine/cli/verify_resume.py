"""``verify-resume``: train, kill the process, resume in a fresh one, and compare every piece of state at every step."""

from __future__ import annotations

import argparse
import json
import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import ignite_engine
from ignite_engine.checkpointing import CheckpointStore
from ignite_engine.config import Config, ConfigError
from ignite_engine.ext.replay.verify_compare import Comparison, compare, table
from ignite_engine.ext.replay.verify_recorder import BoundaryRecord, proof_of, read_records, watch
from ignite_engine.ranks import agreement
from ignite_engine.run_directory import RunDirectory
from ignite_engine.runs import recipe
from ignite_engine.runs.fit import changed
from ignite_engine.runs.run import Run
from ignite_engine.task import IN_PYTHON

ITERATIONS = 20
QUIET: dict[str, dict[str, Any]] = {
    # no logging, and nothing that leaves the machine; none of it changes the result of the run
    "logging": dict.fromkeys(("console", "progress", "memory", "throughput", "clearml", "report"), False),
    # limits of the real run, not of this proof
    "run": {"time_limit": None, "stop_file": None, "must_be_new": False, "restart": False},
}


class PhaseError(RuntimeError):
    """A run that was to be compared did not end as expected; one line."""


def add_arguments(command: argparse.ArgumentParser, count: Callable[[str], int]) -> None:
    """The options of this command alone."""
    command.add_argument(
        "--iterations", type=count, default=ITERATIONS, metavar="N", help=f"compared updates, default {ITERATIONS}"
    )
    command.add_argument(
        "--kill-at", type=count, metavar="K", help="the update in which it is killed; default: past the middle"
    )
    for name in ("--phase", "--folder"):  # for the processes that this command starts
        command.add_argument(name, help=argparse.SUPPRESS)
    command.add_argument("--directory", type=Path, help=argparse.SUPPRESS)
    command.add_argument("--every", type=count, help=argparse.SUPPRESS)


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


def verify(options: argparse.Namespace, config: Config | None) -> None:
    """Print the verdict; exit with code 1 if the resumed run is not equal.

    Args:
        config: None: the file is a script.

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
            comparison = _ThreeRuns(options, config, Path(folder)).compare()
        except PhaseError as error:
            print(f"error: {error}", file=sys.stderr, flush=True)
            sys.exit(1)
    print(comparison.line)
    for line in [*(table(comparison.differences) if comparison.differences else []), *comparison.notes]:
        print(f"  {line}")
    if not comparison.exact:
        sys.exit(1)


def run_phase(config: Config, options: argparse.Namespace) -> None:
    """One of the three runs, on one rank, in the process that was started for it."""
    with RunDirectory(config.directory).logging_to(agreement.rank()):
        _train_watched(recipe.build_run(config), options)


def run_script(options: argparse.Namespace) -> None:
    """One of the three runs, on each rank: the script, up to the end of its first call of ``fit``."""

    def train(run: Run) -> NoReturn:
        _train_watched(run, options)
        sys.exit(0)

    script = str(options.config)
    sys.argv = [script]
    sys.path.insert(0, str(options.config.resolve().parent))
    settings = _settings_by_section(options.directory, options.every)
    if options.backend is not None:
        settings["distributed"] = {"backend": options.backend}
    with changed(settings, train):
        runpy.run_path(script, run_name="__main__")


def _settings_by_section(directory: Path, every: int) -> dict[str, dict[str, Any]]:
    """What each of the three runs has instead of its own settings, by section."""
    run = {**QUIET["run"], "directory": str(directory)}
    return {**QUIET, "run": run, "checkpoint": {"every": every}}


def _train_watched(run: Run, options: argparse.Namespace) -> None:
    path = Path(options.folder) / f"{options.phase}_{agreement.rank()}.jsonl"
    saved = CheckpointStore(run.directory.checkpoints).checkpoints
    watch(run.trainer, path, until=options.iterations, kill_at=options.kill_at, ready=lambda: bool(saved()))
    run.train()


@dataclass
class _ThreeRuns:
    """Reference, killed and resumed run of one config or script, all in one temporary folder."""

    options: argparse.Namespace
    config: Config | None
    folder: Path

    def compare(self) -> Comparison:
        iterations = self.options.iterations
        kill_at: int = self.options.kill_at or (3 * iterations + 2) // 5
        every = self._save_every(kill_at)
        self._run("reference", iterations, every)
        if not self._records("reference"):
            raise PhaseError(f"{self.options.config} ended without a call of fit(): there is nothing to compare.")
        done = min(records[-1].iteration for records in self._records("reference"))
        if done < iterations:  # the run is shorter than that
            if done < 3 or (self.options.kill_at or 0) >= done:
                raise PhaseError(f"The run ends at iteration {done}: there is nothing to compare after a kill.")
            iterations, kill_at = done, self.options.kill_at or max(2, (3 * done + 2) // 5)
            if every >= kill_at:
                every = self._save_every(kill_at)
                for left in self.folder.iterdir():
                    shutil.rmtree(left) if left.is_dir() else left.unlink()
                self._run("reference", iterations, every)
        self._run("killed", iterations, every, kill_at)
        self._run("resumed", iterations, every)
        compared = [
            compare(*records)
            for records in zip(*(self._records(run) for run in ("reference", "killed", "resumed")), strict=True)
        ]
        return next((comparison for comparison in compared if not comparison.exact), compared[0])

    def _save_every(self, kill_at: int) -> int:
        """The config's own interval if it saves before the kill; otherwise one that saves shortly before it."""
        every = self.config.checkpoint.every if self.config is not None else None
        if every is not None and every.iterations is not None and every.iterations < kill_at:
            return every.iterations
        return max(1, kill_at - max(1, kill_at // 5))

    def _records(self, phase: str) -> list[list[BoundaryRecord]]:
        """The records of each rank."""
        return [read_records(path) for path in sorted(self.folder.glob(f"{phase}_*.jsonl"))]

    def _run(self, phase: str, iterations: int, every: int, kill_at: int | None = None) -> None:
        directory = self.folder / ("reference" if phase == "reference" else "run")
        processes = self.options.nproc_per_node
        command = [sys.executable, "-m"]
        if self.config is None and processes is not None:
            command += ["torch.distributed.run", "--standalone", f"--nproc-per-node={processes}", "-m"]
        command += ["ignite_engine", "verify-resume", str(self.options.config)]
        if self.config is None:
            command += ["--directory", str(directory), "--every", str(every)]
        else:
            command += self.options.overrides
            for section, settings in _settings_by_section(directory, every).items():
                command += [f"{section}.{key}={json.dumps(value)}" for key, value in settings.items()]
            command += ["--nproc-per-node", str(processes)] if processes is not None else []
        command += ["--backend", self.options.backend] if self.options.backend is not None else []
        command += ["--phase", phase, "--folder", str(self.folder), "--iterations", str(iterations)]
        command += ["--kill-at", str(kill_at)] if kill_at is not None else []
        code, output = self._start(command)
        if kill_at is None and code != 0:
            raise PhaseError(f"The {phase} run ended with code {code}: {_last_line(output)}")
        if kill_at is not None:
            proofs = list(self.folder.glob(proof_of("killed_*")))
            ranks = len(list(self.folder.glob("reference_*.jsonl")))
            if len(proofs) < ranks or (ranks == 1 and code != -signal.SIGKILL):
                raise PhaseError(f"The run was not killed at iteration {kill_at} (code {code}): {_last_line(output)}")

    def _start(self, command: list[str]) -> tuple[int, str]:
        home = str(Path(ignite_engine.__file__).resolve().parent.parent)
        path = os.pathsep.join(folder for folder in (home, os.environ.get("PYTHONPATH")) if folder)
        # to a file: loader workers that survive a kill for a moment keep a pipe open
        output = self.folder / "output.txt"
        with output.open("w") as file:
            code = subprocess.run(command, stdout=file, stderr=file, env={**os.environ, "PYTHONPATH": path}).returncode
        return code, output.read_text(errors="replace")


def _last_line(output: str) -> str:
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    return lines[-1] if lines else "it printed nothing."
