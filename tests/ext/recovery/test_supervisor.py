"""Ranks that are killed, hang or fail under ``--restarts``, in real processes."""

import contextlib
import itertools
import json
import os
import random
import re
import signal
import time
from collections import Counter
from pathlib import Path

import psutil
import pytest

from ignite_engine.ext.recovery import slots
from tests.faults.processes import CONFIG, group_is_gone, interrupt, start, summary, wait_until, write_config_like

TASK = Path(__file__).parent / "dying_task.py"
KILLS = int(os.environ.get("KILLS", "20"))
BASE = {
    **CONFIG,
    "task": f"{TASK}:build",
    "run": {"max_epochs": 3, "seed": 3, "threads": 1},
    "update": {"clip_norm": 1.0},
    "checkpoint": {"every": 1, "keep_last": 2},
}


def supervised(folder, *arguments, ranks=1, **sections):
    """``train --restarts 5``, or as ``arguments`` say."""
    options = {"directory": str(folder), **sections.pop("task_options", {})}
    config = write_config_like(BASE, folder, {**sections, "task_options": options})
    several = ["--nproc-per-node", str(ranks)] if ranks > 1 else []
    return start(config, *(arguments or ("--restarts", "5")), *several)


def output(folder):
    return (folder / "output.txt").read_text()


def finish(folder, process, code=0):
    """Its summary, when it has ended with this code and left no process."""
    assert process.wait() == code, output(folder)
    assert group_is_gone(process.pid)
    return summary(folder)


def ranks_of(process):
    """The ranks that live; not multiprocessing's resource tracker."""
    children = psutil.Process(process.pid).children()
    return [child for child in children if "resource_tracker" not in " ".join(child.cmdline())]


def iteration(folder, rank=0):
    try:
        return int((folder / f"at_{rank}").read_text() or 0)
    except FileNotFoundError:
        return 0


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    """Of the run that nobody disturbs, by its number of ranks."""
    found = {}
    for ranks in (1, 2):
        folder = tmp_path_factory.mktemp(f"whole_{ranks}")
        process = supervised(folder, "--traceback", ranks=ranks)
        found[ranks] = finish(folder, process)["weights_sha256"]
    return found


@pytest.mark.slow
@pytest.mark.faults
def test_killed_process_goes_on_to_the_same_bits(tmp_path, weights):
    deaths = [{"at": 0, "how": "SIGKILL"}, {"at": 7, "how": "SIGKILL"}, {"at": 60, "how": "SIGSEGV"}]
    process = supervised(tmp_path, task_options={"deaths": deaths}, evaluation={"every": 10})
    ended = finish(tmp_path, process)

    assert (ended["status"], ended["weights_sha256"]) == ("completed", weights[1])
    said = output(tmp_path)
    assert said.count("evaluation has no effect: the task has no val_sets.") == 1
    environment, second_death = tmp_path / "run" / "environment.json", tmp_path / "died_1"
    assert environment.stat().st_mtime < second_death.stat().st_mtime, "its record was written again"
    for number, line in enumerate(
        ("SIGKILL before its first iteration", "SIGKILL in iteration 7", "SIGSEGV in iteration 60"), start=1
    ):
        assert said.count(f"was killed by {line}. Restart {number}, of at most 5 in an hour.\n") == 1, said
    log = (tmp_path / "run" / "logs" / "rank_0.log").read_text()
    assert log.count("was killed by") == 3
    history = [json.loads(line) for line in (tmp_path / "run" / "history.jsonl").read_text().splitlines()]
    resumed = [entry for entry in history if entry["what"] == "resumed"]
    assert [entry["iteration"] for entry in resumed] == [6, 59]
    assert "SIGSEGV in iteration 60" in resumed[1]["reason"]


@pytest.mark.slow
@pytest.mark.faults
@pytest.mark.distributed
@pytest.mark.parametrize("killed", [[1], [0], [0, 1]], ids=str)
def test_killed_ranks_take_their_peers_along_and_all_go_on(tmp_path, weights, killed):
    deaths = [{"rank": rank, "at": 7, "how": "SIGKILL"} for rank in killed]
    process = supervised(tmp_path, ranks=2, task_options={"deaths": deaths})
    ended = finish(tmp_path, process)

    assert (ended["status"], ended["weights_sha256"]) == ("completed", weights[2])
    assert "SIGKILL in iteration 7" in output(tmp_path)
    # a rank that the supervisor stopped before its own death may have it in the next try
    assert f"Restart {len(killed) + 1}" not in output(tmp_path)


