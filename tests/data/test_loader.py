"""Which sample comes when, on which rank, with which randomness; and what a resume loads."""

import copy
import logging
import random
import sys
from typing import Any

import numpy as np
import pytest
import torch
from ignite.engine import Events
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from ignite_engine import StopRequested, Trainer, TrainingEvents, loader
from ignite_engine.data import DataSource, ResumableSampler, resumable
from ignite_engine.errors import StateMismatch
from tests.kit.tiny import Numbers, Passes, linear, numbers_loader, trainer_of, weights


def note_batch(engine, batch):
    return batch


def captured_at(data, iteration, *, epochs=2, **options):
    """What a checkpoint holds at ``iteration``, and the batches of the whole run."""
    trainer, batches, saved = Trainer(note_batch, **options), list[Any](), list[Any]()

    def save():
        if trainer.state.iteration == iteration:
            saved.append(copy.deepcopy(trainer.registry.capture()[1]))

    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: batches.append(trainer.state.batch))
    trainer.add_event_handler(TrainingEvents.RESUME_POINT, save)
    trainer.run(data, max_epochs=epochs)
    return saved[-1], batches


def resumed_batches(saved, data, *, epochs=2, **options):
    trainer, batches = Trainer(note_batch, **options), list[Any]()
    trainer.registry.load(saved, source="memory")
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: batches.append(trainer.state.batch))
    trainer.run(data, max_epochs=epochs)
    return batches


class Indices(Dataset[Any]):
    """Samples that are their indices; counts what is loaded."""

    def __init__(self, count):
        self.count = count
        self.loaded = []

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        self.loaded.append(index)
        return index


class Augmented(Indices):
    """Samples made of their index and of every generator there is."""

    def __getitem__(self, index):
        return torch.tensor([index, random.random(), np.random.rand(), torch.rand(()).item()], dtype=torch.float64)


# -- resume -----------------------------------------------------------------------------------------------------------


@pytest.mark.row("H3")
@pytest.mark.parametrize("iteration", [1, 3, 4, 6, 8])
@pytest.mark.parametrize("shuffle", [False, True])
def test_resume_loads_nothing_of_what_it_skips(iteration, shuffle):
    # 11 samples by 3: 4 batches an epoch
    saved, whole = captured_at(loader(Indices(11), 3, shuffle=shuffle, seed=4), iteration, epochs=3)
    data = Indices(11)
    rest = resumed_batches(saved, loader(data, 3, shuffle=shuffle, seed=4), epochs=3)

    assert [batch.tolist() for batch in rest] == [batch.tolist() for batch in whole[iteration:]]
    assert data.loaded == torch.cat(whole[iteration:]).tolist()


def test_incomplete_last_batch_may_be_dropped():
    saved, whole = captured_at(loader(Indices(11), 3, shuffle=True, drop_last=True), 4)
    rest = resumed_batches(saved, loader(Indices(11), 3, shuffle=True, drop_last=True))

    assert [len(batch) for batch in whole] == [3] * 6
    assert [batch.tolist() for batch in rest] == [batch.tolist() for batch in whole[4:]]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (lambda: loader(Indices(12), 3, shuffle=True), "samples 11 in its data, now it is 12"),
        (lambda: loader(Indices(11), 4, shuffle=True), "batch_size 3 in its data, now it is 4"),
        (lambda: loader(Indices(11), 3, shuffle=True, seed=1), "seed 0 in its data, now it is 1"),
    ],
)
def test_changed_data_is_refused(changed, message):
    saved, _ = captured_at(loader(Indices(11), 3, shuffle=True), 2)

    with pytest.raises(ValueError, match=message) as caught:
        resumed_batches(saved, changed())
    assert "resume(ignore=['data'])" in str(caught.value)


def test_explicit_epoch_length_resumes_in_the_middle_of_a_pass():
    def run(trainer):
        batches = []
        trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: batches.append(trainer.state.batch.tolist()))
        trainer.run(loader(Indices(10), 2, shuffle=True), max_epochs=4, epoch_length=3)
        return batches

    trainer, saved = Trainer(note_batch), dict[int, Any]()
    trainer.add_event_handler(
        TrainingEvents.RESUME_POINT,
        lambda: saved.__setitem__(trainer.state.iteration, copy.deepcopy(trainer.registry.capture()[1])),
    )
    whole = run(trainer)
    assert len(whole) == 12
    for iteration in (2, 3, 4, 5, 6, 11):
        again = Trainer(note_batch)
        again.registry.load(saved[iteration], source="memory")
        assert run(again) == whole[iteration:]


