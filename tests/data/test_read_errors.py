"""Batches that cannot be read: the run ends with the true error, or leaves them out and says how many."""

import logging

import pytest
import torch
import torch.distributed as dist
from ignite.engine import Events
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from ignite_engine import Trainer, Update, loader
from ignite_engine.errors import PeerFailed
from ignite_engine.handlers import Checkpoint
from tests.kit.processes import ranks
from tests.kit.refusals import refusals
from tests.kit.resume import EVERYWHERE, Program, assert_resumes
from tests.kit.seen import Seen
from tests.kit.tiers import tiered
from tests.kit.tiny import linear, one, weights


class Broken(Dataset):
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
    """Its list gets ``[epoch, iteration, samples of each micro-batch that counts]`` of every update."""
    model = linear()
    wrapped = DistributedDataParallel(model) if dist.is_initialized() else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    update = Update(wrapped, optimizer, loss_fn, weight_fn=(lambda batch: len(batch[0])) if weighted else None)
    trainer = Trainer(update, steps, max_read_errors=limit)

    def real(trainer):
        group = trainer.state.batch if steps else [trainer.state.batch]
        return [ids.tolist() for ids, _ in group[: len(group) - trainer.state.group.padding]]

    seen = Seen(real)
    seen.attach(trainer)
    return trainer, seen.lines


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


# -- one process ------------------------------------------------------------------------------------------------------


@pytest.mark.row("H5")
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("bad", [0, 4, 9])
def test_batch_that_cannot_be_read_is_left_out(bad, workers, caplog):
    trainer, seen = trainer_of(4)
    ends = []
    trainer.add_event_handler(Events.EPOCH_COMPLETED, lambda: ends.append((trainer.state.epoch, len(seen))))
    state = trainer.run(loader(Broken(10, bad), 2, num_workers=workers), max_epochs=2)

    batches = [[2 * index, 2 * index + 1] for index in range(5) if index != bad // 2]
    assert [(epoch, batch) for epoch, _, batch in seen] == [(epoch, [each]) for epoch in (1, 2) for each in batches]
    assert (state.status, state.iteration, state.read_errors, ends) == ("completed", 8, 2, [(1, 4), (2, 8)])
    lines = [message for message in caplog.messages if "cannot be read" in message]
    assert len(lines) == 2 and f"sample {bad} is damaged" in lines[0]
    assert f"at iteration {bad // 2 + 1} " in lines[0] and "1 of at most 4" in lines[0] and "2 of at most 4" in lines[1]


@pytest.mark.parametrize(("limit", "bad", "left"), [(0, (4,), 2), (2, (0, 4, 6), 1)])
def test_one_more_than_the_limit_ends_the_run_with_the_error(limit, bad, left):
    """By default the first; what is not consumed is not counted."""
    trainer, seen = trainer_of(limit)
    with pytest.raises(OSError) as raised:
        trainer.run(loader(Broken(10, *bad), 2), max_epochs=1)
    assert f"sample {bad[-1]} is damaged" in str(raised.value)
    assert (len(seen), trainer.state.read_errors, trainer.state.status) == (left, max(0, limit - 1), "failed")


def test_group_is_what_is_left_of_it():
    """Its mean is over what was read; a group of which nothing was is no iteration."""
    trainer, seen = trainer_of(9, steps=2)
    state = trainer.run(loader(Broken(14, 2, 4, 7, 13), 2), max_epochs=1)

    assert seen == [[1, 1, [[0, 1]]], [1, 2, [[8, 9], [10, 11]]]]
    assert (state.read_errors, state.micro_batches) == (4, 3)
    torch.testing.assert_close(weights(trainer), by_hand([[0, 1], [8, 9, 10, 11]]), rtol=0, atol=1e-6)


class Reader:
    """Own iteration: ``next`` can be called again after an error."""

    at = 0

    def __iter__(self):
        return self

    def __next__(self):
        self.at = (self.at + 1) % 6
        if self.at == 0:
            raise StopIteration
        if self.at == 3:
            raise OSError("damaged")
        return torch.tensor([float(self.at)])


class Generated(IterableDataset):
    def __iter__(self):
        yield torch.zeros(1)
        raise OSError("damaged")


@pytest.mark.parametrize(
    "make",
    [lambda: DataLoader(Generated(), 1), lambda: iter(Generated()), lambda: DataLoader(Generated(), 1, num_workers=1)],
)
def test_data_that_ends_with_its_error_raises_it(make):
    with pytest.raises(OSError):
        Trainer(lambda engine, batch: None, max_read_errors=5).run(make(), max_epochs=1)


def test_own_iterator_may_go_on_after_an_error():
    trainer = Trainer(lambda engine, batch: None, max_read_errors=5)
    assert trainer.run(Reader(), max_epochs=2).iteration == 8


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, marks=pytest.mark.nightly),
        pytest.param({"steps": 2}, marks=pytest.mark.nightly),
        {"steps": 3, "weighted": True},
        {"torchdata": True},
    ],
    ids=str,
)
def test_resumed_anywhere_it_ends_with_the_same_bits(options, tmp_path):
    options = dict(options)
    torchdata = options.pop("torchdata", False)

    def data():
        samples = Broken(15, 2, 3, 4, 14)
        return StatefulDataLoader(samples, 2) if torchdata else loader(samples, 2, shuffle=True)

    made = Program(lambda: trainer_of(20, **options)[0], data)
    assert_resumes(made, tmp_path, at=EVERYWHERE, how=["stop"])


