"""Gradients of the gated optimizer on two gloo ranks: what is reduced when, and the result."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD
from torch.optim.lr_scheduler import ExponentialLR

from ignite_engine.ext.accumulation import GradientAccumulationOptimizer, initialize
from tests.kit.collectives import Collectives
from tests.kit.processes import ranks
from tests.kit.tiny import Numbers, linear, mse, one

DOUBLE, LR = torch.float64, 0.1


def micro_batch(rank, index, dtype=DOUBLE):
    data = Numbers(60, dtype=dtype)
    start = 2 * (2 * index + rank)
    return data.inputs[start : start + 2], data.targets[start : start + 2]


def sgd(model, steps):
    return GradientAccumulationOptimizer(SGD(model.parameters(), lr=LR), model, steps)


def by_hand(*groups):
    """Weights after one SGD step per group, on the mean of the losses of all its micro-batches: (rank, index) each."""
    model = linear(dtype=DOUBLE)
    optimizer = SGD(model.parameters(), lr=LR)
    for group in groups:
        optimizer.zero_grad()
        losses = [mse(model, micro_batch(*each)) for each in group]
        torch.stack(losses).mean().backward()
        optimizer.step()
    return one(model)


def both(*indices):
    return [(rank, index) for rank in range(2) for index in indices]


def assert_all_have(answers, expected):
    first, second = (answer["weights"] for answer in answers)
    assert torch.equal(first, second)
    assert torch.allclose(first, expected, rtol=1e-13, atol=1e-14)


def one_reduction_a_step(rank, precision):
    model = DistributedDataParallel(linear())
    bare = SGD(model.parameters(), lr=LR)
    optimizer, scheduler = initialize(model, bare, ExponentialLR(bare, 0.5), 3, precision=precision)
    seen, differ = [], []
    with Collectives() as collectives:
        for index in range(8):
            before = collectives.counts["all_reduce"]
            with optimizer.autocast():
                loss = mse(model, micro_batch(rank, index, torch.float32))
            optimizer.backward(loss)
            seen.append(collectives.counts["all_reduce"] - before)
            gradient = torch.cat([p.grad.reshape(-1) for p in model.parameters()])
            everyone = [torch.empty_like(gradient) for _ in range(2)]
            dist.all_gather(everyone, gradient)
            differ.append(not torch.equal(*everyone))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    optimizer.flush()
    scheduler.step()
    return {"seen": seen, "differ": differ, "end": [optimizer.optimizer_steps, scheduler.get_last_lr()[0]]}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_one_reduction_per_step_and_none_before_the_boundary(precision):
    for each in ranks(2, one_reduction_a_step, precision):
        assert each["seen"] == [0, 0, 1, 0, 0, 1, 0, 0]
        assert each["differ"] == [True, True, False, True, True, False, True, True]
        assert each["end"] == [3, LR / 8]


def tail(rank, counts, clears_first, options):
    """Two whole groups of four, and then ``counts[rank]`` micro-batches of the next."""
    model = DistributedDataParallel(linear(dtype=DOUBLE), **options)
    optimizer = sgd(model, 4)
    for index in range(8 + counts[rank]):
        if clears_first:
            optimizer.zero_grad()
        optimizer.backward(mse(model, micro_batch(rank, index)))
        optimizer.step()
        if not clears_first:
            optimizer.zero_grad()
    flushed = [optimizer.flush(), optimizer.flush()]
    after_flush = one(model).clone()
    for index in range(4):
        optimizer.zero_grad()
        optimizer.backward(mse(model, micro_batch(rank, index)))
        optimizer.step()
    return {"flushed": flushed, "weights": after_flush}, {"weights": one(model)}


@pytest.mark.parametrize(
    ("counts", "group", "clears_first", "options"),
    [
        ((2, 2), both(8, 9), False, {}),
        ((3, 1), [(0, 8), (0, 9), (0, 10), (1, 8)], True, {}),
        ((0, 1), [(1, 8)], True, {}),
        ((0, 0), [], True, {}),
        ((1, 2), [(0, 8), (1, 8), (1, 9)], False, {"gradient_as_bucket_view": True}),
    ],
)
def test_tail_is_the_plain_mean_over_the_micro_batches_of_all_ranks(counts, group, clears_first, options):
    flushed, gone_on = zip(*ranks(2, tail, counts, clears_first, options), strict=True)
    groups = [both(0, 1, 2, 3), both(4, 5, 6, 7), *([group] if group else [])]
    assert [each["flushed"] for each in flushed] == [[bool(group), False]] * 2
    assert_all_have(flushed, by_hand(*groups))
    assert_all_have(gone_on, by_hand(*groups, both(0, 1, 2, 3)))


def second_backward(rank):
    model = DistributedDataParallel(linear(dtype=DOUBLE))
    optimizer = sgd(model, 2)
    losses = [mse(model, micro_batch(rank, index)) for index in range(2)]
    optimizer.backward(losses[0])
    with pytest.raises(RuntimeError) as raised:
        optimizer.backward(losses[1])
    return str(raised.value)


def test_a_second_backward_of_a_micro_batch_is_refused_on_ranks():
    assert all("backward(first + second)" in said for said in ranks(2, second_backward))


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
    return seen, bool(one(model).isfinite().all())


def test_overflow_on_one_rank_skips_on_both():
    assert ranks(2, overflow_on_one_rank) == [([[0, 0, LR], [0, 1, LR], [0, 1, LR], [1, 1, LR / 2]], True)] * 2


def sharded(rank):
    model = linear(dtype=DOUBLE)
    fully_shard(model[0])
    fully_shard(model)
    optimizer, reduced = sgd(model, 3), []
    for index in range(5):
        optimizer.backward(mse(model, micro_batch(rank, index)))
        reduced.append(all(parameter.grad is not None for parameter in model.parameters()))
        optimizer.step()
        optimizer.zero_grad()
    with pytest.raises(RuntimeError, match="whole group"):
        optimizer.flush()
    weights = torch.cat([p.detach().full_tensor().reshape(-1) for p in model.parameters()])
    return {"weights": weights, "reduced": reduced}


def test_sharded_model_reduces_at_the_boundary_and_refuses_a_tail():
    answers = ranks(2, sharded)
    assert_all_have(answers, by_hand(both(0, 1, 2)))
    assert [each["reduced"] for each in answers] == [[False, False, True, False, False]] * 2
