"""Copies in memory on two ranks: an iteration that both hold is resumed, whoever was killed and when."""

import itertools
import os
import shutil
import signal
import subprocess
import sys
import time
from datetime import timedelta

import pytest
import torch.distributed as dist
from ignite.engine import Events
from torch import nn

from ignite_engine.ext.recovery import slots
from ignite_engine.ext.recovery.packing import Packed
from ignite_engine.ranks import watch
from tests.ext.recovery.test_memory import ends, said_in, train
from tests.faults import processes
from tests.faults.processes import free_port, write_config
from tests.kit.faults import kill_this_process, start_child, wait_for
from tests.kit.tiny import linear
from tests.ranks.test_launch import ROOT, environment, rank_pids

pytestmark = [pytest.mark.distributed, pytest.mark.faults]
KILLED = -signal.SIGKILL
meetings = itertools.count()


@pytest.fixture(autouse=True)
def shared_memory(tmp_path, monkeypatch):
    root = tmp_path / "shm"
    root.mkdir()
    monkeypatch.setattr(slots, "ROOT", root)
    yield root


def start(world_size, directory, prepare, **options):
    """The processes of a run on several ranks, forked."""
    meeting_point = directory.parent / f"meeting_{next(meetings)}"

    def one_rank(rank):
        dist.init_process_group(
            "gloo",
            init_method=f"file://{meeting_point}",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=30),
        )
        result = train(
            directory, prepare(rank), model=nn.parallel.DistributedDataParallel(linear(dropout=True)), **options
        )
        dist.destroy_process_group()
        return result

    return [start_child(lambda rank=rank: one_rank(rank)) for rank in range(world_size)]


def run(world_size, directory, prepare=None, **options):
    """How each rank ended, and what it answered."""
    ranks = start(world_size, directory, prepare or (lambda rank: lambda trainer, checkpoint: None), **options)
    return [wait_for(rank, timeout_s=120) for rank in ranks]


def finished(world_size, directory, **options):
    results = run(world_size, directory, **options)
    assert [code for code, _ in results] == world_size * [0]
    return [answer for _, answer in results]


def killed(ranks, at, event=Events.ITERATION_COMPLETED):
    def prepare_on(rank):
        def prepare(trainer, checkpoint):
            if rank in ranks:
                trainer.add_event_handler(event(once=at), kill_this_process)

        return prepare

    return prepare_on


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    train(tmp_path_factory.mktemp("imports"), memory=None)  # here, so that the forked processes need not
    return finished(2, tmp_path_factory.mktemp("undisturbed") / "run", memory=None)


@pytest.mark.parametrize("ranks", [(0,), (1,), (0, 1)])
def test_killed_one_iteration_is_lost_and_no_bit(ranks, tmp_path, shared_memory, undisturbed):
    directory = tmp_path / "run"
    codes = [code for code, _ in run(2, directory, killed(ranks, 7))]
    assert all(codes[rank] == KILLED for rank in ranks) and 0 not in codes
    results = finished(2, directory)

    assert [result["resumed_at"] for result in results] == [6, 6]
    assert [ends(result) for result in results] == [ends(result) for result in undisturbed]
    assert said_in(results[0], "Resumed from memory at iteration 6 (disk has none)")
    assert list(shared_memory.iterdir()) == []


def test_where_a_rank_does_not_learn_which_peer_was_lost_it_keeps_its_copies(tmp_path, undisturbed):
    """On a machine that is too busy for the watch to answer in time."""
    directory, learn = tmp_path / "run", watch.Watch._learn

    def of_itself(self, failure):
        if self.rank in failure.ranks:
            learn(self, failure)

    def prepare_on(rank):
        watch._VERDICT_S = 0.0
        watch.Watch._learn = of_itself
        return killed((1,), 7)(rank)

    assert [code for code, _ in run(2, directory, prepare_on)] == [1, KILLED]
    results = finished(2, directory)

    assert [result["resumed_at"] for result in results] == [6, 6]
    assert [ends(result) for result in results] == [ends(result) for result in undisturbed]


