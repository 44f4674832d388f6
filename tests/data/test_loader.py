"""Which sample comes when: of ``loader()`` and of a loader of the user's, by epoch, rank and seed."""

import logging
from itertools import chain

import pytest
import torch
from ignite.engine import Events
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)
from torchdata import nodes
from torchdata.stateful_dataloader import StatefulDataLoader

from ignite_engine import Trainer, loader
from ignite_engine.errors import StateMismatch
from ignite_engine.handlers import Checkpoint
from tests.data.kinds import Around, EpochSampler, Samples
from tests.kit.processes import ranks
from tests.kit.refusals import refusals
from tests.kit.tiny import Passes


class Indices(Samples):
    """Samples that are their indices."""

    def __getitem__(self, index):
        self.loaded.append(index)
        return index


def passes(data, epochs=3, folder=None, stop_at=None, **options):
    """The samples of each epoch, in order; with a folder it is resumed, and stopped after ``stop_at`` iterations."""
    found = []
    trainer = Trainer(lambda engine, batch: found[-1].extend(torch.as_tensor(batch).flatten().tolist()), **options)
    trainer.add_event_handler(Events.STARTED | Events.EPOCH_STARTED, lambda: found.append([]))
    if folder is not None:
        checkpoint = Checkpoint(folder)
        checkpoint.attach(trainer)
        checkpoint.resume()
    if stop_at:
        trainer.add_event_handler(Events.ITERATION_COMPLETED(once=stop_at), lambda: trainer.request_stop("here"))
    trainer.run(data, max_epochs=epochs)
    return [each for each in found if each]


# -- order ------------------------------------------------------------------------------------------------------------


@pytest.mark.row("A2")
def test_order_is_a_function_of_seed_and_epoch():
    torch.manual_seed(0)
    first = passes(loader(Indices(10), 3, shuffle=True, seed=5))
    torch.manual_seed(1)

    assert passes(loader(Indices(10), 3, shuffle=True, seed=5)) == first
    # on every machine, for ever: checkpoints rely on it
    assert first[:2] == [[3, 5, 6, 2, 7, 4, 1, 9, 0, 8], [4, 9, 3, 5, 2, 6, 8, 0, 7, 1]]
    assert all(sorted(order) == list(range(10)) for order in first)
    assert len({tuple(order) for order in first + passes(loader(Indices(10), 3, shuffle=True, seed=6))}) == 6
    assert passes(loader(Indices(10), 3, seed=5)) == [list(range(10))] * 3


def test_iterated_by_hand_it_sees_what_was_added_and_the_users_functions():
    data = list(range(4))
    batches = loader(data, 2, collate_fn=sum)
    assert list(batches) == [1, 5]
    data.append(4)

    assert list(batches) == [1, 5, 4]


@pytest.mark.row("H3")
@pytest.mark.parametrize("stop_at", [1, 3, 4, 6, 8])
@pytest.mark.parametrize("kind", ["in order", "shuffled", "DataLoader", "single samples", "drop_last"])
def test_resume_loads_nothing_of_what_it_skips(kind, stop_at, tmp_path):
    def make(seed):
        torch.manual_seed(seed)
        return {
            "in order": lambda: loader(Indices(11), 3, seed=4),
            "shuffled": lambda: loader(Indices(11), 3, shuffle=True, seed=4),
            "DataLoader": lambda: DataLoader(Indices(11), 3, shuffle=True, collate_fn=torch.tensor),
            "single samples": lambda: DataLoader(Indices(4), batch_size=None, shuffle=True),
            "drop_last": lambda: loader(Indices(11), 3, shuffle=True, drop_last=True),
        }[kind]()

    whole = [*chain(*passes(make(0)))]
    first = [*chain(*passes(make(0), folder=tmp_path, stop_at=stop_at))]
    data = make(12345)  # the order is that of the checkpoint
    rest = [*chain(*passes(data, folder=tmp_path))]
    dataset = getattr(data.dataset, "dataset", data.dataset)

    assert first + rest == whole and first and rest
    assert dataset.loaded == rest


def samples_of_ranks(rank, count, batch_size, shuffle):
    return passes(loader(Indices(count), batch_size, shuffle=shuffle, seed=3))


