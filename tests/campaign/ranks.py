"""Two gloo ranks: both killed, one killed, or stopped; the same command ends with the same bits."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from tests.campaign.resuming import Difference
from tests.campaign.runs import MAIN, Bench, Item, newest_iteration, reference, resume_and_compare, tail, write_config
from tests.faults.fork_server import Child

TWO_RANKS = ("--nproc-per-node", "2", "--backend", "gloo")
HOW = ("all are killed", "rank 0 is killed", "rank 1 is killed", "Ctrl-C", "SIGTERM to rank 1", "Ctrl-C in evaluation")


def items() -> list[Item]:
    return [
        Item(
            "two ranks",
            f"{how}, {'in the background' if background else 'in the loop'}{', FSDP2' if sharded else ''}",
            partial(_run, how, background, sharded),
        )
        for how in HOW
        for background, sharded in ((False, False), (True, False), (True, True))
    ]


def _run(how: str, background: bool, sharded: bool, bench: Bench) -> dict[str, Any]:
    sections: dict[str, Any] = {
        "run": {"max_epochs": 6},
        "checkpoint": {"every": 2, "background": background},
        # under FSDP2 BatchNorm's statistics are each rank's own, and those of rank 0 are saved
        "task_options": {"step_s": 0.05, "layer_norm": sharded},
        "distributed": {"strategy": "fsdp" if sharded else "ddp"},
    }
    expected = reference(bench, "two ranks, FSDP2" if sharded else "two ranks", *TWO_RANKS, **sections)
    folder = bench.folder / "run"
    config = write_config(folder, **{**sections, "task_options": {**sections["task_options"], "notes": str(folder)}})
    child = bench.servers[0].start(MAIN, ["train", str(config), *TWO_RANKS], output=folder / "output.txt")
    _wait(child, folder, lambda: (newest_iteration(folder) or 0) >= 3)
    if "evaluation" in how:
        (folder / "evaluating").unlink(missing_ok=True)
        _wait(child, folder, (folder / "evaluating").exists)
    pids = [int((folder / f"pid_{rank}").read_text()) for rank in range(2)]
    if how == "all are killed":
        child.signal(signal.SIGKILL)
    elif "Ctrl-C" in how:
        child.signal(signal.SIGINT)
    else:
        rank = 1 if "rank 1" in how else 0
        os.kill(pids[rank], signal.SIGTERM if "SIGTERM" in how else signal.SIGKILL)
    code = child.wait()
    expected_codes = {"all are killed": (-9,), "SIGTERM to rank 1": (143,)}.get(how, (130,) if "Ctrl-C" in how else ())
    if code == 0 or (expected_codes and code not in expected_codes):
        raise Difference(f"ended with code {code}: {tail(folder)}")
    child.signal(signal.SIGKILL)  # so that no process of it writes next to the resumed run
    stopped_at = newest_iteration(folder)
    resume_and_compare(bench, config, expected, *TWO_RANKS)
    return {"code": code, "newest": stopped_at}


def _wait(child: Child, folder: Path, condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        if child.poll(0.02) is not None or time.monotonic() > deadline:
            child.signal(signal.SIGKILL)
            raise Difference(f"it ended on its own, or saved nothing: {tail(folder)}")
