"""One rank of three fails, its disk is full, or the link between two nodes goes down.

Who is named, and how long until the summary says so and until all have ended.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from functools import partial
from pathlib import Path
from typing import Any

from ignite_engine.cli import main
from tests.campaign.nodes import can_join_namespaces, joined_namespaces, start_nodes
from tests.campaign.resuming import Difference
from tests.campaign.runs import MAIN, Bench, Item, newest_iteration, tail
from tests.checkpointing.file_faults import can_mount, mount_small_file_system
from tests.faults.processes import CONFIG, write_config_like
from tests.ranks import failing

HEARTBEAT_TIMEOUT_S = 3.0
TIMEOUT_S = 5.0
ON_A_SMALL_DISK = "tests.campaign.failures:train_on_a_small_disk"
THREE_RANKS = ("--nproc-per-node", "3", "--backend", "gloo")
NAMED = {
    "raise": "failed at iteration .* ValueError",
    "handler": "failed at iteration .* KeyError",
    "exit": r"called sys\.exit\(3\) at iteration",
    "kill": r"\(process \d+\) was killed by SIGKILL. Last heartbeat: iteration",  # which the parent adds
    "stop": "gave no sign of life",
    "hang": "did not come while",
    "disk": "",
}
NO_ROOM = r"CheckpointError: The checkpoint of iteration 8 was not saved in .*rank {}: No space left"


def items() -> list[Item]:
    """Link down only where network namespaces can be made, disk full where a file system can be mounted."""
    ways = [how for how in NAMED if how != "disk" or can_mount()]
    found = [Item("failures", f"{how}, rank {rank}", partial(_run, how, rank)) for how in ways for rank in (0, 1)]
    return [*found, Item("failures", "link down", _link_down)] if can_join_namespaces() else found


def _run(how: str, rank: int, bench: Bench) -> dict[str, Any]:
    config = _config(bench.folder, how=how, rank=rank, notes=str(bench.folder))
    call = (ON_A_SMALL_DISK, str(config)) if how == "disk" else (MAIN, ["train", str(config), *THREE_RANKS])
    child = bench.servers[0].start(*call, output=bench.folder / "output.txt")
    code = child.wait()
    ended = time.time()
    child.signal(signal.SIGKILL)
    return _judge(bench.folder, how, rank, code, ended - (bench.folder / "failed").stat().st_mtime)


def train_on_a_small_disk(config: str) -> int:
    """Train with the checkpoints on a file system of 1 MiB: one save of what has grown on one rank is larger."""
    checkpoints = Path(config).parent / "run" / "checkpoints"
    checkpoints.mkdir(parents=True)
    mount_small_file_system(checkpoints, 1024)
    return main(["train", config, *THREE_RANKS])


def _judge(folder: Path, how: str, rank: int, code: int, seconds: float) -> dict[str, Any]:
    summary = json.loads((folder / "run" / "summary.json").read_text())
    reason = str(summary["reason"])
    if code != (3 if how == "exit" else 1) or summary["status"] != "failed":
        raise Difference(f"code {code}, status {summary['status']}: {tail(folder)}")
    if not re.match(NO_ROOM.format(rank) if how == "disk" else f"[rR]ank {rank} {NAMED[how]}", reason):
        raise Difference(f"the summary says: {reason}")
    ended = f"rank {rank} exited without reporting"
    expected = {"kill": (ended,), "disk": ("No space left on device",)}.get(how, (reason,))
    if (how, rank) == ("stop", 0):  # nobody is left to tell the others: each judges by itself, and the first kills it
        expected = (f"rank {rank} {NAMED[how]}", ended)
    for other in {0, 1, 2} - {rank}:
        log = (folder / "run" / "logs" / f"rank_{other}.log").read_text()
        if not any(said in log for said in expected):
            raise Difference(f"rank {other} does not say so: {log[-500:]}")
    after = (folder / "run" / "summary.json").stat().st_mtime - (folder / "failed").stat().st_mtime
    return {"seconds": round(seconds, 1), "said_after_s": round(after, 1), "line": reason}


def _link_down(bench: Bench) -> dict[str, Any]:
    """The interface of the second node goes down; nothing is closed, and no packet arrives."""
    config = _config(bench.folder, at=10**6, notes=str(bench.folder))
    with joined_namespaces() as namespaces:
        nodes = start_nodes(config, namespaces)
        try:
            deadline = time.monotonic() + 120
            while (newest_iteration(bench.folder) or 0) < 3:
                if time.monotonic() > deadline or any(node.poll() is not None for node in nodes):
                    raise Difference(f"it ended on its own, or saved nothing: {tail(bench.folder)}")
                time.sleep(0.02)
            began = time.monotonic()
            subprocess.run(["ip", "-n", namespaces[1], "link", "set", "wire", "down"], check=True)
            codes = [node.wait(120) for node in nodes]
        finally:
            for node in nodes:
                if node.poll() is None:
                    os.killpg(node.pid, signal.SIGKILL)
    ended = json.loads((bench.folder / "run" / "summary.json").read_text())
    reason = str(ended["reason"])
    if 0 in codes or "gave no sign of life" not in reason:
        raise Difference(f"codes {codes}, the summary says: {ended['status']}, {reason}; {tail(bench.folder)}")
    return {"seconds": round(time.monotonic() - began, 1), "line": reason}


def _config(folder: Path, **options: Any) -> Path:
    sections = {
        "task": f"{failing.__file__}:build",
        "run": {**CONFIG["run"], "max_epochs": 1 if options.get("how") == "disk" else 20},
        "update": {"accumulation_steps": None},
        "checkpoint": {"every": 2},
    }
    waits = {"heartbeat_timeout": HEARTBEAT_TIMEOUT_S, "timeout": TIMEOUT_S}
    return write_config_like({**CONFIG, **sections}, folder, {"task_options": options, "distributed": waits})
