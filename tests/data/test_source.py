"""The source that a Trainer iterates: its length, its position, the order of a user's own loader, its end."""

import copy
import multiprocessing
from functools import partial
from typing import Any

import pytest
import torch
from ignite.engine import Events
from ignite.metrics import Average
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, Sampler, TensorDataset, WeightedRandomSampler

from ignite_engine import Trainer, TrainingEvents, create_evaluator, loader
from ignite_engine.data.own_state import generators_of
from ignite_engine.data.shares import source_of
from ignite_engine.data.source import DataSource
from ignite_engine.data.workers import end_workers
from ignite_engine.errors import StateMismatch
from ignite_engine.handlers import Checkpoint, Evaluation
from tests.kit.tiny import Numbers, on_two_ranks, trainer_of, weights
from tests.search.resume_data import RewoundLoader


def keep_batch(engine, batch):
    return batch


def trainer_with_batches(accumulation_steps=None):
    trainer, batches = Trainer(keep_batch, accumulation_steps), list[Any]()
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: batches.append(trainer.state.batch))
    return trainer, batches


def save_everywhere(trainer):
    """Gets the iteration and all that a checkpoint would hold, at each step boundary from now on."""
    saved = []

    def save():
        shared, local = trainer.registry.capture()
        saved.append((trainer.state.iteration, copy.deepcopy({**shared, **local})))

    trainer.add_event_handler(TrainingEvents.RESUME_POINT, save)
    return saved


class Growing(Dataset[int]):
    """Its samples are their indices; there may be more of them later."""

    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        return index


# -- length -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [DataLoader, loader], ids=["plain", "ours"])
@pytest.mark.parametrize(("count", "lengths"), [(9, [2, 3, 3]), (3, [2, 1, 1])], ids=["grows", "shrinks"])
def test_length_is_read_again_at_each_pass(make, count, lengths):
    dataset = Growing(6)
    data = make(dataset, batch_size=3, shuffle=True)
    trainer, batches = trainer_with_batches()
    trainer.add_event_handler(Events.ITERATION_COMPLETED(once=1), lambda: setattr(dataset, "count", count))
    seen = list[int]()
    trainer.add_event_handler(Events.EPOCH_COMPLETED, lambda: seen.append(trainer.state.epoch_length))
    trainer.run(data, max_epochs=3)

    assert seen == lengths
    passes = torch.cat(batches).split([6, count, count])
    assert [sorted(each.tolist()) for each in passes] == [list(range(each)) for each in (6, count, count)]


def test_growing_dataset_is_resumed_at_each_boundary():
    def run(dataset, saved=None):
        trainer, batches = trainer_with_batches()
        trainer.add_event_handler(Events.EPOCH_COMPLETED(once=1), lambda: setattr(dataset, "count", 9))
        if saved is not None:
            trainer.registry.load(saved, source="memory")
        boundaries = save_everywhere(trainer)
        trainer.run(loader(dataset, 3, shuffle=True), max_epochs=2)
        return [batch.tolist() for batch in batches], boundaries

    whole, saved = run(Growing(6))
    assert len(whole) == 5
    for iteration, state in saved[:-1]:
        rest, _ = run(Growing(6 if iteration < 2 else 9), state)  # it was saved after it had grown
        assert rest == whole[iteration:], iteration


def test_epoch_length_that_was_given_stays():
    dataset = Growing(6)
    trainer, batches = trainer_with_batches()
    trainer.add_event_handler(Events.EPOCH_COMPLETED(once=1), lambda: setattr(dataset, "count", 12))
    trainer.run(loader(dataset, 3), max_epochs=3, epoch_length=3)

    assert trainer.state.epoch_length == 3 and len(batches) == 9


# -- order of a user's own loader ------------------------------------------------------------------------------------


class Shuffled(Sampler[int]):
    """An order that is a function of the epoch, as that of DistributedSampler."""

    def __init__(self, count):
        self.count, self.epoch = count, -1

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return self.count

    def __iter__(self):
        return iter(torch.randperm(self.count, generator=torch.Generator().manual_seed(self.epoch)).tolist())


class ShuffledBatches(BatchSampler):
    def __init__(self, sampler):
        super().__init__(sampler, 2, drop_last=False)
        self.epoch = -1

    def set_epoch(self, epoch):
        self.epoch = epoch