@pytest.mark.long
@pytest.mark.faults
@pytest.mark.distributed
@pytest.mark.parametrize("ranks", [1, 2])
def test_killed_at_random_instants_it_ends_with_the_same_bits_and_leaves_nothing(tmp_path, weights, ranks):
    """With a copy in memory after each iteration no more is lost than that which was killed and the one before."""
    draw, in_memory = random.Random(ranks), {"every": 25, "memory": 1}
    options = {"step_s": 0.01}
    process = supervised(tmp_path, "--restarts", "50", ranks=ranks, task_options=options, checkpoint=in_memory)
    parent, open_files, bytes_held = psutil.Process(process.pid), list[int](), list[int]()
    kills, name = 0, None
    while process.poll() is None and kills < 8:
        time.sleep(draw.uniform(0.0, 0.4))
        with contextlib.suppress(psutil.Error, AssertionError):  # it may have ended meanwhile
            living = ranks_of(process)
            chosen = living if draw.random() < 0.3 else living[-1:]
            for rank in chosen:
                rank.kill()
            kills += bool(chosen)
            # an iteration that dies twice would end the run
            past = iteration(tmp_path) + 1
            wait_until(lambda past=past: iteration(tmp_path) > past, process)
            open_files.append(parent.num_fds())
            bytes_held.append(parent.memory_info().rss)
            name = slots.folder_name(tmp_path / "run" / "checkpoints", create=False)
    ended = finish(tmp_path, process)

    assert ended["weights_sha256"] == weights[ranks], output(tmp_path)
    assert kills >= 3 and len(set(open_files[1:])) == 1, open_files
    assert max(bytes_held) - bytes_held[0] < 2**20 * 4, bytes_held
    said = re.findall(r"iteration (\d+)\. Restart|Resumed from memory at iteration (\d+)", output(tmp_path))
    lost = [int(at) - int(to) for (at, _), (_, to) in itertools.pairwise(said) if at and to]
    assert lost and max(lost) <= 2, said
    assert name and not (slots.ROOT / name).exists(), "its copies are left in memory"


