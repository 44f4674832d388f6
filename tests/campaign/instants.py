"""SIGKILL at random instants of a run: while it starts, computes, evaluates or saves."""

from __future__ import annotations

import random
import shutil
import signal
import time
from functools import partial
from pathlib import Path
from typing import Any

from tests.campaign.resuming import Difference
from tests.campaign.runs import (
    MAIN,
    Bench,
    Item,
    names_in,
    newest_iteration,
    reference,
    resume_and_compare,
    tail,
    write_config,
)

COUNT = 200
ATTEMPTS = 20


def items(count: int = COUNT) -> list[Item]:
    """Every second one saves in the background; every fourth is killed again after its resume."""
    return [Item("instants", f"instant {number}", partial(_run, number)) for number in range(count)]


def _run(number: int, bench: Bench) -> dict[str, Any]:
    sections: dict[str, Any] = {
        "checkpoint": {"every": 1, "background": bool(number % 2)},
        "task_options": {"step_s": 0.002},
    }
    expected = reference(bench, "instants", **sections)
    facts: dict[str, Any] = {"killed": []}
    draw = random.Random(number)
    config = write_config(bench.folder / "run", **sections)
    for turn in range(2 if number % 4 == 3 else 1):
        facts["killed"].append(_kill_somewhere(bench, config, draw, turn))
    resume_and_compare(bench, config, expected)
    left = [name for name in names_in(config.parent) if not name.startswith("iteration_")]
    if left:
        raise Difference(f"left behind: {left}")
    return facts


def _kill_somewhere(bench: Bench, config: Path, draw: random.Random, turn: int) -> dict[str, Any]:
    """Kill the run at a random instant of its duration; if it had ended by then, start it again."""
    folder, kept = config.parent, config.parent.with_name("before")
    for _ in range(ATTEMPTS):
        duration = bench.kept.setdefault("instants: duration", _duration(bench))
        instant = draw.random() * duration
        shutil.rmtree(kept, ignore_errors=True)
        shutil.copytree(folder, kept)
        child = bench.servers[turn % 2].start(MAIN, ["train", str(config)], output=folder / "output.txt")
        code = child.poll(instant)
        if code is None:
            child.signal(signal.SIGKILL)
            code = child.wait()
        if code == -signal.SIGKILL:
            temporary = [name for name in names_in(folder) if name.startswith(".")]
            return {"after_s": round(instant, 3), "newest": newest_iteration(folder), "unfinished": temporary}
        if code != 0:
            raise Difference(f"ended on its own with code {code}: {tail(folder)}")
        shutil.rmtree(folder)
        shutil.move(kept, folder)
        bench.kept["instants: duration"] = 0.9 * duration
    raise Difference(f"was not killed in {ATTEMPTS} attempts")


def _duration(bench: Bench) -> float:
    """Seconds that a whole run takes on this machine now."""
    folder = bench.folder / "duration"
    config = write_config(folder, checkpoint={"every": 1}, task_options={"step_s": 0.002})
    started = time.monotonic()
    if bench.servers[0].call(MAIN, ["train", str(config)], output=folder / "output.txt") != 0:
        raise Difference(f"the uninterrupted run failed: {tail(folder)}")
    return time.monotonic() - started
