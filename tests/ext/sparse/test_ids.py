"""Ids as rows: a hash that is the same everywhere."""

import pytest
import torch

from ignite_engine import rng
from ignite_engine.ext.sparse import hash_ids


@pytest.mark.parametrize("salt", [0, 3, -1])
def test_hash_is_the_published_one(salt):
    ids = torch.tensor([[0, 1, -5], [2**62, 123456789, -(2**63)]])
    expected = [
        [(rng.mix(salt, each) - (1 << 64) * (rng.mix(salt, each) >> 63)) % 1000 for each in row] for row in ids.tolist()
    ]

    assert hash_ids(ids, 1000, salt).tolist() == expected


@pytest.mark.parametrize("dtype", [torch.int32, torch.int16, torch.uint8])
def test_ids_of_any_whole_type_are_the_same_ids(dtype):
    ids = torch.tensor([[1, 2], [200, 7]]).to(dtype)

    for salt in (0, 3, torch.arange(2)):
        assert torch.equal(hash_ids(ids, 1000, salt), hash_ids(ids.long(), 1000, salt))


def test_hash_spreads_neighbours_and_depends_on_the_salt():
    ids = torch.arange(100_000)
    first, other = hash_ids(ids, 64), hash_ids(ids, 64, 1)

    for buckets in (first, other):
        counts = torch.bincount(buckets, minlength=64)
        chi_squared = ((counts - 100_000 / 64) ** 2 / (100_000 / 64)).sum()
        assert len(counts) == 64 and chi_squared < 120  # 63 degrees of freedom: above 120 in one of 50,000
    assert (first == other).float().mean() < 0.03
    columns = hash_ids(ids[:8].reshape(4, 2), 64, torch.tensor([0, 1]))
    assert columns.tolist() == torch.stack([hash_ids(ids[:8:2], 64), hash_ids(ids[1:8:2], 64, 1)], 1).tolist()
