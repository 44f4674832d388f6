"""The command ``track``."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from ignite_engine.checkpoint.lock import InUse
from ignite_engine.handlers.trackers import following


def track(command: argparse.ArgumentParser) -> None:
    """Send what the trackers of a run lack."""
    command.add_argument("run", type=Path, metavar="RUN_DIR", help="the directory of a run")
    command.set_defaults(work=_track)


def _track(options: argparse.Namespace) -> int:
    """1: some trackers still lack something, each in one line."""
    try:
        problems = following.track(options.run)
    except InUse as holder:
        problems = {str(options.run): f"{holder} sends it already"}
    for name, problem in problems.items():
        print(f"error: {name}: {problem}", file=sys.stderr)
    return int(bool(problems))
