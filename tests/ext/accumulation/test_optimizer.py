"""The gated pair in one process: what it gates, counts and saves, against the loop written by hand."""

import copy
import io
import warnings

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim import lr_scheduler as torch_schedulers

from ignite_engine.ext.accumulation import (
    GradientAccumulationLRScheduler,
    GradientAccumulationOptimizer,
    initialize,
)
from ignite_engine.handlers import warmup_cosine
from tests.kit.refusals import refusals
from tests.kit.tiny import Numbers, linear, mse, one

DOUBLE = torch.float64


def micro_batches(count):
    data = Numbers(2 * count, dtype=DOUBLE)
    return [(data.inputs[i : i + 2], data.targets[i : i + 2]) for i in range(0, 2 * count, 2)]


def made(steps, make=lambda optimizer: torch_schedulers.MultiplicativeLR(optimizer, lambda epoch: 0.9), **options):
    """A model and the pair over AdamW and a scheduler, which takes a tenth off the LR at each update."""
    model = linear(dtype=DOUBLE)
    optimizer = AdamW(model.parameters(), lr=0.1)
    return model, *initialize(model, optimizer, make(optimizer), steps, **options)


def gated(steps, lr=1.0, **options):
    """A model and the optimizer alone, over SGD."""
    model = linear(dtype=DOUBLE)
    return model, GradientAccumulationOptimizer(SGD(model.parameters(), lr=lr), model, steps, **options)


def by_hand(groups):
    """Weights and LRs after one update for each group, its gradient that of the mean of the losses."""
    model, lrs = linear(dtype=DOUBLE), []
    optimizer = AdamW(model.parameters(), lr=0.1)
    scheduler = torch_schedulers.MultiplicativeLR(optimizer, lambda epoch: 0.9)
    for group in groups:
        optimizer.zero_grad()
        torch.stack([mse(model, batch) for batch in group]).mean().backward()
        optimizer.step()
        scheduler.step()
        lrs.append(scheduler.get_last_lr()[0])
    return one(model), lrs


def clear_first(model, optimizer, scheduler, batch):
    optimizer.zero_grad()
    with optimizer.autocast():
        loss = mse(model, batch)
    optimizer.backward(loss)
    optimizer.step()
    scheduler.step()


def clear_last(model, optimizer, scheduler, batch):
    with optimizer.autocast():
        loss = mse(model, batch)
    optimizer.backward(loss)
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()


def close(weights, expected):
    return torch.allclose(weights, expected, rtol=1e-12, atol=1e-13)


@pytest.mark.row("B4")
@pytest.mark.parametrize("call", [clear_first, clear_last])
def test_groups_of_three_are_updates_with_the_mean_of_three(call):
    batches, seen = micro_batches(12), []
    model, optimizer, scheduler = made(3)
    for batch in batches:
        call(model, optimizer, scheduler, batch)
        seen.append(scheduler.get_last_lr()[0])

    expected, lrs = by_hand([batches[i : i + 3] for i in range(0, 12, 3)])
    assert close(one(model), expected)
    assert seen[2::3] == lrs and len(set(seen)) == 5  # the LR at the start and four moves
    assert (optimizer.optimizer_steps, optimizer.skipped_steps, optimizer.micro_batches) == (4, 0, 0)


@pytest.mark.row("B4")
def test_boundary_is_where_the_last_micro_batch_completed_its_group_and_gradients_are_kept_until_then():
    model, optimizer, _ = made(3)
    before, after_backward, after_step, cleared = [], [], [], []
    for batch in micro_batches(7):
        before.append(optimizer.accumulation_boundary())
        optimizer.backward(mse(model, batch))
        after_backward.append(optimizer.accumulation_boundary())
        optimizer.step()
        after_step.append(optimizer.accumulation_boundary())
        optimizer.zero_grad()
        cleared.append(all(parameter.grad is None for parameter in model.parameters()))

    assert before == [True, False, False, True, False, False, True]
    assert after_backward == after_step == cleared == [False, False, True, False, False, True, False]


