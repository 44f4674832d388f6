"""Ranks that are killed, hang or fail under ``train --restarts``, in real processes."""

import contextlib
import itertools
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.ext.recovery import deaths
from tests.ext.recovery.deaths import copies_of, number_in, slots_of
from tests.kit import runs
from tests.kit.processes import ROOT, wait_until
from tests.kit.refusals import command
from tests.kit.runs import CONFIG, free_port, group_is_gone, interrupt, summary, write_config
from tests.kit.tiers import tiered

KILLS = int(os.environ.get("KILLS", "20"))
"""Of the nightly test; a hundred are a thorough one."""
BASE = {
    **CONFIG,
    "task": f"{Path(deaths.__file__)}:build",
    "run": {"max_iterations": 40, "seed": 3, "threads": 1},
    "update": {"clip_norm": 1.0},
    "handlers": {**CONFIG["handlers"], "Checkpoint": {"every": 1, "keep_last": 2}},
}
MEMORY_ALONE = {"every": 1000, "memory": 1}


def supervised(folder, *words, ranks=1, **sections):
    """``train --restarts 5``, or as ``words`` say, of the task whose ranks die: a ``Child``."""
    options = {"directory": str(folder), **sections.pop("task_options", {})}
    config = write_config(folder, base=BASE, **sections, task_options=options)
    several = ["--nproc-per-node", str(ranks)] if ranks > 1 else []
    return runs.train(config, *(words or ("--restarts", "5")), *several)


def output(folder):
    return (folder / "output.txt").read_text()


def log_of(folder):
    return (folder / "run" / "logs" / "rank_0.log").read_text()


def finish(folder, process, code=0):
    """Its summary, when it has ended with this code and left no process."""
    assert process.wait() == code, output(folder)
    assert group_is_gone(process)
    return summary(folder)


def ranks_of(process):
    """The ranks that live; not multiprocessing's resource tracker."""
    children = psutil.Process(process.pid).children()
    return [child for child in children if "resource_tracker" not in " ".join(child.cmdline())]


def kill_everything(process):
    children = ranks_of(process)
    for number in (process.pid, *(child.pid for child in children)):
        os.kill(number, signal.SIGKILL)
    process.wait()
    psutil.wait_procs(children, timeout=10)


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    """The digest of the run that nobody disturbs, by its number of ranks."""
    found = {}

    def of(ranks=1):
        if ranks not in found:
            folder = tmp_path_factory.mktemp(f"whole_{ranks}")
            found[ranks] = finish(folder, supervised(folder, "--traceback", ranks=ranks))["weights_sha256"]
        return found[ranks]

    return of


def test_killed_process_goes_on_to_the_same_bits_and_says_so(tmp_path, weights):
    kills = [
        (0, "SIGKILL", "before its first iteration"),
        (7, "SIGKILL", "in iteration 7"),
        (30, "SIGSEGV", "in iteration 30"),
    ]
    options = {"deaths": [{"at": at, "how": how, "event": "ITERATION_STARTED"} for at, how, _ in kills]}
    ended = finish(tmp_path, supervised(tmp_path, task_options=options))

    assert (ended["status"], ended["weights_sha256"]) == ("completed", weights())
    said = output(tmp_path)
    environment, second_death = tmp_path / "run" / "environment.json", tmp_path / "died_0_7_ITERATION_STARTED"
    assert environment.stat().st_mtime < second_death.stat().st_mtime, "its record was written again"
    for number, (_, how, where) in enumerate(kills, start=1):
        assert re.search(rf"{how} {where}\. Restart {number}, of at most 5", said), said
    assert log_of(tmp_path).count("was killed by") == 3
    history = [json.loads(line) for line in (tmp_path / "run" / "starts.jsonl").read_text().splitlines()]
    resumed = [entry for entry in history if entry["what"] == "resumed"]
    assert [entry["iteration"] for entry in resumed] == [6, 29]
    assert "SIGSEGV in iteration 30" in resumed[1]["reason"]


@pytest.mark.parametrize(
    "killed", [*(pytest.param([rank], marks=pytest.mark.nightly) for rank in (1, 0)), [0, 1]], ids=str
)
def test_killed_ranks_take_their_peers_along_and_all_go_on_from_memory(tmp_path, weights, killed):
    options = {"deaths": [{"rank": rank, "at": 7} for rank in killed]}
    ended = finish(tmp_path, supervised(tmp_path, ranks=2, task_options=options, Checkpoint=MEMORY_ALONE))

    assert (ended["status"], ended["weights_sha256"]) == ("completed", weights(2))
    assert "SIGKILL in iteration 7" in output(tmp_path)
    assert "Resumed from memory at iteration 6 (disk has none)" in log_of(tmp_path)
    # a rank that was stopped before its own death may have it in the next try
    assert f"Restart {len(killed) + 1}" not in output(tmp_path)
    assert copies_of(tmp_path) == []


