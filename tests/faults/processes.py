"""Real runs in real processes: start one, wait for what it does, signal it, read what it left."""

import json
import os
import signal
import socket
import time
from pathlib import Path

import yaml

from tests.faults.fork_server import shared

HERE = Path(__file__).parent
CONFIG = {
    "task": f"{HERE.parent / 'kit' / 'task.py'}:build",
    "run": {"max_epochs": 6, "seed": 3, "threads": 1},
    "data": {"batch_size": 4, "num_workers": 0},
    "optimizer": {"name": "AdamW", "lr": 0.01},
    "schedule": {"name": "cosine", "warmup": 3},
    "update": {"precision": "bf16", "accumulation_steps": 4, "clip_norm": 1.0},
    "evaluation": {"every": {"epochs": 1}, "sanity_batches": 0},  # batches are counted, and where one is broken off
    "checkpoint": {"every": 5},
    "logging": {
        "every": 2,
        **dict.fromkeys(["console", "progress", "memory", "throughput", "clearml", "report"], False),
    },
}


def write_config(folder, **sections):
    """A config in ``folder`` whose run directory is ``folder/run``; ``sections`` override values of CONFIG."""
    options = {"directory": str(folder), **sections.get("task_options", {})}
    return write_config_like(CONFIG, folder, {**sections, "task_options": options})


def write_config_like(base, folder, sections):
    """``base`` with its values overridden by ``sections``, in ``folder``, whose run directory is ``folder/run``."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {name: dict(value) if isinstance(value, dict) else value for name, value in base.items()}
    for name, values in sections.items():
        config[name] = {**config.get(name, {}), **values}
    config["run"]["directory"] = str(folder / "run")
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


class Run:
    """A command that a fork server started, with what tests use of a ``Popen``."""

    def __init__(self, child):
        self.pid, self._child = child.pid, child

    @property
    def returncode(self):
        return self._child.poll()

    def poll(self):
        return self._child.poll()

    def wait(self, timeout=120.0):
        return self._child.wait(timeout)


def start(config, *arguments, function="tests.faults.commands:main"):
    """``train`` in a session of its own, so that a signal to its group is a terminal's Ctrl-C.

    It is forked from a process that has imported torch and the engine: the same command, seconds earlier.

    Args:
        function: what calls the command line; this one forks the ranks too, which ``ignite_engine.cli:main`` spawns.
    """
    output = config.parent / "output.txt"
    return Run(shared().start(function, ["train", str(config), *arguments], output=output))


def train(config, *arguments):
    """Run to the end."""
    process = start(config, *arguments)
    assert process.wait(timeout=120) == 0, (config.parent / "output.txt").read_text()


def wait_until(condition, process, timeout_s=60.0):
    """Poll until ``condition()`` is true; the process must be alive all the while."""
    deadline = time.monotonic() + timeout_s
    while not (found := condition()):
        assert process.poll() is None, f"the run ended early with {process.returncode}"
        assert time.monotonic() < deadline, "what the test waits for did not happen"
        time.sleep(0.02)
    return found


def interrupt(process, number=signal.SIGINT):
    """Signal the whole group as a terminal does; exit code and seconds until the process was gone."""
    began = time.monotonic()
    os.killpg(process.pid, number)
    return process.wait(timeout=60), time.monotonic() - began


def lines(folder):
    path = folder / "run" / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def evaluated(folder, rank=0):
    """Batches that were evaluated so far, by a task with ``count_batches``."""
    path = folder / f"evaluated_{rank}"
    return len(path.read_text()) if path.exists() else 0


def summary(folder):
    result = json.loads((folder / "run" / "summary.json").read_text())
    return result


def group_is_gone(leader, timeout_s=10.0):
    """No process of the group is left; multiprocessing's resource tracker goes a moment after its parent."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        try:
            os.killpg(leader, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.05)
    return False


def free_port():
    """A TCP port of this machine that is free now."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])
