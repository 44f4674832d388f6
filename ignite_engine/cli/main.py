"""The commands by name."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

from ignite_engine.cli.launch import exit_code, print_line
from ignite_engine.cli.parsing import Parser, Table
from ignite_engine.ranks import signals
from ignite_engine.runs.config import ConfigWarning

COMMANDS: Table = {
    "train": ("ignite_engine.cli.run:train", "start a run, or resume it: the command is the same"),
    "evaluate": ("ignite_engine.cli.run:evaluate", "print the metrics of a checkpoint as one line of JSON"),
    "describe": ("ignite_engine.cli.run:describe", "print the schedule, the learning rates and the bus; nothing runs"),
    "verify-resume": (
        "ignite_engine.ext.replay.commands:verify_resume",
        "kill the run, resume it, compare all state",
    ),
    "doctor": ("ignite_engine.cli.doctor:doctor", "print what a run here would use and why; paste it into an issue"),
    "report": ("ignite_engine.ext.report.commands:report", "write a page with a run's curves, config and outcome"),
    "compare": ("ignite_engine.ext.report.commands:compare", "write a page that compares several runs"),
    "track": ("ignite_engine.handlers.trackers.command:track", "send to a run's trackers what they lack of it"),
    "checkpoints": ("ignite_engine.cli.checkpoints:checkpoints", "list, verify, compare, export, prune, fetch, upload"),
    "replay": (
        "ignite_engine.ext.replay.commands:replay",
        "train an iteration again, bit for bit",
    ),
    "compare-runs": (
        "ignite_engine.ext.replay.commands:compare",
        "the first difference of two runs; code 1 if any",
    ),
    "audit": (
        "ignite_engine.ext.replay.commands:audit",
        "train segments of a run again; code 1 if one differs",
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
                return exit_code(options.work, options)
        except KeyboardInterrupt:  # before the run handled signals
            return 130
        except BrokenPipeError:  # such as: describe ... | head
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def _show_warning(message: Warning | str, category: type[Warning], *place: Any, **more: Any) -> None:
    if issubclass(category, ConfigWarning):
        print_line(f"warning: {message}")
    else:
        sys.stderr.write(warnings.formatwarning(message, category, *place[:2]))