def with_limit(limit, **options):
    return lambda: Trainer(lambda engine, batch: None, max_read_errors=limit, **options)


test_refusals = refusals(
    [
        (str(limit), with_limit(limit), ValueError, "max_read_errors whole number at least 0")
        for limit in (-1, 1.5, True)
    ]
    + [
        (
            "groups of all ranks",
            with_limit(1, global_micro_batches=2),
            ValueError,
            "max_read_errors=1 accumulation_steps",
        )
    ]
)


# -- ranks ------------------------------------------------------------------------------------------------------------

BAD = (0, 1, 2, 3, 11, 19)
PLANS = {"one by one": {}, "groups": {"steps": 2}, "weighted": {"steps": 3, "weighted": True}, "own state": {}}


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


class Lines(logging.Handler):
    def __init__(self):
        super().__init__(logging.WARNING)
        self.lines = []

    def emit(self, record):
        if "cannot be read" in record.getMessage():
            self.lines.append(record.getMessage())


def run_plan(name, folder=None, stop_at=None):
    trainer, seen = trainer_of(20, **PLANS[name])
    if folder is not None:
        checkpoint = Checkpoint(folder)
        checkpoint.attach(trainer)
        checkpoint.resume(ignore=[] if stop_at else ["seen"])
    if stop_at is not None:
        trainer.add_event_handler(Events.ITERATION_COMPLETED(once=stop_at), lambda: trainer.request_stop("here"))
    logged = Lines()
    logging.getLogger("ignite_engine").addHandler(logged)
    data = Owned(dist.get_rank()) if name == "own state" else loader(Broken(23, *BAD), 1)
    state = trainer.run(data, max_epochs=2)
    logging.getLogger("ignite_engine").removeHandler(logged)
    seen = [(epoch, each) for epoch, _, each in seen if each != "end"]
    report = {"seen": seen, "weights": weights(trainer), "count": state.read_errors, "lines": logged.lines}
    return report | {"iteration": state.iteration}


def plan_on_a_rank(rank, name, folder):
    return run_plan(name), run_plan(name, folder, stop_at=2), run_plan(name, folder)


def samples_of(reports):
    return sorted((epoch, each) for report in reports for epoch, batches in report["seen"] for (each,) in batches)


@pytest.mark.row("H5")
@pytest.mark.parametrize("name", tiered(PLANS, "weighted", "own state"))
def test_ranks_leave_the_same_out_and_stay_in_step_also_resumed_and_on_fewer_ranks(name, tmp_path):
    """Of samples 0, 1 and 2 no rank has anything to train on: with a batch of one that is no iteration."""
    whole, stopped, resumed = zip(*ranks(3, plan_on_a_rank, name, tmp_path / "run"), strict=True)

    expected = [(epoch, each) for epoch in (1, 2) for each in range(23) if each not in BAD]
    steps, places = PLANS[name].get("steps", 1), -(-23 // 3)
    assert samples_of(whole) == expected
    assert {each["count"] for each in whole} == {2 * len(BAD)}
    assert {each["iteration"] for each in whole} == {2 * (-(-places // steps) - (steps == 1))}
    lines = whole[0]["lines"]
    assert len(lines) == 2 * len(BAD) and not whole[1]["lines"] + whole[2]["lines"]
    assert {"sample 1 is damaged" in line for line in lines if "cannot be read on rank 1" in line} == {True, False}
    updates = [[each for one in whole for (each,) in one["seen"][step][1]] for step in range(whole[0]["iteration"])]
    for one_whole, first, rest in zip(whole, stopped, resumed, strict=True):
        torch.testing.assert_close(one_whole["weights"], by_hand(updates), rtol=0, atol=1e-6)
        assert torch.equal(rest["weights"], one_whole["weights"]) and rest["count"] == 2 * len(BAD)
        assert first["seen"] + rest["seen"] == one_whole["seen"] and first["iteration"] == 2


@pytest.mark.row("H5")
@pytest.mark.parametrize("name", tiered(sorted(PLANS.keys() - {"own state"}), "groups", "weighted"))
def test_on_another_number_of_ranks_each_sample_comes_once(name, tmp_path):
    stopped = ranks(3, stop_on_a_rank, name, tmp_path / "run")
    rest = run_plan(name, tmp_path / "run")

    assert samples_of([*stopped, rest]) == [(epoch, each) for epoch in (1, 2) for each in range(23) if each not in BAD]
    assert rest["count"] == 2 * len(BAD)


def stop_on_a_rank(rank, name, folder):
    return run_plan(name, folder, stop_at=2)


def too_many(rank):
    trainer, seen = trainer_of(1)
    try:
        trainer.run(loader(Broken(23, 4, 10), 1), max_epochs=1)
    except (OSError, PeerFailed) as error:
        return type(error), "sample 10 is damaged" in str(error), "Rank 1" in str(error), len(seen)


def test_error_beyond_the_limit_is_named_on_every_rank():
    peer = (PeerFailed, True, True, 3)
    assert ranks(3, too_many) == [peer, (OSError, True, False, 3), peer]
