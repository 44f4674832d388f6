"""Every generator of the process, put back as it was."""

import random

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

import ignite_engine
from ignite_engine import loader, rng
from ignite_engine.errors import StateMismatch
from tests.kit.refusals import refuses


def draw():
    return random.random(), random.gauss(0, 1), float(np.random.randn()), torch.randn(()).item()


def test_captured_generators_go_on_the_same_after_a_file(tmp_path):
    draw()  # both gauss functions have a second number in store now
    torch.save(rng.capture(), tmp_path / "rng")
    expected = [draw() for _ in range(3)]
    draw()
    rng.restore(torch.load(tmp_path / "rng", weights_only=True))

    assert [draw() for _ in range(3)] == expected


@pytest.fixture
def numpys_own():
    yield
    np.random.set_bit_generator(np.random.MT19937(0))


@pytest.mark.parametrize("kind", ["PCG64", "PCG64DXSM", "Philox", "SFC64"])
def test_another_bit_generator_of_numpy_goes_on_the_same_too(tmp_path, numpys_own, kind):
    np.random.set_bit_generator(getattr(np.random, kind)(1))
    test_captured_generators_go_on_the_same_after_a_file(tmp_path)
    test_isolated_draws_leave_no_trace_on_an_error_too()
    draws = [[sample.tolist() for sample in loader(NumPysNumbers(), 3, num_workers=workers)] for workers in (0, 1)]
    assert draws[0] == draws[1]
    state = rng.capture()
    np.random.set_bit_generator(np.random.MT19937(0))
    refuses(lambda: rng.restore(state), StateMismatch, f"{kind} MT19937 set_bit_generator")


class NumPysNumbers(Dataset):
    def __len__(self):
        return 90

    def __getitem__(self, index):
        return float(np.random.rand())


def test_isolated_draws_leave_no_trace_on_an_error_too():
    state = rng.capture()
    expected = draw()
    rng.restore(state)
    with rng.isolated():
        draw()
    with pytest.raises(KeyError), rng.isolated():
        draw()
        raise KeyError

    assert draw() == expected


def test_one_seed_sets_every_generator_of_the_host():
    with rng.isolated():
        rng.seed_host(5)
        first = draw()
        rng.seed_host((1 << 63) + 5)
        other = draw()
        rng.seed_host(5)

        assert draw() == first
        assert (first[0], first[3]) != (other[0], other[3])


def test_mixed_seeds_are_spread_and_fixed():
    seeds = {rng.mix(a, b, c) for a in range(10) for b in range(10) for c in range(10)}

    assert len(seeds) == 1000 and rng.mix(1, 2) != rng.mix(2, 1) and rng.mix(0) != rng.mix(0, 0)
    assert max(seeds) < 1 << 64 and max(seeds) > 1 << 62
    # the same on every machine, for ever: checkpoints rely on it
    assert rng.mix(0, 1, 2) == 17650578182555822980


def test_derived_state_is_a_function_of_a_state_and_its_keys():
    state = rng.capture()
    expected = draw()
    rng.restore(state)
    one, two = rng.derived(state, 1), rng.derived(state, 2)
    assert draw() == expected, "the generators were disturbed"
    rng.restore(one)
    first = draw()
    rng.restore(two)
    assert draw() != first
    rng.restore(rng.derived(state, 1))
    assert draw() == first != expected


def test_seed_everything_seeds_all_of_them():
    ignite_engine.seed_everything(3)
    first = draw()
    ignite_engine.seed_everything(3)

    assert draw() == first != draw()
    assert torch.initial_seed() == 3
