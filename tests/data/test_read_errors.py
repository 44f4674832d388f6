"""Batches that cannot be read: the run ends with the true error, or leaves them out and says how many."""

import copy
import logging
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ignite.engine import Events
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, IterableDataset

from ignite_engine import Trainer, TrainingEvents, Update, loader
from ignite_engine.errors import PeerFailed
from tests.kit.tiny import linear, one
from tests.ranks.forkserver import on_ranks


class Broken(Dataset[Any]):
    """Sample i is ``(i, features)``; those of ``bad`` cannot be read."""

    def __init__(self, count, *bad):
        self.count, self.bad = count, bad

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        if index in self.bad:
            raise OSError(5, f"sample {index} is damaged")
        return index, torch.tensor([(index * k % 7) / 7 - 0.5 for k in (1, 2, 3)])


def loss_fn(model, batch):
    ids, inputs = batch
    return (model(inputs).squeeze(1) - ids.remainder(5) / 5).square().mean()


def trainer_of(limit, steps=None, *, weighted=False):
    """Its list gets ``(epoch, samples of each micro-batch that counts)`` of every update."""
    model = linear()
    wrapped = DistributedDataParallel(model) if dist.is_initialized() else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    update = Update(wrapped, optimizer, loss_fn, weight_fn=(lambda batch: len(batch[0])) if weighted else None)
    trainer, seen = Trainer(update, steps, max_read_errors=limit), list[Any]()

    @trainer.on(Events.ITERATION_COMPLETED)
    def note():
        group = trainer.state.batch if steps else [trainer.state.batch]
        real = group[: len(group) - trainer.state.padding]
        seen.append((trainer.state.epoch, [ids.tolist() for ids, _ in real]))

    return trainer, seen


def weights(trainer):
    return one(trainer.update.model).clone()


def test_by_default_the_run_ends_with_the_error():
    trainer, seen = trainer_of(0)
    with pytest.raises(OSError, match="sample 4 is damaged"):
        trainer.run(loader(Broken(10, 4), 2), max_epochs=1)
    assert (len(seen), trainer.state.status) == (2, "failed")