class Wrapped(Sampler[int]):
    """A sampler in a sampler, as accelerate's and lightning's wrap the user's."""

    def __init__(self, sampler):
        self.sampler = sampler

    def __iter__(self):
        return iter(self.sampler)

    def __len__(self):
        return len(self.sampler)


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("stateful", [False, True])
def test_epoch_reaches_the_batch_sampler_and_every_sampler_in_it(nested, stateful):
    from torchdata.stateful_dataloader import StatefulDataLoader

    kind = StatefulDataLoader if stateful else DataLoader
    sampler = Shuffled(6)
    batch_sampler = ShuffledBatches(Wrapped(sampler) if nested else sampler)
    trainer, batches = trainer_with_batches()
    seen = list[tuple[int, int]]()
    trainer.add_event_handler(Events.EPOCH_COMPLETED, lambda: seen.append((batch_sampler.epoch, sampler.epoch)))
    trainer.run(kind(Growing(6), batch_sampler=batch_sampler), max_epochs=3)

    assert seen == [(0, 0), (1, 1), (2, 2)]
    expected = Shuffled(6)
    for number, samples in enumerate(torch.cat(batches).split(6)):
        expected.set_epoch(number)
        assert samples.tolist() == list(expected)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("steps", [None, 2])
def test_generator_that_the_loader_shares_with_its_sampler_is_resumed(workers, steps):
    from torchdata.stateful_dataloader import StatefulDataLoader

    def run(seed, saved=None):
        own = torch.Generator().manual_seed(seed)
        data = StatefulDataLoader(TensorDataset(torch.arange(5)), 1, shuffle=True, generator=own, num_workers=workers)
        trainer, batches = trainer_with_batches(steps)
        if saved is not None:
            trainer.registry.load(saved, source="memory")
        boundaries = save_everywhere(trainer)
        trainer.run(data, max_epochs=3)
        assert trainer.reproducibility() == (
            []
            if not workers
            else [
                f"StatefulDataLoader does not save the random numbers of its {workers} workers: "
                "samples that draw any differ"
            ]
        )
        return batches, boundaries

    whole, saved = run(1)
    for iteration, state in saved[:-1]:
        rest, _ = run(2, state)
        assert str(rest) == str(whole[iteration:]), iteration


# -- loaders that are not DataLoaders --------------------------------------------------------------------------------


class Bare:
    """Looks like a loader of single samples, and has nothing else of a DataLoader."""

    batch_size = None

    def __iter__(self):
        return iter(torch.arange(3))


def test_loader_without_a_batch_sampler_is_reported_as_replayed():
    trainer, batches = trainer_with_batches()
    trainer.run(Bare(), max_epochs=1)

    assert len(batches) == 3 and trainer.reproducibility() == ["Bare keeps no state: its batches are replayed"]


@pytest.mark.parametrize("kind", [list, tuple])
def test_listed_batches_are_exact_and_resumed_without_a_warning(kind, tmp_path, caplog):
    seen = list[Tensor]()
    for until in (2, 6):
        trainer, batches = trainer_with_batches()
        trainer.register("model", nn.Linear(1, 1))
        checkpoint = Checkpoint(tmp_path)
        checkpoint.attach(trainer)
        checkpoint.resume()
        trainer.run(kind(torch.arange(4)[:, None]), max_iters=until, epoch_length=4)
        seen += batches

    assert torch.cat(seen).tolist() == [0, 1, 2, 3, 0, 1]
    assert trainer.reproducibility() == []
    assert all(message.startswith("Resumed from") for message in caplog.messages)


class Empty:
    def __iter__(self):
        return iter(())


class EmptySized(Empty):
    def __len__(self):
        return 0


@pytest.mark.parametrize(
    "data", [Empty(), EmptySized(), [], DataLoader(Growing(0))], ids=lambda data: type(data).__name__
)
@pytest.mark.parametrize("epoch_length", [None, 4])
def test_data_without_a_batch_is_an_error_and_counts_nothing(data, epoch_length):
    trainer, batches = trainer_with_batches()
    for _ in range(3):  # each restart is the first run again
        with pytest.raises(ValueError, match=r"zero size|no batch"):
            trainer.run(data, max_epochs=2, epoch_length=epoch_length)
        assert (trainer.state.iteration, trainer.progress.epochs_completed, batches) == (0, 0, [])
    trainer.run([1, 2], max_epochs=2)
    assert batches == [1, 2, 1, 2]


