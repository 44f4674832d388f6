"""The commands that draw the curves of runs: ``report`` and ``compare``."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ignite_engine.config import ConfigError
from ignite_engine.config.load import default_values
from ignite_engine.report import ordered, read_run, runs_in, sweep_table, write_comparison, write_report


def add_parsers(subparsers: Any) -> None:
    """Add both commands; they take the directories of runs, not a config."""
    descriptions = {
        "report": "write a page with a run's curves, config and outcome, for a browser; no network is needed",
        "compare": "write a page that compares several runs: curves in the same charts, differences of their configs",
    }
    for name, text in descriptions.items():
        command = subparsers.add_parser(name, help=text, description=text, allow_abbrev=False)
        command.set_defaults(overrides=[], traceback=False)
        if name == "report":
            command.add_argument("runs", nargs=1, type=Path, metavar="RUN_DIR", help="the directory of a run")
            command.add_argument(
                "--serve",
                action="store_true",
                help="show the page live on this machine, with buttons that stop, save and evaluate, until Ctrl-C",
            )
            command.add_argument("--port", type=int, metavar="N", help="of --serve; default: one that is free")
        else:
            command.add_argument(
                "runs", nargs="+", type=Path, metavar="RUN", help="directories of runs, or a folder of them"
            )
            command.add_argument(
                "--sort", metavar="METRIC", help="print a table of the runs too, the best first; such as val/accuracy"
            )
            command.add_argument(
                "--group-by",
                metavar="KEY",
                help="a key of the configs, such as optimizer.lr: runs with the same value are one curve, their mean, "
                "with a band; default: so are runs that differ in run.seed alone",
            )
            command.add_argument(
                "--mode", choices=["min", "max"], help="which value of --sort is the best; default: as the runs say"
            )
        default = "report.html in the run's directory" if name == "report" else "compare.html"
        command.add_argument("-o", "--output", type=Path, metavar="FILE", help=f"default: {default}")


def report(options: argparse.Namespace) -> None:
    """Write the page of one run and print its path, or serve it."""
    if options.serve:
        if options.output is not None:
            raise ConfigError(f"--output: got '{options.output}', which has no effect with --serve; leave one out.")
        if options.port is not None and not 0 <= options.port < 65536:
            raise ConfigError(f"--port: got {options.port}, expected a number from 0 to 65535.")
        from ignite_engine.report.live import PortInUse, serve

        try:
            serve(options.runs[0], options.port or 0, default_values())
        except PortInUse as error:
            raise ConfigError(str(error)) from None
        return
    if options.port is not None:
        raise ConfigError(f"--port: got {options.port}, which has no effect without --serve.")
    print(write_report(options.runs[0], _checked(options.output), defaults=default_values()))


def compare(options: argparse.Namespace) -> None:
    """Write the page of several runs and print its path, and before it a table if one is asked for."""
    output, runs = _checked(options.output), [read_run(run) for given in options.runs for run in runs_in(given)]
    if options.mode is not None and options.sort is None:
        raise ConfigError(f"--mode: got {options.mode}, which has no effect without --sort METRIC.")
    if options.sort is not None:
        runs = ordered(runs, options.sort, options.mode)
        print("\n".join(sweep_table(runs, options.sort, options.mode)))
    chosen = {"group_by": options.group_by, "metric": options.sort, "mode": options.mode}
    print(write_comparison(runs, output or "compare.html", **chosen))


COMMANDS: dict[str, Callable[[argparse.Namespace], None]] = {"report": report, "compare": compare}


def _checked(output: Path | None) -> Path | None:
    """The file asked for, if it can be written."""
    if output is not None and (output.is_dir() or not output.parent.is_dir()):
        problem = f"{output} is a directory" if output.is_dir() else f"there is no directory {output.parent}"
        raise FileNotFoundError(f"--output: got '{output}', but {problem}; name a file in an existing directory.")
    return output