def test_killed_within_a_copy_that_the_peer_has_made_both_take_the_one_before(tmp_path, undisturbed):
    directory, whole = tmp_path / "run", Packed.write

    def prepare_on(rank):
        calls = itertools.count(1)

        def write(self, room):
            whole(self, room)
            if next(calls) == 6:
                (directory / f"wrote_{rank}").touch()
                if rank == 1:
                    kill_this_process()

        def prepare(trainer, checkpoint):
            Packed.write = write

        return prepare

    codes = [code for code, _ in run(2, directory, prepare_on)]
    assert codes[1] == KILLED and (directory / "wrote_0").exists()
    results = finished(2, directory)

    assert [result["resumed_at"] for result in results] == [5, 5]
    assert [ends(result) for result in results] == [ends(result) for result in undisturbed]


def test_a_copy_that_the_peer_lacks_is_not_taken_for_a_later_one_of_its_number(tmp_path, undisturbed):
    """The sixth copy is made by rank 0 in the first start alone, and by rank 1 in the second."""
    directory, whole = tmp_path / "run", slots.Slot.write

    def dies_at_the_sixth(killed):
        """``killed`` before it makes that copy, when the peer has made it."""

        def prepare_on(rank):
            def write(self, header, packed):
                if header.number == 6 and rank == killed:
                    while not (directory / f"wrote_{1 - killed}").exists():
                        time.sleep(0.01)
                    kill_this_process()
                whole(self, header, packed)
                if header.number == 6:
                    (directory / f"wrote_{rank}").touch()

            def prepare(trainer, checkpoint):
                slots.Slot.write = write

            return prepare

        return prepare_on

    for killed_rank in (1, 0):
        assert run(2, directory, dies_at_the_sixth(killed_rank))[killed_rank][0] == KILLED
    results = finished(2, directory)

    assert [result["resumed_at"] for result in results] == [5, 5]
    assert [ends(result) for result in results] == [ends(result) for result in undisturbed]


def test_an_exception_of_one_rank_leaves_nothing(tmp_path, shared_memory):
    def fails(rank):
        def prepare(trainer, checkpoint):
            if rank == 1:
                trainer.add_event_handler(Events.ITERATION_COMPLETED(once=5), lambda: 1 / 0)

        return prepare

    assert [code for code, _ in run(2, tmp_path / "run", fails)] == [1, 1]
    assert list(shared_memory.iterdir()) == []


def test_a_rank_that_was_stopped_and_then_killed_loses_no_more(tmp_path, undisturbed):
    directory = tmp_path / "run"

    def stops(rank):
        def prepare(trainer, checkpoint):
            if rank == 1:
                trainer.add_event_handler(
                    Events.ITERATION_COMPLETED(once=7), lambda: os.kill(os.getpid(), signal.SIGSTOP)
                )

        return prepare

    ranks = start(2, directory, stops)
    os.waitid(os.P_PID, ranks[1][0], os.WSTOPPED | os.WNOWAIT)
    for process, _ in ranks:
        os.kill(process, signal.SIGKILL)
    assert [wait_for(rank)[0] for rank in ranks] == [KILLED, KILLED]
    results = finished(2, directory)

    assert [result["resumed_at"] for result in results] == [6, 6]
    assert [ends(result) for result in results] == [ends(result) for result in undisturbed]


@pytest.mark.parametrize(("before", "now"), [(2, 1), (1, 2)])
def test_on_another_number_of_ranks_it_goes_on_as_from_disk(before, now, tmp_path, shared_memory):
    """One copy is resumed from memory, one checkpoint of the same iteration from disk."""
    memory, disk = tmp_path / "memory", tmp_path / "disk"
    assert {code for code, _ in run(before, memory, killed((0, 1), 5))} == {KILLED}
    assert {code for code, _ in run(before, disk, killed((0, 1), 5), save_every=4, memory=None)} == {KILLED}
    from_memory = finished(now, memory, save_every=4)
    from_disk = finished(now, disk, save_every=4, memory=None)

    assert (
        [result["resumed_at"] for result in from_memory] == [4] * now == [result["resumed_at"] for result in from_disk]
    )
    assert said_in(from_memory[0], "Resumed from memory")
    assert [result["weights"] for result in from_memory] == [result["weights"] for result in from_disk]
    assert said_in(from_memory[0], "may go on with other bits: ranks: ")
    assert list(shared_memory.iterdir()) == []