# -- ranks ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("shuffle", [False, True])
def test_ranks_share_one_order_without_padding(world_size, shuffle):
    single = ResumableSampler(11, shuffle=shuffle, seed=3, rank=0, world_size=1)
    samplers = [
        ResumableSampler(11, shuffle=shuffle, seed=3, rank=rank, world_size=world_size) for rank in range(world_size)
    ]
    shards = [[index for _, index in sampler] for sampler in samplers]

    assert sorted(index for shard in shards for index in shard) == list(range(11))
    assert [len(shard) for shard in shards] == [len(sampler) for sampler in samplers]
    whole = [index for _, index in single]
    assert shards == [whole[rank::world_size] for rank in range(world_size)]


def test_shard_resumes_at_its_position():
    sampler = ResumableSampler(11, shuffle=True, seed=3, rank=1, world_size=2)
    whole = list(sampler)
    sampler.start = 3

    assert list(sampler) == whole[3:] and len(whole) == 5
    sampler.start, sampler.pass_number = 0, 1
    assert sorted(index for _, index in sampler) != sorted(index for _, index in whole)


# -- randomness -------------------------------------------------------------------------------------------------------


def augmented(workers, *, epochs=2, saved=None, batch_size=3):
    data = loader(Augmented(7), batch_size, shuffle=True, seed=9, num_workers=workers)
    trainer, batches = Trainer(note_batch), list[torch.Tensor]()
    if saved is not None:
        trainer.registry.load(saved, source="memory")
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: batches.append(trainer.state.batch))
    trainer.run(data, max_epochs=epochs)
    return batches


def generators():
    state = random.getstate(), np.random.get_state(), torch.get_rng_state()
    drawn = [random.random(), float(np.random.rand()), torch.rand(()).item()]
    random.setstate(state[0])
    np.random.set_state(state[1])
    torch.set_rng_state(state[2])
    return drawn


@pytest.mark.row("H6")
def test_sample_randomness_is_the_same_with_any_number_of_workers():
    before = generators()
    here = augmented(0)
    after = generators()
    random.seed(99), np.random.seed(99), torch.manual_seed(99)
    there = augmented(2)

    assert all(torch.equal(ours, theirs) for ours, theirs in zip(here, there, strict=True))
    assert after == before
    samples = torch.cat(here)
    assert len({tuple(sample.tolist()[1:]) for sample in samples}) == 14  # 7 samples in each of 2 epochs


def test_sample_randomness_depends_on_the_sample_alone():
    """Another batch size is another order of work, as another number of ranks is."""
    by_3 = {tuple(sample.tolist()) for sample in torch.cat(augmented(0))}

    assert {tuple(sample.tolist()) for sample in torch.cat(augmented(0, batch_size=2))} == by_3


def test_workers_leave_the_generators_of_this_process_alone():
    before = generators()
    augmented(2)

    assert generators() == before


class AugmentedLate(Indices):
    def __getitem__(self, index):
        return torch.tensor([random.random(), np.random.randn()] if index < 20 else [0.0, 0.0])


@pytest.mark.parametrize("kind", [Augmented, AugmentedLate])
def test_stop_that_breaks_into_a_fetch_anywhere_leaves_the_generators_as_they_were(kind):
    """A signal's handler may raise where any function begins or ends, so also while the generators are put back."""
    used = loader(kind(200), batch_size=3).dataset
    for first in range(100, 200, 10):  # until it seeds only what was drawn from
        used.__getitems__([(0, index) for index in range(first, first + 10)])
    random.seed(5), np.random.seed(5), torch.manual_seed(5)
    expected = generators()

    def broken_off_at(moment):
        moments, data = 0, copy.deepcopy(used)

        def break_in(frame, *_):
            nonlocal moments
            moments += frame.f_code is not broken_off_at.__code__
            if moments == moment:
                sys.setprofile(None)
                raise StopRequested

        sys.setprofile(break_in)
        try:
            data.__getitems__([(0, 3), (0, 4)])
        except StopRequested:
            return True
        finally:
            sys.setprofile(None)
        return False

    tried = 0
    while broken_off_at(tried + 1):
        tried += 1
        assert generators() == expected, f"broken off at moment {tried}"
        random.seed(5), np.random.seed(5), torch.manual_seed(5)
    assert tried > 60


