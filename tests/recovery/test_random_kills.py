"""SIGKILL at random instants, again and again: one iteration is lost each time at most, and no bit."""

from __future__ import annotations

import mmap
import os
import random
import signal
import time
from collections.abc import Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ignite.engine import Events
from torch import nn

from ignite_engine.handlers import Checkpoint, MetricLogger
from ignite_engine.recovery import slots
from tests.builders import linear, numbers_loader, trainer_of, weights
from tests.checkpointing.file_faults import start_child, wait_for

pytestmark = [pytest.mark.faults, pytest.mark.distributed]
EPOCHS = 10
KILLS = int(os.environ.get("KILLS", "10"))
KILLED = -signal.SIGKILL


@pytest.fixture(autouse=True)
def shared_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    root = tmp_path / "shm"
    root.mkdir()
    monkeypatch.setattr(slots, "ROOT", root)
    yield root


def train(directory: Path, progress: mmap.mmap, memory: int | None = 1, sleep_s: float = 0.0) -> Any:
    """``progress`` has one more than the iteration that was resumed, and the last one whose update is done."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    model: Any = linear(dropout=True)
    trainer = trainer_of(nn.parallel.DistributedDataParallel(model) if dist.is_initialized() else model)
    torch.manual_seed(rank)
    MetricLogger(directory, console=False).attach(trainer, Events.ITERATION_COMPLETED(every=3))
    checkpoint = Checkpoint(directory / "checkpoints", memory=memory)
    checkpoint.attach(trainer, Events.ITERATION_COMPLETED(every=7))

    def note() -> None:
        progress[8 + 8 * rank : 16 + 8 * rank] = trainer.state.iteration.to_bytes(8, "little")

    trainer.add_event_handler(Events.ITERATION_STARTED, lambda: time.sleep(sleep_s))
    trainer.add_event_handler(Events.ITERATION_COMPLETED, note)
    checkpoint.resume()
    progress[:8] = (1 + trainer.state.iteration).to_bytes(8, "little")
    note()
    trainer.run(numbers_loader(48, 2, shuffle=True), max_epochs=EPOCHS)
    return [weights(trainer).tolist(), (directory / "metrics.jsonl").read_text()]


def one_rank(rank: int, world_size: int, meeting_point: Path, *arguments: Any) -> Any:
    if world_size > 1:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{meeting_point}",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=20),
        )
    result = train(*arguments)
    if world_size > 1:
        dist.destroy_process_group()
    return result


def kill_at_random(folder: Path, world_size: int, kills: int, seed: int) -> dict[str, Any]:
    """Runs, each killed until it ends, until so many kills have been made."""
    drawn, lost, ends, number, starts, made = random.Random(seed), [], [], 0, 0, 0
    progress = mmap.mmap(-1, 24)
    while made < kills or not ends:
        directory, finished, number = folder / f"run_{number}", False, number + 1
        completed = 0
        progress[:] = bytes(24)
        while not finished:
            starts, began = starts + 1, time.monotonic()
            meeting = folder / f"meeting_{starts}"
            children = [
                start_child(partial(one_rank, rank, world_size, meeting, directory, progress, 1, 0.002))
                for rank in range(world_size)
            ]
            if made < kills:
                if drawn.random() < 0.75:  # else at any instant of the start
                    while int.from_bytes(progress[:8], "little") == 0 and time.monotonic() < began + 30:
                        time.sleep(0.002)
                time.sleep(drawn.uniform(0, 0.3))
                made += 1
                for process, _ in drawn.sample(children, world_size):
                    os.kill(process, signal.SIGKILL)
                    time.sleep(drawn.choice([0.0, 0.01]))
            results = [wait_for(child, timeout_s=100) for child in children]
            assert {code for code, _ in results} <= {KILLED, 0, 1}
            finished = results[0][0] == 0 and results[-1][0] == 0
            if begun := int.from_bytes(progress[:8], "little"):
                lost.append(completed - (begun - 1))
            completed = max(int.from_bytes(progress[at : at + 8], "little") for at in (8, 16))
            progress[:8] = bytes(8)
            if finished:
                ends.append(results[0][1])
    return {"lost": lost, "ends": ends, "starts": starts}


@pytest.mark.parametrize("world_size", [1, 2])
def test_killed_at_random_instants(world_size: int, tmp_path: Path, shared_memory: Path) -> None:
    progress = mmap.mmap(-1, 24)
    train(tmp_path / "imports", progress)  # here, so that the forked processes need not
    reference = [
        start_child(partial(one_rank, rank, world_size, tmp_path / "meeting", tmp_path / "plain", progress, None))
        for rank in range(world_size)
    ]
    undisturbed, *_ = (wait_for(child)[1] for child in reference)
    result = kill_at_random(tmp_path, world_size, kills=KILLS, seed=world_size)

    print(result["starts"], sorted(result["lost"]), len(result["ends"]))
    assert max(result["lost"]) <= 1
    assert all(end == undisturbed for end in result["ends"])
    assert list(shared_memory.iterdir()) == []
