"""Ranks that ``--restarts`` forks again go on from their copies in memory."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import psutil
import pytest

from ignite_engine.recovery import slots
from tests.faults.processes import wait_until
from tests.recovery.test_supervisor import finish, iteration, ranks_of, supervised

pytestmark = [pytest.mark.faults, pytest.mark.distributed]
MEMORY_ALONE = {"every": 1000, "memory": 1}


@pytest.mark.parametrize("ranks", [1, 2])
def test_ranks_that_are_forked_again_lose_one_iteration(ranks: int, tmp_path: Path) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    whole.mkdir()
    expected = finish(whole, supervised(whole, "--traceback", ranks=ranks))["weights_sha256"]
    deaths = [{"rank": rank % ranks, "at": at, "how": "SIGKILL"} for rank, at in enumerate((7, 30, 60))]
    killed.mkdir()
    process = supervised(killed, ranks=ranks, task_options={"deaths": deaths}, checkpoint=MEMORY_ALONE)
    ended = finish(killed, process)

    assert (ended["status"], ended["weights_sha256"]) == ("completed", expected)
    log = (killed / "run" / "logs" / "rank_0.log").read_text()
    assert [log.count(f"Resumed from memory at iteration {at} (disk has none)") for at in (6, 29, 59)] == [1, 1, 1]
    assert not (killed / "run" / "checkpoints" / slots.MEMORY_TOKEN).exists()


def test_where_the_parent_is_killed_too_the_next_start_goes_on_from_memory(tmp_path: Path) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    whole.mkdir()
    expected = finish(whole, supervised(whole, "--traceback"))["weights_sha256"]
    killed.mkdir()
    process = supervised(killed, task_options={"step_s": 0.02}, checkpoint=MEMORY_ALONE)
    wait_until(lambda: iteration(killed) >= 6, process)
    children = ranks_of(process)
    os.kill(process.pid, signal.SIGKILL)
    for child in children:
        os.kill(child.pid, signal.SIGKILL)
    process.wait()
    psutil.wait_procs(children, timeout=10)
    name = slots.folder_name(killed / "run" / "checkpoints", create=False)
    assert name in os.listdir(slots.ROOT)
    ended = finish(killed, supervised(killed, task_options={"step_s": 0.02}, checkpoint=MEMORY_ALONE))

    assert "Resumed from memory at iteration" in (killed / "run" / "logs" / "rank_0.log").read_text()
    assert ended["weights_sha256"] == expected
    assert name not in os.listdir(slots.ROOT)