def test_several_losses_are_one_micro_batch_also_of_one_graph():
    batches, ends = micro_batches(8), []
    for apart in (True, False):
        model, optimizer, scheduler = made(2)
        for first, second in zip(batches[::2], batches[1::2], strict=True):
            losses = mse(model, first), mse(model, second)
            if apart:
                optimizer.backward(losses[0], retain_graph=True)
                optimizer.backward(losses[0])
                optimizer.backward(losses[1])
            else:
                optimizer.backward(2 * losses[0] + losses[1])
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        assert optimizer.optimizer_steps == 2
        ends.append((one(model), scheduler.get_last_lr()))

    assert close(ends[0][0], ends[1][0]) and ends[0][1] == ends[1][1]


def test_one_micro_batch_to_a_group_is_the_bare_optimizer_bit_for_bit():
    batches = micro_batches(5)
    model, optimizer, scheduler = made(1)
    other = linear(dtype=DOUBLE)
    bare = AdamW(other.parameters(), lr=0.1)
    bare_scheduler = torch_schedulers.MultiplicativeLR(bare, lambda epoch: 0.9)
    for batch in batches:
        clear_last(model, optimizer, scheduler, batch)
        mse(other, batch).backward()
        bare.step()
        bare_scheduler.step()
        bare.zero_grad()
    assert torch.equal(one(model), one(other)) and scheduler.get_last_lr() == bare_scheduler.get_last_lr()


@pytest.mark.parametrize("is_stepped", [True, False])
def test_tail_is_the_plain_mean_of_what_there_is(is_stepped):
    batches = micro_batches(8)
    model, optimizer, scheduler = made(3)
    for batch in batches[:7]:
        clear_last(model, optimizer, scheduler, batch)
    if not is_stepped:
        optimizer.backward(mse(model, batches[7]))
    assert optimizer.micro_batches == 1 and optimizer.flush()
    scheduler.step()

    expected, lrs = by_hand([batches[:3], batches[3:6], batches[6 : 8 - is_stepped]])
    assert close(one(model), expected) and scheduler.get_last_lr()[0] == lrs[-1]
    assert all(parameter.grad is None for parameter in model.parameters()) and not optimizer.flush()
    assert optimizer.optimizer_steps == 3
    clear_last(model, optimizer, scheduler, batches[0])
    assert optimizer.micro_batches == 1 and not optimizer.accumulation_boundary()


@pytest.mark.parametrize("options", [{}, {"precision": "fp16", "grad_scaler": {"init_scale": 8.0}}], ids=str)
@pytest.mark.parametrize("by_flush", [True, False])
def test_clipping_sees_the_gradient_of_the_mean(by_flush, options):
    batches, norms = micro_batches(2), []
    model, optimizer = gated(4 if by_flush else 2, **options)
    for batch in batches:
        optimizer.backward(mse(model, batch))
        norms.append(None if by_flush else optimizer.clip_gradients(0.01))
        optimizer.step()
    if by_flush:
        optimizer.flush(max_norm=0.01)
    other = linear(dtype=DOUBLE)
    torch.stack([mse(other, batch) for batch in batches]).mean().backward()
    norm = nn.utils.clip_grad_norm_(other.parameters(), 0.01)
    SGD(other.parameters(), lr=1.0).step()

    assert norm > 0.02 and norms == [None, None if by_flush else pytest.approx(norm.item())]
    assert close(one(model), one(other))


