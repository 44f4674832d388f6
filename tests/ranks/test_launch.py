"""Ranks that are launched here: their exit codes, signals before they train, and groups that end with them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch.distributed as dist

from ignite_engine import Parallel
from ignite_engine.ranks import agreement
from tests.faults.processes import group_is_gone

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = """
import sys, time
from pathlib import Path
from ignite_engine import Parallel

def main(rank, folder):
    (Path(folder) / f"building_{rank}").touch()
    time.sleep(60)

if __name__ == "__main__":
    with Parallel(backend="gloo", nproc_per_node=2) as parallel:
        parallel.run(main, sys.argv[1])
"""


def started(folder: Path) -> subprocess.Popen[str]:
    (folder / "script.py").write_text(SCRIPT)
    return subprocess.Popen(
        [sys.executable, str(folder / "script.py"), str(folder)],
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )


def wait_until(condition: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.distributed
@pytest.mark.faults
@pytest.mark.parametrize(
    ("number", "to_group", "importing"),
    [
        (signal.SIGINT, True, False),
        (signal.SIGINT, False, False),
        (signal.SIGTERM, False, False),
        (signal.SIGINT, True, True),
        (signal.SIGTERM, True, True),
    ],
)
def test_signal_before_ranks_train_is_their_exit_code(
    tmp_path: Path, number: int, to_group: bool, importing: bool
) -> None:
    process = started(tmp_path)

    def importing_now() -> bool:
        return sum("spawn_main" in " ".join(each.cmdline()) for each in psutil.Process(process.pid).children()) == 2

    def building_now() -> bool:
        return len(list(tmp_path.glob("building_*"))) == 2

    wait_until(importing_now if importing else building_now, process)
    (os.killpg if to_group else os.kill)(process.pid, number)
    _, errors = process.communicate(timeout=60)

    assert process.returncode == 128 + number, errors
    assert "Traceback" not in errors
    assert group_is_gone(process.pid)
    assert not importing or not list(tmp_path.glob("building_*")), "the signal came too late"


@pytest.mark.distributed
def test_ranks_may_meet_in_a_file(tmp_path: Path) -> None:
    with Parallel(backend="gloo", nproc_per_node=2, init_method=f"file://{tmp_path}/store") as parallel:
        parallel.run(write_rank, tmp_path)

    assert sorted(each.read_text() for each in tmp_path.glob("rank_*")) == ["0 of 2", "1 of 2"]


def write_rank(local_rank: int, folder: Path) -> None:
    (folder / f"rank_{local_rank}").write_text(f"{agreement.rank()} of {agreement.world_size()}")


def test_groups_end_with_the_block_in_a_process_that_a_launcher_started(monkeypatch: pytest.MonkeyPatch) -> None:
    groups: dict[Any, Any] = {}
    monkeypatch.setattr(agreement, "_groups", groups)
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ZeroDivisionError), Parallel(backend="gloo"):
        agreement.cpu_group()
        assert len(groups) == 1 and dist.is_initialized()
        raise ZeroDivisionError
    assert groups == {} and not dist.is_initialized()