@pytest.mark.nightly
def test_dead_in_one_iteration_it_may_die_in_another(tmp_path, weights):
    """Also in an earlier one, and in the same when it has done it meanwhile."""
    options = {"deaths": [{"at": 9}, {"at": 8}, {"at": 10}, {"at": 9, "event": "ITERATION_STARTED", "in_turn": True}]}
    process = supervised(tmp_path, task_options=options, Checkpoint={"every": 5})
    assert finish(tmp_path, process)["weights_sha256"] == weights()


ENDS = {
    "an iteration that dies twice": (
        1,
        "5",
        [{"at": 7, "how": "SIGABRT", "times": 9}],
        "iteration 7, where it died before",
        1,
    ),
    "all restarts of an hour": (1, "2", [{"at": at} for at in (5, 10, 15)], "started again 2 times within an hour", 2),
    "an exception of one rank": (2, "5", [{"rank": 1, "at": 7, "how": "raise"}], "rank 1 failed at iteration 7", 0),
}


@pytest.mark.parametrize("why", tiered(ENDS, "all restarts of an hour", "an exception of one rank"))
def test_what_ends_a_run_is_named(tmp_path, why):
    ranks, restarts, died, words, count = ENDS[why]
    process = supervised(tmp_path, "--restarts", restarts, ranks=ranks, task_options={"deaths": died})
    ended = finish(tmp_path, process, code=1)
    assert words in ended["reason"] and ended["status"] == "failed"
    assert output(tmp_path).count("Restart ") == count


@pytest.mark.parametrize("when", ["training", "starting again and again"])
def test_ctrl_c_means_what_it_does_without_restarts(tmp_path, when):
    options = {"slow_step_s": 0.05} if when == "training" else {"deaths": [{"at": 0, "times": 9999}]}
    process = supervised(tmp_path, "--restarts", "9999", task_options=options)
    if when == "training":
        wait_until(lambda: number_in(tmp_path / "at_0") > 3, process)
    else:
        wait_until(lambda: "Restart 3," in output(tmp_path), process)
    code, seconds = interrupt(process)

    assert code == 130, output(tmp_path)
    assert seconds < 10 and group_is_gone(process)
    assert "Traceback" not in output(tmp_path)
    if when == "training":
        assert summary(tmp_path)["status"] == "interrupted" and "Restart" not in output(tmp_path)


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.nightly), 2])
def test_ranks_whose_parent_was_killed_save_and_end(tmp_path, ranks):
    process = supervised(tmp_path, ranks=ranks, task_options={"slow_step_s": 0.05}, Checkpoint=MEMORY_ALONE)
    wait_until(lambda: number_in(tmp_path / "at_0") > 3, process)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()

    assert group_is_gone(process, timeout_s=20), "the ranks live on"
    ended = summary(tmp_path)
    assert (ended["status"], ended["reason"]) == ("interrupted", "SIGTERM")
    assert (tmp_path / "run" / "checkpoints" / f"iteration_{ended['iteration']:08d}").is_dir()
    assert copies_of(tmp_path) == []


@pytest.mark.nightly  # tests/ranks has ranks that stop, and above are those that are killed
def test_stopped_rank_is_killed_by_its_peers_and_all_go_on(tmp_path, weights):
    options = {"deaths": [{"rank": 1, "at": 7, "how": "SIGSTOP"}]}
    waits = {"heartbeat_timeout": 1.0}
    process = supervised(tmp_path, ranks=2, task_options=options, distributed=waits, Checkpoint=MEMORY_ALONE)
    assert finish(tmp_path, process)["weights_sha256"] == weights(2)
    assert "Restart 1" in output(tmp_path) and "Resumed from memory" in log_of(tmp_path)
    assert copies_of(tmp_path) == []


@pytest.mark.nightly  # the peers wait three seconds
def test_rank_that_its_peers_wait_for_in_vain_hangs_and_all_go_on(tmp_path, weights):
    options = {"deaths": [{"rank": 1, "at": 7, "how": "hang"}]}
    process = supervised(tmp_path, ranks=2, task_options=options, distributed={"timeout": 3})
    assert finish(tmp_path, process)["weights_sha256"] == weights(2)
    assert re.search(r"Rank 1 \(process \d+\) hangs in iteration 7\. Restart 1, of", output(tmp_path))