@pytest.mark.row("H5")
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("bad", [0, 4, 9], ids=["first", "middle", "last"])
def test_batch_that_cannot_be_read_is_left_out(bad, workers, caplog):
    trainer, seen = trainer_of(4)
    events = list[tuple[int, int]]()
    trainer.add_event_handler(Events.EPOCH_COMPLETED, lambda: events.append((trainer.state.epoch, len(seen))))

    state = trainer.run(loader(Broken(10, bad), 2, num_workers=workers), max_epochs=2)

    batches = [[2 * index, 2 * index + 1] for index in range(5) if index != bad // 2]
    assert seen == [(epoch, [batch]) for epoch in (1, 2) for batch in batches]
    assert (state.status, state.iteration, state.read_errors, events) == ("completed", 8, 2, [(1, 4), (2, 8)])
    lines = [record.getMessage() for record in caplog.records if "cannot be read" in record.getMessage()]
    assert len(lines) == 2 and f"sample {bad} is damaged" in lines[0]
    assert lines[0].startswith(f"A batch at iteration {bad // 2 + 1} cannot be read and is left out (1 of at most 4): ")


def test_one_more_than_the_limit_ends_the_run():
    trainer, seen = trainer_of(2)
    with pytest.raises(OSError, match="sample 6 is damaged"):
        trainer.run(loader(Broken(10, 0, 4, 6), 2), max_epochs=1)
    assert (len(seen), trainer.state.read_errors) == (1, 1), "what is not consumed is not counted"


def test_group_is_what_is_left_of_it():
    """Its mean is over what was read; a group of which nothing was is no iteration."""
    trainer, seen = trainer_of(9, steps=2)
    state = trainer.run(loader(Broken(14, 2, 4, 7, 13), 2), max_epochs=1)

    assert seen == [(1, [[0, 1]]), (1, [[8, 9], [10, 11]])]
    assert (state.read_errors, state.micro_batches) == (4, 3)
    torch.testing.assert_close(weights(trainer), by_hand([[0, 1], [8, 9, 10, 11]]), rtol=0, atol=1e-6)


class Reader:
    """Own iteration: ``next`` can be called again after an error."""

    def __init__(self, count, bad):
        self.count, self.bad, self.at = count, bad, 0

    def __iter__(self):
        return self

    def __next__(self):
        self.at += 1
        if self.at > self.count:
            self.at = 0
            raise StopIteration
        if self.at == self.bad + 1:
            raise OSError("damaged")
        return torch.tensor([float(self.at)])


class Generated(IterableDataset[Any]):
    def __iter__(self):
        yield torch.zeros(1)
        raise OSError("damaged")


def test_data_that_ends_with_its_error_raises_it():
    for data in (DataLoader(Generated(), 1), iter(Generated()), DataLoader(Generated(), 1, num_workers=1)):
        with pytest.raises(OSError, match="damaged"):
            Trainer(lambda engine, batch: None, max_read_errors=5).run(data, max_epochs=1)
    trainer = Trainer(lambda engine, batch: None, max_read_errors=5)
    assert trainer.run(Reader(5, 2), max_epochs=2).iteration == 8


@pytest.mark.parametrize("options", [{}, {"steps": 2}, {"steps": 3, "weighted": True}, {"stateful": True}], ids=str)
def test_resumed_anywhere_it_ends_with_the_same_bits(options):
    stateful = options.pop("stateful", False)

    def data():
        if stateful:
            from torchdata.stateful_dataloader import StatefulDataLoader

            return StatefulDataLoader(Broken(21, 2, 3, 4, 20), 2)
        return loader(Broken(21, 2, 3, 4, 20), 2, shuffle=True)

    trainer, seen = trainer_of(20, **options)
    saved = list[Any]()

    @trainer.on(TrainingEvents.RESUME_POINT)
    def save():
        shared, local = trainer.registry.capture()
        saved.append((trainer.state.iteration, copy.deepcopy({**shared, **local})))

    trainer.run(data(), max_epochs=2)
    assert len({iteration for iteration, _ in saved}) == trainer.state.iteration > 5

    for iteration, state in saved:
        resumed, rest = trainer_of(20, **options)
        resumed.registry.load(state, source="memory")
        resumed.run(data(), max_epochs=2)
        assert rest == seen[iteration:], iteration
        assert resumed.state.read_errors == trainer.state.read_errors > 4
        assert torch.equal(weights(resumed), weights(trainer))


def test_settings_that_cannot_be_are_refused():
    for limit in (-1, 1.5, True):
        with pytest.raises(ValueError, match=r"^max_read_errors must be a whole number of at least 0"):
            Trainer(lambda engine, batch: None, max_read_errors=limit)
    with pytest.raises(ValueError, match=r"^max_read_errors=1 would make"):
        Trainer(lambda engine, batch: None, global_micro_batches=2, max_read_errors=1)


# -- ranks ------------------------------------------------------------------------------------------------------------


class Lines(logging.Handler):
    def __init__(self):
        super().__init__(logging.WARNING)
        self.lines = []

    def emit(self, record):
        self.lines.append(record.getMessage())


PLANS = {
    "one by one": {},
    "groups": {"steps": 2},
    "weighted": {"steps": 3, "weighted": True},
    "own state": {},
}
OWN = "own state"
BAD = (0, 1, 2, 3, 11, 19)


class Owned:
    """Every third sample, a batch each; where it is in its pass is its own state."""

    def __init__(self, rank):
        self.rank, self.next, self.samples = rank, 0, Broken(23, *BAD)

    def __iter__(self):
        return self

    def __next__(self):
        index = 3 * self.next + self.rank
        if index >= 23:
            self.next = 0
            raise StopIteration
        self.next += 1
        return tuple(torch.as_tensor(each)[None] for each in self.samples[index])

    def state_dict(self):
        return {"next": self.next}

    def load_state_dict(self, state):
        self.next = state["next"]


def plan_on_ranks(name, stop_at, state):
    options = PLANS[name]
    trainer, seen = trainer_of(20, **options)
    if state is not None:
        trainer.registry.load(state, source="memory")
    logged = Lines()
    logging.getLogger("ignite_engine.data.read_errors").addHandler(logged)
    saved = dict[str, Any]()

    @trainer.on(Events.ITERATION_COMPLETED)
    def stop():
        if trainer.state.iteration == stop_at:
            trainer.request_stop("here")
            trainer.vote_at_next_boundary()

    @trainer.on(TrainingEvents.RESUME_POINT)
    def save():
        shared, local = trainer.registry.capture()
        saved.update(copy.deepcopy({**shared, **local}) if trainer.state.stopping else {})

    data = Owned(dist.get_rank()) if name == OWN else loader(Broken(23, *BAD), 1)
    state = trainer.run(data, max_epochs=2)
    logging.getLogger("ignite_engine.data.read_errors").removeHandler(logged)
    report = {"seen": seen, "weights": weights(trainer), "count": state.read_errors, "lines": logged.lines}
    return report | {"saved": saved, "iteration": state.iteration}


def _rank(rank, folder):
    reports = {}
    for name in PLANS:
        reports[name] = plan_on_ranks(name, None, None)
        first = plan_on_ranks(name, 2, None)
        reports[f"{name}, stopped"] = first
        reports[f"{name}, resumed"] = plan_on_ranks(name, None, first["saved"])
    trainer, seen = trainer_of(1)
    try:
        trainer.run(loader(Broken(23, 4, 10), 1), max_epochs=1)
    except (OSError, PeerFailed) as error:
        reports["too many"] = (f"{type(error).__name__}: {error}", len(seen))
    torch.save(reports, f"{folder}/{rank}.pt")


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    folder = tmp_path_factory.mktemp("read_errors")
    on_ranks(3, _rank, folder)
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(3)]


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("name", PLANS)
def test_ranks_leave_the_same_out_and_stay_in_step(reports, name):
    """Of samples 0, 1 and 2 no rank has anything to train on: with a batch of one that is no iteration."""
    ranks = [report[name] for report in reports]
    seen = [(epoch, each) for report in ranks for epoch, batches in report["seen"] for (each,) in batches]
    assert sorted(seen) == [(epoch, each) for epoch in (1, 2) for each in range(23) if each not in BAD]
    assert [report["count"] for report in ranks] == [2 * len(BAD)] * 3
    steps = PLANS[name].get("steps", 1)
    places = -(-23 // 3)
    assert {report["iteration"] for report in ranks} == {2 * (-(-places // steps) - (steps == 1))}
    lines = ranks[0]["lines"]
    assert len(lines) == 2 * len(BAD) and not ranks[1]["lines"] + ranks[2]["lines"]
    assert {"sample 1 is damaged" in line for line in lines if "cannot be read on rank 1 and is" in line} == {
        True,
        False,
    }

    updates = [
        [each for report in ranks for (each,) in report["seen"][step][1]] for step in range(ranks[0]["iteration"])
    ]
    for report in ranks:
        torch.testing.assert_close(report["weights"], by_hand(updates), rtol=0, atol=1e-6)
    for rank, report in enumerate(reports):
        assert torch.equal(report[f"{name}, resumed"]["weights"], ranks[rank]["weights"])
        assert report[f"{name}, stopped"]["seen"] + report[f"{name}, resumed"]["seen"] == ranks[rank]["seen"]
        assert report[f"{name}, resumed"]["count"] == 2 * len(BAD)


def by_hand(updates):
    """The weights of a loop that takes the mean over the samples of each update."""
    model, whole = linear(), Broken(23)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for samples in updates:
        inputs = torch.stack([whole[each][1] for each in samples])
        optimizer.zero_grad()
        loss_fn(model, (torch.tensor(samples), inputs)).backward()
        optimizer.step()
    return one(model).detach()


@pytest.mark.row("H5")
@pytest.mark.distributed
def test_on_another_number_of_ranks_each_sample_comes_once(reports):
    for name in PLANS.keys() - {OWN}:
        first = [report[f"{name}, stopped"] for report in reports]
        rest = plan_on_ranks(name, None, first[0]["saved"])
        seen = [(epoch, each) for report in (*first, rest) for epoch, batches in report["seen"] for (each,) in batches]
        assert sorted(seen) == [(epoch, each) for epoch in (1, 2) for each in range(23) if each not in BAD]
        assert rest["count"] == 2 * len(BAD)


@pytest.mark.distributed
def test_error_beyond_the_limit_is_named_on_every_rank(reports):
    peers = ("PeerFailed: Rank 1 failed, reading its data: sample 10 is damaged", 3)
    own = ("OSError: [Errno 5] sample 10 is damaged", 3)
    assert [report["too many"] for report in reports] == [peers, own, peers]
