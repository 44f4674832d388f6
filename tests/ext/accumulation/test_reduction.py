"""Gradients of the gated optimizer on two gloo ranks: what is reduced when, and the result."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD
from torch.optim.lr_scheduler import ExponentialLR

from ignite_engine.ext.accumulation import GradientAccumulationOptimizer, initialize
from tests.kit.tiny import Numbers, linear, mse, one
from tests.ranks.forkserver import on_ranks

pytestmark = pytest.mark.distributed

DOUBLE = torch.float64
LR = 0.1
Result = dict[str, Any]


def micro_batch(rank, index, dtype=DOUBLE):
    data = Numbers(60, dtype=dtype)
    start = 2 * (2 * index + rank)
    return data.inputs[start : start + 2], data.targets[start : start + 2]


class Rows(nn.Module):
    """An embedding with sparse gradients."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.rows = nn.Embedding(9, 2, sparse=True, dtype=DOUBLE)

    def forward(self, indices):
        return self.rows(indices).square().mean()


def counted(model, **options):
    """In DDP, with a hook that counts buckets; a model this small has one."""
    ddp, reductions = DistributedDataParallel(model, **options), [0]

    def count(state, bucket):
        reductions[0] += 1
        return allreduce_hook(None, bucket)

    ddp.register_comm_hook(None, count)
    return ddp, reductions


def sgd(model, steps, **options):
    return GradientAccumulationOptimizer(SGD(model.parameters(), lr=LR), model, steps, **options)


def one_reduction_a_step(rank, precision):
    model, reductions = counted(linear())
    bare = SGD(model.parameters(), lr=LR)
    optimizer, scheduler = initialize(model, bare, ExponentialLR(bare, 0.5), 3, precision=precision)
    seen, differ = list[int](), list[bool]()
    for index in range(8):
        with optimizer.autocast():
            loss = mse(model, micro_batch(rank, index, torch.float32))
        optimizer.backward(loss)
        differ.append(ranks_differ(torch.cat([p.grad.reshape(-1) for p in model.parameters() if p.grad is not None])))
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        seen.append(reductions[0])
    optimizer.flush()
    end = [reductions[0], optimizer.optimizer_steps, scheduler.get_last_lr()[0]]
    return {"seen": seen, "differ": differ, "end": end, "weights": one(model)}


def ranks_differ(tensor):
    everyone = [torch.empty_like(tensor) for _ in range(2)]
    dist.all_gather(everyone, tensor)
    return not torch.equal(*everyone)


def tail(rank, counts, clear_first, **options):
    """Two whole groups of four, and then ``counts[rank]`` micro-batches of the next."""
    model = DistributedDataParallel(linear(dtype=DOUBLE), **options)
    optimizer = sgd(model, 4)
    for index in range(8 + counts[rank]):
        if clear_first:
            optimizer.zero_grad()
        optimizer.backward(mse(model, micro_batch(rank, index)))
        optimizer.step()
        if not clear_first:
            optimizer.zero_grad()
    flushed = [optimizer.flush(), optimizer.flush()]
    after_flush = one(model).clone()
    for index in range(4):
        optimizer.zero_grad()
        optimizer.backward(mse(model, micro_batch(rank, index)))
        optimizer.step()
    return {"flushed": flushed, "weights": after_flush, "goes_on": one(model)}


def sparse_tail(rank):
    model = DistributedDataParallel(Rows())
    optimizer = sgd(model, 3)
    for _ in range(1 - rank):  # rank 1 has none
        optimizer.backward(model(torch.tensor([1, 1, 4])))
        optimizer.step()
    flushed = optimizer.flush()
    return {"flushed": flushed, "weights": one(model)}


def two_losses(rank):
    model, reductions = counted(linear(dtype=DOUBLE))
    optimizer, message = sgd(model, 2), ""
    for index in (0, 2):
        first, second = (model(micro_batch(rank, index + place)[0]) for place in range(2))
        optimizer.backward(first.square().mean() + second.sin().mean())
        try:
            optimizer.backward(first.square().mean())
        except RuntimeError as error:
            message = str(error)
        optimizer.step()
    return {"weights": one(model), "reductions": reductions[0], "message": message}