@pytest.mark.faults
@pytest.mark.distributed
@pytest.mark.long  # starts two processes and kills one of them, again and again
@pytest.mark.parametrize("ranks", [1, 2])
def test_kills_also_of_the_parent_and_within_restarts(tmp_path, ranks):
    """Of one rank, of all, of the parent, of everything at once; ``KILLS=100`` makes a hundred."""
    length = {"run": {**BASE["run"], "max_epochs": 20 + KILLS // 4}}
    whole = supervised(tmp_path / "whole", "--traceback", ranks=ranks, checkpoint={"every": 50}, **length)
    expected = finish(tmp_path / "whole", whole)["weights_sha256"]
    draw, folder, within = random.Random(10 + ranks), tmp_path / "run", False
    kills, killed, names = Counter[str](), list[tuple[int, int]](), set[str | None]()
    options = {"step_s": 0.005}

    def begin():
        memory = {"every": 50, "memory": 1}
        return supervised(folder, "--restarts", "999", ranks=ranks, task_options=options, checkpoint=memory, **length)

    def resumed():
        log = folder / "run" / "logs" / "rank_0.log"
        found = re.findall(r"Resumed from .* at iteration (\d+)", log.read_text() if log.exists() else "")
        return [int(at) for at in found]

    process = begin()
    while kills.total() < KILLS and process.poll() is None:
        before, pid = iteration(folder), (folder / "pid_0").read_text() if (folder / "pid_0").exists() else ""
        time.sleep(0.0 if within else draw.uniform(0.0, 0.3))
        what = draw.choices(["one", "all", "the parent", "everything"], [6, 2, 1, 1])[0]
        try:
            living = ranks_of(process)
        except psutil.Error:  # one has ended meanwhile
            continue
        if what in ("the parent", "everything"):
            os.kill(process.pid, signal.SIGKILL)
        for rank in {"one": living[-1:], "the parent": []}.get(what, living):
            with contextlib.suppress(psutil.Error):
                rank.kill()
        kills[what] += 1
        time.sleep(0.01)  # for its peers
        names.add(slots.folder_name(folder / "run" / "checkpoints", create=False))
        if what != "the parent":  # without it the ranks save, and end
            killed.append((iteration(folder), len(resumed())))
        if what in ("the parent", "everything"):
            process.wait()
            assert group_is_gone(process.pid, timeout_s=40)
            process = begin()
        # Sometimes within the restart, before its first iteration. Else beyond the iteration of this kill: one that
        # dies twice ends the run.
        deadline, within = time.monotonic() + 20.0, draw.random() < 0.3
        while process.poll() is None and time.monotonic() < deadline:
            again = (folder / "pid_0").exists() and (folder / "pid_0").read_text() not in ("", pid)
            if (again and within) or iteration(folder) > before + 2:
                break
            time.sleep(0.002)
    ended = finish(folder, process)
    starts = resumed()
    lost = [at - starts[number] for at, number in killed if number < len(starts)]

    print(ranks, kills, Counter(lost), len(starts))
    assert ended["weights_sha256"] == expected, output(folder)
    assert kills.total() >= KILLS // 2, kills
    assert max(lost) <= ranks, "more than the iteration that was killed, and one that a peer had begun"
    assert not names & set(os.listdir(slots.ROOT)), "copies are left in memory"


@pytest.mark.slow
@pytest.mark.faults
def test_iteration_that_dies_twice_is_named_and_ends_the_run(tmp_path):
    process = supervised(tmp_path, task_options={"deaths": [{"at": 7, "how": "SIGABRT", "times": 9}]})
    ended = finish(tmp_path, process, code=1)

    assert "was killed by SIGABRT in iteration 7, where it died before. The run ends" in ended["reason"]
    assert ended["status"] == "failed" and "Restart 2" not in output(tmp_path)


@pytest.mark.slow
@pytest.mark.faults
def test_dead_in_one_iteration_it_may_die_in_another(tmp_path, weights):
    """Also in an earlier one, and in the same when it has done it meanwhile."""
    deaths = [{"at": 9, "how": "SIGKILL"}, {"at": 8, "how": "SIGKILL"}, {"at": 10, "how": "SIGKILL"}]
    process = supervised(tmp_path, task_options={"deaths": deaths}, checkpoint={"every": 5})
    assert finish(tmp_path, process)["weights_sha256"] == weights[1]


@pytest.mark.slow
@pytest.mark.faults
def test_exception_ends_the_run(tmp_path):
    process = supervised(tmp_path, task_options={"deaths": [{"at": 7, "how": "raise"}]})
    ended = finish(tmp_path, process, code=1)

    assert "ArithmeticError: a program's own error" in output(tmp_path)
    assert "ArithmeticError" in ended["reason"] and "Restart" not in output(tmp_path)


@pytest.mark.slow
@pytest.mark.faults
@pytest.mark.distributed
@pytest.mark.parametrize("peer_aborts", [False, True])
def test_exception_of_one_rank_ends_all(tmp_path, peer_aborts):
    """Also where a library of the peer's aborts because of it."""
    deaths = [{"rank": 1, "at": 7, "how": "raise"}]
    if peer_aborts:
        deaths.append({"rank": 0, "at": 7, "how": "SIGABRT", "after_s": 1.0})
    process = supervised(tmp_path, ranks=2, task_options={"deaths": deaths})
    ended = finish(tmp_path, process, code=1)
    assert "rank 1 failed at iteration 7" in ended["reason"]
    assert "Restart" not in output(tmp_path)


@pytest.mark.slow
@pytest.mark.faults
def test_restarts_of_an_hour_are_used_up(tmp_path):
    deaths = [{"at": at, "how": "SIGKILL"} for at in (5, 10, 15)]
    process = supervised(tmp_path, "--restarts", "2", task_options={"deaths": deaths})
    ended = finish(tmp_path, process, code=1)
    assert "in iteration 15. The run ends: it was started again 2 times within an hour." in ended["reason"]


@pytest.mark.slow
@pytest.mark.faults
@pytest.mark.parametrize("when", ["training", "starting again and again"])
def test_ctrl_c_means_what_it_does_without_restarts(tmp_path, when):
    options = {"step_s": 0.05} if when == "training" else {"deaths": [{"at": 0, "how": "SIGKILL", "times": 9999}]}
    process = supervised(tmp_path, "--restarts", "9999", task_options=options)
    if when == "training":
        wait_until(lambda: iteration(tmp_path) > 3, process)
    else:
        wait_until(lambda: "Restart 3," in output(tmp_path), process)
    code, seconds = interrupt(process)

    assert code == 130, output(tmp_path)
    assert seconds < 10 and group_is_gone(process.pid)
    assert "Traceback" not in output(tmp_path)
    if when == "training":
        assert summary(tmp_path)["status"] == "interrupted" and "Restart" not in output(tmp_path)


@pytest.mark.slow
@pytest.mark.faults
@pytest.mark.distributed
@pytest.mark.parametrize("ranks", [1, 2])
def test_ranks_whose_parent_was_killed_save_and_end(tmp_path, ranks):
    process = supervised(tmp_path, ranks=ranks, task_options={"step_s": 0.05}, checkpoint={"every": 1000})
    wait_until(lambda: iteration(tmp_path) > 3, process)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()

    assert group_is_gone(process.pid, timeout_s=20), "the ranks live on"
    ended = summary(tmp_path)
    assert (ended["status"], ended["reason"]) == ("interrupted", "SIGTERM")
    assert (tmp_path / "run" / "checkpoints" / f"iteration_{ended['iteration']:08d}").is_dir()


@pytest.mark.slow
@pytest.mark.faults
@pytest.mark.distributed
def test_stopped_rank_is_killed_by_its_peers_and_all_go_on(tmp_path, weights):
    waits = {"heartbeat_timeout": 2.0}
    deaths = [{"rank": 1, "at": 7, "how": "SIGSTOP"}]
    process = supervised(tmp_path, ranks=2, task_options={"deaths": deaths}, distributed=waits)
    assert finish(tmp_path, process)["weights_sha256"] == weights[2]
    assert "Restart 1" in output(tmp_path)


@pytest.mark.long
@pytest.mark.faults
@pytest.mark.distributed
def test_rank_that_its_peers_wait_for_in_vain_hangs_and_all_go_on(tmp_path, weights):
    deaths = [{"rank": 1, "at": 7, "how": "hang"}]
    waits = {"timeout": {"seconds": 3}}
    process = supervised(tmp_path, ranks=2, task_options={"deaths": deaths}, distributed=waits)
    assert finish(tmp_path, process)["weights_sha256"] == weights[2]
    assert re.search(r"Rank 1 \(process \d+\) hangs in iteration 7\. Restart 1, of", output(tmp_path))
