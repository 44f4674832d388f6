"""Two ranks whose data ends, fails or waits at different places: they agree on each group before its step."""

import os
import shutil
import signal
import threading
from functools import partial

import pytest
import torch
import torch.distributed as dist
from ignite.engine import Events
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset

from ignite_engine import Trainer, loader
from ignite_engine.errors import Interrupted
from ignite_engine.handlers import Checkpoint, GracefulStop
from tests.kit.processes import ranks
from tests.kit.tiers import tiered
from tests.kit.tiny import Numbers, trainer_of


class Stream(IterableDataset):
    """Batches of a rank, without a length: the numbers from ``100 * rank`` on."""

    def __init__(self, rank, count, at=-1, then=lambda: None):
        self.rank, self.count, self.at, self.then = rank, count, at, then

    def __iter__(self):
        for index in range(self.count):
            if index == self.at:
                self.then()
            yield torch.tensor([100.0 * self.rank + index])


def trainer_and_seen(steps=None):
    """What it trained on in each iteration: the epoch, this rank's numbers, the batches of all ranks together."""
    trainer, seen = Trainer(lambda engine, batch: None, steps), []

    @trainer.on(Events.ITERATION_COMPLETED)
    def note():
        state = trainer.state
        seen.append((state.epoch, [int(batch) for batch in state.group.real], state.group.total))

    return trainer, seen


def streamed(*arguments, **options):
    return DataLoader(Stream(*arguments, **options), batch_size=None)


def stop_here(trainer):
    trainer.request_stop("a pause")


# ------------------------------------------------------------------------------------------------------------- ends


def uneven_epochs(rank):
    trainer, seen = trainer_and_seen()
    events = []
    for event in (Events.EPOCH_STARTED, Events.DATALOADER_STOP_ITERATION, Events.EPOCH_COMPLETED):
        trainer.add_event_handler(event, lambda engine, name: events.append(name), event.name)
    trainer.run(streamed(rank, (7, 4)[rank]), max_epochs=3)
    return seen, events, trainer.state.epoch_length


@pytest.mark.row("H2")
def test_epochs_of_unsized_data_end_together():
    (first, events, length), (second, *others) = ranks(2, uneven_epochs)

    assert first == [(epoch, [index], 1 + (index < 4)) for epoch in (1, 2, 3) for index in range(7)]
    assert [epoch for epoch, _, _ in second] == [1] * 7 + [2] * 7 + [3] * 7
    assert [batch for _, batch, _ in second] == [[100], [101], [102], [103], [], [], []] * 3
    assert [events, length] == others
    assert events == ["EPOCH_STARTED", "DATALOADER_STOP_ITERATION", "EPOCH_COMPLETED"] * 3 and length == 7


# ------------------------------------------------------------------------------------------------------------ stops


def stop_of_one(rank, folder):
    """Rank 1 waits for long for its fourth batch; a signal comes meanwhile."""
    interrupted = []

    def wait():
        threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGTERM)).start()
        interrupted.append(True)
        threading.Event().wait(60)
        interrupted.clear()

    def trainer_that_resumes():
        trainer, seen = trainer_and_seen()
        checkpoint = Checkpoint(folder)
        checkpoint.attach(trainer)
        checkpoint.resume()
        return trainer, seen

    trainer, seen = trainer_that_resumes()
    GracefulStop().attach(trainer)
    try:
        trainer.run(streamed(rank, 6, at=3 if rank else -1, then=wait))
    except Interrupted as error:
        code = error.code
    rest, seen_after = trainer_that_resumes()
    rest.run(streamed(rank, 6))
    return code, seen, seen_after, interrupted


def test_a_signal_ends_the_wait_for_data_and_no_batch_is_lost(tmp_path):
    for rank, (code, seen, rest, interrupted) in enumerate(ranks(2, stop_of_one, tmp_path)):
        assert code == 143 and interrupted == [True] * rank
        assert seen == [(1, [100 * rank + index], 2) for index in range(3)]
        assert rest == [(1, [100 * rank + index], 2) for index in range(3, 6)]


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

    return run(None), run(lambda trainer: trainer.interrupt()), run(stop_here)


def test_an_iterator_goes_on_after_a_pause_without_losing_a_batch():
    for whole, interrupted, stopped in ranks(2, one_iterator):
        assert len(whole) == 5 and interrupted == whole and stopped == whole


