"""Two nodes of two ranks each under torchrun: two network namespaces that a pair of virtual interfaces joins.

Ended in every way, and started again with the same commands: the bits are those of four ranks on one node.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from tests.campaign.resuming import Difference
from tests.campaign.runs import Bench, Item, compare, end_of, newest_iteration, reference, tail, write_config
from tests.faults.fork_server import ROOT

FOUR_RANKS = ("--nproc-per-node", "4", "--backend", "gloo")
HOW = (
    "not interrupted",
    "SIGTERM to the second node",
    "Ctrl-C on both nodes",
    "a rank of the second node is killed",
    "the second node is killed",
)
PORT = 29511  # in a namespace of its own no port is taken
SECTIONS: dict[str, Any] = {"run": {"max_epochs": 8}, "checkpoint": {"every": 2}, "task_options": {"step_s": 0.05}}


def items() -> list[Item]:
    """None where network namespaces cannot be made."""
    if not can_join_namespaces():
        return []
    return [Item("two nodes", how, partial(_run, how)) for how in HOW]


def can_join_namespaces() -> bool:
    if os.geteuid() != 0 or not shutil.which("ip"):
        return False
    try:
        with joined_namespaces():
            return True
    except subprocess.CalledProcessError:
        return False


@contextmanager
def joined_namespaces() -> Iterator[list[str]]:
    """Two network namespaces, 10.77.0.1 and 10.77.0.2, each with an interface ``wire``."""
    names = [f"node_{os.getpid()}_{time.monotonic_ns()}_{number}" for number in range(2)]
    with ExitStack() as undo:
        for name in names:
            _ip("netns", "add", name)
            undo.callback(_ip, "netns", "delete", name)
            _ip("-n", name, "link", "set", "lo", "up")
        _ip("-n", names[0], "link", "add", "name", "wire", "type", "veth", "peer", "name", "wire", "netns", names[1])
        for number, name in enumerate(names, 1):
            _ip("-n", name, "address", "add", f"10.77.0.{number}/24", "dev", "wire")
            _ip("-n", name, "link", "set", "wire", "up")
        yield names


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


def start_nodes(config: Path, namespaces: list[str], ranks_per_node: int = 2) -> list[subprocess.Popen[bytes]]:
    """The same command on each node, but for its rank."""
    processes = []
    for number, name in enumerate(namespaces):
        torchrun = f"-m torch.distributed.run --nnodes 2 --node-rank {number} --nproc-per-node {ranks_per_node}".split()
        rendezvous = f"--master-addr 10.77.0.1 --master-port {PORT}".split()
        train = f"-m ignite_engine train {config} distributed.backend=gloo".split()
        command = ["ip", "netns", "exec", name, sys.executable, *torchrun, *rendezvous, *train]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "wire"}
        with (config.parent / "output.txt").open("a") as output:
            processes.append(
                subprocess.Popen(
                    command, stdout=output, stderr=output, env=environment, cwd=ROOT, start_new_session=True
                )
            )
    return processes


def _run(how: str, bench: Bench) -> dict[str, Any]:
    expected = reference(bench, "two nodes", *FOUR_RANKS, **SECTIONS)
    folder = bench.folder / "run"
    config = write_config(folder, **{**SECTIONS, "task_options": {"step_s": 0.05, "notes": str(folder)}})
    facts: dict[str, Any] = {}
    with joined_namespaces() as namespaces:
        if how != "not interrupted":
            facts = _interrupt(how, config, start_nodes(config, namespaces))
        if any(code := [process.wait(300) for process in start_nodes(config, namespaces)]):
            raise Difference(f"ended with codes {code}: {tail(folder)}")
    compare(expected, end_of(folder))
    return facts


def _interrupt(how: str, config: Path, nodes: list[subprocess.Popen[bytes]]) -> dict[str, Any]:
    folder = config.parent
    try:
        deadline = time.monotonic() + 120
        while (newest_iteration(folder) or 0) < 3:
            if time.monotonic() > deadline or any(node.poll() is not None for node in nodes):
                raise Difference(f"it ended on its own, or saved nothing: {tail(folder)}")
            time.sleep(0.02)
        began = time.monotonic()
        if how == "SIGTERM to the second node":
            nodes[1].terminate()
        elif how == "Ctrl-C on both nodes":
            for node in nodes:
                os.killpg(node.pid, signal.SIGINT)
        elif how == "a rank of the second node is killed":
            os.kill(int((folder / "pid_3").read_text()), signal.SIGKILL)
        else:
            os.killpg(nodes[1].pid, signal.SIGKILL)
            for rank in (2, 3):
                os.kill(int((folder / f"pid_{rank}").read_text()), signal.SIGKILL)
        codes = [node.wait(120) for node in nodes]
        if 0 in codes:
            raise Difference(f"ended with codes {codes}: {tail(folder)}")
        return {"codes": codes, "newest": newest_iteration(folder), "seconds": round(time.monotonic() - began, 1)}
    finally:
        for node in nodes:
            if node.poll() is None:
                os.killpg(node.pid, signal.SIGKILL)
