"""Runs over windows, killed or stopped within one, between two, or while they wait, end with the same bits."""

import signal
import time

import pytest

from tests.ext.windows import task as windows_task
from tests.faults.fork_server import shared
from tests.faults.processes import CONFIG, lines, summary, write_config_like

pytestmark = [pytest.mark.faults, pytest.mark.long]

MAIN = "ignite_engine.cli:main"
WINDOWS = range(7)


def config_of(folder, **options):
    sections = {
        "task": f"{windows_task.__file__}:build",
        "run": {**CONFIG["run"], "max_epochs": 1},
        "schedule": {"name": "constant", "warmup": 2},
        "update": {"accumulation_steps": 2},
        "evaluation": {"progressive": True},
        "checkpoint": {"every": {"windows": 1}, "save_at_end": False},
        "logging": {**CONFIG["logging"], "every": 1},
    }
    return write_config_like({**CONFIG, **sections}, folder, {"task_options": {"directory": str(folder), **options}})


@pytest.fixture(scope="module")
def server():
    return shared()


def run(server, config):
    return server.call(MAIN, ["train", str(config)], output=config.parent / "output.txt")


def complete(folder):
    windows_task.write(folder / "hours", *WINDOWS)
    (folder / "hours" / "end").touch()


@pytest.fixture(scope="module")
def whole(server, tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    complete(folder)
    assert run(server, config_of(folder)) == 0, (folder / "output.txt").read_text()
    assert sum("progressive/loss" in line for line in lines(folder)) == len(WINDOWS) - 1, "one of them is empty"
    return {"digest": summary(folder)["weights_sha256"], "lines": lines(folder)}


@pytest.mark.parametrize("kill", [["iteration", 2], ["iteration", 5], ["window", 3], ["window", 6]])
def test_killed_within_a_window_or_between_two(server, tmp_path, whole, kill):
    complete(tmp_path)
    config = config_of(tmp_path, kill=kill)
    assert run(server, config) == -signal.SIGKILL
    assert run(server, config) == 0, (tmp_path / "output.txt").read_text()
    assert summary(tmp_path)["weights_sha256"] == whole["digest"] and lines(tmp_path) == whole["lines"]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_ended_while_it_waits_for_a_window(server, tmp_path, whole, number):
    windows_task.write(tmp_path / "hours", *WINDOWS[:5])
    config = config_of(tmp_path)
    child = server.start(MAIN, ["train", str(config)], output=tmp_path / "output.txt")
    deadline = time.monotonic() + 60
    while not (tmp_path / "run" / "checkpoints").exists() or len(lines(tmp_path)) < 8:  # 4 windows of 2 iterations
        assert time.monotonic() < deadline
        time.sleep(0.02)
    time.sleep(0.2)
    began = time.monotonic()
    child.signal(number)
    code = child.wait(30.0)
    assert code == (-signal.SIGKILL if number == signal.SIGKILL else 130) and time.monotonic() - began < 10
    complete(tmp_path)
    assert run(server, config) == 0, (tmp_path / "output.txt").read_text()
    assert summary(tmp_path)["weights_sha256"] == whole["digest"] and lines(tmp_path) == whole["lines"]