@pytest.mark.parametrize("shuffle", [False, True])
def test_ranks_share_one_order_without_padding(shuffle):
    whole = passes(loader(Indices(11), 4, shuffle=shuffle, seed=3))
    for count in (2, 3):
        of_ranks = ranks(count, samples_of_ranks, 11, 2, shuffle)
        for number, order in enumerate(whole):
            assert [found[number] for found in of_ranks] == [order[rank::count] for rank in range(count)]


# -- loaders of the user's --------------------------------------------------------------------------------------------


def test_plain_loader_is_rebuilt_once_and_says_so(caplog):
    with caplog.at_level(logging.INFO, logger="ignite_engine.data"):
        found = passes(DataLoader(Indices(11), 3, shuffle=True), epochs=2)

    assert caplog.text.count("DataLoader rebuilt to resume exactly: shuffle=True") == 1
    assert [sorted(order) for order in found] == [list(range(11))] * 2 and found[0] != found[1]


def test_rebuilt_loader_keeps_its_options():
    """Read from outside: batches, the function of the workers, and how many there are."""
    told = []

    class Told(Indices):
        def __getitem__(self, index):
            return index, torch.utils.data.get_worker_info().num_workers, self.number

    def init(worker):
        torch.utils.data.get_worker_info().dataset.dataset.number = 10 + worker

    data = DataLoader(Told(5), 2, num_workers=2, prefetch_factor=3, drop_last=True, timeout=60, worker_init_fn=init)
    Trainer(lambda engine, batch: told.append([each.tolist() for each in batch])).run(data)

    assert told == [[[0, 1], [2, 2], [10, 10]], [[2, 3], [2, 2], [11, 11]]]


class Subclass(DataLoader): ...


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(6))


class SizedStream(Stream):
    def __len__(self):
        return 6


class Bare:
    """Looks like a loader of single samples, and has nothing else of a DataLoader."""

    batch_size = None

    def __iter__(self):
        return iter(torch.arange(3))


REPORTED = {
    "DataLoader with list": lambda: DataLoader(Indices(6), batch_sampler=[[0, 1], [2, 3]]),
    "Subclass": lambda: Subclass(Indices(6), 2),
    "DataLoader with Stream": lambda: DataLoader(Stream(), 2),
    "Bare": Bare,
    "StatefulDataLoader with Stream": lambda: StatefulDataLoader(Stream(), 2),
}
EXACT = {
    "list": lambda: [[1], [2]],
    "tuple": lambda: ([1], [2]),
    "loader": lambda: loader(Indices(6), 2, shuffle=True),
    "DataLoader": lambda: DataLoader(Indices(6), 2, shuffle=True),
    "DataLoader with WeightedRandomSampler": lambda: DataLoader(
        Indices(6), 2, sampler=WeightedRandomSampler([1.0] * 6, 6)
    ),
    "DataLoader with SubsetRandomSampler": lambda: DataLoader(Indices(6), 2, sampler=SubsetRandomSampler([1, 2, 4])),
    "DataLoader with RandomSampler": lambda: DataLoader(
        Indices(6), 2, sampler=RandomSampler(Indices(6), replacement=True)
    ),
    "torchdata": lambda: StatefulDataLoader(Indices(6), 2, shuffle=True),
    "torchdata in order": lambda: StatefulDataLoader(Indices(6), 2),
    "torchdata of single samples": lambda: StatefulDataLoader(Indices(6), batch_size=None),
}
ORDER_NOT_SAVED = {
    "WeightedRandomSampler": {"sampler": WeightedRandomSampler([1.0] * 6, 6)},
    "RandomSampler": {"batch_sampler": BatchSampler(RandomSampler(range(6)), 1, False)},
}


@pytest.mark.parametrize("kind", [*REPORTED, *EXACT, *ORDER_NOT_SAVED])
def test_what_is_not_exact_is_in_the_report(kind):
    trainer = Trainer(lambda engine, batch: None)
    make = {**REPORTED, **EXACT}.get(kind) or (lambda: StatefulDataLoader(Indices(6), **ORDER_NOT_SAVED[kind]))
    trainer.run(make())

    reasons = {
        **{name: [f"{name} keeps no state: its batches are replayed"] for name in REPORTED},
        **{name: [] for name in EXACT},
        **{
            name: [f"StatefulDataLoader does not save the order of its {name}: it is drawn again"]
            for name in ORDER_NOT_SAVED
        },
    }
    assert trainer.reproducibility() == reasons[kind]