@pytest.mark.nightly
def test_where_everything_was_killed_the_next_start_goes_on_from_memory(tmp_path, weights):
    """A replay between leaves the copies alone."""
    sections = {"Checkpoint": MEMORY_ALONE, "task_options": {"slow_step_s": 0.02}}
    process = supervised(tmp_path, **sections)
    wait_until(lambda: number_in(tmp_path / "at_0") >= 6, process)
    kill_everything(process)
    before = {path: path.read_bytes() for path in slots_of(tmp_path)}
    command("replay", tmp_path / "run", "--at", 2)
    assert {path: path.read_bytes() for path in slots_of(tmp_path)} == before != {}
    ended = finish(tmp_path, supervised(tmp_path, **sections))

    assert "Resumed from memory" in log_of(tmp_path) and ended["weights_sha256"] == weights()
    assert copies_of(tmp_path) == []


@pytest.mark.nightly  # starts processes and kills them, again and again
@pytest.mark.parametrize("ranks", [1, 2])
def test_killed_at_random_instants_it_loses_an_iteration_each_time_and_no_bit(tmp_path, ranks):
    """One rank or all of them; sometimes again before the restart has trained."""
    length = {"run": {**BASE["run"], "max_iterations": 20 * (15 + KILLS // 2)}}
    whole = supervised(tmp_path / "whole", "--traceback", ranks=ranks, Checkpoint={"every": 50}, **length)
    expected = finish(tmp_path / "whole", whole)["weights_sha256"]
    draw, folder, kills = random.Random(10 + ranks), tmp_path / "run", 0
    sections = {"task_options": {"slow_step_s": 0.005}, "Checkpoint": {"every": 50, "memory": 1}, **length}
    process = supervised(folder, "--restarts", "999", ranks=ranks, **sections)
    while kills < KILLS and process.poll() is None:
        before = number_in(folder / "at_0")
        time.sleep(draw.uniform(0.0, 0.3))
        with contextlib.suppress(psutil.Error):  # one has ended meanwhile
            living = ranks_of(process)
            for rank in living if draw.random() < 0.3 else living[-1:]:
                rank.kill()
            kills += 1
        # beyond the iteration of this kill: one that dies twice ends the run
        again, killed_at = draw.random() < 0.3 and before == 0, number_in(folder / "at_0")
        wait_until(lambda at=killed_at, again=again: again or number_in(folder / "at_0") > at + 2, process)
    ended = finish(folder, process)
    pairs = re.findall(r"iteration (\d+)\. Restart|Resumed from .*? at iteration (\d+)", output(folder))
    lost = [int(at) - int(to) for (at, _), (_, to) in itertools.pairwise(pairs) if at and to]

    assert ended["weights_sha256"] == expected, output(folder)
    assert kills == KILLS and lost and max(lost) <= ranks, "the killed iteration, and one that a peer had begun"
    assert copies_of(tmp_path) == []


@pytest.mark.nightly  # each rank imports torch
def test_ranks_that_torchrun_starts_again_go_on_from_memory(tmp_path):
    digests = []
    for how in ("whole", "killed"):
        options = {"directory": str(tmp_path / how), "slow_step_s": 0.02 if how == "killed" else 0.0}
        config = write_config(tmp_path / how, base=BASE, task_options=options, Checkpoint=MEMORY_ALONE)
        torchrun = ["--nproc-per-node=2", "--max-restarts=1", f"--master-port={free_port()}", "-m", "ignite_engine"]
        words = [sys.executable, "-m", "torch.distributed.run", *torchrun, "train", str(config), "--backend", "gloo"]
        with (tmp_path / how / "output.txt").open("w") as file:
            process = subprocess.Popen(words, env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=file, stderr=file)
        if how == "killed":
            wait_until(lambda: number_in(tmp_path / "killed" / "at_0") >= 6, timeout_s=100)
            kill = [child for child in psutil.Process(process.pid).children() if "--backend" in child.cmdline()][-1]
            kill.kill()
        assert process.wait(timeout=120) == 0, output(tmp_path / how)
        digests.append(summary(tmp_path / how)["weights_sha256"])
    assert "Resumed from memory at iteration" in log_of(tmp_path / "killed")
    assert digests[0] == digests[1] and copies_of(tmp_path) == []
