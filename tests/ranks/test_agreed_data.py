"""Two gloo ranks whose data ends, fails or waits at different places: they agree on each group before its step."""

import os
import signal
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ignite.engine import Events
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset

from ignite_engine import Trainer, TrainingEvents, Update, loader
from ignite_engine.errors import Interrupted
from ignite_engine.handlers import Checkpoint, GracefulStop
from ignite_engine.ranks import agreement
from tests.kit.tiny import Numbers, linear, mse, one
from tests.ranks.forkserver import on_ranks

pytestmark = pytest.mark.distributed


class Stream(IterableDataset[Any]):
    """Batches of a rank, without a length: the numbers from ``100 * rank`` on."""

    def __init__(self, rank, count, at=-1, then=lambda: None):
        self.rank, self.count, self.at, self.then = rank, count, at, then

    def __iter__(self):
        for index in range(self.count):
            if index == self.at:
                self.then()
            yield torch.tensor([100.0 * self.rank + index])


def trainer_and_seen(steps=None):
    trainer, seen = Trainer(lambda engine, batch: None, steps), list[Any]()

    @trainer.on(Events.ITERATION_COMPLETED)
    def note():
        state = trainer.state
        group = state.batch if steps else [state.batch]
        seen.append((state.epoch, [int(batch) for batch in group[: len(group) - state.padding]], state.group_total))

    return trainer, seen


def uneven_epochs(rank):
    trainer, seen = trainer_and_seen()
    events = list[str]()
    for event in (Events.EPOCH_STARTED, Events.DATALOADER_STOP_ITERATION, Events.EPOCH_COMPLETED):
        trainer.add_event_handler(event, lambda engine, name: events.append(name), event.name)
    trainer.run(DataLoader(Stream(rank, (7, 4)[rank]), batch_size=None), max_epochs=3)
    return {"seen": seen, "events": events, "length": trainer.state.epoch_length}


def groups(rank):
    trainer, seen = trainer_and_seen(3)
    trainer.run(DataLoader(Stream(rank, (7, 4)[rank]), batch_size=None), max_epochs=1)
    return seen


def error_of_one(rank):
    def fail():
        raise OSError(5, "the disk is gone")

    trainer, seen = trainer_and_seen()
    data = DataLoader(Stream(rank, 6, at=3 if rank else -1, then=fail), batch_size=None)
    try:
        trainer.run(data)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}", "seen": len(seen), "status": trainer.state.status}


def stop_of_one(rank):
    """Rank 1 waits for long for its fourth batch; a signal comes meanwhile."""
    trainer, seen = trainer_and_seen()

    def wait():
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGTERM)).start()
        time.sleep(60)

    GracefulStop().attach(trainer)
    saved = {}

    @trainer.on(TrainingEvents.RESUME_POINT)
    def save():
        shared, local = trainer.registry.capture()
        saved.update({**shared, **local} if trainer.state.stopping else {})

    started = time.monotonic()
    try:
        trainer.run(DataLoader(Stream(rank, 6, at=3 if rank else -1, then=wait), batch_size=None))
    except Interrupted as error:
        code = error.code
    taken = time.monotonic() - started
    rest, seen_after = trainer_and_seen()
    rest.registry.load(saved, source="memory")
    rest.run(DataLoader(Stream(rank, 6), batch_size=None))
    return {"code": code, "seen": seen, "rest": seen_after, "waited": taken > 30}


def without_a_batch(rank):
    """One sample for two ranks: the other one trains on it, too, with weight zero."""
    model = DistributedDataParallel(linear())
    trainer = Trainer(Update(model, torch.optim.SGD(model.parameters(), lr=0.1), mse))
    trainer.run(loader(Numbers(1), 2), max_epochs=3)
    return one(model), trainer.state.iteration


def counted(rank, sized):
    """The collectives of each step: those that wait, those that do not, and waits for one of the latter."""
    calls = list[str]()
    gather = dist.all_gather

    def counting(tensors, tensor, *, async_op=False, **options):
        calls.append("started" if async_op else "waited for")
        return gather(tensors, tensor, async_op=async_op, **options)

    model = DistributedDataParallel(linear())
    update = Update(model, torch.optim.SGD(model.parameters(), lr=0.1), mse, weight_fn=lambda batch: len(batch[0]))
    trainer, steps = Trainer(update), list[list[str]]()

    @trainer.on(Events.ITERATION_COMPLETED)
    def note():
        steps.append(list(calls))
        calls.clear()

    data = loader(Numbers(22), 2)
    dist.all_gather, period = counting, agreement._VOTE_PERIOD_S
    agreement._VOTE_PERIOD_S = 1e6  # one vote, at the first step
    try:
        trainer.run(data if sized else (batch for batch in list(data)), max_epochs=1)
    finally:
        dist.all_gather, agreement._VOTE_PERIOD_S = gather, period
    return steps


class Noise(nn.Module):
    """Draws from a generator of its own."""

    def __init__(self):
        super().__init__()
        self.generator = torch.Generator().manual_seed(5)

    def forward(self, hidden):
        return hidden + 0.1 * torch.randn(hidden.shape, generator=self.generator)


