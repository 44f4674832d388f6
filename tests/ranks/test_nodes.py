"""Two nodes, which are two network namespaces that a pair of virtual interfaces joins."""

import os
import shutil
import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager

import pytest

from tests.kit.processes import ROOT
from tests.kit.runs import lines, summary, trained, write_config

PORT = 29511  # in a namespace of its own no port is taken


def can_join_namespaces():
    if os.geteuid() != 0 or not shutil.which("ip"):
        return False
    try:
        with joined_namespaces():
            return True
    except subprocess.CalledProcessError:
        return False


@contextmanager
def joined_namespaces():
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


def _ip(*arguments):
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


def start_nodes(config, namespaces):
    """The same command on each node, but for its rank."""
    rendezvous = f"--nproc-per-node 1 --master-addr 10.77.0.1 --master-port {PORT}".split()
    train = f"-m ignite_engine train {config} distributed.backend=gloo".split()
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "wire"}
    processes = []
    for number, name in enumerate(namespaces):
        node = f"-m torch.distributed.run --nnodes 2 --node-rank {number}".split()
        command = ["ip", "netns", "exec", name, sys.executable, *node, *rendezvous, *train]
        with (config.parent / "output.txt").open("a") as output:
            processes.append(subprocess.Popen(command, stdout=output, stderr=output, env=environment, cwd=ROOT))
    return processes


@pytest.mark.row("I4")
@pytest.mark.nightly
@pytest.mark.skipif(not can_join_namespaces(), reason="network namespaces cannot be made here")
def test_two_nodes_under_torchrun_train_to_the_bits_of_as_many_ranks_on_one(tmp_path):
    options = {"run": {"max_epochs": 2}, "task_options": {"count_reductions": True}}  # whose handler notes both ranks
    trained(write_config(tmp_path / "one", **options), "--nproc-per-node", "2", "--backend", "gloo")
    config = write_config(tmp_path / "two", **options)
    with joined_namespaces() as namespaces:
        codes = [node.wait(120) for node in start_nodes(config, namespaces)]

    assert codes == [0, 0], (tmp_path / "two" / "output.txt").read_text()
    assert len(list((tmp_path / "two").glob("reductions_*.json"))) == 2
    assert lines(tmp_path / "two") == lines(tmp_path / "one")
    assert summary(tmp_path / "two")["weights_sha256"] == summary(tmp_path / "one")["weights_sha256"]