def test_seed_of_sample_randomness_counts():
    first, second = (next(iter(loader(Augmented(4), 4, seed=seed))) for seed in (0, 1))

    assert torch.equal(first[:, 0], second[:, 0]) and not (first[:, 1:] == second[:, 1:]).any()


# -- loaders of the user ----------------------------------------------------------------------------------------------


@pytest.mark.row("H3")
def test_plain_loader_is_rebuilt_to_resume_exactly(caplog):
    def plain(data):
        return DataLoader(data, 3, shuffle=True, collate_fn=torch.tensor)

    with caplog.at_level(logging.INFO, logger="ignite_engine.data"):
        saved, whole = captured_at(plain(Indices(11)), 5)
    assert caplog.text.count("DataLoader rebuilt to resume exactly: shuffle=True") == 1
    torch.manual_seed(12345)  # the order is taken from the checkpoint
    data = Indices(11)
    rest = resumed_batches(saved, plain(data))

    assert [batch.tolist() for batch in rest] == [batch.tolist() for batch in whole[5:]]
    assert data.loaded == torch.cat(whole[5:]).tolist()
    assert [sorted(torch.cat(whole[:4]).tolist()), sorted(torch.cat(whole[4:]).tolist())] == [list(range(11))] * 2


@pytest.mark.parametrize("shuffle", [False, True])
def test_loader_of_single_samples_is_rebuilt_too(shuffle):
    def plain(data):
        return DataLoader(data, batch_size=None, shuffle=shuffle)

    class Rows(Indices):
        def __getitem__(self, index):
            return np.array([super().__getitem__(index)] * 2), str(index)

    saved, whole = captured_at(plain(Rows(5)), 7)
    torch.manual_seed(12345)
    data = Rows(5)
    rest = resumed_batches(saved, plain(data))

    assert str(rest) == str(whole[7:]) and data.loaded == [int(index) for _, index in whole[7:]]
    assert sorted(index for _, index in whole[:5]) == [*"01234"] and whole[0][0].shape == (2,)


def test_rebuilt_loader_keeps_its_options():
    def init(worker): ...

    rebuilt = resumable(
        DataLoader(Indices(5), 2, num_workers=2, prefetch_factor=3, drop_last=True, timeout=7, worker_init_fn=init)
    )

    assert isinstance(rebuilt.sampler, ResumableSampler) and not rebuilt.sampler.shuffle
    assert (rebuilt.num_workers, rebuilt.prefetch_factor, rebuilt.drop_last, rebuilt.timeout) == (2, 3, True, 7)
    assert rebuilt.worker_init_fn.user is init
    assert len(rebuilt) == 2


class Subclass(DataLoader[Any]): ...


class Stream(IterableDataset[Any]):
    def __iter__(self):
        return iter(range(6))


class SizedStream(Stream):
    def __len__(self):
        return 6


LEFT_ALONE = {
    "DataLoader with WeightedRandomSampler": lambda: DataLoader(
        Indices(6), 2, sampler=WeightedRandomSampler([1.0] * 6, 6)
    ),
    "DataLoader with SubsetRandomSampler": lambda: DataLoader(Indices(6), 2, sampler=SubsetRandomSampler([1, 2, 4])),
    "DataLoader with RandomSampler": lambda: DataLoader(
        Indices(6), 2, sampler=RandomSampler(Indices(6), replacement=True)
    ),
    "DataLoader with list": lambda: DataLoader(Indices(6), batch_sampler=[[0, 1], [2, 3]]),
    "Subclass": lambda: Subclass(Indices(6), 2),
    "DataLoader with Stream": lambda: DataLoader(Stream(), 2),
}