@pytest.mark.parametrize(("order", "is_saved"), [(range(6), True), (RandomSampler(range(6)), False)])
def test_order_that_nodes_of_torchdata_do_not_save_is_in_the_report(order, is_saved):
    trainer = Trainer(lambda engine, batch: None)
    trainer.run(nodes.Loader(nodes.Prefetcher(nodes.SamplerWrapper(order), 2)))
    reasons = [] if is_saved else ["Loader does not save the order of its RandomSampler: it is drawn again"]
    assert trainer.reproducibility() == reasons


def test_sampler_that_draws_another_order_than_before_is_a_reason(tmp_path):
    for weights, expected in (([1.0] * 12, False), ([1.0, 9.0] * 6, True)):
        folder = tmp_path / str(expected)
        for used, stop_at in (([1.0] * 12, 2), (weights, None)):
            trainer, checkpoint = Trainer(lambda engine, batch: None), Checkpoint(folder)
            checkpoint.attach(trainer)
            checkpoint.resume()
            trainer.run(loader(Indices(12), 3, sampler=WeightedRandomSampler(used, 12)), max_iters=stop_at or 3)
        assert any("draws another order" in reason for reason in trainer.reproducibility()) is expected


def test_replayed_data_leaves_out_what_was_consumed_and_says_so(tmp_path, caplog):
    passes(Passes(4), epochs=1, folder=tmp_path, stop_at=2)
    caplog.clear()
    rest = passes(Passes(4), epochs=1, folder=tmp_path)

    assert rest == [[102.0, 103.0]]
    assert "the 2 batches that were consumed are loaded again and skipped" in caplog.text


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("kind", [DataLoader, StatefulDataLoader])
def test_epoch_reaches_the_batch_sampler_and_every_sampler_in_it(nested, kind):
    class Batches(BatchSampler):
        def __init__(self, sampler):
            super().__init__(sampler, 2, drop_last=False)
            self.told = []

        def set_epoch(self, epoch):
            self.told.append(epoch)

    sampler = EpochSampler(6)
    batch_sampler = Batches(Around(sampler) if nested else sampler)
    found = passes(kind(Indices(6), batch_sampler=batch_sampler))

    assert sorted(set(batch_sampler.told)) == sorted(set(sampler.told)) == [0, 1, 2]
    for number, order in enumerate(found):
        sampler.set_epoch(number)
        assert order == list(sampler)


# -- what is refused --------------------------------------------------------------------------------------------------


def other_data(name):
    """Resumed with data of which something has changed."""
    changed = {
        "samples": lambda: loader(Indices(12), 3, shuffle=True),
        "seed": lambda: loader(Indices(11), 3, shuffle=True, seed=1),
        "shuffle": lambda: loader(Indices(11), 3),
    }[name]

    def call(folder):
        passes(loader(Indices(11), 3, shuffle=True), folder=folder, stop_at=2)
        passes(changed(), folder=folder)

    return call


test_refusals = refusals(
    [
        ("stream", lambda: loader(Stream(), 2), TypeError, "dataset __len__ __getitem__ Stream"),
        ("sized stream", lambda: loader(SizedStream(), 2), TypeError, "dataset __getitem__ SizedStream"),
        (
            "shuffle and sampler",
            lambda: loader(Indices(4), 2, shuffle=True, sampler=SequentialSampler(range(4))),
            TypeError,
            "shuffle with a sampler",
        ),
        ("text", lambda: loader([1], batch_size="2"), TypeError, "batch_size whole number '2'"),
        ("no seed", lambda: loader([1], seed=None), TypeError, "seed whole number None"),
        ("no sample", lambda: loader(Indices(0), 2), ValueError, "dataset is empty"),
        ("a number", lambda: loader(torch.tensor(1.0), 2), ValueError, "first dimension Tensor [] float32"),
        ("other samples", other_data("samples"), StateMismatch, "samples 11 12 resume(ignore=['data'])"),
        ("other seed", other_data("seed"), StateMismatch, "seed 0 1 resume(ignore=['data'])"),
        ("other order", other_data("shuffle"), StateMismatch, "shuffle True False resume(ignore=['data'])"),
    ]
)


