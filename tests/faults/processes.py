"""Real runs in real processes: start one, wait for what it does, signal it, read what it left."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml

from tests.faults.fork_server import Child, shared

HERE = Path(__file__).parent
CONFIG: dict[str, Any] = {
    "task": f"{HERE / 'task.py'}:build",
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


def write_config(folder: Path, **sections: Any) -> Path:
    """A config in ``folder`` whose run directory is ``folder/run``; ``sections`` override values of CONFIG."""
    options = {"directory": str(folder), **sections.get("task_options", {})}
    return write_config_like(CONFIG, folder, {**sections, "task_options": options})


def write_config_like(base: Mapping[str, Any], folder: Path, sections: Mapping[str, Any]) -> Path:
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

    def __init__(self, child: Child) -> None:
        self.pid, self._child = child.pid, child

    @property
    def returncode(self) -> int | None:
        return self._child.poll()

    def poll(self) -> int | None:
        return self._child.poll()

    def wait(self, timeout: float = 120.0) -> int:
        return self._child.wait(timeout)


def start(config: Path, *arguments: str, function: str = "tests.faults.commands:main") -> Run:
    """``train`` in a session of its own, so that a signal to its group is a terminal's Ctrl-C.

    It is forked from a process that has imported torch and the engine: the same command, seconds earlier.

    Args:
        function: what calls the command line; this one forks the ranks too, which ``ignite_engine.cli:main`` spawns.
    """
    output = config.parent / "output.txt"
    return Run(shared().start(function, ["train", str(config), *arguments], output=output))


def train(config: Path, *arguments: str) -> None:
    """Run to the end."""
    process = start(config, *arguments)
    assert process.wait(timeout=120) == 0, (config.parent / "output.txt").read_text()


def wait_until(condition: Callable[[], Any], process: Run, timeout_s: float = 60.0) -> Any:
    """Poll until ``condition()`` is true; the process must be alive all the while."""
    deadline = time.monotonic() + timeout_s
    while not (found := condition()):
        assert process.poll() is None, f"the run ended early with {process.returncode}"
        assert time.monotonic() < deadline, "what the test waits for did not happen"
        time.sleep(0.02)
    return found


def interrupt(process: Run, number: int = signal.SIGINT) -> tuple[int, float]:
    """Signal the whole group as a terminal does; exit code and seconds until the process was gone."""
    began = time.monotonic()
    os.killpg(process.pid, number)
    return process.wait(timeout=60), time.monotonic() - began


def lines(folder: Path) -> list[dict[str, Any]]:
    path = folder / "run" / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def evaluated(folder: Path, rank: int = 0) -> int:
    """Batches that were evaluated so far, by a task with ``count_batches``."""
    path = folder / f"evaluated_{rank}"
    return len(path.read_text()) if path.exists() else 0


def summary(folder: Path) -> dict[str, Any]:
    result: dict[str, Any] = json.loads((folder / "run" / "summary.json").read_text())
    return result


def group_is_gone(leader: int, timeout_s: float = 10.0) -> bool:
    """No process of the group is left; multiprocessing's resource tracker goes a moment after its parent."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        try:
            os.killpg(leader, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.05)
    return False


def free_port() -> int:
    """A TCP port of this machine that is free now."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])