def without_statistics(rank):
    """Rank 1 repeats its last batch twice; its generators and statistics stay as they are in the meantime."""
    torch.manual_seed(rank)
    inner = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), Noise(), nn.Linear(4, 1))
    model = DistributedDataParallel(inner, broadcast_buffers=False)
    trainer = Trainer(Update(model, torch.optim.SGD(model.parameters(), lr=0.1), mse))
    seen = list[Any]()

    @trainer.on(Events.ITERATION_COMPLETED)
    def note():
        drawn = torch.stack([torch.get_rng_state(), inner[3].generator.get_state()])
        seen.append((inner[1].running_mean.clone(), int(inner[1].num_batches_tracked), drawn))

    batches = list(DataLoader(Numbers(8), 2))
    mine = batches[: 4 - 2 * rank]
    trainer.run(mine, max_epochs=1)
    trainer.run(iter(mine), max_epochs=1)
    return [seen[:4], seen[4:]]


def shared_statistics(rank):
    """Rank 1 has one group, rank 0 three: what DDP gives rank 1 before each of the others is not changed there."""
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    model = DistributedDataParallel(inner)
    trainer = Trainer(Update(model, torch.optim.SGD(model.parameters(), lr=0.1), mse), accumulation_steps=2)
    seen = list[Any]()

    @trainer.on(Events.ITERATION_COMPLETED)
    def note():
        seen.append(inner[1].running_mean.clone())

    trainer.run(list(DataLoader(Numbers(12), 2))[: 6 if rank == 0 else 2], max_epochs=1)
    return seen


def repeated(rank):
    """What a run sees in each iteration, and what one sees that is resumed at each of its step boundaries."""

    def run(data, state, options):
        trainer, seen, saved = Trainer(lambda engine, batch: None, **options), list[Any](), list[Any]()
        trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: seen.append([*trainer.state.batch]))
        trainer.add_event_handler(TrainingEvents.RESUME_POINT, lambda: saved.append(trainer.registry.capture()))
        if state is not None:
            trainer.registry.load({**state[0], **state[1]}, source="memory")
        trainer.run(data, max_epochs=2)
        return seen, saved

    found = list[Any]()
    listed = [torch.tensor([10 * rank + index]) for index in range(7 if rank == 0 else 3)]
    by_rank, dealt = {"accumulation_steps": 2}, {"global_micro_batches": 4}
    shuffled = partial(loader, torch.arange(5), 1, shuffle=True)
    for make, options in ((shuffled, by_rank), (lambda: listed, by_rank), (shuffled, dealt)):
        whole, saved = run(make(), None, options)
        found.append([(whole[index:], run(make(), saved[index - 1], options)[0]) for index in range(1, len(whole))])
    return found


def one_iterator(rank):
    """An iterator that can be read only once, of 9 or 5 batches in groups of 2: what a run that pauses trains on."""

    def run(pause):
        trainer, seen = trainer_and_seen(2)
        data = iter(Stream(rank, (9, 5)[rank]))
        if pause is not None:
            trainer.add_event_handler(Events.ITERATION_COMPLETED(event_filter=lambda _, count: count in (1, 4)), pause)
        while trainer.state.iteration < 5:
            trainer.run(data, max_iters=5)
        return seen

    def stop(trainer):
        trainer.vote_at_next_boundary()
        trainer.request_stop("a pause")

    return [run(None), run(lambda trainer: trainer.interrupt()), run(stop)]


CASES = {
    "one iterator": one_iterator,
    "uneven epochs": uneven_epochs,
    "groups": groups,
    "error": error_of_one,
    "stop": stop_of_one,
    "without a batch": without_a_batch,
    "sized": lambda rank: counted(rank, True),
    "unsized": lambda rank: counted(rank, False),
    "statistics": without_statistics,
    "shared statistics": shared_statistics,
    "repeated": repeated,
}


def _rank(rank, folder):
    torch.save({name: case(rank) for name, case in CASES.items()}, f"{folder}/{rank}.pt")


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    folder = tmp_path_factory.mktemp("agreed")
    on_ranks(2, _rank, folder)
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(2)]


@pytest.mark.row("H2")
def test_epochs_of_unsized_data_end_together(reports):
    first, second = (each["uneven epochs"] for each in reports)

    assert first["seen"] == [(epoch, [index], 1 + (index < 4)) for epoch in (1, 2, 3) for index in range(7)]
    assert [epoch for epoch, _, _ in second["seen"]] == [1] * 7 + [2] * 7 + [3] * 7
    assert [batch for _, batch, _ in second["seen"]] == [[100], [101], [102], [103], [], [], []] * 3
    assert first["events"] == second["events"]
    assert first["events"] == ["EPOCH_STARTED", "DATALOADER_STOP_ITERATION", "EPOCH_COMPLETED"] * 3
    assert first["length"] == second["length"] == 7


def test_a_short_group_is_filled_up_to_the_longest(reports):
    assert [each["groups"] for each in reports] == [
        [(1, [0, 1, 2], 6), (1, [3, 4, 5], 4), (1, [6], 1)],
        [(1, [100, 101, 102], 6), (1, [103], 4), (1, [], 1)],
    ]


