"""SIGKILL of one rank in a sharded save: no half of it is ever taken, the peer ends, and the one before loads."""

import contextlib
import signal
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from ignite_engine.checkpointing import CheckpointError, CheckpointStore
from tests.kit.faults import FileOperations, kill_this_process, start_child, wait_for

pytestmark = [pytest.mark.distributed, pytest.mark.faults]


def save(store, iteration, rank):
    mesh = init_device_mesh("cpu", (2,))
    weight = distribute_tensor(torch.full((5, 3), float(iteration)), mesh, [Shard(0)])
    return store.save({"model": {"weight": weight}}, {"rng": {"own": rank}}, iteration=iteration, epoch=1)


def two_ranks(directory, meeting_point, victim, at):
    """A good save, then one in which a rank is killed; how both ended, and whether the other got an error."""

    def one_rank(rank):
        dist.init_process_group(
            "gloo", init_method=f"file://{meeting_point}", rank=rank, world_size=2, timeout=timedelta(seconds=30)
        )
        store = CheckpointStore(directory)
        save(store, 100, rank)
        dist.barrier()
        kills = (
            FileOperations(directory, at=at, action=kill_this_process) if rank == victim else contextlib.nullcontext()
        )
        try:
            with kills:
                save(store, 200, rank)
        except (CheckpointError, RuntimeError) as error:
            return str(error)
        return "saved"

    children = [start_child(lambda rank=rank: one_rank(rank)) for rank in range(2)]
    return [wait_for(child) for child in children]


POINTS = [
    (0, ("write", "/shards_0.pt")),
    (1, ("open", "/shards_1.pt")),
    (1, ("fsync", "/shards_1.pt")),
    (0, ("fsync", "/manifest.json")),
    (0, ("rename", "> iteration_00000200")),
]


@pytest.mark.parametrize(("victim", "at"), POINTS)
def test_a_rank_that_is_killed_in_a_save_leaves_the_newest_whole_one(tmp_path, victim, at):
    directory = tmp_path / "directory"
    directory.mkdir()
    ended = two_ranks(directory, tmp_path / "meeting", victim, at)
    assert ended[victim][0] == -signal.SIGKILL
    code, error = ended[1 - victim]
    assert code == 0 and error != "saved"
    store = CheckpointStore(directory)
    newest, skipped = store.latest()
    assert newest is not None and newest.iteration == 100 and skipped == []
    assert torch.equal(store.load(newest.path).shared["model"]["weight"], torch.full((5, 3), 100.0))
    store.sweep()
    assert {each.name for each in directory.iterdir()} == {each.path.name for each in store.checkpoints()}
