"""``eject``: a run as a program in plain PyTorch."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from ignite_engine.config import ConfigError
from ignite_engine.task import TaskError, find_task


def add_parser(subparsers: Any) -> None:
    """Add the command to a parser of commands."""
    description = "print a run as a program in plain PyTorch, which ends with the same weights"
    command = subparsers.add_parser(
        "eject",
        help=description,
        description=description,
        allow_abbrev=False,
        epilog="section.key=value overrides the file's value. What a plain program cannot express is refused.",
    )
    command.add_argument("config", type=Path, metavar="CONFIG|RUN", help="a YAML file, or the folder of a run")
    command.add_argument("overrides", nargs="*", metavar="section.key=value", help="settings that override the file's")
    command.add_argument(
        "--build", metavar="FILE:FUNCTION", help="for a run of fit(): function(directory) calls it, as for replay"
    )
    command.add_argument("--traceback", action="store_true", help="show the traceback of an error in the task")


def eject(options: argparse.Namespace) -> None:
    """Print the program of a run."""
    from ignite_engine.replay.eject import eject as ejected

    try:
        build: Any = None if options.build is None else find_task(options.build)
    except TaskError as error:
        raise ConfigError(f"--build: {error}.") from error.__cause__
    print(ejected(options.config, options.overrides, build), end="")


COMMANDS = {"eject": eject}