class Drawn:
    """Has a state, and samples with a random number; a signal comes to rank 0 while one of them is made."""

    def __init__(self, kill_at=None):
        self.at, self.kill_at = 0, kill_at if dist.get_rank() == 0 else None

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


def drawn_of(folder, data):
    """What a run drew for its samples and in its iterations."""
    torch.manual_seed(0)
    trainer, drawn = (
        Trainer(lambda engine, group: drawn.append((torch.stack(group).tolist(), torch.rand(2).tolist())), 2),
        [],
    )
    checkpoint = Checkpoint(folder)
    checkpoint.attach(trainer)
    GracefulStop(exit=False).attach(trainer)
    checkpoint.resume()
    trainer.run(data, max_epochs=1)
    return drawn


def test_a_signal_while_samples_are_drawn_changes_no_bit_of_the_run(tmp_path):
    def work(rank):
        whole = drawn_of(tmp_path / "whole", Drawn())
        return whole, [drawn_of(tmp_path / str(at), Drawn(*kill)) for at in (2, 5) for kill in ([at], [])]

    for whole, parts in ranks(2, work):
        assert len(whole) == 4 and len(parts[0]) < 4
        assert parts[0] + parts[1] == parts[2] + parts[3] == whole


# -------------------------------------------------------------------------------------------------- repeated batches


class Noise(nn.Module):
    """Draws from a generator of its own."""

    def __init__(self):
        super().__init__()
        self.generator = torch.Generator().manual_seed(5)

    def forward(self, hidden):
        return hidden + 0.1 * torch.randn(hidden.shape, generator=self.generator)


def shared_statistics(rank):
    """Rank 1 has one group, rank 0 three."""
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), Noise(), nn.Linear(4, 1))
    torch.manual_seed(rank)
    trainer, means, drawn = trainer_of(DistributedDataParallel(inner), 2), [], []

    @trainer.on(Events.ITERATION_COMPLETED)
    def note():
        means.append(inner[1].running_mean.clone())
        drawn.append(torch.stack([torch.get_rng_state(), inner[3].generator.get_state()]))

    trainer.run(iter(list(DataLoader(Numbers(12), 2))[: 6 if rank == 0 else 2]), max_epochs=1)
    return means, drawn


def test_a_rank_without_a_batch_draws_nothing_and_keeps_its_statistics():
    (first, drawn), (second, of_second) = ranks(2, shared_statistics)
    assert len(first) == 3 and not torch.equal(first[0], first[1]) and not torch.equal(drawn[0], drawn[1])
    assert torch.equal(second[1], second[0]) and torch.equal(second[2], second[0])
    assert torch.equal(of_second[0], of_second[1]) and torch.equal(of_second[0], of_second[2])


def repeated(rank, folder, make, options, boundaries):
    """What a run sees after each of these boundaries, and what one sees that is resumed there."""

    def run(place, event=Events.COMPLETED):
        trainer, seen = Trainer(lambda engine, batch: None, **options), []
        trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: seen.append([*trainer.state.batch]))
        checkpoint = Checkpoint(place, keep_last=99)
        checkpoint.attach(trainer, event)
        checkpoint.resume()
        trainer.run(make(rank), max_epochs=2)
        return seen

    whole, pairs = run(folder / "whole", Events.ITERATION_COMPLETED), []
    for index in boundaries:
        place = folder / str(index)
        if rank == 0:
            name = f"iteration_{index:08}"
            shutil.copytree(folder / "whole" / name, place / name)
        dist.barrier()
        pairs.append((whole[index:], run(place)))
    return pairs


SHUFFLED = partial(loader, torch.arange(5), 1, shuffle=True)
REPEATED = {
    "one order": (lambda rank: SHUFFLED(), {"accumulation_steps": 2}, (1, 3)),
    "each rank its own": (
        lambda rank: [torch.tensor([10 * rank + index]) for index in range(5 if rank == 0 else 3)],
        {"accumulation_steps": 2},
        (2, 5),
    ),
    "dealt": (lambda rank: SHUFFLED(), {"global_micro_batches": 4}, (1, 3)),
}


@pytest.mark.parametrize("name", tiered(REPEATED, "each rank its own"))
def test_a_rank_that_is_resumed_without_a_batch_repeats_the_one_that_it_had_last(name, tmp_path):
    for pairs in ranks(2, repeated, tmp_path, *REPEATED[name]):
        for whole, resumed in pairs:
            assert whole and whole == resumed
