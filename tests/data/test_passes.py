"""How long a pass is, and an epoch: known, unknown, growing, cut, spanned; and data without a batch."""

import pytest
import torch
from ignite.engine import Events
from torch.utils.data import BatchSampler, DataLoader, Dataset

from ignite_engine import Trainer, every, loader
from ignite_engine.handlers import Checkpoint, LRSchedule
from ignite_engine.schedules import warmup_linear
from tests.data.kinds import EpochSampler, Misjudged, RewoundLoader, Samples
from tests.kit.resume import EVERYWHERE, assert_resumes, program
from tests.kit.seen import Seen
from tests.kit.tiers import tiered
from tests.kit.tiny import Passes


class Growing(Dataset):
    """Its samples are their indices; there may be more of them later."""

    grows = False

    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        return index


def noting(accumulation_steps=None):
    """A trainer, and ``(epoch, batch)`` of each iteration, where a tensor is a list."""
    seen = []
    trainer = Trainer(lambda engine, batch: seen.append((engine.state.epoch, batch)), accumulation_steps)
    return trainer, seen


# -- without a length -------------------------------------------------------------------------------------------------


@pytest.mark.row("A2")
@pytest.mark.parametrize("steps", [None, 2])
def test_passes_without_a_length_are_measured_anew(steps):
    (trainer, seen), lengths = noting(steps), []
    trainer.add_event_handler(Events.EPOCH_COMPLETED, lambda: lengths.append(trainer.state.epoch_length))
    state = trainer.run(Passes(3, 5, 2), max_epochs=3)

    if steps is None:
        assert [(epoch, batch.item()) for epoch, batch in seen] == [
            *[(1, 100), (1, 101), (1, 102), (2, 200), (2, 201), (2, 202), (2, 203), (2, 204), (3, 300), (3, 301)]
        ]
    else:
        assert [(epoch, len(batch)) for epoch, batch in seen] == [(1, 2), (1, 1), (2, 2), (2, 2), (2, 1), (3, 2)]
    assert lengths == ([3, 5, 2] if steps is None else [2, 3, 1])
    assert (state.iteration, state.epoch, state.reason) == (len(seen), 3, "max_epochs")


@pytest.mark.parametrize("off", [-1, 2])
def test_epoch_ends_where_the_data_end_though_they_misjudge_their_length(off, tmp_path, caplog):
    def data():
        return DataLoader(Samples(7), batch_sampler=Misjudged(off))

    trainer, seen = noting()
    trainer.add_event_handler(every(epochs=0.5), lambda: halves.add(trainer.state.epoch))
    halves = set()
    trainer.run(data(), max_epochs=3)
    for epoch in (1, 2, 3):
        of_epoch = [number for at, (inputs, _) in seen if at == epoch for number in inputs[:, 0].tolist()]
        assert sorted(of_epoch) == list(range(7)) and epoch in halves
    (line,) = [line for line in caplog.messages if "length of the data" in line]
    assert f"says {3 + off} iterations" in line and "gave 3:" in line

    def over_the_run(trainer):  # its length is computed once
        LRSchedule(warmup_linear(*trainer.update.optimizers.values())).attach(trainer)

    made = program([Seen, over_the_run], data=data, limits={"max_epochs": 3})
    assert_resumes(made, tmp_path, at=(5,), how=["stop"])


# -- that changes -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [DataLoader, loader])
@pytest.mark.parametrize(("count", "lengths"), [(9, [2, 3, 3]), (3, [2, 1, 1])])
def test_length_is_read_again_at_each_pass(make, count, lengths):
    dataset, seen = Growing(6), []
    trainer, batches = noting()
    trainer.add_event_handler(Events.ITERATION_COMPLETED(once=1), lambda: setattr(dataset, "count", count))
    trainer.add_event_handler(Events.EPOCH_COMPLETED, lambda: seen.append(trainer.state.epoch_length))
    trainer.run(make(dataset, batch_size=3, shuffle=True), max_epochs=3)

    assert seen == lengths
    passes = torch.cat([batch for _, batch in batches]).split([6, count, count])
    assert [sorted(each.tolist()) for each in passes] == [list(range(each)) for each in (6, count, count)]


def test_epoch_length_that_was_given_stays():
    dataset, (trainer, batches) = Growing(6), noting()
    trainer.add_event_handler(Events.EPOCH_COMPLETED(once=1), lambda: setattr(dataset, "count", 12))
    trainer.run(loader(dataset, 3), max_epochs=3, epoch_length=3)

    assert trainer.state.epoch_length == 3 and len(batches) == 9


