"""SIGKILL at random instants, again and again: one iteration is lost each time at most, and no bit.

``KILLS=100`` makes a hundred in each layout, a quarter of them each meant for a start, a copy, a save, and any instant.
"""

from __future__ import annotations

import logging
import mmap
import os
import random
import signal
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ignite.engine import Events

from ignite_engine.ext.recovery import slots
from ignite_engine.ext.recovery.memory import Memory
from ignite_engine.handlers import Checkpoint, MetricLogger
from ignite_engine.handlers.checkpoint.saver import Saver
from ignite_engine.run_directory import weights_sha256
from tests.builders import linear, numbers_loader, trainer_of
from tests.checkpointing.file_faults import start_child, wait_for
from tests.sharded import in_layout

pytestmark = [pytest.mark.faults, pytest.mark.distributed, pytest.mark.long]
EPOCHS = 10
KILLS = int(os.environ.get("KILLS", "10"))
KILLED = -signal.SIGKILL
STARTING, TRAINING, COPYING, SAVING = range(4)
PLACES = ("starting", "training", "copying", "saving")
Children = Sequence[tuple[int, int]]


@pytest.fixture(autouse=True)
def shared_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    root = tmp_path / "shm"
    root.mkdir()
    monkeypatch.setattr(slots, "ROOT", root)
    yield root


