"""Row-wise Adagrad: the published formula, the same for sparse and dense gradients, saved and resumed exactly."""

import copy

import pytest
import torch
from torch import nn

from ignite_engine.ext.sparse import RowwiseAdagrad
from ignite_engine.states.model_and_optimizer import OptimizerState

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
def test_saved_state_goes_on_with_the_same_bits(dtype):
    model = table(True, dtype)
    optimizer = RowwiseAdagrad(model.parameters(), lr=0.1, initial_accumulator=0.1)
    step(model, optimizer, TOKENS[0])
    fresh = copy.deepcopy(model)
    again = RowwiseAdagrad(fresh.parameters(), lr=0.1)
    OptimizerState(again, fresh).load_state_dict(copy.deepcopy(OptimizerState(optimizer, model).state_dict()))
    step(model, optimizer, TOKENS[1])
    step(fresh, again, TOKENS[1])

    assert torch.equal(model.weight, fresh.weight)
    assert torch.equal(optimizer.state[model.weight]["sum"], again.state[fresh.weight]["sum"])


def test_rows_may_have_any_shape():
    for shape in ((4,), (4, 2, 3)):
        parameter = nn.Parameter(torch.ones(shape))
        parameter.grad = torch.full(shape, 2.0)
        RowwiseAdagrad([parameter], lr=1.0).step()
        torch.testing.assert_close(parameter.detach(), torch.zeros(shape))  # 1 - 2 / sqrt(4)


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"lr": -1.0}, "lr must be at least 0, got -1.0"),
        ({"eps": 0.0}, "eps must be above 0, or a row without a gradient becomes 0 / 0, got 0.0"),
        ({"initial_accumulator": float("nan")}, "initial_accumulator must be at least 0, got nan"),
    ],
)
def test_values_out_of_range_are_refused(options, line):
    with pytest.raises(ValueError, match=line):
        RowwiseAdagrad([nn.Parameter(torch.ones(2, 2))], **options)


def test_parameter_without_rows_is_refused():
    with pytest.raises(ValueError, match="RowwiseAdagrad needs parameters with rows, got one without a dimension"):
        RowwiseAdagrad([nn.Parameter(torch.ones(()))])
