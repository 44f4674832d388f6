"""Which generators are seeded for a sample, and what happens when one is drawn from that was not."""

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, default_collate

from ignite_engine import StopRequested, loader, rng
from ignite_engine.data import SeededDataset

WATCHED = 64


class SeededInFull(SeededDataset):
    """All generators seeded for each call, as the numbers are defined."""

    def __getitems__(self, keys):
        with rng.isolated():
            (pass_number, first), samples = keys[0], []
            if self.reads_batches:
                rng.seed_host(rng.mix(self.seed, pass_number, first))
                samples = self.dataset.__getitems__([index for _, index in keys])
            else:
                for pass_number, index in keys:
                    rng.seed_host(rng.mix(self.seed, pass_number, index))
                    samples.append(self.dataset[index])
            rng.seed_host(rng.mix(self.seed, pass_number, first, 1))
            return self.collate_fn(samples)


def everything():
    name, words, *rest = np.random.get_state()
    return random.getstate(), (name, words.tobytes(), rest), torch.get_rng_state().numpy().tobytes()


class Drawing(Dataset[Any]):
    """Samples of their index and what ``draw`` gives for it; counts the reads."""

    def __init__(self, draw, length=200):
        self.draw, self.length = draw, length
        self.read = []

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        self.read.append(index)
        return index, self.draw(index)


def late(draw, start=100):
    return lambda index: draw() if index >= start else 0.0


def batches(kind, draw, collate=list, size=10):
    dataset = Drawing(draw)
    data = kind(dataset, collate, 3)
    keys = [(0, index) for index in range(len(dataset))]
    return [data.__getitems__(keys[at : at + size]) for at in range(0, len(keys), size)], dataset.read


@pytest.fixture
def seeded(monkeypatch):
    """How often each generator is seeded."""
    counts = {"python": 0, "numpy": 0}
    of_python, of_numpy = random.seed, np.random.seed

    def count(name, seed):
        def counted(*arguments):
            counts[name] += 1
            seed(*arguments)

        return counted

    monkeypatch.setattr(random, "seed", count("python", of_python))
    monkeypatch.setattr(np.random, "seed", count("numpy", of_numpy))
    return counts


@pytest.mark.parametrize(
    ("draw", "drawn_from"),
    [
        (lambda: 0.0, set()),
        (random.random, {"python"}),
        (np.random.rand, {"numpy"}),
        (lambda: torch.rand(()).item(), set()),
        (lambda: random.random() + np.random.randn(), {"python", "numpy"}),
    ],
)
def test_only_generators_that_are_drawn_from_are_seeded(draw, drawn_from, seeded):
    data = SeededDataset(Drawing(lambda index: draw()), list, 3)
    for at in range(0, 160, 10):
        data.__getitems__([(0, index) for index in range(at, at + 10)])
    seeded.update(python=0, numpy=0)
    data.__getitems__([(0, index) for index in range(160, 200)])

    assert {name for name, count in seeded.items() if count} == drawn_from
    assert all(count in (0, 40, 41) for count in seeded.values())  # for the samples, and to begin the collating


@pytest.mark.parametrize(
    "draw", [random.random, np.random.randn, lambda: np.random.rand(312).sum(), lambda: random.gauss(0, 1)]
)
def test_dataset_that_begins_to_draw_late_reads_one_sample_again(draw):
    found, read = batches(SeededDataset, late(draw))
    expected, once = batches(SeededInFull, late(draw))

    assert found == expected
    assert read == [*once[:100], 100, *once[100:]]


def test_dataset_that_draws_from_the_start_reads_each_sample_once():
    rarely = late(random.random, start=WATCHED - 1)

    assert batches(SeededDataset, rarely)[1] == list(range(200))


def test_numbers_that_depend_on_others_are_right_too():
    """The second generator is drawn from because of what the first gave."""

    def draw(index):
        return np.random.rand() if index >= 100 and random.random() < 0.5 else index

    assert batches(SeededDataset, draw)[0] == batches(SeededInFull, draw)[0]


def test_error_because_of_a_number_is_that_of_the_right_number():
    def fail(index):
        if index >= 100 and (drawn := random.random()) < 0.3:
            raise IndexError(f"{index}: {drawn}")

    def errors(kind):
        data, found = kind(Drawing(fail), list, 3), []
        for index in range(200):
            try:
                data[0, index]
            except IndexError as error:
                found.append(str(error))
        return found

    assert errors(SeededDataset) == errors(SeededInFull) != []


def test_collate_function_that_begins_to_draw_late_gets_fresh_samples():
    class Dicts(Drawing):
        def __getitem__(self, index):
            return {"index": super().__getitem__(index)[0]}

    def collate(samples):
        indices = [sample.pop("index") for sample in samples]
        return indices, samples, np.random.rand() if indices[0] >= 100 else None

    def made(kind):
        data = kind(Dicts(abs), collate, 3)
        return [data.__getitems__([(0, index) for index in range(at, at + 5)]) for at in range(0, 200, 5)]

    assert made(SeededDataset) == made(SeededInFull)


@pytest.mark.parametrize("parity", [0, 1])
def test_half_of_a_pair_outside_is_neither_drawn_nor_lost(parity):
    """``randn`` makes two numbers and keeps one, which is drawn later without a move of the generator."""

    def made(kind):
        data = kind(Drawing(late(np.random.randn)), list, 3)
        rng.seed_host(1)
        after = [np.random.randn() for _ in range(parity)]
        for at in range(0, 200, 5):
            after.append(data.__getitems__([(0, index) for index in range(at, at + 5)]))
            after.append(np.random.randn())
        return after

    assert made(SeededDataset) == made(SeededInFull)