# -- position ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shuffle", [False, True])
def test_other_shuffle_is_refused(shuffle):
    trainer, _ = trainer_with_batches()
    saved = save_everywhere(trainer)
    trainer.run(loader(Growing(6), 2, shuffle=shuffle), max_epochs=1)
    other, _ = trainer_with_batches()
    other.registry.load(saved[0][1], source="memory")

    with pytest.raises(ValueError, match=rf"with shuffle {shuffle} in its data, now it is {not shuffle}"):
        other.run(loader(Growing(6), 2, shuffle=not shuffle), max_epochs=1)


# -- evaluation over the training data -----------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("own_generator", [False, True])
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", ["stateful", "ours"])
def test_evaluation_over_the_training_loader_leaves_no_trace(kind, workers, own_generator):
    """Within an epoch and at its end: the same batches as without it, and as in a resumed run."""

    def run(evaluate, saved=None):
        torch.manual_seed(3)
        options = {"shuffle": True, "num_workers": workers}
        if own_generator and kind == "stateful":
            options["generator"] = torch.Generator().manual_seed(4)
        data = KINDS[kind](Growing(6), 2, **options)
        trainer, batches = trainer_with_batches()
        sums = list[float]()
        if evaluate:
            evaluator = create_evaluator(
                torch.nn.Linear(1, 1), lambda model, batch: float(batch.sum()), {"x": Average()}
            )
            Evaluation(evaluator, data).attach(trainer, Events.ITERATION_COMPLETED(every=2) | Events.EPOCH_COMPLETED)
            trainer.add_event_handler(
                TrainingEvents.EVALUATION_COMPLETED, lambda: sums.append(trainer.state.metrics["val/x"])
            )
        if saved is not None:
            trainer.registry.load(saved, source="memory")
        boundaries = save_everywhere(trainer)
        trainer.run(data, max_epochs=epochs)
        assert set(sums) <= {5.0}  # of all batches each time
        return [batch.tolist() for batch in batches], boundaries

    epochs = 2 if workers else 3  # workers start at each evaluation
    plain, _ = run(evaluate=False)
    whole, saved = run(evaluate=True)
    assert whole == plain and len(whole) == 3 * epochs
    for iteration, state in saved[1:3] if workers else saved[:-1]:  # within an epoch and at its end
        rest, _ = run(True, state)
        assert rest == whole[iteration:], iteration


# -- the end of a run ----------------------------------------------------------------------------------------------


class Subclass(DataLoader[Any]): ...


def stateful(*arguments, **options):
    from torchdata.stateful_dataloader import StatefulDataLoader

    return StatefulDataLoader(*arguments, **options)


KINDS = {"ours": loader, "plain": DataLoader, "subclass": Subclass, "stateful": stateful}


@pytest.mark.slow
@pytest.mark.parametrize("fails", [False, True], ids=["completes", "fails"])
@pytest.mark.parametrize("kind", KINDS)
def test_loader_workers_end_with_the_run(kind, fails):
    before = set(multiprocessing.active_children())
    trainer, batches = trainer_with_batches()
    if fails:
        handler = trainer.add_event_handler(Events.ITERATION_COMPLETED(once=2), lambda: 1 / 0)
    data = KINDS[kind](Growing(8), 2, num_workers=2)
    error = None
    try:
        trainer.run(data, max_iters=3)
    except ZeroDivisionError as raised:
        error = raised  # its traceback holds the frames that hold the iterator
        handler.remove()
    assert (error is not None) is fails

    assert not set(multiprocessing.active_children()) - before
    trainer.run(data, max_iters=6)
    assert len(batches) >= 6
    assert not set(multiprocessing.active_children()) - before


def test_loader_workers_end_with_a_pass_that_is_dealt_out():
    source = source_of(loader(Growing(8), 2, num_workers=1), None, global_micro_batches=2)
    source.agree_lengths()

    assert [len(group) for group in source] == [2, 2]
    assert multiprocessing.active_children() == []