@pytest.mark.parametrize("flushed", [False, True])
def test_overflow_skips_optimizer_and_scheduler(flushed):
    batches = [(inputs.float(), targets.float()) for inputs, targets in micro_batches(5)]
    model = linear()
    bare = SGD(model.parameters(), lr=0.1)
    options = {"precision": "fp16", "grad_scaler": {"init_scale": 64.0}}
    optimizer, scheduler = initialize(model, bare, torch_schedulers.ExponentialLR(bare, 0.5), 2, **options)
    clear_first(model, optimizer, scheduler, batches[0])
    clear_first(model, optimizer, scheduler, batches[1])
    before = one(model).clone()
    if not flushed:
        clear_first(model, optimizer, scheduler, batches[2])
    clear_first(model, optimizer, scheduler, (batches[3][0], torch.full_like(batches[3][1], float("inf"))))
    if flushed:
        assert not optimizer.flush()
    assert torch.equal(one(model), before) and scheduler.get_last_lr() == [0.05]
    assert (optimizer.optimizer_steps, optimizer.skipped_steps) == (1, 1)
    assert optimizer.scaler.get_scale() == 32.0

    clear_first(model, optimizer, scheduler, batches[0])
    clear_first(model, optimizer, scheduler, batches[1])
    assert not torch.equal(one(model), before) and one(model).isfinite().all()
    assert scheduler.get_last_lr() == [0.025] and optimizer.optimizer_steps == 2


# -- the scheduler ----------------------------------------------------------------------------------------------------


def test_scheduler_alone_counts_its_own_calls_and_saves_how_far_its_group_is():
    optimizer = SGD(linear().parameters(), lr=1.0)
    scheduler = GradientAccumulationLRScheduler(torch_schedulers.ExponentialLR(optimizer, 0.5), 3)
    optimizer.step()
    seen = []
    for _ in range(8):
        scheduler.step()
        seen.append(scheduler.get_last_lr()[0])
    assert seen == [1.0, 1.0, 0.5, 0.5, 0.5, 0.25, 0.25, 0.25]
    other = GradientAccumulationLRScheduler(torch_schedulers.ExponentialLR(optimizer, 0.5), 3)
    other.load_state_dict(scheduler.state_dict())
    other.step()
    assert (scheduler.last_epoch, other.last_epoch) == (2, 3)


