"""The commands that take the folders of runs: ``report``, ``compare`` and ``track``."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ignite_engine.checkpoint.lock import InUse
from ignite_engine.ext.report import read_run, runs_in, write_comparison, write_report
from ignite_engine.ext.report.pages import RELOAD_S
from ignite_engine.handlers.trackers.following import follow


def add_parsers(subparsers: Any) -> None:
    """Add the commands; they take the directories of runs, not a config."""
    descriptions = {
        "report": "write a page with a run's curves, config and outcome, for a browser; no network is needed",
        "compare": "write a page that compares several runs: curves in the same charts, differences of their configs",
        "track": "send to a run's trackers what they lack of it, to its end",
    }
    for name, text in descriptions.items():
        command = subparsers.add_parser(name, help=text, description=text, allow_abbrev=False)
        command.set_defaults(overrides=[], traceback=False)
        if name == "track":
            command.add_argument("run", type=Path, metavar="RUN_DIR", help="the directory of a run")
            continue
        if name == "report":
            command.add_argument("runs", nargs=1, type=Path, metavar="RUN_DIR", help="the directory of a run")
            command.add_argument(
                "--watch",
                action="store_true",
                help="write the page every 15 s until the run has ended",
            )
        else:
            command.add_argument(
                "runs", nargs="+", type=Path, metavar="RUN", help="directories of runs, or a folder of them"
            )
        default = "report.html in the run's directory" if name == "report" else "compare.html"
        command.add_argument("-o", "--output", type=Path, metavar="FILE", help=f"default: {default}")


def report(options: argparse.Namespace) -> None:
    """Write the page of one run and print its path."""
    (run,), output = options.runs, _checked(options.output)
    print(write_report(run, output), flush=True)
    while options.watch and read_run(run).status == "running":
        time.sleep(RELOAD_S)
        write_report(run, output)


def compare(options: argparse.Namespace) -> None:
    """Write the page of several runs and print its path."""
    runs = [run for given in options.runs for run in runs_in(given)]
    print(write_comparison(runs, _checked(options.output) or "compare.html"))


def track(options: argparse.Namespace) -> int:
    """Send what the trackers of a run lack; 1: some still do, each in one line."""
    try:
        problems = follow(options.run)
    except InUse as holder:
        problems = {str(options.run): f"{holder} sends it already"}
    for name, problem in problems.items():
        print(f"error: {name}: {problem}", file=sys.stderr)
    return int(bool(problems))


COMMANDS: dict[str, Callable[[argparse.Namespace], int | None]] = {"report": report, "compare": compare, "track": track}


def _checked(output: Path | None) -> Path | None:
    """The file asked for, if it can be written."""
    if output is not None and (output.is_dir() or not output.parent.is_dir()):
        problem = f"{output} is a directory" if output.is_dir() else f"there is no directory {output.parent}"
        raise FileNotFoundError(f"--output: got '{output}', but {problem}; name a file in an existing directory.")
    return output
