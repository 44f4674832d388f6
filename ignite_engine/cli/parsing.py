"""Tables of commands, each of which adds its options when it is called, and options that several commands have.

A table names for each command the function that adds its options, as ``module:function``, and says in a few words what
the command does. The function sets the default ``work``, which runs the command: ``work(options)`` returns an exit
code, None for 0.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from ignite_engine.errors import by_name, did_you_mean

USAGE_ERROR = 2
Table = Mapping[str, tuple[str, str]]


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line, with what was possibly meant.

    Args:
        adds: called with it before it parses: it adds the options.
    """

    def __init__(self, *, adds: Callable[[Parser], object] | None = None, **settings: Any) -> None:
        super().__init__(allow_abbrev=False, **settings)
        self._adds = adds
        self._commands: tuple[str, Iterable[str]] = "", ()

    def add_commands(self, table: Table, kind: str = "command") -> None:
        """Let the next word be one of a table."""
        self._commands = kind, table
        commands = self.add_subparsers(dest=kind, required=True, metavar=kind, parser_class=Parser)
        for name, (where, text) in table.items():
            commands.add_parser(name, help=text, description=text, adds=partial(_add, kind, name, where))

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        adds, self._adds = self._adds, None
        if adds is not None:
            adds(self)
        options, rest = super().parse_known_args(args, namespace)
        for word in rest:
            if word.startswith("-") or not hasattr(options, "overrides"):
                near = did_you_mean(word.split("=")[0], re.findall(r"--[\w-]+", self.format_usage()))
                self.error(f"got {word!r}, which {self.prog.partition(' ')[2] or self.prog} does not take{near}")
            options.overrides.append(word)  # argparse takes those before the first option alone
        return options, []

    def error(self, message: str) -> NoReturn:
        kind, names = self._commands
        unknown = re.search(rf"argument {kind}: invalid choice: '([^']*)'", message)
        if kind and unknown:
            message = f"got {unknown[1]!r}, which is no {kind}{did_you_mean(unknown[1], names)}"
        elif kind and message.endswith(f"required: {kind}"):
            message = f"expected one of the {kind}s {', '.join(names)}; --help says what each does"
        # argparse lists the overrides too, which are optional
        self.exit(USAGE_ERROR, f"error: {message.replace(', section.key=value', '')}\n")


def _add(kind: str, name: str, where: str, command: Parser) -> None:
    try:
        by_name(kind, name, {name: where})(command)
    except ValueError as error:
        command.error(str(error))


def takes_config(command: Parser, *, or_function: bool = False) -> None:
    """A config and overrides."""
    command.epilog = "section.key=value overrides the file's value."
    command.add_argument(
        "config",
        type=Path,
        metavar="CONFIG|FILE:FUNCTION" if or_function else "CONFIG",
        help="a YAML file" + (", or function(directory), which builds a run" if or_function else ""),
    )
    command.add_argument("overrides", nargs="*", metavar="section.key=value", help="settings that override the file's")
    command.add_argument("--traceback", action="store_true", help="show the traceback of an error in the task")


def takes_ranks(command: Parser, default: str = "as the config says") -> None:
    """How many processes are started."""
    text = f"processes to start on this machine; default: {default}"
    command.add_argument("--nproc-per-node", type=whole_number, metavar="N", help=text)


def takes_backend(command: Parser) -> None:
    """What they talk by."""
    command.add_argument("--backend", choices=["gloo", "nccl"], help="default: nccl with CUDA, otherwise gloo")


def whole_number(text: str) -> int:
    """Of an option: at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected a whole number of at least 1")
    return int(text)
