"""Every leaf of a state has a digest that one bit changes and the layout in memory does not."""

import numpy as np
import pytest
import torch

from ignite_engine.checkpointing.digests import tensor_sha256


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (torch.zeros(2), torch.tensor([0.0, -0.0])),
        (torch.zeros(2), torch.zeros(2, dtype=torch.int32)),
        (torch.zeros(2), torch.zeros(2, 1)),
        (torch.tensor(1.0), torch.tensor(1.0 + 2**-23)),
        (torch.eye(2).to_sparse(), torch.ones(2, 2).to_sparse()),
        (torch.tensor([1j]), torch.tensor([-1j])),
        (np.zeros(2), np.ones(2)),
    ],
)
def test_one_bit_is_another_digest(one, other):
    assert tensor_sha256(one) != tensor_sha256(other)


def test_layout_in_memory_does_not_count():
    whole = torch.arange(12.0).reshape(3, 4)
    assert tensor_sha256(whole.T) == tensor_sha256(whole.T.contiguous())
    assert tensor_sha256(torch.tensor([1 + 1j]).conj()) == tensor_sha256(torch.tensor([1 - 1j]))
    twice = torch.sparse_coo_tensor([[1, 1]], [1.0, 2.0], (3,), check_invariants=True)
    assert tensor_sha256(twice) == tensor_sha256(twice.coalesce())