@pytest.mark.parametrize("restored", ["isolated", "restore"])
def test_half_of_a_pair_that_is_put_back_is_neither_drawn_nor_lost(restored):
    def made(kind):
        data = kind(Drawing(late(np.random.randn)), list, 3)

        def read(start):
            return data.__getitems__([(0, index) for index in range(start, start + 5)])

        rng.seed_host(1)
        batches = [read(at) for at in range(0, 90, 5)]
        np.random.randn()
        state = rng.capture()
        with rng.isolated():
            np.random.randn()
            batches.append(read(90))
            if restored == "restore":
                rng.restore(state)
                return [*batches, read(100), np.random.randn()]
        return [*batches, read(100), np.random.randn()]

    assert made(SeededDataset) == made(SeededInFull)


def test_half_of_a_pair_of_a_sample_is_not_drawn_by_the_collate_function():
    def collate(samples):
        return samples, np.random.randn() if samples[0][0] >= 100 else None

    def made(kind):
        return batches(kind, lambda index: np.random.randn(), collate, size=5)

    assert made(SeededDataset)[0] == made(SeededInFull)[0]


@pytest.mark.parametrize("start", [0, 100])
def test_stop_within_a_sample_leaves_the_generators_as_they_were(start):
    def stop(index):
        random.random(), np.random.rand(), torch.rand(())
        if index == 150:
            raise StopRequested

    data = SeededDataset(Drawing(late(lambda: 0.0)), list, 3)
    data.__getitems__([(0, index) for index in range(start)] or [(0, 0)])
    data.dataset.draw = stop
    before = everything()
    with pytest.raises(StopRequested):
        data[0, 150]

    assert everything() == before


class LateInWorkers(Drawing):
    """Two workers have read what they watch when they come to the first sample that draws."""

    def __init__(self):
        super().__init__(abs, 300)

    def __getitem__(self, index):
        return index, random.random() + np.random.randn() if index >= 250 else 0.0


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_workers_draw_the_same(method):
    full = SeededInFull(LateInWorkers(), default_collate, 5)
    expected = [full.__getitems__([(0, at) for at in range(first, first + 10)]) for first in range(0, 300, 10)]
    data = loader(LateInWorkers(), 10, seed=5, num_workers=2, multiprocessing_context=method)

    assert [[each.tolist() for each in batch] for batch in data] == [[each.tolist() for each in b] for b in expected]


class Nested(Drawing):
    """Reads a loader of its own between two draws."""

    def __init__(self):
        super().__init__(abs, 12)
        self.inner = loader(Drawing(lambda index: random.random()), 2)

    def __getitem__(self, index):
        first = random.random() + np.random.randn()
        return first, next(iter(self.inner))[1], random.random() + np.random.randn()


def test_loader_within_a_sample_leaves_its_numbers_alone():
    alone, in_workers = (list(loader(Nested(), 3, num_workers=workers)) for workers in (0, 2))
    full = SeededInFull(Nested(), default_collate, 0)

    assert (
        str(alone)
        == str(in_workers)
        == str([full.__getitems__([(0, i) for i in range(k, k + 3)]) for k in (0, 3, 6, 9)])
    )


@pytest.mark.parametrize("seed", [0, 1, 5])
@pytest.mark.parametrize("workers", [0, 1])
def test_call_that_seeds_after_its_draw_is_noticed(seed, workers):
    def drawn(index):
        if index < 100:
            return 0.0
        number = random.random() + np.random.rand()
        random.seed(seed)
        np.random.seed(seed)
        return number

    with rng.isolated():
        rng.seed_host(7)
        found = [batch for batch in loader(Drawing(drawn), 10, seed=3, num_workers=workers, collate_fn=list)]
        assert found == batches(SeededInFull, drawn)[0]


def test_memory_of_numpys_generator_is_where_it_is_looked_for():
    with rng.isolated():
        np.random.seed(0)
        places = [rng.numpy_place().raw]
        for draw in (np.random.rand, np.random.randn, lambda: np.random.rand(312), lambda: np.random.seed(1)):
            draw()
            places.append(rng.numpy_place().raw)
        assert len(set(places)) == 5
        np.random.seed(0)
        assert rng.numpy_place().raw == places[0]


@pytest.mark.filterwarnings("ignore:get_state and legacy")
def test_another_generator_of_numpy_is_seeded_for_each_sample():
    before = np.random.get_bit_generator()
    np.random.set_bit_generator(np.random.PCG64(1))
    try:
        assert rng.numpy_place() is None
        assert batches(SeededDataset, late(np.random.rand)) == batches(SeededInFull, late(np.random.rand))
    finally:
        np.random.set_bit_generator(before)


def test_another_implementation_of_it_is_seeded_for_each_sample(monkeypatch):
    monkeypatch.setattr(rng, "numpy_place", lambda: None)

    assert batches(SeededDataset, late(np.random.rand))[0] == batches(SeededInFull, late(np.random.rand))[0]


def test_collating_by_default_leaves_no_trace():
    data = loader(Drawing(late(random.random)), 10, collate_fn=default_collate)
    rng.seed_host(7)
    before = everything()
    list(data)

    assert everything() == before
