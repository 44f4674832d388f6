"""Ids as rows: a hash that is the same everywhere, and rows of their own."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from ignite_engine import rng
from ignite_engine.sparse import IdRows, hash_ids


@pytest.mark.parametrize("salt", [0, 3, -1])
def test_hash_is_the_published_one(salt: int) -> None:
    ids = torch.tensor([[0, 1, -5], [2**62, 123456789, -(2**63)]])
    expected = [
        [(rng.mix(salt, each) - (1 << 64) * (rng.mix(salt, each) >> 63)) % 1000 for each in row] for row in ids.tolist()
    ]

    assert hash_ids(ids, 1000, salt).tolist() == expected


@pytest.mark.parametrize("dtype", [torch.int32, torch.int16, torch.uint8])
def test_ids_of_any_whole_type_are_the_same_ids(dtype: torch.dtype) -> None:
    ids, rows = torch.tensor([[1, 2], [200, 7]]).to(dtype), IdRows(20, shared=3)
    whole = ids.long()
    rows.assign(whole.reshape(-1).unique(), torch.tensor([5, 6, 7, 8])[: len(whole.reshape(-1).unique())])

    for salt in (0, 3, torch.arange(2)):
        assert torch.equal(hash_ids(ids, 1000, salt), hash_ids(whole, 1000, salt))
    assert torch.equal(rows(ids), rows(whole)) and torch.equal(rows.find(whole)[1], torch.ones(2, 2, dtype=torch.bool))


def test_what_are_no_ids_or_buckets_is_one_line() -> None:
    for ids in (torch.ones(2), torch.ones(2, dtype=torch.bool)):
        with pytest.raises(TypeError, match=rf"^ids must be whole numbers, got {ids.dtype}: give ids\.long\(\)"):
            hash_ids(ids, 10)
    for buckets in (0, -1, 2.5):
        with pytest.raises(ValueError, match=r"^buckets must be a whole number of at least 1, got"):
            hash_ids(torch.tensor([1]), buckets)  # type: ignore[arg-type]  # what is tested


def test_hash_spreads_neighbours_and_depends_on_the_salt() -> None:
    ids = torch.arange(100_000)
    first, other = hash_ids(ids, 64), hash_ids(ids, 64, 1)

    for buckets in (first, other):
        counts = torch.bincount(buckets, minlength=64)
        chi_squared = ((counts - 100_000 / 64) ** 2 / (100_000 / 64)).sum()
        assert len(counts) == 64 and chi_squared < 120  # 63 degrees of freedom: above 120 in one of 50,000
    assert (first == other).float().mean() < 0.03
    columns = hash_ids(ids[:8].reshape(4, 2), 64, torch.tensor([0, 1]))
    assert columns.tolist() == torch.stack([hash_ids(ids[:8:2], 64), hash_ids(ids[1:8:2], 64, 1)], 1).tolist()


def test_ids_have_their_own_row_or_one_that_they_share() -> None:
    rows = IdRows(10, shared=3, salt=5)
    ids = torch.tensor([[70, -2], [5, 2**40]])
    assert torch.equal(rows(ids), hash_ids(ids, 3, 5))
    rows.assign(torch.tensor([-2, 2**40]), torch.tensor([9, 3]))
    shared = hash_ids(ids, 3, 5)

    assert rows(ids).tolist() == [[shared[0, 0], 9], [shared[1, 0], 3]]
    assert rows(torch.empty(0, 4, dtype=torch.int64)).shape == (0, 4)
    assert rows.free_rows().tolist() == [4, 5, 6, 7, 8]


def test_rows_are_part_of_the_model() -> None:
    def model() -> nn.Module:
        return nn.Sequential(IdRows(6, shared=1), nn.Embedding(6, 2, padding_idx=0))

    trained, loaded = model(), model()
    trained[0].assign(torch.tensor([-7, 12]), torch.tensor([5, 2]))  # type: ignore[operator]
    state = copy.deepcopy(trained.state_dict())
    loaded.load_state_dict(state)
    ids = torch.tensor([12, 13, -7])

    assert torch.equal(loaded(ids), trained(ids)) and not loaded(ids)[1].any()  # an id without a row has zeros
    assert not list(trained[0].buffers()), "DDP would send them with each forward"
    assert state["0._extra_state"].shape == model().state_dict()["0._extra_state"].shape


def test_other_rows_than_the_saved_ones_are_refused() -> None:
    with pytest.raises(RuntimeError, match="gives out 4 rows and this one 5"):
        IdRows(6, shared=1).set_extra_state(IdRows(6, shared=2).get_extra_state())
    for shared in (0, 6):
        with pytest.raises(ValueError, match="shared must be from 1 to rows - 1, which is 5"):
            IdRows(6, shared=shared)
