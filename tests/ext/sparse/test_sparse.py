"""Row-wise Adagrad by its published formula, saved and resumed exactly; and ids as rows, by a hash of all machines."""

import pytest
import torch
from torch import nn

from ignite_engine import Trainer, Update, loader
from ignite_engine.ext.sparse import RowwiseAdagrad, hash_ids
from tests.kit.refusals import refusals
from tests.kit.resume import Program, assert_resumes

ROWS, WIDTH = 50, 3
TOKENS = [torch.tensor([4, 4, 1]), torch.tensor([4, 30, 49, 4]), torch.tensor([], dtype=torch.long)]


def table(sparse, dtype=torch.float64):
    torch.manual_seed(3)
    return nn.Embedding(ROWS, WIDTH, sparse=sparse, dtype=dtype)


def step(model, optimizer, tokens):
    optimizer.zero_grad()
    (model(tokens).pow(2) * torch.arange(1, WIDTH + 1)).sum().backward()
    optimizer.step()
    assert model.weight.grad is not None
    return model.weight.grad


@pytest.mark.parametrize("sparse", [True, False])
def test_each_row_follows_the_formula(sparse):
    model = table(sparse)
    optimizer = RowwiseAdagrad(model.parameters(), lr=0.1, initial_accumulator=0.5, eps=1e-3)
    weight, sums = model.weight.detach().clone(), [0.5] * ROWS
    for tokens in TOKENS:
        gradient = step(model, optimizer, tokens).to_dense()
        for row in range(ROWS):
            sums[row] += sum(value**2 for value in gradient[row].tolist()) / WIDTH
            weight[row] -= 0.1 * gradient[row] / (sums[row] ** 0.5 + 1e-3)

    torch.testing.assert_close(model.weight.detach(), weight, rtol=1e-13, atol=0)
    assert optimizer.state[model.weight]["sum"].tolist() == pytest.approx(sums, rel=1e-13)
    assert sums[4] > sums[30] > 0.5 == sums[0]


def test_sparse_gradients_change_their_rows_alone_and_as_dense_ones_do():
    """A row of zeros changes nothing, so an optimizer of sparse gradients has not been late where one comes."""
    sparse, dense, before = table(True), table(False), table(False)
    optimizers = [RowwiseAdagrad(model.parameters(), lr=0.1) for model in (sparse, dense)]
    for tokens in TOKENS:
        for model, optimizer in zip((sparse, dense), optimizers, strict=True):
            step(model, optimizer, tokens)

    torch.testing.assert_close(sparse.weight, dense.weight, rtol=1e-13, atol=0)
    assert (sparse.weight != before.weight).any(1).nonzero().reshape(-1).tolist() == [1, 4, 30, 49]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_accumulators_are_one_number_for_each_row_in_float32(dtype):
    model = table(True, dtype)
    optimizer = RowwiseAdagrad(model.parameters(), lr=0.1)
    step(model, optimizer, TOKENS[0])
    sums = optimizer.state[model.weight]["sum"]

    assert (sums.shape, sums.dtype, model.weight.dtype) == ((ROWS,), torch.float32, dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_saved_state_goes_on_with_the_same_bits(dtype, tmp_path):
    def build():
        model = table(True, dtype)
        optimizer = RowwiseAdagrad(model.parameters(), lr=0.1, initial_accumulator=0.1)
        return Trainer(Update(model, optimizer, lambda model, tokens: model(tokens).float().square().mean()))

    tokens = torch.arange(24).view(8, 3) % 7
    assert_resumes(Program(build, lambda: loader(tokens, 2)), tmp_path, at=(3,), how=("stop",))


def test_rows_may_have_any_shape():
    for shape in ((4,), (4, 2, 3)):
        parameter = nn.Parameter(torch.ones(shape))
        parameter.grad = torch.full(shape, 2.0)
        RowwiseAdagrad([parameter], lr=1.0).step()
        torch.testing.assert_close(parameter.detach(), torch.zeros(shape))  # 1 - 2 / sqrt(4)


def made(shape=(2, 2), **options):
    return lambda: RowwiseAdagrad([nn.Parameter(torch.ones(shape))], **options)


test_refusals = refusals(
    [
        ("lr", made(lr=-1.0), ValueError, "lr at least 0 got -1.0"),
        ("eps", made(eps=0.0), ValueError, "eps above 0 got"),
        ("accumulator", made(initial_accumulator=float("nan")), ValueError, "initial_accumulator at least 0 nan"),
        ("no rows", made(shape=()), ValueError, "parameters with rows dimension"),
    ]
)

KNOWN = {
    0: [[439, 495, 284], [969, 210, 69]],
    3: [[999, 205, 23], [341, 688, 99]],
    -1: [[767, 645, 595], [43, 893, 270]],
}
"""Rows of 1000 by salt, as every machine must have them."""


@pytest.mark.parametrize("salt", KNOWN)
def test_hash_is_the_published_one(salt):
    ids = torch.tensor([[0, 1, -5], [2**62, 123456789, -(2**63)]])
    assert hash_ids(ids, 1000, salt).tolist() == KNOWN[salt]


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