class Progress:
    """What the ranks of a run say of themselves, in memory that outlives them."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, 32)

    def clear(self) -> None:
        self._memory[:] = bytes(32)

    @property
    def resumed_at(self) -> int | None:
        """None: it was not resumed yet."""
        return int.from_bytes(self._memory[:8], "little") - 1 if any(self._memory[:8]) else None

    @resumed_at.setter
    def resumed_at(self, iteration: int | None) -> None:
        self._memory[:8] = (0 if iteration is None else iteration + 1).to_bytes(8, "little")

    @property
    def completed(self) -> int:
        """The last iteration whose update is done on some rank."""
        return max(int.from_bytes(self._memory[at : at + 8], "little") for at in (8, 16))

    def complete(self, rank: int, iteration: int) -> None:
        self._memory[8 + 8 * rank : 16 + 8 * rank] = iteration.to_bytes(8, "little")

    @property
    def places(self) -> bytes:
        """Of the ranks."""
        return self._memory[24:26]

    def enter(self, rank: int, place: int) -> int:
        """Returns the place where the rank was."""
        before = self._memory[24 + rank]
        self._memory[24 + rank] = place
        return before


def train(directory: Path, progress: Progress, layout: str, memory: int | None = 1, sleep_s: float = 0.0) -> Any:
    rank = dist.get_rank() if dist.is_initialized() else 0
    model: Any = in_layout(layout, linear(dropout=True))[0]  # type: ignore[arg-type]  # a Sequential
    trainer = trainer_of(model)
    torch.manual_seed(rank)
    MetricLogger(directory, console=False).attach(trainer, Events.ITERATION_COMPLETED(every=3))
    checkpoint = Checkpoint(directory / "checkpoints", memory=memory)
    checkpoint.attach(trainer, Events.ITERATION_COMPLETED(every=7))
    trainer.add_event_handler(Events.ITERATION_STARTED, lambda: time.sleep(sleep_s))
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: progress.complete(rank, trainer.state.iteration))
    checkpoint.resume()
    progress.complete(rank, trainer.state.iteration)
    progress.resumed_at = trainer.state.iteration
    progress.enter(rank, TRAINING)
    trainer.run(numbers_loader(48, 2, shuffle=True), max_epochs=EPOCHS)
    return [weights_sha256(model), (directory / "metrics.jsonl").read_text()]


def noted(whole: Callable[..., Any], place: int, rank: int, progress: Progress) -> Callable[..., Any]:
    def within(*args: Any, **options: Any) -> Any:
        before = progress.enter(rank, place)
        try:
            return whole(*args, **options)
        finally:
            progress.enter(rank, before)

    return within


def one_rank(rank: int, world_size: int, meeting_point: Path, directory: Path, progress: Progress, *rest: Any) -> Any:
    Memory.write = noted(Memory.write, COPYING, rank, progress)  # type: ignore[method-assign]
    Saver.save = noted(Saver.save, SAVING, rank, progress)  # type: ignore[method-assign]
    logging.getLogger("torch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    if world_size > 1:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{meeting_point}",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=20),
        )
    result = train(directory, progress, *rest)
    if world_size > 1:
        dist.destroy_process_group()
    return result


def kill_at_random(children: Children, progress: Progress, draw: random.Random) -> None:
    """One rank or all, at an instant within a place that is drawn."""
    place = draw.choice([STARTING, TRAINING, COPYING, SAVING])
    until = time.monotonic() + 30.0
    while place != STARTING and progress.resumed_at is None and time.monotonic() < until:
        time.sleep(0.002)
    if place in (COPYING, SAVING):
        until = time.monotonic() + 1.0
        while place not in progress.places and time.monotonic() < until:
            pass  # a copy takes less than a millisecond
        if draw.random() < 0.5:
            time.sleep(draw.uniform(0.0, 0.0003 if place == COPYING else 0.005))
    else:
        time.sleep(draw.uniform(0.0, 0.3))
    alone = place != STARTING and draw.random() < 0.3  # while they start, a peer would wait for the group's timeout
    for process, _ in draw.sample(list(children), 1 if alone else len(children)):
        os.kill(process, signal.SIGKILL)
        time.sleep(draw.choice([0.0, 0.01]))


def train_killed(folder: Path, root: Path, layout: str, world_size: int) -> dict[str, Any]:
    """Runs, each killed until it ends, until so many kills have struck, also within a copy and within a save."""
    draw, progress = random.Random(world_size), Progress()
    lost: list[int] = []
    ends: list[Any] = []
    starts, struck = 0, Counter[str]()

    def enough() -> bool:
        return struck.total() >= KILLS and {"copying", "saving"} <= struck.keys()

    while not (ends and enough()):
        directory, completed, finished = folder / f"run_{len(ends)}", 0, False
        while not finished:
            progress.clear()
            starts += 1
            rest = (world_size, folder / f"meeting_{starts}", directory, progress, layout, 1, 0.002)
            children = [start_child(partial(one_rank, rank, *rest)) for rank in range(world_size)]
            if not enough():
                kill_at_random(children, progress, draw)
            results = [wait_for(child, timeout_s=100) for child in children]
            codes = [code for code, _ in results]
            finished = set(codes) == {0}
            assert finished or KILLED in codes, codes
            if not finished:
                struck[PLACES[max(progress.places)]] += 1
            assert len(list(root.iterdir())) <= 1, "copies of the ranks that were killed are left"
            if progress.resumed_at is not None:
                lost.append(completed - progress.resumed_at)
                completed = progress.completed
        ends.append(results[0][1])
    return {"lost": lost, "ends": ends, "struck": struck, "starts": starts}


@pytest.mark.parametrize(("world_size", "layout"), [(1, "plain"), (2, "ddp"), (2, "fsdp")])
def test_killed_at_random_instants(world_size: int, layout: str, tmp_path: Path, shared_memory: Path) -> None:
    progress = Progress()
    train(tmp_path / "imports", progress, "plain")  # here, so that the forked processes need not
    meeting, plain = tmp_path / "meeting", tmp_path / "plain"
    reference = [
        start_child(partial(one_rank, rank, world_size, meeting, plain, progress, layout, None))
        for rank in range(world_size)
    ]
    undisturbed, *_ = (wait_for(child)[1] for child in reference)
    result = train_killed(tmp_path, shared_memory, layout, world_size)

    print(layout, result["struck"], Counter(result["lost"]), f"{result['starts']} starts, {len(result['ends'])} runs")
    assert max(result["lost"]) <= 1
    assert all(end == undisturbed for end in result["ends"])
    assert list(shared_memory.iterdir()) == []
