"""A loader with a state of its own is resumed by it, wherever in a pass it was saved."""

import copy
import hashlib
import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from ignite.engine import Events
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from ignite_engine import Trainer, TrainingEvents, Update, create_evaluator
from ignite_engine.checkpointing import CheckpointStore
from ignite_engine.handlers import Checkpoint, Evaluation
from tests.kit.tiny import linear, mse, trainer_of, weights


class Stream(IterableDataset[Any]):
    """Five samples in a pass, without a length, which goes on where its state says."""

    def __init__(self):
        self.given = 0

    def __iter__(self):
        while self.given < 5:
            self.given += 1
            yield torch.full((3,), float(self.given)), torch.ones(1)
        self.given = 0

    def state_dict(self):
        return {"given": self.given}

    def load_state_dict(self, state):
        self.given = state["given"]


class BeginsAnew(Stream):
    """A loader whose state at the end of a pass is that of the next one's begin, which draws."""

    loaded = False

    def __len__(self):
        return 5

    def __iter__(self):
        torch.rand(())
        self.given, self.loaded = self.given if self.loaded else 0, False
        return super().__iter__()

    def load_state_dict(self, state):
        super().load_state_dict(state)
        self.loaded = True


def numbers():
    generator = torch.Generator().manual_seed(3)
    return TensorDataset(torch.randn(5, 3, generator=generator), torch.randn(5, 1, generator=generator))


@pytest.mark.slow
@pytest.mark.parametrize("cut_short", [False, True])
@pytest.mark.parametrize("steps", [None, 2, 5], ids=lambda steps: f"groups_of_{steps}")
@pytest.mark.parametrize("kind", [numbers, Stream, "plain", "begins anew"])
def test_resumes_bit_for_bit_at_every_edge(kind, steps, cut_short, caplog):
    """Also at those where the loader has already said that its pass is over: the last group is a short one."""
    from torchdata.stateful_dataloader import StatefulDataLoader

    def make(seed):
        torch.manual_seed(seed)
        trainer, seen = trainer_of(linear(dropout=True), steps), list[Any]()
        dataset = Stream() if kind is Stream else numbers()
        if cut_short:
            trainer.add_event_handler(Events.ITERATION_COMPLETED(once=2), lambda: trainer.terminate_epoch())
        trainer.add_event_handler(
            Events.ITERATION_COMPLETED,
            lambda: seen.append((trainer.state.iteration, trainer.state.epoch, float(trainer.state.output["loss"]))),
        )
        trainer.add_event_handler(Events.EPOCH_COMPLETED, lambda: seen.append(("epoch", trainer.state.epoch)))
        if kind == "begins anew":
            return trainer, seen, BeginsAnew()
        loader = DataLoader if kind == "plain" else StatefulDataLoader
        return trainer, seen, loader(dataset, 1, shuffle=kind is not Stream)

    def save():
        shared, local = whole.registry.capture()
        saved.append((len(expected), copy.deepcopy({**shared, **local})))

    saved = []
    whole, expected, data = make(0)
    whole.add_event_handler(TrainingEvents.RESUME_POINT, save)
    whole.run(data, max_epochs=3)
    for before, state in saved[:-1]:
        resumed, seen, data = make(1)
        resumed.registry.load(state, source="memory")
        with caplog.at_level(logging.ERROR):
            resumed.run(data, max_epochs=3)
        assert seen == expected[before:]
        assert torch.equal(weights(resumed), weights(whole))


class Generated(IterableDataset[Any]):
    """A stream without a state, which torchdata replays."""

    def __iter__(self):
        for index in range(9):
            yield torch.full((3,), float(index)), torch.ones(1)


class Listed(IterableDataset[Any]):
    """The same by a method that is no generator function."""

    def __iter__(self):
        return iter([(torch.full((3,), float(index)), torch.ones(1)) for index in range(9)])


class CountedIterator(Iterator[tuple[Tensor, Tensor]]):
    """Over the same, with a state."""

    def __init__(self):
        self.given = 0

    def __next__(self):
        if self.given == 9:
            raise StopIteration
        self.given += 1
        return torch.full((3,), float(self.given - 1)), torch.ones(1)

    def state_dict(self):
        return {"given": self.given}

    def load_state_dict(self, state):
        self.given = state["given"]