def resumed(folder, data, steps=None, stop_at=None):
    """The epoch that is reached and the samples that are seen, by a run that goes on in the folder."""
    trainer, seen = noting(steps)
    checkpoint = Checkpoint(folder)
    checkpoint.attach(trainer)
    checkpoint.resume()
    if stop_at:
        trainer.add_event_handler(Events.ITERATION_COMPLETED(once=stop_at), lambda: trainer.request_stop("here"))
    if data.dataset.dataset.grows:
        trainer.add_event_handler(Events.EPOCH_COMPLETED(once=1), lambda: setattr(data.dataset.dataset, "count", 9))
    state = trainer.run(data, max_epochs=2)
    return state.epoch, [each for _, batch in seen for each in torch.cat(batch if steps else [batch]).tolist()]


def test_growing_dataset_is_resumed_at_each_boundary(tmp_path):
    def data(count):
        dataset = Growing(count)
        dataset.grows = True
        return loader(dataset, 3, shuffle=True)

    _, whole = resumed(tmp_path / "whole", data(6))
    assert len(whole) == 15
    for at in range(1, 5):
        _, first = resumed(tmp_path / str(at), data(6), stop_at=at)
        _, rest = resumed(tmp_path / str(at), data(6 if at < 2 else 9))  # it was saved after it had grown
        assert first + rest == whole, at


CURRICULA = {
    "loader": lambda data: loader(data, 2, sampler=EpochSampler(4, grows=2)),
    "DataLoader": lambda data: DataLoader(data, 2, sampler=EpochSampler(4, grows=2)),
    "batch sampler": lambda data: DataLoader(
        data, batch_sampler=BatchSampler(EpochSampler(4, grows=2), 2, drop_last=False)
    ),
}


@pytest.mark.parametrize("kind", tiered(CURRICULA, "batch sampler"))
def test_epochs_of_a_sampler_that_grows_have_their_own_length_also_where_it_resumes(tmp_path, kind):
    made = program([Seen], data=lambda: CURRICULA[kind](Samples(10)), limits={"max_epochs": 3})
    for how, places in (("stop", EVERYWHERE), ("same process", (1, 2, 3, 5, 6))):
        assert_resumes(made, tmp_path / how, at=places, how=[how])


@pytest.mark.parametrize("steps", tiered((None, 2, 3, 5), None, 3))
def test_other_groups_from_anywhere_take_each_batch_once(steps, tmp_path):
    """Iterations are another unit then: what counts is the place in the data."""

    def data():
        return loader(Growing(5), shuffle=True)

    _, whole = resumed(tmp_path / "whole", data())
    for at in range(1, 11):
        _, first = resumed(tmp_path / str(at), data(), stop_at=at)
        epoch, rest = resumed(tmp_path / str(at), data(), steps)
        assert first + rest == whole and epoch == 2, at


# -- asked for once ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 1])
def test_data_that_begins_anew_where_it_is_asked_for_an_iterator_is_asked_once_in_a_pass(workers):
    trainer, seen = noting(2)
    trainer.run(RewoundLoader([1, 2, 3, 4, 5, 6], batch_size=None, num_workers=workers), max_epochs=2)

    assert [batch for _, batch in seen] == [[1, 2], [3, 4], [5, 6]] * 2


def test_with_global_micro_batches_one_batch_is_a_pass():
    trainer = Trainer(lambda engine, batch: None, global_micro_batches=2)

    assert trainer.run(loader(Samples(2), 2), max_epochs=3).iteration == 3


# -- without a batch --------------------------------------------------------------------------------------------------


class Empty:
    def __iter__(self):
        return iter(())


class EmptySized(Empty):
    def __len__(self):
        return 0


@pytest.mark.parametrize("make", [Empty, EmptySized, list, lambda: DataLoader(Growing(0))])
@pytest.mark.parametrize("limits", [{"max_epochs": 2}, {"max_epochs": 2, "epoch_length": 4}, {"max_iters": 3}])
def test_data_without_a_batch_is_an_error_and_counts_nothing(make, limits):
    trainer, seen = noting()
    for _ in range(2):  # each restart is the first run again
        with pytest.raises(ValueError) as raised:
            trainer.run(make(), **limits)
        assert "zero size" in str(raised.value) or "no batch" in str(raised.value)
        assert (trainer.state.iteration, seen) == (0, [])
    trainer.run([1, 2], max_epochs=2)
    assert seen == [(1, 1), (1, 2), (2, 1), (2, 2)]