def test_persistent_workers_outlive_the_run():
    before = set(multiprocessing.active_children())
    trainer, _ = trainer_with_batches()
    data = loader(Growing(8), 2, num_workers=1, persistent_workers=True)
    trainer.run(data, max_epochs=1)
    (worker,) = set(multiprocessing.active_children()) - before
    trainer.run(data, max_epochs=1)

    assert set(multiprocessing.active_children()) - before == {worker}
    end_workers(data._iterator, data)


def test_generators_of_the_loader_are_loaded_with_the_position():
    """An evaluation over the same loader at STARTED draws from them before the pass is opened."""

    def source():
        torch.manual_seed(0)
        return DataSource(KINDS["stateful"](Growing(6), 2, shuffle=True), None)

    saved, loaded = source(), source()
    next(iter(saved))
    saved.consumed(1)
    loaded.load_state_dict(saved.state_dict())
    pairs = zip(generators_of(saved.data), generators_of(loaded.data), strict=True)

    assert all(torch.equal(one.get_state(), other.get_state()) for one, other in pairs)
    assert not all(
        torch.equal(one.get_state(), other.get_state())
        for one, other in zip(generators_of(saved.data), generators_of(source().data), strict=True)
    )


def test_an_evaluation_before_the_first_batch_reads_the_pass_that_was_saved():
    """An interrupted evaluation over the training data is done again when the run is resumed, before a pass is open."""
    order = Shuffled(4)
    for data, current in (
        (ours := loader(TensorDataset(torch.arange(4)), 2), lambda: ours.sampler.pass_number),
        (DataLoader(TensorDataset(torch.arange(4)), 2, sampler=order), lambda: order.epoch),
    ):
        source = DataSource(data, None)
        source.agree_lengths()
        source.load_state_dict({"pass": 3, "batch": 1, "ended": False})
        assert current() == 3


# -- objects that answer every attribute ------------------------------------------------------------------------------


class Proxy:
    """Each attribute of it is another proxy."""

    def __getattr__(self, name):
        return Proxy()

    def __call__(self, *arguments):
        return Proxy()

    def __iter__(self):
        return iter([1, 2, 3])

    def __len__(self):
        return 3


@pytest.mark.timeout(60)
def test_run_over_data_that_answers_every_attribute_ends():
    trainer, batches = trainer_with_batches()

    trainer.run(Proxy(), max_epochs=2)

    assert batches == [1, 2, 3, 1, 2, 3]


class Wrapping(Sampler[int]):
    """Tells the sampler inside which pass is read only where it is told itself."""

    def __init__(self, sampler):
        self.sampler, self.passes = sampler, list[int]()

    def set_epoch(self, epoch):
        self.passes.append(epoch)

    def __iter__(self):
        return iter(self.sampler)

    def __len__(self):
        return len(self.sampler)


def test_samplers_within_samplers_are_told_the_pass_once_each():
    inner = Wrapping(range(4))
    middle = Wrapping(inner)
    outer = Wrapping(middle)
    trainer, _ = trainer_with_batches()

    trainer.run(DataLoader(Growing(4), batch_sampler=BatchSampler(outer, 2, drop_last=False)), max_epochs=2)

    assert inner.passes == middle.passes == outer.passes == [0, 1]


def test_sampler_that_draws_another_order_than_before_is_a_reason():
    def run(weights, saved=None):
        trainer, _ = trainer_with_batches()
        if saved is not None:
            trainer.registry.load(saved, source="memory")
        boundaries = save_everywhere(trainer)
        trainer.run(loader(Growing(12), 3, sampler=WeightedRandomSampler(weights, 12)), max_epochs=2)
        return boundaries, any("draws another order" in reason for reason in trainer.reproducibility())

    (_, first), _, _, (_, at_the_end), *_ = run([1.0] * 12)[0]
    assert [run([1.0] * 12, first)[1], run([1.0, 9.0] * 6, first)[1]] == [False, True]
    assert not run([1.0, 9.0] * 6, at_the_end)[1]  # from the next pass on


class Curriculum(Sampler[int]):
    """Two samples more in each epoch."""

    def __init__(self):
        self.epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return 4 + 2 * self.epoch

    def __iter__(self):
        return iter(range(len(self)))


