"""SIGKILL at random instants, again and again: one iteration is lost each time at most, and no bit.

``KILLS=100`` makes a hundred in each layout, a quarter of them each meant for a start, a copy, a save, and any instant.
"""

import logging
import mmap
import os
import random
import signal
import time
import warnings
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from functools import partial

import pytest
import torch
import torch.distributed as dist
from ignite.engine import Events

from ignite_engine.ext.recovery import slots
from ignite_engine.ext.recovery.memory import Memory
from ignite_engine.handlers import Checkpoint, MetricLogger
from ignite_engine.handlers.checkpoint.saver import Saver
from ignite_engine.run_directory import weights_sha256
from tests.kit.faults import start_child, wait_for
from tests.kit.sharded import in_layout
from tests.kit.tiny import linear, numbers_loader, trainer_of

pytestmark = [pytest.mark.faults, pytest.mark.distributed, pytest.mark.long]
EPOCHS = 10
KILLS = int(os.environ.get("KILLS", "10"))
KILLED = -signal.SIGKILL
STARTING, TRAINING, COPYING, SAVING = range(4)
PLACES = ("starting", "training", "copying", "saving")
Children = Sequence[tuple[int, int]]


@pytest.fixture(autouse=True)
def shared_memory(tmp_path, monkeypatch):
    root = tmp_path / "shm"
    root.mkdir()
    monkeypatch.setattr(slots, "ROOT", root)
    yield root


class Progress:
    """What the ranks of a run say of themselves, in memory that outlives them."""

    def __init__(self):
        self._memory = mmap.mmap(-1, 32)

    def clear(self):
        self._memory[:] = bytes(32)

    @property
    def resumed_at(self):
        """None: it was not resumed yet."""
        return int.from_bytes(self._memory[:8], "little") - 1 if any(self._memory[:8]) else None

    @resumed_at.setter
    def resumed_at(self, iteration):
        self._memory[:8] = (0 if iteration is None else iteration + 1).to_bytes(8, "little")

    @property
    def completed(self):
        """The last iteration whose update is done on some rank."""
        return max(int.from_bytes(self._memory[at : at + 8], "little") for at in (8, 16))

    def complete(self, rank, iteration):
        self._memory[8 + 8 * rank : 16 + 8 * rank] = iteration.to_bytes(8, "little")

    @property
    def places(self):
        """Of the ranks."""
        return self._memory[24:26]

    def enter(self, rank, place):
        """Returns the place where the rank was."""
        before = self._memory[24 + rank]
        self._memory[24 + rank] = place
        return before


def train(directory, progress, layout, memory=1, sleep_s=0.0):
    rank = dist.get_rank() if dist.is_initialized() else 0
    model = in_layout(layout, linear(dropout=True))[0]
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


def noted(whole, place, rank, progress):
    def within(*args, **options):
        before = progress.enter(rank, place)
        try:
            return whole(*args, **options)
        finally:
            progress.enter(rank, before)

    return within


def one_rank(rank, world_size, meeting_point, directory, progress, *rest):
    Memory.write = noted(Memory.write, COPYING, rank, progress)
    Saver.save = noted(Saver.save, SAVING, rank, progress)
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


def kill_at_random(children, progress, draw):
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


def train_killed(folder, root, layout, world_size):
    """Runs, each killed until it ends, until so many kills have struck, also within a copy and within a save."""
    draw, progress = random.Random(world_size), Progress()
    lost = []
    ends = []
    starts, struck = 0, Counter[str]()

    def enough():
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
def test_killed_at_random_instants(world_size, layout, tmp_path, shared_memory):
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
