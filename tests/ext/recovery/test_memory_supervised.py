"""Ranks that ``--restarts`` forks again go on from their copies in memory."""

import os
import signal

import psutil
import pytest

from ignite_engine.ext.recovery import slots
from tests.ext.recovery.test_supervisor import finish, iteration, output, ranks_of, supervised
from tests.faults.processes import group_is_gone, wait_until

pytestmark = [pytest.mark.faults, pytest.mark.distributed, pytest.mark.slow]
MEMORY_ALONE = {"every": 1000, "memory": 1}
INVARIANT = {"update": {"rank_invariant": True, "global_micro_batches": 2, "clip_norm": 1.0}}


@pytest.mark.parametrize("ranks", [1, 2])
def test_ranks_that_are_forked_again_lose_one_iteration(ranks, tmp_path):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    whole.mkdir()
    expected = finish(whole, supervised(whole, "--traceback", ranks=ranks))["weights_sha256"]
    deaths = [{"rank": rank % ranks, "at": at, "how": "SIGKILL"} for rank, at in enumerate((7, 30, 60))]
    killed.mkdir()
    process = supervised(killed, ranks=ranks, task_options={"deaths": deaths}, checkpoint=MEMORY_ALONE)
    ended = finish(killed, process)

    assert (ended["status"], ended["weights_sha256"]) == ("completed", expected)
    log = log_of(killed)
    assert [log.count(f"Resumed from memory at iteration {at} (disk has none)") for at in (6, 29, 59)] == [1, 1, 1]
    assert not (killed / "run" / "checkpoints" / slots.MEMORY_TOKEN).exists()


def kill_everything(process):
    children = ranks_of(process)
    for number in (process.pid, *(child.pid for child in children)):
        os.kill(number, signal.SIGKILL)
    process.wait()
    psutil.wait_procs(children, timeout=10)


def name_of_copies(folder):
    return slots.folder_name(folder / "run" / "checkpoints", create=False)


def log_of(folder):
    return (folder / "run" / "logs" / "rank_0.log").read_text()


def test_where_the_parent_is_killed_too_the_next_start_goes_on_from_memory(tmp_path):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    whole.mkdir()
    expected = finish(whole, supervised(whole, "--traceback"))["weights_sha256"]
    killed.mkdir()
    process = supervised(killed, task_options={"step_s": 0.02}, checkpoint=MEMORY_ALONE)
    wait_until(lambda: iteration(killed) >= 6, process)
    kill_everything(process)
    name = name_of_copies(killed)
    assert name in os.listdir(slots.ROOT)
    ended = finish(killed, supervised(killed, task_options={"step_s": 0.02}, checkpoint=MEMORY_ALONE))

    assert "Resumed from memory at iteration" in log_of(killed)
    assert ended["weights_sha256"] == expected
    assert name not in os.listdir(slots.ROOT)


@pytest.mark.long
def test_on_one_rank_two_and_one_again_a_rank_invariant_run_has_one_sha256(tmp_path):
    whole, folder = tmp_path / "whole", tmp_path / "killed"
    whole.mkdir()
    expected = finish(whole, supervised(whole, "--traceback", **INVARIANT))["weights_sha256"]
    folder.mkdir()
    sections = {"task_options": {"step_s": 0.02}, "checkpoint": MEMORY_ALONE, **INVARIANT}
    for ranks, at in ((1, 8), (2, 25)):
        process = supervised(folder, ranks=ranks, **sections)
        wait_until(lambda at=at: iteration(folder) >= at, process)
        kill_everything(process)
    name = name_of_copies(folder)
    assert name in os.listdir(slots.ROOT)
    ended = finish(folder, supervised(folder, **sections))

    assert log_of(folder).count("Resumed from memory at iteration") == 2
    assert "(disk has none)" in log_of(folder) and "(disk has 2" not in log_of(folder)
    assert (ended["weights_sha256"], ended["world_size"]) == (expected, 1)
    assert name not in os.listdir(slots.ROOT)


@pytest.mark.parametrize("how", ["a rank is stopped", "the parent is killed", "another config", "the folder is moved"])
def test_whatever_happens_nothing_is_left(how, tmp_path):
    """In this machine's shared memory, and of processes."""
    folder = tmp_path / "folder"
    folder.mkdir()
    options = {"directory": str(tmp_path), "step_s": 0.02}
    sections = {"task_options": options, "checkpoint": MEMORY_ALONE, "distributed": {"heartbeat_timeout": 2.0}}
    process = supervised(folder, ranks=2, **sections)
    wait_until(lambda: iteration(tmp_path) >= 6, process)
    name, ranks = name_of_copies(folder), ranks_of(process)
    assert name in os.listdir(slots.ROOT)
    if how == "a rank is stopped":
        ranks[1].suspend()
        finish(folder, process)
        assert "Restart 1" in output(folder) and "Resumed from memory" in log_of(folder)
    elif how == "the parent is killed":
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        assert group_is_gone(process.pid, timeout_s=20)
    else:
        kill_everything(process)
        assert name in os.listdir(slots.ROOT)
        if how == "another config":
            sections["optimizer"] = {"name": "sgd", "lr": 0.5}
        else:
            folder = folder.rename(tmp_path / "moved")
        finish(folder, supervised(folder, ranks=2, **sections))
        unused = "The state in memory is not used: it is of other settings."
        assert ("Resumed from memory" in log_of(folder), unused in log_of(folder)) == (
            how == "the folder is moved",
            how == "another config",
        )
    assert name not in os.listdir(slots.ROOT)
