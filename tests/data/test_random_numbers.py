"""Random numbers of a sample are a function of (seed, epoch, index), and those of the process are left alone."""

import random
from itertools import chain

import numpy as np
import pytest
import torch
from ignite.engine import Events
from torch.utils.data import DataLoader, Dataset, Subset, default_collate

from ignite_engine import Trainer, create_evaluator, loader, seed_everything
from ignite_engine.handlers import Evaluation
from tests.kit.tiny import linear

LATE = 100
"""Beyond the first batch, after which only generators are seeded that were drawn from."""


class Drawing(Dataset):
    """Samples of their index and what ``draw(index)`` gives; remembers which were read."""

    def __init__(self, draw, length=160):
        self.draw, self.length, self.read = draw, length, []

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        self.read.append(index)
        return index, self.draw(index)


def everything(*_):
    return random.random(), np.random.rand(), torch.rand(()).item()


def generators():
    """What comes next from each generator of the process, which stays as it is."""
    state = random.getstate(), np.random.get_state(), torch.get_rng_state()
    drawn = [*everything(), np.random.randn(), random.gauss(0, 1)]
    random.setstate(state[0])
    np.random.set_state(state[1])
    torch.set_rng_state(state[2])
    return drawn


def samples(dataset, batch_size=10, *, epochs=1, **options):
    """What a run reads, by epoch and index; samples that are lists are left as they are."""
    data = loader(dataset, batch_size, collate_fn=list, **options)
    trainer, found = Trainer(lambda engine, batch: None), {}
    trainer.add_event_handler(
        Events.ITERATION_COMPLETED,
        lambda: found.update({(trainer.state.epoch, index): drawn for index, drawn in trainer.state.batch}),
    )
    trainer.run(data, max_epochs=epochs)
    return found


def drawn_late(draw, **options):
    """The same samples of a dataset that draws for all, and of one that begins to draw when it was seen not to."""
    always = Drawing(lambda index: draw())
    late = Drawing(lambda index: draw() if index >= LATE else 0.0)
    expected, found = samples(always), samples(late, **options)
    assert always.read == list(range(160)), "each is read once"
    return (
        {key: drawn for key, drawn in expected.items() if key[1] >= LATE},
        {key: drawn for key, drawn in found.items() if key[1] >= LATE},
        late,
    )


@pytest.mark.row("H6")
def test_sample_randomness_is_the_same_with_any_number_of_workers():
    dataset = Drawing(everything, 7)
    before = generators()
    here = samples(dataset, 3, epochs=2, shuffle=True, seed=9)
    after = generators()
    random.seed(99), np.random.seed(99), torch.manual_seed(99)

    assert samples(dataset, 3, epochs=2, shuffle=True, seed=9, num_workers=2) == here
    assert samples(dataset, 2, epochs=2, shuffle=True, seed=9) == here, "another order of work, as on other ranks"
    assert after == before and len(set(here.values())) == 14
    other = samples(dataset, 3, epochs=2, seed=8)
    assert not set(other.values()) & set(here.values())


DRAWS = {
    "python": random.random,
    "gauss": lambda: random.gauss(0, 1),
    "numpy": np.random.rand,
    "half of a pair of numpy's": np.random.randn,
    "many of numpy's": lambda: np.random.rand(312).sum(),
    "torch": lambda: torch.rand(()).item(),
    "two": lambda: random.random() + np.random.randn(),
    "one by another": lambda: np.random.rand() if random.random() < 0.5 else 1.0,
}


@pytest.mark.parametrize("name", DRAWS)
def test_dataset_that_begins_to_draw_late_draws_the_same_and_reads_one_batch_again(name):
    expected, found, dataset = drawn_late(DRAWS[name])

    assert found == expected
    assert sorted(dataset.read)[:LATE] == list(range(LATE)) and len(dataset.read) <= 170
    by_workers, _, _ = drawn_late(DRAWS[name], num_workers=2)
    assert by_workers == expected


def test_iterated_by_hand_each_pass_is_another_and_an_evaluation_is_always_the_same():
    data = loader(Drawing(everything, 12), 4, shuffle=True, collate_fn=list)
    passes = [[sample for batch in data for sample in batch] for _ in range(3)]
    assert len({tuple(index for index, _ in each) for each in passes}) == 3
    assert len({drawn for each in passes for _, drawn in each}) == 36

    evaluated = []
    evaluator = create_evaluator(linear(), lambda model, batch: evaluated.append(batch) or batch, {})
    trainer = Trainer(lambda engine, batch: None)
    Evaluation(evaluator, data).attach(trainer, Events.ITERATION_COMPLETED)
    trainer.run([1, 2])
    assert len(evaluated) == 6 and evaluated[:3] == evaluated[3:]


def test_collate_function_that_draws_late_gets_fresh_samples():
    """It may have taken them apart before it was seen to draw."""

    def collate(batch):
        indices = [sample.pop("index") for sample in batch]
        return indices, batch, np.random.rand() if indices[0] >= start else None

    class Dicts(Drawing):
        def __getitem__(self, index):
            return {"index": index}

    found = {}
    for start in (0, LATE):
        found[start] = [each for each in loader(Dicts(abs), 5, collate_fn=collate) if each[0][0] >= LATE]
    assert found[LATE] == found[0] and len(found[0]) == 12