def overflow_on_one_rank(rank):
    model = DistributedDataParallel(linear())
    bare = SGD(model.parameters(), lr=LR)
    options = {"precision": "fp16", "grad_scaler": {"init_scale": 64.0}}
    optimizer, scheduler = initialize(model, bare, ExponentialLR(bare, 0.5), 2, **options)
    seen = []
    for index in range(4):
        inputs, targets = micro_batch(rank, index, torch.float32)
        with optimizer.autocast():
            loss = nn.functional.mse_loss(model(inputs), targets.fill_(float("inf")) if index == rank == 0 else targets)
        optimizer.backward(loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        seen.append([optimizer.optimizer_steps, optimizer.skipped_steps, scheduler.get_last_lr()[0]])
    return {"seen": seen, "weights": one(model)}


def sharded(rank):
    model = linear(dtype=DOUBLE)
    fully_shard(model[0])
    fully_shard(model)
    optimizer = sgd(model, 3)
    reduced = []
    for index in range(5):
        optimizer.backward(mse(model, micro_batch(rank, index)))
        reduced.append(all(parameter.grad is not None for parameter in model.parameters()))
        optimizer.step()
        optimizer.zero_grad()
    message = ""
    try:
        optimizer.flush()
    except RuntimeError as error:
        message = str(error)
    weights = torch.cat([p.detach().full_tensor().reshape(-1) for p in model.parameters()])
    return {"weights": weights, "reduced": reduced, "message": message}


def no_state_within_a_group(rank):
    model = DistributedDataParallel(linear(dtype=DOUBLE))
    optimizer, message = sgd(model, 2), ""
    for index in range(2):
        optimizer.backward(mse(model, micro_batch(rank, index)))
        optimizer.step()
        try:
            saved = optimizer.state_dict()
        except RuntimeError as error:
            message = str(error)
    optimizer.release()
    return {"message": message, "saved": saved["accumulation"], "released": model.require_backward_grad_sync}


CASES = {
    "fp32": lambda rank: one_reduction_a_step(rank, "fp32"),
    "bf16": lambda rank: one_reduction_a_step(rank, "bf16"),
    "tail 2 2": lambda rank: tail(rank, (2, 2), clear_first=False),
    "tail 3 1": lambda rank: tail(rank, (3, 1), clear_first=True),
    "tail 0 1": lambda rank: tail(rank, (0, 1), clear_first=True),
    "tail 0 0": lambda rank: tail(rank, (0, 0), clear_first=True),
    "tail 1 2 in views": lambda rank: tail(rank, (1, 2), clear_first=False, gradient_as_bucket_view=True),
    "sparse tail": sparse_tail,
    "two losses": two_losses,
    "overflow": overflow_on_one_rank,
    "sharded": sharded,
    "state": no_state_within_a_group,
}


def _one_of_two_ranks(rank, folder):
    results = {name: case(rank) for name, case in CASES.items()}
    torch.save(results, f"{folder}/{rank}.pt")


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    on_ranks(2, _one_of_two_ranks, folder)
    first, second = (torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(2))
    yield first, second


Results = tuple[dict[str, Result], dict[str, Result]]


def by_hand(*groups, model=None):
    """Weights after one SGD step per group, on the mean of the losses of all its micro-batches."""
    model = model or linear(dtype=DOUBLE)
    optimizer = SGD(model.parameters(), lr=LR)
    for group in groups:
        optimizer.zero_grad()
        torch.stack([loss(model) for loss in group]).mean().backward()
        optimizer.step()
    return one(model)


def losses(*places):
    """The loss of the micro-batch of each (rank, index)."""
    return [lambda model, place=place: mse(model, micro_batch(*place)) for place in places]


def both(*indices):
    return [(rank, index) for rank in range(2) for index in indices]


def is_close(weights, expected):
    return torch.allclose(weights, expected, rtol=1e-13, atol=1e-14)


@pytest.mark.slow
def test_ranks_end_with_the_same_weights(results):
    with_weights = [name for name in CASES if "weights" in results[0][name]]
    assert len(with_weights) == 11
    assert [name for name in with_weights if not torch.equal(*(each[name]["weights"] for each in results))] == []


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_one_reduction_per_step_and_none_before_the_boundary(results, precision):
    for each in results:
        assert each[precision]["seen"] == [0, 0, 1, 1, 1, 2, 2, 2]
        assert each[precision]["differ"] == [True, True, False, True, True, False, True, True]
        assert each[precision]["end"] == [2, 3, LR / 8]  # flush() reduces by itself, past DDP's buckets


@pytest.mark.parametrize(
    ("name", "group"),
    [
        ("tail 2 2", both(8, 9)),
        ("tail 3 1", [(0, 8), (0, 9), (0, 10), (1, 8)]),
        ("tail 0 1", [(1, 8)]),
        ("tail 1 2 in views", [(0, 8), (1, 8), (1, 9)]),
    ],
)
def test_tail_is_the_plain_mean_over_the_micro_batches_of_all_ranks(results, name, group):
    groups = [losses(*both(0, 1, 2, 3)), losses(*both(4, 5, 6, 7)), losses(*group)]
    for each in results:
        assert each[name]["flushed"] == [True, False]
        assert is_close(each[name]["weights"], by_hand(*groups))
        assert is_close(each[name]["goes_on"], by_hand(*groups, losses(*both(0, 1, 2, 3))))


def test_flush_where_no_rank_has_anything_changes_nothing(results):
    for each in results:
        assert each["tail 0 0"]["flushed"] == [False, False]
        assert is_close(each["tail 0 0"]["weights"], by_hand(losses(*both(0, 1, 2, 3)), losses(*both(4, 5, 6, 7))))


def test_sparse_gradients_of_a_tail(results):
    expected = by_hand([lambda model: model(torch.tensor([1, 1, 4]))], model=Rows())
    assert all(each["sparse tail"]["flushed"] for each in results)
    assert is_close(results[0]["sparse tail"]["weights"], expected)


def test_two_losses_are_one_backward(results):
    def pair(rank, index):
        return lambda model: (
            model(micro_batch(rank, index)[0]).square().mean() + model(micro_batch(rank, index + 1)[0]).sin().mean()
        )

    expected = by_hand([pair(*place) for place in both(0, 2)])
    for each in results:
        assert is_close(each["two losses"]["weights"], expected) and each["two losses"]["reductions"] == 1
        assert "backward(first + second)" in each["two losses"]["message"]


def test_overflow_on_one_rank_skips_on_both(results):
    for each in results:
        assert each["overflow"]["seen"] == [[0, 0, LR], [0, 1, LR], [0, 1, LR], [1, 1, LR / 2]]
        assert each["overflow"]["weights"].isfinite().all()


def test_sharded_model_reduces_at_the_boundary_and_refuses_a_tail(results):
    expected = by_hand(losses(*both(0, 1, 2)))
    for each in results:
        assert each["sharded"]["reduced"] == [False, False, True, False, False]
        assert "end the data with a whole group" in each["sharded"]["message"]
        assert is_close(each["sharded"]["weights"], expected)


def test_state_within_a_group_of_several_ranks_is_refused(results):
    for each in results:
        assert "within a group (1 of 2 micro-batches)" in each["state"]["message"]
        assert each["state"]["saved"]["optimizer_steps"] == 1 and each["state"]["released"]
