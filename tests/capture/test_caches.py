"""Real processes that are killed while they compile, and that find a cache of compiled code of no use."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Callable
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest

from tests.checkpointing.file_faults import can_mount
from tests.faults.processes import Run, start, summary, write_config_like

pytestmark = [
    pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler, which torch.compile calls"),
    pytest.mark.faults,
    pytest.mark.long,
]

TASK = Path(__file__).with_name("captured_task.py")
CONFIG: dict[str, Any] = {
    "task": f"{TASK}:build",
    "run": {"max_epochs": 2, "seed": 3, "threads": 1},
    "data": {"batch_size": 8, "num_workers": 0},
    "optimizer": {"name": "AdamW", "lr": 0.01},
    "update": {"capture": True, "clip_norm": 1.0},
    "checkpoint": {"every": 3},
    "logging": {
        "every": 2,
        **dict.fromkeys(["console", "progress", "memory", "throughput", "clearml", "report"], False),
    },
}


def config_in(folder: Path) -> Path:
    return write_config_like(CONFIG, folder, {})


def begin(folder: Path, function: str = "main") -> Run:
    config = folder / "config.yaml"
    return start(config if config.exists() else config_in(folder), function=f"tests.capture.captured_task:{function}")


def finish(folder: Path, function: str = "main") -> str:
    """Train to the end; what the process has said."""
    said, before = folder / "output.txt", 0
    if said.exists():
        before = len(said.read_text())
    code = begin(folder, function).wait(timeout=400)
    text = said.read_text()[before:]
    assert code == 0, text
    return text


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that compiled into an empty cache."""
    folder = tmp_path_factory.mktemp("undisturbed")
    text = finish(folder)
    assert "The update is being compiled" in text and "not be written" not in text
    assert list((folder / "run" / "graphs").rglob("*.so"))
    return folder


def digest(folder: Path) -> str:
    found = summary(folder)
    assert found["status"] == "completed" and found["iteration"] == 10
    return str(found["weights_sha256"])


def compiler_runs(leader: int) -> bool:
    """Whether the C++ compiler proper or the linker runs in the group."""
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if os.getpgid(int(process.name)) == leader and (process / "comm").read_text().strip() in ("cc1plus", "ld"):
                return True
        except (OSError, ValueError):
            continue
    return False


def wait_for(condition: Callable[[], bool], process: Run) -> None:
    deadline = time.monotonic() + 200
    while not condition():
        assert process.poll() is None and time.monotonic() < deadline, "what the test waits for did not happen"
        time.sleep(0.01)


def test_a_run_that_is_killed_while_it_compiles_starts_again_to_the_same_bits(
    undisturbed: Path, tmp_path: Path
) -> None:
    """Killed with its compiler: before it runs, while it does, and while it makes the step's graph."""
    graphs = tmp_path / "run" / "graphs"

    def libraries() -> int:
        return len(list(graphs.rglob("*.so")))

    moments: tuple[Callable[[Run], bool], ...] = (
        lambda process: "being compiled" in (tmp_path / "output.txt").read_text(),
        lambda process: compiler_runs(process.pid),
        lambda process: libraries() > 0,
    )
    for moment in moments:
        process = begin(tmp_path)
        wait_for(lambda: moment(process), process)  # noqa: B023  # called at once
        os.killpg(process.pid, signal.SIGKILL)
        assert process.wait(timeout=60) == -signal.SIGKILL
        assert not (tmp_path / "run" / "summary.json").exists() or summary(tmp_path)["status"] != "completed"
    finish(tmp_path)

    assert digest(tmp_path) == digest(undisturbed)


def halve(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def fill_with_rubbish(path: Path) -> None:
    path.write_bytes(b"\x80\x04rubbish" * 100)


def test_a_damaged_cache_is_left(undisturbed: Path, tmp_path: Path) -> None:
    """Of each two files one is cut off, the other is rubbish."""
    config_in(tmp_path)
    shutil.copytree(undisturbed / "run" / "graphs", tmp_path / "run" / "graphs")
    damaged = sorted(
        path
        for path in (tmp_path / "run" / "graphs").rglob("*")
        if path.is_file() and path.suffix not in (".py", ".cpp", ".h")
    )
    for damage, path in zip(cycle([halve, fill_with_rubbish]), damaged, strict=False):
        damage(path)
    text = finish(tmp_path)

    assert damaged and digest(tmp_path) == digest(undisturbed), text


@pytest.mark.skipif(not can_mount(), reason="a file system cannot be mounted here")
@pytest.mark.parametrize("function", ["main_with_a_full_cache", "main_with_a_cache_that_is_not_written"])
def test_a_cache_without_room_or_not_to_be_written_is_left_with_a_warning(
    function: str, undisturbed: Path, tmp_path: Path
) -> None:
    text = finish(tmp_path, function)

    assert text.count("is perhaps full, damaged or not to be written") == 2, text  # for the gradients and for the step
    assert digest(tmp_path) == digest(undisturbed)


def test_a_second_start_with_the_cache_of_the_first_compiles_nothing_anew(undisturbed: Path, tmp_path: Path) -> None:
    config_in(tmp_path)
    shutil.copytree(undisturbed / "run" / "graphs", tmp_path / "run" / "graphs")
    before = sorted((tmp_path / "run" / "graphs").rglob("*.so"))
    finish(tmp_path)

    assert sorted((tmp_path / "run" / "graphs").rglob("*.so")) == before != []
    assert digest(tmp_path) == digest(undisturbed)
