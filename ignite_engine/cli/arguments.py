"""The options of the command line, and the exit code of each outcome."""

from __future__ import annotations

import argparse
import os
import re
import sys
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from ignite_engine import __version__
from ignite_engine.cli import checkpoints, commands, doctor, launch, pages, time_travel, verify_resume
from ignite_engine.errors import did_you_mean
from ignite_engine.ranks import signals
from ignite_engine.runs.config import ConfigWarning


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line, with what was possibly meant."""

    def error(self, message: str) -> NoReturn:
        unknown = re.search(r"invalid choice: '([^']*)'", message)
        if unknown and "command" in message:
            message = f"got {unknown[1]!r}, which is not a command{did_you_mean(unknown[1], commands.COMMANDS)}"
        if message.endswith("required: command"):
            message = f"expected a command: {', '.join(commands.COMMANDS)}; --help says what each does"
        # argparse lists the overrides too, which are optional
        self.exit(launch.USAGE_ERROR, f"error: {message.replace(', section.key=value', '')}\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Returns:
        The exit code: 0 completed, 1 a check that failed (``checkpoints verify`` and ``diff``) or a last checkpoint
        that could not be saved, 2 a wrong config or argument (each reported in one line), 128 + n stopped by signal n.
        Any other exception is raised unchanged (Python prints it and exits with 1).
    """
    options = parse(arguments)
    with warnings.catch_warnings():
        warnings.simplefilter("always", ConfigWarning)
        warnings.showwarning = _show_warning
        try:
            with signals.stops_go_to(signals.Ending()):
                return commands.COMMANDS[options.command](options) or 0
        except (*launch.USER_ERRORS, *launch.RUN_ERRORS, FileNotFoundError) as error:
            if options.traceback or not launch.one_line_is_enough(error, options.command):
                raise
            _print_line(f"error: {error}")
            return launch.code_of(error, options.command)
        except KeyboardInterrupt:  # before the run handled signals
            return 130
        except BrokenPipeError:  # such as: describe ... | head
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The arguments by name; ``overrides`` are all words after the config that are not options."""
    parser, commands_by_name = make_parser()
    options, rest = parser.parse_known_args(arguments)
    for word in rest:
        if options.command == "doctor":
            parser.error(f"got {word!r}, and doctor takes nothing")
        if options.command in pages.COMMANDS:
            takes = {"report": "a directory, --watch and --output", "track": "a directory"}.get(
                options.command, "directories and --output"
            )
            parser.error(f"got {word!r}, which {options.command} does not take; it takes {takes}")
        if options.command in time_travel.COMMANDS and not word.startswith("-"):
            parser.error(f"got {word!r}, which {options.command} does not take; --help says what it does")
        if options.command in checkpoints.COMMANDS:
            parser.error(f"got {word!r}, which checkpoints {options.action} does not take; --help says what it does")
        if word.startswith("-"):
            known = re.findall(r"--[\w-]+", commands_by_name[options.command].format_usage())
            near = did_you_mean(word.split("=")[0], known)
            parser.error(f"got {word!r}, which is not an option of {options.command}{near}")
    options.overrides += rest
    return options


def make_parser() -> tuple[Parser, Mapping[str, Parser]]:
    """The parser of the whole command line, and that of each command."""
    parser = Parser(
        prog="ignite-engine", description="Train, evaluate and describe the run of a config.", allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=f"ignite-engine {__version__}")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="command", parser_class=Parser)
    descriptions = {
        "train": "start a run, or resume one that was interrupted: the command is the same",
        "evaluate": "print the metrics of the best, or last, checkpoint as one line of JSON",
        "describe": "print the schedule, the learning rates and the bus, without running",
        "verify-resume": "kill the run, resume it, and compare every piece of state with the run that was not killed",
    }
    for name, description in descriptions.items():
        command = subparsers.add_parser(
            name,
            help=description,
            description=description,
            allow_abbrev=False,
            epilog="section.key=value overrides the file's value.",
        )
        takes_functions = name == "verify-resume"
        command.add_argument(
            "config",
            type=Path,
            metavar="CONFIG|FILE:FUNCTION" if takes_functions else "CONFIG",
            help="a YAML file" + (", or function(directory), which builds a run" if takes_functions else ""),
        )
        command.add_argument(
            "overrides", nargs="*", metavar="section.key=value", help="settings that override the file's"
        )
        command.add_argument("--traceback", action="store_true", help="show the traceback of an error in the task")
        if name == "describe":
            continue
        command.add_argument("--nproc-per-node", type=_count, metavar="N", help="processes to start on this machine")
        command.add_argument("--backend", choices=["gloo", "nccl"], help="default: nccl with CUDA, otherwise gloo")
        if name == "train":
            command.add_argument(
                "--restarts",
                type=_count,
                metavar="N",
                help="start the ranks again when one was killed or hangs, at most N times in an hour; default: never",
            )
        if name == "verify-resume":
            verify_resume.add_arguments(command, _count)
        if name == "evaluate":
            command.add_argument(
                "--checkpoint",
                metavar="PATH|best|last",
                help="a checkpoint, RUN/best or RUN/last, or which of this run; default: the best, or else the last",
            )
            command.add_argument(
                "--follow", action="store_true", help="each new checkpoint of the run, beside its training, to its end"
            )
            command.add_argument(
                "--all", action="store_true", help="with --follow: the oldest first, and none is left out"
            )
            command.add_argument(
                "--wait",
                type=_seconds,
                metavar="SECONDS",
                help="with --follow: for a run that has not begun, or was killed; default: 300",
            )
    doctor.add_parser(subparsers)
    pages.add_parsers(subparsers)
    checkpoints.add_parser(subparsers)
    time_travel.add_parsers(subparsers, _count)
    return parser, subparsers.choices


def _count(text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected a whole number of at least 1")
    return number


def _seconds(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number < float("inf"):
        raise argparse.ArgumentTypeError(f"got {text!r}, expected a number of seconds of at least 0")
    return number


def _show_warning(message: Warning | str, category: type[Warning], *place: Any, **more: Any) -> None:
    if issubclass(category, ConfigWarning):
        _print_line(f"warning: {message}")
    else:
        sys.stderr.write(warnings.formatwarning(message, category, *place[:2]))


def _print_line(line: str) -> None:
    """One line on stderr, by rank 0 alone under a launcher."""
    if os.environ.get("RANK", "0") == "0":
        print(line, file=sys.stderr, flush=True)