CURRICULA = {
    "loader": lambda data: loader(data, 2, sampler=Curriculum()),
    "DataLoader": lambda data: DataLoader(data, 2, sampler=Curriculum()),
    "batch sampler": lambda data: DataLoader(data, batch_sampler=BatchSampler(Curriculum(), 2, drop_last=False)),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", CURRICULA)
def test_epochs_of_a_sampler_that_grows_have_their_own_length_also_where_it_resumes(tmp_path, kind):
    def run(folder, stop_at=None, again=False):
        trainer, ends = trainer_of(), list[int]()
        trainer.add_event_handler(Events.EPOCH_COMPLETED, lambda: ends.append(trainer.state.iteration))
        if folder is not None:
            checkpoint = Checkpoint(folder)
            checkpoint.attach(trainer, Events.COMPLETED)
            checkpoint.resume()
        if stop_at is not None:
            trainer.add_event_handler(Events.ITERATION_COMPLETED(once=stop_at), lambda: trainer.request_stop("here"))
        data = CURRICULA[kind](Numbers(10))
        trainer.run(data, max_epochs=3)
        if again:
            trainer.run(data, max_epochs=3)
        return ends, weights(trainer)

    ends, bits = run(None)
    assert ends == [2, 5, 9]
    for stop_at in range(1, 9):
        before, _ = run(tmp_path / str(stop_at), stop_at)
        after, resumed = run(tmp_path / str(stop_at))
        assert before + after == ends and torch.equal(resumed, bits), stop_at
        in_one_process, continued = run(None, stop_at, again=True)
        assert in_one_process == ends and torch.equal(continued, bits), stop_at


@pytest.mark.parametrize(
    ("event", "expected"),
    [(Events.ITERATION_COMPLETED(once=3), [4, 2, 7, 12]), (Events.EPOCH_STARTED(once=1), [2, 2, 5, 9])],
)
@pytest.mark.parametrize("kind", CURRICULA)
def test_pass_after_a_terminated_one_has_its_own_length(kind, event, expected):
    """The length that the second run starts with, and the iterations at which the epochs end."""
    trainer, ends, data = trainer_of(), list[int](), CURRICULA[kind](Numbers(10))
    trainer.add_event_handler(Events.EPOCH_COMPLETED, lambda: ends.append(trainer.state.iteration))
    trainer.add_event_handler(event, trainer.terminate)
    trainer.run(data, max_epochs=3)
    trainer.add_event_handler(Events.STARTED, lambda: ends.insert(0, trainer.state.epoch_length))
    trainer.run(data, max_epochs=4)
    assert ends == expected and trainer.state.epoch == 4  # as in Ignite the epoch that was left counts


def test_with_global_micro_batches_one_batch_is_a_pass():
    trainer = Trainer(lambda engine, batch: None, global_micro_batches=2)
    assert trainer.run(loader(Numbers(2), 2), max_epochs=3).iteration == 3


class Shifted(Curriculum):
    def __init__(self, by):
        super().__init__()
        self.by = by

    def __iter__(self):
        return iter([(index + self.by) % len(self) for index in range(len(self))])


def shard(rank):
    """A rank's own, as ``dataset.shard(world, rank)`` gives it."""
    return TensorDataset(torch.arange(8.0) + 8 * rank)


def test_shard_with_a_sampler_of_the_users_is_read_whole_by_its_rank(tmp_path):
    def seen(rank):
        found = list[float]()
        trainer = Trainer(lambda engine, batch: found.extend(batch[0].tolist()))
        trainer.run(DataLoader(shard(rank), 2, sampler=range(8)), max_epochs=1)
        return {"seen": found}

    assert on_two_ranks(seen, tmp_path / "meet")["seen"] == [[*range(8)], [*range(8, 16)]]


def test_ranks_that_would_share_out_other_orders_are_refused(tmp_path):
    def cases(rank):
        said = {}
        for name, data in {
            "seed": loader(Numbers(8), 2, shuffle=True, seed=rank),
            "sampler": loader(Numbers(8), 2, sampler=Shifted(by=rank)),
            "alike": loader(Numbers(8), 2, sampler=Shifted(by=1)),
            "length": loader(Numbers(8 - rank), 2, shuffle=True),
            "in order": loader(Numbers(8), 2, seed=rank),
            "dataset": DataLoader(shard(rank), 2, shuffle=True),
        }.items():
            for options in ({}, {"global_micro_batches": 2}):
                trainer = Trainer(lambda engine, batch: None, **options)
                try:
                    said[f"{name} {len(options)}"] = str(trainer.run(data, max_epochs=1).iteration)
                except ValueError as error:
                    said[f"{name} {len(options)}"] = str(error)
        return said

    said = on_two_ranks(cases, tmp_path / "meet")
    for name, (first, second) in said.items():
        assert first == second
        if name.startswith("dataset"):
            assert first.startswith("The dataset on rank 1 is not that of rank 0, and each rank takes its share of one")
            continue
        assert (
            first.startswith("The order of the data on rank 1 is not that of rank 0, and")
            if name.startswith(("seed", "sampler", "length"))
            else first.isdigit()
        ), name
    assert len(said) == 12


def test_what_one_rank_refuses_of_a_saved_place_is_raised_on_all(tmp_path):
    def refused(rank):
        first, second = Trainer(lambda engine, batch: None), Trainer(lambda engine, batch: None)
        first.run(loader(Numbers(8), 2), max_iters=1)
        shared, local = first.registry.capture()
        second.registry.load({**shared, **local}, source="memory")
        with pytest.raises(StateMismatch) as raised:
            second.run(loader(Numbers(8), 2 + rank), max_iters=2)
        return {"said": str(raised.value)}

    first, second = on_two_ranks(refused, tmp_path / "meet")["said"]
    assert first == second
    assert first.startswith("The checkpoint was made with batch_size 2 in its data, now it is 3")


class Rewound:
    """Data of a kind that is often written: it is its own iterator, and begins anew where it is asked for one."""

    at, loaded = 0, False

    def __iter__(self):
        self.at = self.at if self.loaded else 0
        self.loaded = False
        return self

    def __next__(self):
        if self.at == 6:
            raise StopIteration
        self.at += 1
        return self.at


class RewoundWithState(Rewound):
    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at, self.loaded = state["at"], True


def rewound_loader(workers):
    return RewoundLoader([1, 2, 3, 4, 5, 6], batch_size=None, num_workers=workers)


WHOLE = {None: [1, 2, 3, 4, 5, 6], 2: [[1, 2], [3, 4], [5, 6]]}


@pytest.mark.parametrize(
    "make", [Rewound, partial(rewound_loader, 0), partial(rewound_loader, 1)], ids=["plain", "loader", "with a worker"]
)
@pytest.mark.parametrize("steps", [None, 2])
def test_data_that_begins_anew_where_it_is_asked_for_an_iterator_is_asked_once_in_a_pass(steps, make):
    trainer, batches = trainer_with_batches(steps)
    evaluation = Evaluation(create_evaluator(nn.Identity(), lambda model, batch: batch), make())
    seen = []
    evaluation.evaluator.add_event_handler(Events.ITERATION_COMPLETED, lambda engine: seen.append(engine.state.output))
    evaluation.attach(trainer, Events.EPOCH_COMPLETED)
    trainer.run(make(), max_epochs=2)
    assert batches == WHOLE[steps] * 2 and seen == [1, 2, 3, 4, 5, 6] * 2


@pytest.mark.parametrize("make", [Rewound, partial(rewound_loader, 0)], ids=["plain", "loader"])
def test_batches_that_were_consumed_are_skipped_once_in_data_that_begins_anew(make):
    trainer, batches = trainer_with_batches()
    saved = save_everywhere(trainer)
    trainer.run(make(), max_epochs=2)
    for iteration, state in saved[:-1]:
        resumed, rest = trainer_with_batches()
        resumed.registry.load(state, source="memory")
        resumed.run(make(), max_epochs=2)
        assert rest == batches[iteration:]


@pytest.mark.parametrize("steps", [None, 2])
def test_data_that_would_begin_anew_goes_on_from_its_state(steps):
    trainer, batches = trainer_with_batches(steps)
    saved = save_everywhere(trainer)
    trainer.run(RewoundWithState(), max_epochs=2)
    assert batches == WHOLE[steps] * 2
    for iteration, state in saved[:-1]:
        resumed, rest = trainer_with_batches(steps)
        resumed.registry.load(state, source="memory")
        resumed.run(RewoundWithState(), max_epochs=2)
        assert rest == batches[iteration:]