def test_torch_schedulers_may_be_made_over_it():
    model, optimizer = gated(2)
    scheduler = torch_schedulers.ExponentialLR(optimizer, 0.5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch's, about a step that it has not seen
        for batch in micro_batches(4):
            optimizer.backward(mse(model, batch))
            optimizer.step()
            optimizer.zero_grad()
            if optimizer.accumulation_boundary():
                scheduler.step()

    assert optimizer.optimizer.param_groups[0]["lr"] == 0.25 and optimizer.optimizer_steps == 2


# -- states and copies ------------------------------------------------------------------------------------------------

SCHEDULERS = {
    "lambda": lambda optimizer: torch_schedulers.LambdaLR(optimizer, lambda epoch: 1.0 / (epoch + 1)),
    "one cycle": lambda optimizer: torch_schedulers.OneCycleLR(optimizer, max_lr=0.1, total_steps=20),
    "sequential": lambda optimizer: torch_schedulers.SequentialLR(
        optimizer,
        [torch_schedulers.LinearLR(optimizer), torch_schedulers.CosineAnnealingLR(optimizer, 9)],
        milestones=[3],
    ),
    "ours": lambda optimizer: warmup_cosine(optimizer, warmup=3, total=10),
}


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_state_that_was_saved_goes_on_exactly(name, precision):
    batches, ends, file, saved_after = micro_batches(16), [], io.BytesIO(), 8
    for resumed in (False, True):
        three, rates = made(2, SCHEDULERS[name], precision=precision), []
        if resumed:
            file.seek(0)
            for each, state in zip(three, torch.load(file, weights_only=True), strict=True):
                each.load_state_dict(state)
        for index, batch in enumerate(batches):
            if index == saved_after and not resumed:
                torch.save([each.state_dict() for each in three], file)
            if index >= saved_after or not resumed:
                clear_last(*three, batch)
                rates.append(three[1].param_groups[0]["lr"])
        ends.append((rates[-(16 - saved_after) :], one(three[0]).tolist(), three[1].optimizer_steps))
    assert ends[0] == ends[1] and len(set(ends[0][0])) >= 3 and ends[0][2] == 8


def test_states_go_to_and_from_the_bare_ones():
    model, optimizer, scheduler = made(2)
    for batch in micro_batches(4):
        clear_last(model, optimizer, scheduler, batch)
    fresh = AdamW(linear(dtype=DOUBLE).parameters(), lr=1.0)
    fresh_scheduler = torch_schedulers.MultiplicativeLR(fresh, lambda epoch: 0.9)
    fresh.load_state_dict(optimizer.state_dict())
    fresh_scheduler.load_state_dict(scheduler.state_dict())
    assert fresh.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"] and fresh_scheduler.last_epoch == 2
    assert set(fresh.state_dict()) == {"state", "param_groups"}

    _, back, back_scheduler = made(3)
    back.load_state_dict(fresh.state_dict())
    back_scheduler.load_state_dict(fresh_scheduler.state_dict())
    assert back.state_dict()["state"][0]["step"] == 2 and back.optimizer_steps == 0 and back_scheduler.last_epoch == 2


def test_loading_drops_the_group_that_is_open():
    batches = micro_batches(5)
    three = made(2)
    states = copy.deepcopy([each.state_dict() for each in three])
    for batch in batches[:3]:
        clear_last(*three, batch)
    for each, state in zip(three, states, strict=True):
        each.load_state_dict(state)
    for batch in batches[3:]:
        clear_last(*three, batch)

    assert close(one(three[0]), by_hand([batches[3:]])[0]) and three[1].optimizer_steps == 1


def test_it_is_an_optimizer_and_everything_else_is_the_wrapped_ones():
    model, optimizer, scheduler = made(2)
    bare, calls = optimizer.optimizer, []
    assert isinstance(optimizer, Optimizer) and isinstance(scheduler, torch_schedulers.LRScheduler)
    assert optimizer.param_groups is bare.param_groups and optimizer.state is bare.state
    assert optimizer.defaults is bare.defaults and "lr: 0.1" in repr(optimizer)
    assert scheduler.base_lrs == [0.1] and scheduler.last_epoch == 0 and scheduler.optimizer is bare
    optimizer.register_step_post_hook(lambda *_: calls.append("stepped"))
    optimizer.register_state_dict_pre_hook(lambda *_: calls.append("saved"))
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1, dtype=DOUBLE))], "lr": 0.5})
    assert [group["lr"] for group in bare.param_groups] == [0.1, 0.5]
    for batch in micro_batches(4):
        optimizer.backward(mse(model, batch))
        optimizer.step()
    optimizer.state_dict()
    assert calls == ["stepped", "stepped", "saved"]
    with pytest.raises(AttributeError, match="no_such_thing"):
        _ = optimizer.no_such_thing


# -- mistakes ---------------------------------------------------------------------------------------------------------


MODEL, STATIC = linear(), linear()
STATIC.require_backward_grad_sync = STATIC.static_graph = True
BARE = SGD(MODEL.parameters(), lr=0.1)


def of(optimizer, model, steps=2, **options):
    return lambda: GradientAccumulationOptimizer(optimizer, model, steps, **options)


def after_a_backward(call, own=True):
    def check():
        model, optimizer = gated(4)
        loss = mse(model, micro_batches(1)[0])
        optimizer.backward(loss) if own else loss.backward()
        call(optimizer)

    return check


test_refusals = refusals(
    [
        ("no steps", of(BARE, MODEL, 0), ValueError, "whole number at least 1 got 0"),
        ("no optimizer", of(MODEL, BARE), TypeError, "optimizer must got Sequential"),
        ("precision", of(BARE, MODEL, precision="fp8"), ValueError, "fp32 bf16 'fp8'"),
        ("scaler", of(BARE, MODEL, grad_scaler={"init_scale": 1.0}), ValueError, "no effect 'fp32'"),
        ("static graph", of(SGD(STATIC.parameters()), STATIC), ValueError, "static_graph=True cannot accumulate"),
        ("step of another loss", after_a_backward(lambda o: o.step(), False), RuntimeError, "step() backward(loss)"),
        ("saved in a group", after_a_backward(lambda o: o.state_dict()), RuntimeError, "within a group flush()"),
    ]
)