def test_killed_on_fewer_ranks_before_a_copy_all_ranks_still_have_theirs(tmp_path, shared_memory, undisturbed):
    directory = tmp_path / "run"
    assert {code for code, _ in run(2, directory, killed((0, 1), 7))} == {KILLED}
    assert run(1, directory, killed((0,), 7, Events.ITERATION_STARTED))[0][0] == KILLED
    results = finished(2, directory)

    assert [result["resumed_at"] for result in results] == [6, 6]
    assert [ends(result) for result in results] == [ends(result) for result in undisturbed]
    assert list(shared_memory.iterdir()) == []


def test_slots_of_ranks_that_are_no_more_go_with_the_second_copy(tmp_path, shared_memory):
    directory, slots_of = tmp_path / "run", ["rank_0.0", "rank_0.1", "rank_1.0", "rank_1.1"]
    run(2, directory, killed((0, 1), 5))
    for at, names in ((6, slots_of), (8, slots_of[:2])):
        assert run(1, directory, killed((0,), at))[0][0] == KILLED
        assert sorted(path.name for path in shared_memory.glob("*/rank_*")) == names


def test_a_rank_without_its_slots_sends_all_to_the_disk(tmp_path, shared_memory):
    directory = tmp_path / "run"
    run(2, directory, killed((0, 1), 10))
    for path in shared_memory.glob("*/rank_1.*"):
        path.unlink()
    results = finished(2, directory)

    assert [result["resumed_at"] for result in results] == [8, 8]
    assert said_in(results[0], "The state in memory is not used: the ranks do not hold the same iteration.")


def test_where_one_rank_has_no_room_no_rank_copies(tmp_path, shared_memory):
    def prepare_on(rank):
        def prepare(trainer, checkpoint):
            def full(descriptor, offset, size):
                raise OSError(28, "No space left on device")

            if rank == 1:
                os.posix_fallocate = full

        return prepare

    results = [answer for _, answer in run(2, tmp_path / "run", prepare_on)]

    assert all(said_in(result, "No copies of the state in memory, as") for result in results)
    assert list(shared_memory.iterdir()) == []
    shutil.rmtree(tmp_path / "run")


@pytest.mark.long  # each rank imports torch
def test_ranks_that_torchrun_starts_again_go_on_from_memory(tmp_path):
    """In this machine's shared memory, of which nothing is left."""
    digests, name = [], None
    for how in ("whole", "killed"):
        options = {"slow_step_s": 0.2, "count_reductions": True}  # until there is a file "fast"
        config = write_config(tmp_path / how, task_options=options, checkpoint={"every": 1000, "memory": 1})
        if how == "whole":
            (tmp_path / how / "fast").touch()
        torchrun = ["--nproc-per-node=2", "--max-restarts=1", f"--master-port={free_port()}", "-m", "ignite_engine"]
        command = [sys.executable, "-m", "torch.distributed.run", *torchrun, "train", str(config), "--backend", "gloo"]
        with (tmp_path / how / "output.txt").open("w") as output:
            process = subprocess.Popen(command, env=environment(), cwd=ROOT, stdout=output, stderr=output)
        if how == "killed":
            processes.wait_until(lambda: len(processes.lines(tmp_path / "killed")) >= 3, process)
            name = slots.folder_name(tmp_path / how / "run" / "checkpoints", create=False)
            assert name in os.listdir("/dev/shm")
            os.kill(rank_pids(tmp_path / how)[1], signal.SIGKILL)
            (tmp_path / how / "fast").touch()
        assert process.wait(timeout=120) == 0, (tmp_path / how / "output.txt").read_text()
        digests.append(processes.summary(tmp_path / how)["weights_sha256"])
    said = (tmp_path / "killed" / "run" / "logs" / "rank_0.log").read_text()
    assert "Resumed from memory at iteration" in said and "(disk has none)" in said
    assert digests[0] == digests[1]
    assert name not in os.listdir("/dev/shm")
