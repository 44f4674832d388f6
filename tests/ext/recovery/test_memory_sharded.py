"""Sharded models go on from the copies of all ranks, in the layout they had or in another one."""

import logging
import signal
import warnings
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from ignite.engine import Events

from ignite_engine.ext.recovery import slots
from tests.kit.faults import kill_this_process, start_child, wait_for
from tests.kit.sharded import train, trainer_in

pytestmark = [pytest.mark.distributed, pytest.mark.faults]
KILLED = -signal.SIGKILL


@pytest.fixture(autouse=True)
def shared_memory(tmp_path, monkeypatch):
    root = tmp_path / "shm"
    root.mkdir()
    monkeypatch.setattr(slots, "ROOT", root)
    yield root


def run(world_size, layout, folder, killed=(), **options):
    """How each rank ended that trains 8 iterations, and what it has come to; ``killed`` die at the 6th."""
    number = len(list(folder.parent.glob("meeting_*")))

    def one_rank(rank):
        torch.set_num_threads(1)
        logging.getLogger("torch").setLevel(logging.ERROR)
        warnings.simplefilter("ignore")
        meeting_point = f"file://{folder.parent}/meeting_{number}"
        timeout = timedelta(seconds=30)
        dist.init_process_group("gloo", init_method=meeting_point, rank=rank, world_size=world_size, timeout=timeout)
        trainer, checkpoint, data = trainer_in(layout, folder, **options)
        if rank in killed:
            trainer.add_event_handler(Events.ITERATION_COMPLETED(once=6), kill_this_process)
        found = checkpoint.resume()
        resumed = None if found is None else (found.name, trainer.state.iteration)
        answer = {**train(trainer, data), "resumed": resumed}
        dist.destroy_process_group()
        return answer

    children = [start_child(lambda rank=rank: one_rank(rank)) for rank in range(world_size)]
    return [wait_for(child, timeout_s=120) for child in children]


def answers(ended):
    assert [code for code, _ in ended] == [0] * len(ended)
    return [answer for _, answer in ended]


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "killed"), [("fsdp", (1,)), ("tp", (0, 1))])
def test_killed_one_iteration_is_lost_and_no_bit(layout, killed, tmp_path, shared_memory):
    undisturbed = answers(run(2, layout, tmp_path / "whole"))
    codes = [code for code, _ in run(2, layout, tmp_path / "run", killed, memory=1)]
    assert all(codes[rank] == KILLED for rank in killed) and 0 not in codes
    results = answers(run(2, layout, tmp_path / "run", memory=1))

    for result, expected in zip(results, undisturbed, strict=True):
        assert result["resumed"] == [slots.MEMORY_TOKEN, 5]
        assert (result["state"], result["weights_sha256"]) == (expected["state"], expected["weights_sha256"])
        assert result["losses"] == {at: loss for at, loss in expected["losses"].items() if int(at) > 5}
    assert list(shared_memory.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize(("before", "now"), [((2, "fsdp"), (1, "plain")), ((2, "ddp"), (2, "fsdp"))])
def test_in_another_layout_it_goes_on_as_from_disk(before, now, tmp_path, shared_memory):
    """The fifth iteration from memory, the fourth from disk."""
    results = {}
    for place, options in (("memory", {"memory": 1}), ("disk", {})):
        run(*before, tmp_path / place, (0, 1), **options)
        results[place] = answers(run(*now, tmp_path / place, **options))[0]

    assert results["memory"]["resumed"] == [slots.MEMORY_TOKEN, 5]
    assert results["disk"]["resumed"] == ["iteration_00000004", 4]
    last = [results[place]["losses"]["8"] for place in ("memory", "disk")]
    assert last[0] == pytest.approx(last[1], rel=1e-4)  # the fifth was summed over other ranks
    assert list(shared_memory.iterdir()) == []


@pytest.mark.slow
def test_without_the_pieces_of_a_rank_the_disk_is_taken(tmp_path, shared_memory):
    run(2, "fsdp", tmp_path / "run", (0, 1), memory=1)
    for path in shared_memory.glob("*/rank_1.*"):
        path.unlink()
    results = answers(run(2, "fsdp", tmp_path / "run", memory=1))

    assert [result["resumed"] for result in results] == [["iteration_00000004", 4]] * 2


@pytest.mark.slow
def test_with_a_torn_slot_of_one_rank_all_take_the_copy_before(tmp_path, shared_memory):
    undisturbed = answers(run(2, "fsdp", tmp_path / "whole"))
    run(2, "fsdp", tmp_path / "run", (0, 1), memory=1)
    of_rank_1 = [slots.Slot(path) for path in shared_memory.glob("*/rank_1.*")]
    newest = max(of_rank_1, key=lambda slot: slot.header.number if slot.header else 0)
    with newest.path.open("r+b") as file:
        file.seek(4096 + 64)
        file.write(b"torn")
    results = answers(run(2, "fsdp", tmp_path / "run", memory=1))

    assert [result["resumed"] for result in results] == [[slots.MEMORY_TOKEN, 4]] * 2
    assert [result["state"] for result in results] == [result["state"] for result in undisturbed]


@pytest.mark.slow
def test_memory_auto_copies_shards(tmp_path, shared_memory):
    """The first five iterations are copied, by which it measures."""
    undisturbed = answers(run(2, "fsdp", tmp_path / "whole"))
    run(2, "fsdp", tmp_path / "run", (1,), memory="auto")
    results = answers(run(2, "fsdp", tmp_path / "run", memory="auto"))

    assert [result["resumed"] for result in results] == [[slots.MEMORY_TOKEN, 5]] * 2
    assert [result["state"] for result in results] == [result["state"] for result in undisturbed]
    assert list(shared_memory.iterdir()) == []
