"""The commands ``report`` and ``compare``."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from ignite_engine.cli.parsing import Parser
from ignite_engine.ext.report import read_run, runs_in, write_comparison, write_report
from ignite_engine.ext.report.pages import RELOAD_S


def report(command: Parser) -> None:
    command.add_argument("runs", nargs=1, type=Path, metavar="RUN_DIR", help="the directory of a run")
    command.add_argument("--watch", action="store_true", help="write the page every 15 s until the run has ended")
    _takes_output(command, "report.html in the run's directory")
    command.set_defaults(work=_report)


def compare(command: Parser) -> None:
    command.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="directories of runs, or a folder of them")
    _takes_output(command, "compare.html")
    command.set_defaults(work=_compare)


def _takes_output(command: Parser, default: str) -> None:
    command.add_argument("--output", "-o", type=Path, metavar="FILE", help=f"default: {default}")


def _report(options: argparse.Namespace) -> None:
    """Write the page of one run and print its path."""
    (run,), output = options.runs, _checked(options.output)
    print(write_report(run, output), flush=True)
    while options.watch and read_run(run).status == "running":
        time.sleep(RELOAD_S)
        write_report(run, output)


def _compare(options: argparse.Namespace) -> None:
    """Write the page of several runs and print its path."""
    runs = [run for given in options.runs for run in runs_in(given)]
    print(write_comparison(runs, _checked(options.output) or "compare.html"))


def _checked(output: Path | None) -> Path | None:
    """The requested file, if it can be written."""
    if output is not None and (output.is_dir() or not output.parent.is_dir()):
        problem = f"{output} is a directory" if output.is_dir() else f"there is no directory {output.parent}"
        raise FileNotFoundError(f"--output: got '{output}', but {problem}; name a file in an existing directory.")
    return output