class Counted(IterableDataset[Any]):
    """A stream whose iterator has a state."""

    def __iter__(self):
        return CountedIterator()


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("stream", [Generated, Listed, Counted])
def test_stream_goes_on_where_it_was_in_a_second_resume_too(stream, workers):
    """Torchdata counts twice what it has replayed."""
    from torchdata.stateful_dataloader import StatefulDataLoader

    state = None
    seen = []
    for limit in (2, 3, 5, 18):
        trainer = trainer_of()
        trainer.add_event_handler(
            Events.ITERATION_COMPLETED, lambda engine: seen.append(float(engine.state.batch[0][0, 0]))
        )
        if state is not None:
            trainer.registry.load(state, source="memory")
        trainer.run(StatefulDataLoader(stream(), 1, num_workers=workers), max_iters=limit)
        assert [reason for reason in trainer.reproducibility() if "its batches are replayed" in reason] == (
            []
            if stream is Counted
            else [f"StatefulDataLoader with {stream.__name__} keeps no state: its batches are replayed"]
        )
        shared, local = trainer.registry.capture()
        state = copy.deepcopy({**shared, **local})

    one_pass = [float(index) for index in range(9) for _ in range(max(workers, 1))]
    assert seen == (one_pass * 2)[:18]


class Shared(Stream):
    """The samples of a :class:`Stream`, dealt out to two workers."""

    def __iter__(self):
        worker = torch.utils.data.get_worker_info()
        own = range(5) if worker is None else range(worker.id, 5, worker.num_workers)
        while self.given < len(own):
            self.given += 1
            yield torch.full((3,), float(own[self.given - 1])), torch.ones(1)
        self.given = 0


@pytest.mark.slow
@pytest.mark.parametrize("stream", [Shared, Counted])
def test_workers_whose_stream_begins_anew_when_asked_again_are_announced(stream):
    """Torchdata forgets that a worker's stream has ended: only the state of an iterator still says so."""
    from torchdata.stateful_dataloader import StatefulDataLoader

    def run(limit, state=None):
        trainer, seen = trainer_of(), list[list[float]]()
        trainer.add_event_handler(
            Events.ITERATION_COMPLETED, lambda engine: seen.append(engine.state.batch[0][:, 0].tolist())
        )
        if state is not None:
            trainer.registry.load(state, source="memory")
        trainer.run(StatefulDataLoader(stream(), 2, num_workers=2), max_iters=limit)
        return seen, trainer

    whole, _ = run(40)
    in_one_pass = next(count for count in range(1, 40) if whole[count:] == whole[:-count])
    first, trainer = run(in_one_pass)
    shared, local = trainer.registry.capture()
    rest, resumed = run(40, copy.deepcopy({**shared, **local}))
    twice = "StatefulDataLoader asks workers again whose stream has ended: where Shared then begins anew, its batches"
    announced = [reason for reason in resumed.reproducibility() if reason.startswith(twice)]
    assert (first + rest == whole) == (not announced) == (stream is Counted)


def test_stopped_in_the_evaluation_of_the_iteration_that_ends_an_epoch_twice(tmp_path):
    """``terminate_epoch()`` in an epoch's last iteration opens the next pass before the save, as in the whole run."""
    torchdata = pytest.importorskip("torchdata.stateful_dataloader")

    def drawn(folder, stop=False):
        torch.manual_seed(1)
        model = linear()
        trainer = Trainer(Update(model, torch.optim.SGD(model.parameters(), lr=0.1), mse))
        evaluator = create_evaluator(model, lambda model, batch: (model(batch[0]), batch[1]), {})
        Evaluation(evaluator, [next(iter(DataLoader(numbers(), 2)))]).attach(
            trainer, Events.ITERATION_COMPLETED(every=2)
        )
        trainer.add_event_handler(Events.ITERATION_COMPLETED(every=4), lambda: trainer.terminate_epoch())
        checkpoint = Checkpoint(tmp_path / folder)
        checkpoint.attach(trainer, Events.EPOCH_COMPLETED)
        noted = []
        trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: noted.append(digest()))
        if stop:
            trainer.add_event_handler(
                TrainingEvents.EVALUATION_STARTED,
                lambda: trainer.request_stop("test") if trainer.state.iteration == 4 else None,
            )
        checkpoint.resume()
        trainer.run(torchdata.StatefulDataLoader(numbers(), 3, shuffle=True), max_epochs=4)
        return [*noted, digest()]

    def digest():
        return hashlib.sha256(torch.get_rng_state().numpy().tobytes()).hexdigest()[:8]

    whole = drawn("whole")
    assert drawn("cut", stop=True)[:4] == whole[:4]
    assert CheckpointStore(tmp_path / "cut").checkpoints()[-1].iteration == 4
    assert drawn("cut") == whole[4:]