@pytest.mark.parametrize("kind", LEFT_ALONE)
def test_custom_order_is_left_alone_and_said_to_be_inexact(kind):
    data = LEFT_ALONE[kind]()
    trainer = Trainer(note_batch)
    trainer.run(data)

    assert trainer.progress.source is not None and trainer.progress.source.data is data
    assert trainer.reproducibility() == [f"{kind} keeps no state: its batches are replayed"]


def test_loader_of_ours_is_exact():
    trainer = Trainer(note_batch)
    trainer.run(numbers_loader())

    assert trainer.reproducibility() == []


class Batches:
    def __len__(self):
        return 4

    def __iter__(self):
        return iter([10, 20, 30, 40])


def test_replayed_data_leaves_out_what_was_consumed(caplog):
    saved, _ = captured_at(Batches(), 6)
    with caplog.at_level(logging.WARNING, logger="ignite_engine.data"):
        rest = resumed_batches(saved, Batches())

    assert rest == [30, 40]
    assert "the 2 batches that were consumed are loaded again and skipped" in caplog.text


def test_batch_size_may_change_with_the_ranks_where_the_global_batch_stays():
    def resumed(ranks, batch_size, steps=1):
        before = DataSource(numbers_loader(24, batch_size), steps)
        before.consumed(2)
        now = DataSource(numbers_loader(24, 4), 2)
        now.load_state_dict(before.state_dict() | {"ranks": ranks})
        return now

    for ranks, batch_size, steps in ((2, 2, 1), (2, 4, 1), (4, 1, 1)):
        source = resumed(ranks, batch_size, steps)
        assert (source.place.batch, source.place.skipped) == (0, 2 * ranks * batch_size)
        assert source.changed is not None and source.changed.startswith(
            f"The data position was saved on {ranks} ranks,"
        )
    for ranks, batch_size in ((1, 2), (2, 3), (3, 2)):
        with pytest.raises(StateMismatch, match=f"with batch_size {batch_size} in its data, now it is 4"):
            resumed(ranks, batch_size)


class StatefulNumbers:
    """A loader that saves its own position, and draws from the global generator at the start of a pass."""

    def __init__(self, count, *, sized):
        self.count, self.next, self.epochs = count, 0, list[int]()
        if sized and type(self) is StatefulNumbers:
            self.__class__ = SizedStatefulNumbers

    def __iter__(self):
        torch.rand(())  # as a DataLoader does
        return self._rest()

    def _rest(self):
        while self.next < self.count:
            self.next += 1
            inputs = torch.full((2, 3), float(self.next))
            yield inputs, inputs[:, :1]
        self.next = 0

    def set_epoch(self, epoch):
        self.epochs.append(epoch)

    def state_dict(self):
        return {"next": self.next}

    def load_state_dict(self, state):
        self.next = state["next"]


class SizedStatefulNumbers(StatefulNumbers):
    def __len__(self):
        return self.count


@pytest.mark.row("D13")
@pytest.mark.parametrize("sized", [True, False])
def test_loader_with_a_state_of_its_own_resumes_at_every_edge(sized):
    def make():
        torch.manual_seed(0)
        return trainer_of(linear(dropout=True))

    def run(trainer):
        seen = []
        data = StatefulNumbers(4, sized=sized)
        trainer.add_event_handler(
            Events.ITERATION_COMPLETED, lambda: seen.append((trainer.state.epoch, trainer.state.batch[0][0, 0].item()))
        )
        trainer.run(data, max_epochs=3)
        return seen, data.epochs, weights(trainer)

    whole, saved = make(), list[Any]()
    assert whole.reproducibility() == []
    whole.add_event_handler(
        TrainingEvents.RESUME_POINT,
        lambda: saved.append((whole.state.iteration, copy.deepcopy(whole.registry.capture()))),
    )
    seen, epochs, end = run(whole)
    assert seen == [(epoch, float(number)) for epoch in (1, 2, 3) for number in (1, 2, 3, 4)]
    assert epochs == [0, 1, 2]
    for iteration, (shared, local) in saved:
        rest = make()
        rest.registry.load({**shared, **local}, source="memory")
        seen_again, epochs_again, end_again = run(rest)
        assert seen_again == seen[iteration:], iteration
        assert torch.equal(end_again, end), iteration
        if iteration < 12:
            assert epochs_again[-1] == 2