class Transform:
    shared = np.random.RandomState(1)  # of the class, as MONAI's have it

    def __init__(self):
        self.generators = {"python": random.Random(1), "torch": torch.Generator().manual_seed(1)}
        self.numpy = [np.random.default_rng(1), np.random.RandomState(1)]

    def __call__(self, index):
        python, of_torch = self.generators.values()
        of_numpy = [each.random() for each in (*self.numpy, self.shared)]
        return python.random(), torch.rand((), generator=of_torch).item(), *of_numpy


def test_generators_of_the_dataset_itself_are_seeded_for_each_sample():
    whole = samples(Drawing(Transform(), 20), shuffle=True, epochs=2)
    assert len({drawn for drawns in whole.values() for drawn in drawns}) == 5 * 40, "all differ"
    assert samples(Drawing(Transform(), 20), shuffle=True, epochs=2, num_workers=2) == whole
    data = Drawing(Transform(), 20)
    data.draw(0)
    assert samples(data, shuffle=True, epochs=2) == whole


@pytest.mark.parametrize("parity", [0, 1])
def test_half_of_a_pair_outside_is_neither_drawn_nor_lost(parity):
    """``randn`` makes two numbers and keeps one, which is drawn later without a move of the generator."""

    def read(start):
        data = iter(loader(Drawing(lambda index: np.random.randn() if index >= start else 0.0), 5, collate_fn=list))
        seed_everything(1)
        between, batches = [np.random.randn() for _ in range(parity)], []
        for _ in range(32):
            batches.append(next(data))
            between.append(np.random.randn())
        return between, batches[20:]

    assert read(LATE) == read(0)
    between, _ = read(0)
    seed_everything(1)
    assert between == [np.random.randn() for _ in range(32 + parity)]


@pytest.mark.parametrize("kind", ["PCG64", "Philox"])
def test_another_bit_generator_of_numpy_draws_for_each_sample_too(kind):
    np.random.set_bit_generator(getattr(np.random, kind)(1))
    try:
        expected, found, _ = drawn_late(np.random.rand)
        assert found == expected and len(set(found.values())) == 60
        assert drawn_late(np.random.rand, num_workers=1)[1] == expected
    finally:
        np.random.set_bit_generator(np.random.MT19937(0))


class Nested(Drawing):
    """Reads a loader of its own between two draws."""

    def __init__(self):
        super().__init__(self.both, 12)
        self.inner = loader(Drawing(lambda index: random.random()), 2)

    def both(self, index):
        first = everything()
        next(iter(self.inner))
        return first, everything()


def test_loader_within_a_sample_leaves_its_numbers_alone():
    alone = samples(Drawing(lambda index: (everything(), everything()), 12), 3)

    assert samples(Nested(), 3) == samples(Nested(), 3, num_workers=2) == alone


# -- datasets that read batches ---------------------------------------------------------------------------------------


class Alone(Dataset):
    """Samples of an index and a random number, read one by one; counts the reads."""

    def __init__(self):
        self.reads = []

    def __len__(self):
        return 7

    def __getitem__(self, index):
        self.reads.append(1)
        return index, random.random()


class Batches(Alone):
    def __getitems__(self, indices):
        self.reads.append(len(indices))
        made = []
        while indices:  # which are its own to use up
            made.append((indices.pop(0), random.random()))
        return made


class BatchesOnly(Batches):
    __getitem__ = None


def numbers(dataset, batch_size, **options):
    return dict(chain(*loader(dataset, batch_size, shuffle=True, seed=3, collate_fn=list, **options)))


@pytest.mark.parametrize("kind", [Batches, BatchesOnly])
@pytest.mark.parametrize("plain", [False, True])
def test_dataset_that_reads_batches_is_asked_for_batches(kind, plain):
    dataset = kind()
    Trainer(lambda engine, batch: None).run(DataLoader(dataset, batch_size=3) if plain else loader(dataset, 3))

    assert dataset.reads == [3, 3, 1]


def test_random_numbers_of_a_dataset_that_reads_batches_do_not_depend_on_the_workers():
    alone = numbers(Batches(), 3)

    assert numbers(Batches(), 3, num_workers=2) == alone and sorted(alone) == list(range(7))
    assert numbers(Batches(), 2) != alone and len(set(alone.values())) == 7


def test_subset_keeps_the_random_numbers_of_each_sample():
    """Torch's Subset has ``__getitems__`` whatever it is a subset of."""
    assert numbers(Subset(Alone(), range(7)), 3) == numbers(Alone(), 2)
    assert numbers(Subset(Subset(Batches(), range(7)), range(7)), 3) == numbers(Batches(), 3)


class HasNoNext(Alone):
    def __getitem__(self, index):
        return next(iter([index] if index != 4 else []))


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("collates", [False, True])
def test_stop_iteration_of_a_sample_or_of_a_collate_function_is_an_error(workers, collates):
    """Else it would end the pass, and the epoch be filled from another one."""
    kind, named = (Alone, "Alone[6]") if collates else (HasNoNext, "HasNoNext[4]")
    function = (lambda batch: next(iter(batch[1:]))) if collates else default_collate
    with pytest.raises(RuntimeError) as raised:
        Trainer(lambda engine, batch: None).run(loader(kind(), 3, collate_fn=function, num_workers=workers))
    assert named in str(raised.value) and "StopIteration" in str(raised.value)