def test_an_error_in_the_data_of_one_rank_is_named_on_all(reports):
    first, second = (each["error"] for each in reports)

    assert second["error"] == "OSError: [Errno 5] the disk is gone"
    assert first["error"] == "PeerFailed: Rank 1 failed, reading its data: the disk is gone"
    assert [each["seen"] for each in (first, second)] == [3, 3]
    assert [each["status"] for each in (first, second)] == ["failed", "failed"]


def test_a_signal_ends_the_wait_for_data_that_is_looked_ahead(reports):
    for rank, each in enumerate(reports):
        stop = each["stop"]
        assert (stop["code"], stop["waited"]) == (143, False)
        assert stop["seen"] == [(1, [100 * rank + index], 2) for index in range(3)]
        assert stop["rest"] == [(1, [100 * rank + index], 2) for index in range(3, 6)]


def test_an_iterator_goes_on_after_a_pause_without_losing_what_was_looked_ahead(reports):
    for each in reports:
        whole, interrupted, stopped = each["one iterator"]
        assert len(whole) == 5 and interrupted == whole and stopped == whole


@pytest.mark.row("H2")
def test_a_rank_without_a_batch_trains_along(reports):
    model = linear()
    trainer = Trainer(Update(model, torch.optim.SGD(model.parameters(), lr=0.1), mse))
    trainer.run(loader(Numbers(1), 2), max_epochs=3)
    for each in reports:
        weights, iterations = each["without a batch"]
        assert iterations == 3
        torch.testing.assert_close(weights, one(model), rtol=0, atol=1e-7)


@pytest.mark.row("B11")
def test_a_step_waits_for_no_exchange_of_weights(reports):
    for each in reports:
        sized, unsized = each["sized"], each["unsized"]
        assert [step.count("started") for step in sized] == [2, 1, 1, 1, 1, 0]
        assert [step.count("started") for step in unsized] == [2, 1, 1, 1, 1, 1]
        for steps in (sized, unsized):  # the ranks compare their weights after iterations 1, 2 and 4
            assert [step.count("waited for") for step in steps][1:] == [2, 1, 0, 1, 0]


def test_a_repeated_batch_moves_neither_statistics_nor_random_numbers(reports):
    for sized in (0, 1):
        first, second = (each["statistics"][sized] for each in reports)
        start = 4 * sized
        assert [count for _, count, _ in first] == [start + 1, start + 2, start + 3, start + 4]
        assert [count - 2 * sized for _, count, _ in second] == [1, 2, 2, 2]
        assert all(
            torch.equal(second[1][0], mean) and torch.equal(second[1][2], state) for mean, _, state in second[2:]
        )
        assert not any(torch.equal(one, other) for one, other in zip(second[0][2], second[1][2], strict=True))


def test_a_rank_without_a_batch_has_the_statistics_that_ddp_gave_it(reports):
    """So they follow from what rank 0 saves: a resumed run has the same ones."""
    first, second = (each["shared statistics"] for each in reports)
    assert len(first) == 3 and not torch.equal(first[0], first[1])
    assert torch.equal(second[1], first[0]) and torch.equal(second[2], first[1])


def test_a_rank_that_is_resumed_without_a_batch_repeats_the_one_that_it_had_last(reports):
    for each in reports:
        assert [len(pairs) for pairs in each["repeated"]] == [3, 7, 3]
        for whole, resumed in (pair for pairs in each["repeated"] for pair in pairs):
            assert whole == resumed


class Drawn:
    """Has a state, and samples with a random number; a signal comes to rank 0 while one of them is made."""

    def __init__(self, kill_at=None):
        self.at, self.kill_at = 0, kill_at if agreement.rank() == 0 else None

    def __iter__(self):
        while self.at < 8:
            self.at += 1
            sample = torch.tensor([[float(self.at), torch.rand(()).item()]])
            if self.at == self.kill_at:
                self.kill_at = None
                os.kill(os.getpid(), signal.SIGTERM)
            yield sample
        self.at = 0

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


def losses_of(folder, data):
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(2, 4), nn.Dropout(0.5), nn.Linear(4, 1)))
    update = Update(model, torch.optim.SGD(model.parameters(), lr=0.01), lambda model, batch: model(batch).mean())
    trainer, losses = Trainer(update, 2), list[float]()
    checkpoint = Checkpoint(folder, strict=True)
    checkpoint.attach(trainer)
    GracefulStop(exit=False).attach(trainer)
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: losses.append(trainer.state.output["loss"].item()))
    checkpoint.resume()
    trainer.run(data, max_epochs=1)
    return losses


def _stopped_while_read(rank, folder):
    whole = losses_of(Path(folder, "whole"), Drawn())
    found = {
        at: losses_of(Path(folder, str(at)), Drawn(at)) + losses_of(Path(folder, str(at)), Drawn())
        for at in (1, 2, 5, 6)
    }
    assert len(whole) == 4 and found == dict.fromkeys(found, whole)


def test_a_signal_while_samples_are_drawn_changes_no_bit_of_the_run(tmp_path):
    on_ranks(2, _stopped_while_read, tmp_path)