class Prompt(SizedStatefulNumbers):
    """Taken up at the end of a pass, it begins the next one at once."""

    def load_state_dict(self, state):
        self.next = state["next"] % self.count


def test_loader_that_begins_the_next_pass_at_once_is_counted_right():
    saved, _ = captured_at(Prompt(4, sized=True), 4, epochs=3)
    trainer, seen = Trainer(note_batch), list[Any]()
    trainer.registry.load(saved, source="memory")
    trainer.add_event_handler(
        TrainingEvents.RESUME_POINT,
        lambda: seen.append((trainer.state.epoch, trainer.registry.objects["data"].state_dict())),
    )
    trainer.run(Prompt(4, sized=True), max_epochs=3)

    assert [(epoch, position["pass"], position["batch"]) for epoch, position in seen] == [
        (epoch, *position)
        for epoch in (2, 3)
        for position in ((epoch - 1, 1), (epoch - 1, 2), (epoch - 1, 3), (epoch, 0))
    ]


def test_unsized_data_resumes_at_every_edge():
    def run(trainer):
        seen = []
        trainer.add_event_handler(
            Events.ITERATION_COMPLETED, lambda: seen.append((trainer.state.epoch, trainer.state.batch.item()))
        )
        trainer.run(Generated(), max_epochs=3)
        return seen

    trainer, saved = Trainer(note_batch), list[Any]()
    trainer.add_event_handler(
        TrainingEvents.RESUME_POINT,
        lambda: saved.append((trainer.state.iteration, copy.deepcopy(trainer.registry.capture()[1]))),
    )
    whole = run(trainer)
    assert len(whole) == 10
    for iteration, state in saved:
        again = Trainer(note_batch)
        again.registry.load(state, source="memory")
        assert run(again) == whole[iteration:], iteration


class Generated:
    """Passes of 3, 5 and 2 batches, each a function of the pass's number."""

    def __init__(self):
        self.number = 0

    def set_epoch(self, epoch):
        self.number = epoch

    def __iter__(self):
        data = Passes(3, 5, 2)
        data.passes = self.number
        return iter(data)


@pytest.mark.parametrize("persistent", [False, True])
def test_loader_whose_workers_were_ended_gives_new_ones(persistent):
    data = loader(Indices(8), 2, num_workers=1, persistent_workers=persistent)
    source = DataSource(data, None)
    assert next(iter(source)).tolist() == [0, 1]
    (worker,) = source._iterator._workers
    source.abandon()
    worker.join(5)

    assert worker.exitcode is not None
    assert [batch.tolist() for batch in source] == [[0, 1], [2, 3], [4, 5], [6, 7]]


# -- refusals ---------------------------------------------------------------------------------------------------------


def test_what_cannot_be_loaded_is_refused():
    with pytest.raises(TypeError, match="needs a dataset with __len__ and __getitem__, got Stream"):
        loader(Stream(), 2)
    with pytest.raises(TypeError, match="needs a dataset with __len__ and __getitem__, got SizedStream"):
        loader(SizedStream(), 2)
    with pytest.raises(TypeError, match="sets batch_sampler itself"):
        loader(Indices(4), 2, batch_sampler=BatchSampler(SequentialSampler(Indices(4)), 2, drop_last=False))
    with pytest.raises(TypeError, match="got shuffle with a sampler, which has an order of its own"):
        loader(Indices(4), 2, shuffle=True, sampler=SequentialSampler(Indices(4)))
    with pytest.raises(ValueError, match="batch_size must be at least 1, got 0"):
        loader(Indices(4), 0)
    with pytest.raises(ValueError, match="The dataset is empty"):
        loader(Indices(0), 2)


def test_collate_fn_and_worker_init_fn_are_the_users():
    assert list(loader(Indices(5), 2, collate_fn=sum)) == [1, 5, 4]


def test_numbers_are_loaded_once_each():
    data = Numbers(5)
    list(loader(data, 2))

    assert data.loaded == [0, 1, 2, 3, 4]


def test_number_in_the_place_of_a_dataset_is_refused():
    with pytest.raises(ValueError, match=r"must have samples along its first dimension, got Tensor \[\] float32\.$"):
        loader(torch.tensor(1.0), 2)
