"""The commands by name, and the exit code of each outcome."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

from ignite_engine.cli import launch
from ignite_engine.cli.parsing import Parser, Table
from ignite_engine.ranks import signals
from ignite_engine.runs import recipe
from ignite_engine.runs.config import ConfigWarning

COMMANDS: Table = {
    "train": (
        "ignite_engine.cli.run:train",
        "start a run, or resume one that was interrupted: the command is the same",
    ),
    "evaluate": (
        "ignite_engine.cli.run:evaluate",
        "print the metrics of the best, or last, checkpoint as one line of JSON",
    ),
    "describe": (
        "ignite_engine.cli.run:describe",
        "print the schedule, the learning rates and the bus, without running",
    ),
    "verify-resume": (
        "ignite_engine.ext.replay.commands:verify_resume",
        "kill the run, resume it, and compare every piece of state with the run that was not killed",
    ),
    "doctor": (
        "ignite_engine.cli.doctor:doctor",
        "print versions, devices and backends, what a run here would use and why; paste it into an issue",
    ),
    "report": (
        "ignite_engine.ext.report.commands:report",
        "write a page with a run's curves, config and outcome, for a browser; no network is needed",
    ),
    "compare": (
        "ignite_engine.ext.report.commands:compare",
        "write a page that compares several runs: curves in the same charts, differences of their configs",
    ),
    "track": (
        "ignite_engine.handlers.trackers.command:track",
        "send to a run's trackers what they lack of it, to its end",
    ),
    "checkpoints": (
        "ignite_engine.cli.checkpoints:checkpoints",
        "list, verify, compare, export and prune checkpoints; fetch them from a mirror, and upload them",
    ),
    "replay": (
        "ignite_engine.ext.replay.commands:replay",
        "bring a run to an iteration again, bit for bit, and say what that iteration was; its folder is only read",
    ),
    "compare-runs": (
        "ignite_engine.ext.replay.commands:compare",
        "the first difference of two runs that should be equal, named: a sample, a weight, a gradient; code 1 if any",
    ),
    "audit": (
        "ignite_engine.ext.replay.commands:audit",
        "train segments of a run again, and compare them with its logs and checkpoints; code 1 if one is another",
    ),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Returns:
        The exit code: 0 completed, 1 a check that failed (``checkpoints verify`` and ``diff``) or a last checkpoint
        that could not be saved, 2 a wrong config or argument (each reported in one line), 128 + n stopped by signal n.
        Any other exception is raised unchanged (Python prints it and exits with 1).
    """
    parser = Parser(prog="ignite-engine", description="Train, evaluate and describe the run of a config.")
    parser.add_argument("--version", action="version", version=f"ignite-engine {version('ignite-engine')}")
    parser.set_defaults(traceback=False)
    parser.add_commands(COMMANDS)
    options = parser.parse_args(arguments)
    with warnings.catch_warnings():
        warnings.simplefilter("always", ConfigWarning)
        warnings.showwarning = _show_warning
        try:
            with signals.stops_go_to(signals.Ending()):
                return options.work(options) or 0
        except (*recipe.USER_ERRORS, *recipe.RUN_ERRORS, FileNotFoundError) as error:
            if options.traceback or not launch.one_line_is_enough(error, options.command):
                raise
            _print_line(f"error: {error}")
            return launch.code_of(error, options.command)
        except KeyboardInterrupt:  # before the run handled signals
            return 130
        except BrokenPipeError:  # such as: describe ... | head
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def _show_warning(message: Warning | str, category: type[Warning], *place: Any, **more: Any) -> None:
    if issubclass(category, ConfigWarning):
        _print_line(f"warning: {message}")
    else:
        sys.stderr.write(warnings.formatwarning(message, category, *place[:2]))


def _print_line(line: str) -> None:
    """One line on stderr, by rank 0 alone under a launcher."""
    if os.environ.get("RANK", "0") == "0":
        print(line, file=sys.stderr, flush=True)
