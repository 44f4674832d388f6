"""A run that is stopped five times: ``keep_last=1`` keeps one checkpoint, however it was stopped."""

from __future__ import annotations

import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

from ignite.engine import Events

from ignite_engine.config import load_config
from ignite_engine.run_directory import RunDirectory
from ignite_engine.runs import recipe
from tests.campaign.resuming import Difference
from tests.campaign.runs import (
    Bench,
    Item,
    committed_in,
    names_in,
    newest_iteration,
    reference,
    resume_and_compare,
    tail,
    write_config,
)

TRAIN = "tests.campaign.restarts:train_until"
STOPS = (3, 6, 7, 11, 14)


def train_until(config: str, how: str, at: int) -> int:
    """``train``, stopped at the start of iteration ``at``: by SIGKILL, or by Ctrl-C to the whole group."""
    loaded = load_config(Path(config))
    with RunDirectory(loaded.directory).logging_to(0):
        run = recipe.build_run(loaded)
        run.trainer.add_event_handler(Events.ITERATION_STARTED(once=at), _strike, how)
        run.train()
    return 0


def _strike(how: str) -> None:
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    os.killpg(os.getpid(), signal.SIGINT)


def items() -> list[Item]:
    return [
        Item(
            "restarts",
            f"five times, {how}, {'in the background' if background else 'in the loop'}",
            partial(_run, how, background),
        )
        for how in ("stop", "kill")
        for background in (False, True)
    ]


def _run(how: str, background: bool, bench: Bench) -> dict[str, Any]:
    sections = {"checkpoint": {"every": 2, "keep_last": 1, "best": None, "mode": "min", "background": background}}
    expected = reference(bench, "restarts", **sections)
    folder = bench.folder / "run"
    config = write_config(folder, **sections)
    kept: list[list[str]] = []
    for number, at in enumerate(STOPS):
        code = bench.servers[number % 2].call(TRAIN, str(config), how, at, output=folder / "output.txt")
        if code != (-signal.SIGKILL if how == "kill" else 130):
            raise Difference(f"not ended at {at} by {how}: code {code}; {tail(folder)}")
        committed = committed_in(folder)
        # killed, it may not have pruned the one before, and in the background not have committed the first
        killed = how == "kill"
        if len(committed) > 1 + killed or (newest_iteration(folder) is None and not (background and killed)):
            raise Difference(f"after {number + 1} restarts there are {committed}")
        kept.append(names_in(folder))
    resume_and_compare(bench, config, expected)
    if names_in(folder) != ["iteration_00000016"]:
        raise Difference(f"left behind: {names_in(folder)}")
    return {"kept": kept}