# -- ranks ------------------------------------------------------------------------------------------------------------


class Shifted(EpochSampler):
    def __init__(self, by):
        super().__init__(8)
        self.by = by

    def __iter__(self):
        return iter([(index + self.by) % 8 for index in range(8)])


def other_orders(rank):
    said = {}
    for name, data in {
        "seed": loader(Indices(8), 2, shuffle=True, seed=rank),
        "sampler": loader(Indices(8), 2, sampler=Shifted(by=rank)),
        "length": loader(Indices(8 - rank), 2, shuffle=True),
        "dataset": DataLoader(TensorDataset(torch.arange(8.0) + 8 * rank), 2, shuffle=True),
        "alike": loader(Indices(8), 2, sampler=Shifted(by=1)),
        "in order": loader(Indices(8), 2, seed=rank),
    }.items():
        for options in ({}, {"global_micro_batches": 2}):
            try:
                said[f"{name} {len(options)}"] = Trainer(lambda engine, batch: None, **options).run(data).iteration
            except ValueError as error:
                said[f"{name} {len(options)}"] = str(error)
    return said


def test_ranks_that_would_share_out_other_orders_are_refused():
    first, second = ranks(2, other_orders)
    assert first == second and len(first) == 12
    for name, said in first.items():
        if name.startswith(("alike", "in order")):
            assert said == 2, name
        else:
            assert ("dataset" if name.startswith("dataset") else "order of the data") in said and "rank 1" in said


SAMPLERS = {
    "weighted": lambda: WeightedRandomSampler([1.0] * 12, 12),
    "subset": lambda: SubsetRandomSampler(range(0, 16, 2)),
    "some": lambda: RandomSampler(range(12), num_samples=8),
}


def samples_of_samplers(rank):
    """Each rank has random numbers of its own, from which torch's samplers draw."""
    torch.manual_seed(rank)
    return {name: passes(DataLoader(Indices(16), 2, sampler=make()), 2) for name, make in SAMPLERS.items()}


def test_ranks_share_out_what_a_sampler_of_torchs_draws():
    first, second = ranks(2, samples_of_samplers)
    for name, count in {"weighted": 12, "subset": 8, "some": 8}.items():
        both = [one + other for one, other in zip(first[name], second[name], strict=True)]
        assert both[0] != both[1] and [len(each) for each in both] == [count] * 2, name
        for one, other in zip(first[name], second[name], strict=True):
            assert one != other and (name == "weighted" or len({*one, *other}) == count), name


def warnings_of_streams(rank):
    lines, handler, logger = [], logging.Handler(logging.WARNING), logging.getLogger("ignite_engine.loop")
    handler.emit = lambda record: lines.append(record.getMessage())
    logger.addHandler(handler)
    try:
        found = passes(DataLoader(Stream(), 2), 1)
    finally:
        logger.removeHandler(handler)
    return found, [line for line in lines if "Stream is read whole" in line]


def test_stream_that_each_rank_reads_whole_is_named_once():
    (found, lines), other = ranks(2, warnings_of_streams)
    assert found == [[*range(6)]] and other == (found, [])
    assert len(lines) == 1 and "data_rank()" in lines[0] and "\n" not in lines[0]


def on_other_ranks(rank, folder, batch_size, stop_at):
    return passes(loader(Indices(24), batch_size, shuffle=True), 2, folder=folder, stop_at=stop_at)


@pytest.mark.parametrize("batch_size", [2, 4, 3])
def test_batch_size_may_change_with_the_ranks(batch_size, tmp_path, caplog):
    """Two ranks with batches of 2, then one: each sample of the epoch comes once."""
    first = ranks(2, on_other_ranks, tmp_path, 2, 2)
    rest = on_other_ranks(0, tmp_path, batch_size, None)

    whole = passes(loader(Indices(24), 4, shuffle=True), 2)
    assert sorted(first[0][0] + first[1][0] + rest[0]) == list(range(24)) and rest[1] == whole[1]
    assert "8 of 24 samples of this pass are consumed" in caplog.text
