"""The gated optimizer in one process: what it gates, what it counts, what it saves."""

import copy

import pytest
import torch
from ignite.engine import Engine, Events
from torch import nn
from torch.optim import SGD, AdamW
from torch.optim import lr_scheduler as torch_schedulers

from ignite_engine import Trainer
from ignite_engine.ext.accumulation import (
    GradientAccumulationLRScheduler,
    GradientAccumulationOptimizer,
    initialize,
)
from ignite_engine.handlers import Checkpoint
from tests.ext.accumulation.loops import DOUBLE, by_hand, clear_first, clear_last, close, gradient, made, micro_batches
from tests.kit.tiny import linear, mse, numbers_loader, one


@pytest.mark.row("B4")
@pytest.mark.parametrize("call", [clear_first, clear_last])
def test_groups_of_three_are_updates_with_the_mean_of_three(call):
    batches = micro_batches(12)
    model, optimizer, scheduler = made(3)
    seen = []
    for batch in batches:
        call(model, optimizer, scheduler, batch)
        seen.append(scheduler.get_last_lr()[0])

    expected, lrs = by_hand([batches[i : i + 3] for i in range(0, 12, 3)])
    assert close(one(model), expected)
    assert seen[2::3] == lrs and len(set(seen)) == 5  # the LR at the start and four moves
    assert (optimizer.optimizer_steps, optimizer.skipped_steps, optimizer.micro_batches) == (4, 0, 0)


@pytest.mark.row("B4")
def test_boundary_is_where_the_last_micro_batch_completed_its_group():
    model, optimizer, _ = made(3)
    before, after_backward, after_step = list[bool](), list[bool](), list[bool]()
    for batch in micro_batches(7):
        before.append(optimizer.accumulation_boundary())
        optimizer.backward(mse(model, batch))
        after_backward.append(optimizer.accumulation_boundary())
        optimizer.step()
        after_step.append(optimizer.accumulation_boundary())
        optimizer.zero_grad()

    assert before == [True, False, False, True, False, False, True]
    assert after_backward == after_step == [False, False, True, False, False, True, False]


def test_zero_grad_keeps_the_gradients_of_an_open_group():
    model, optimizer, _ = made(2)
    first, second = micro_batches(2)
    optimizer.backward(mse(model, first))
    optimizer.zero_grad()
    optimizer.step()
    optimizer.zero_grad()
    assert all(parameter.grad is not None for parameter in model.parameters())
    optimizer.backward(mse(model, second))
    optimizer.step()
    optimizer.zero_grad()
    assert all(parameter.grad is None for parameter in model.parameters())


def test_two_losses_are_one_micro_batch():
    batches = micro_batches(8)
    model, optimizer, scheduler = made(2)
    for one_loss, other in zip(batches[::2], batches[1::2], strict=True):
        optimizer.backward(mse(model, one_loss))
        optimizer.backward(mse(model, other))
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    summed, summed_optimizer, summed_scheduler = made(2)
    for one_loss, other in zip(batches[::2], batches[1::2], strict=True):
        summed_optimizer.backward(mse(summed, one_loss) + mse(summed, other))
        summed_optimizer.step()
        summed_scheduler.step()
        summed_optimizer.zero_grad()

    assert optimizer.optimizer_steps == 2
    assert close(one(model), one(summed)) and scheduler.get_last_lr() == summed_scheduler.get_last_lr()


def test_two_losses_of_one_graph():
    (batch,) = micro_batches(1)
    model, optimizer, _ = made(1)
    loss = mse(model, batch)
    optimizer.backward(loss, retain_graph=True)
    optimizer.backward(loss)
    other = linear(dtype=DOUBLE)
    (2 * mse(other, batch)).backward()

    assert close(gradient(model), gradient(other))


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

    # what only a bare optimizer is asked: no backward of its own, a closure, gradients thrown away
    losses = list[float]()
    for each, net in ((optimizer, model), (bare, other)):
        mse(net, batches[0]).backward()
        each.zero_grad()

        def closure(net=net):
            loss = mse(net, batches[1])
            loss.backward()
            return loss

        losses.append(each.step(closure).item())
    assert torch.equal(one(model), one(other)) and losses[0] == losses[1] and not optimizer.flush()


def test_tail_is_the_plain_mean_of_what_there_is():
    batches = micro_batches(7)
    model, optimizer, scheduler = made(3)
    for batch in batches:
        clear_last(model, optimizer, scheduler, batch)
    assert optimizer.micro_batches == 1 and optimizer.flush()

    expected, lrs = by_hand([batches[:3], batches[3:6], batches[6:]])
    assert close(one(model), expected) and scheduler.get_last_lr()[0] == lrs[-1]
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not optimizer.flush() and torch.equal(one(model), one(model))
    scheduler.step()  # of the loop, which may come after it
    assert scheduler.get_last_lr()[0] == lrs[-1] and optimizer.optimizer_steps == 3
    clear_last(model, optimizer, scheduler, batches[0])
    assert optimizer.micro_batches == 1 and not optimizer.accumulation_boundary()


def test_flush_counts_the_micro_batch_that_is_not_stepped_yet():
    batches = micro_batches(2)
    model, optimizer, scheduler = made(3)
    clear_last(model, optimizer, scheduler, batches[0])
    optimizer.backward(mse(model, batches[1]))
    optimizer.flush()

    assert close(one(model), by_hand([batches])[0])


def test_flush_clips_the_mean():
    batches = micro_batches(2)
    model, other = linear(dtype=DOUBLE), linear(dtype=DOUBLE)
    optimizer = GradientAccumulationOptimizer(SGD(model.parameters(), lr=1.0), model, 4)
    for batch in batches:
        optimizer.backward(mse(model, batch))
        optimizer.step()
    optimizer.flush(max_norm=0.01)
    torch.stack([mse(other, batch) for batch in batches]).mean().backward()
    assert nn.utils.clip_grad_norm_(other.parameters(), 0.01) > 0.02
    SGD(other.parameters(), lr=1.0).step()

    assert close(one(model), one(other))


def test_clipping_is_at_the_boundary_and_sees_the_gradient_of_the_mean():
    batches = micro_batches(2)
    model, other = linear(dtype=DOUBLE), linear(dtype=DOUBLE)
    optimizer = GradientAccumulationOptimizer(
        SGD(model.parameters(), lr=1.0), model, 2, precision="fp16", grad_scaler={"init_scale": 8.0}
    )
    norms = []
    for batch in batches:
        optimizer.backward(mse(model, batch))
        norms.append(optimizer.clip_gradients(0.01))
        optimizer.step()
    torch.stack([mse(other, batch) for batch in batches]).mean().backward()
    norm = nn.utils.clip_grad_norm_(other.parameters(), 0.01)
    SGD(other.parameters(), lr=1.0).step()

    assert norms[0] is None and norms[1] == pytest.approx(norm.item())
    assert close(one(model), one(other))


def overflowing(batch):
    return batch[0], torch.full_like(batch[1], float("inf"))


@pytest.mark.parametrize("flushed", [False, True])
def test_overflow_skips_optimizer_and_scheduler(flushed):
    batches = [(inputs.float(), targets.float()) for inputs, targets in micro_batches(5)]
    model = linear()
    optimizer, scheduler = initialize(
        model,
        bare := SGD(model.parameters(), lr=0.1),
        torch_schedulers.ExponentialLR(bare, 0.5),
        2,
        precision="fp16",
        grad_scaler={"init_scale": 64.0},
    )
    clear_first(model, optimizer, scheduler, batches[0])
    clear_first(model, optimizer, scheduler, batches[1])
    before = one(model).clone()
    if not flushed:
        clear_first(model, optimizer, scheduler, batches[2])
    clear_first(model, optimizer, scheduler, overflowing(batches[3]))
    if flushed:
        assert not optimizer.flush()
    assert torch.equal(one(model), before) and scheduler.get_last_lr() == [0.05]
    assert (optimizer.optimizer_steps, optimizer.skipped_steps) == (1, 1)
    assert optimizer.scaler is not None and optimizer.scaler.get_scale() == 32.0

    clear_first(model, optimizer, scheduler, batches[0])
    clear_first(model, optimizer, scheduler, batches[1])
    assert not torch.equal(one(model), before) and one(model).isfinite().all()
    assert scheduler.get_last_lr() == [0.025] and optimizer.optimizer_steps == 2


def test_states_go_to_and_from_the_bare_ones():
    batches = micro_batches(4)
    model, optimizer, scheduler = made(2)
    for batch in batches:
        clear_last(model, optimizer, scheduler, batch)
    fresh = AdamW(linear(dtype=DOUBLE).parameters(), lr=1.0)
    fresh_scheduler = torch_schedulers.MultiplicativeLR(fresh, lambda epoch: 0.9)
    fresh.load_state_dict(optimizer.state_dict())
    fresh_scheduler.load_state_dict(scheduler.state_dict())
    assert fresh.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"] and fresh_scheduler.last_epoch == 2

    _, back, back_scheduler = made(3)
    back.load_state_dict(fresh.state_dict())
    plain = torch_schedulers.MultiplicativeLR(fresh, lambda epoch: 0.9)
    fresh.step()
    plain.step()
    back_scheduler.load_state_dict(plain.state_dict())
    assert back.state_dict()["state"][0]["step"] == 2 and back.optimizer_steps == 0
    assert back_scheduler.last_epoch == 1 and set(fresh.state_dict()) == {"state", "param_groups"}


def test_no_state_between_backward_and_step():
    model, optimizer, _ = made(4)
    optimizer.backward(mse(model, micro_batches(1)[0]))

    with pytest.raises(RuntimeError, match=r"within a group \(1 of 4 micro-batches\)"):
        optimizer.state_dict()


def test_state_from_within_a_group_asks_for_the_same_group():
    model, optimizer, scheduler = made(4)
    clear_last(model, optimizer, scheduler, micro_batches(1)[0])
    state = optimizer.state_dict()
    _, other, _ = made(3)

    with pytest.raises(ValueError, match=r"within a group of 4 micro-batches in fp32.*accumulation_steps=3 in fp32"):
        other.load_state_dict(state)


def test_loading_drops_the_group_that_is_open():
    batches = micro_batches(5)
    model, optimizer, scheduler = made(2)
    states = copy.deepcopy([each.state_dict() for each in (model, optimizer, scheduler)])
    for batch in batches[:3]:
        clear_last(model, optimizer, scheduler, batch)
    for each, state in zip((model, optimizer, scheduler), states, strict=True):
        each.load_state_dict(state)
    for batch in batches[3:]:
        clear_last(model, optimizer, scheduler, batch)

    assert close(one(model), by_hand([batches[3:]])[0]) and optimizer.optimizer_steps == 1


def test_a_failing_step_leaves_the_next_group_whole():
    class Failing(SGD):
        def step(self, closure=None):
            raise OSError("no step")

    model = linear(dtype=DOUBLE)
    optimizer = GradientAccumulationOptimizer(Failing(model.parameters(), lr=0.1), model, 1)
    for _ in range(2):
        with pytest.raises(OSError, match="no step"):
            optimizer.step()
    assert optimizer.micro_batches == optimizer.optimizer_steps == 0


def test_in_an_ignite_engine():
    batches = micro_batches(5)
    model, optimizer, scheduler = made(2)

    def step(engine, batch):
        loss = mse(model, batch)
        optimizer.backward(loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        return loss.item()

    engine = Engine(step)
    engine.add_event_handler(Events.EPOCH_COMPLETED, lambda: optimizer.flush())
    engine.run(batches, max_epochs=2)

    expected, lrs = by_hand([batches[:2], batches[2:4], batches[4:]] * 2)
    assert close(one(model), expected) and scheduler.get_last_lr()[0] == lrs[-1]
    assert (engine.state.iteration, optimizer.optimizer_steps) == (10, 6)


def test_in_a_trainer_a_resume_within_a_group_is_exact(tmp_path):
    def run(folder, max_iters):
        model = linear()
        bare = AdamW(model.parameters(), lr=0.1)
        optimizer, scheduler = initialize(model, bare, torch_schedulers.ExponentialLR(bare, 0.9), 3)

        def step(engine, batch):
            loss = mse(model, batch)
            optimizer.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            return loss.detach()

        trainer = Trainer(step)
        for name, each in (("model", model), ("optimizer", optimizer), ("scheduler", scheduler)):
            trainer.register(name, each)
        checkpoint = Checkpoint(tmp_path / folder)
        checkpoint.attach(trainer)
        assert (checkpoint.resume() is None) == (trainer.state.iteration == 0)
        trainer.run(numbers_loader(), max_iters=max_iters)
        return one(model).clone()

    whole = run("whole", 12)
    run("parts", 4)
    assert not torch.equal(run("parts", 5), whole)
    assert torch.equal(run("parts", 12), whole)


def test_a_loss_that_was_not_given_to_it_is_refused():
    model, optimizer, _ = made(2)
    mse(model, micro_batches(1)[0]).backward()

    with pytest.raises(RuntimeError, match=r"step\(\) was called without optimizer.backward\(loss\)"):
        optimizer.step()
    with pytest.raises(RuntimeError, match=r"clip_gradients\(\) was called without"):
        optimizer.clip_gradients(1.0)
    with pytest.raises(ValueError, match="takes no closure"):
        optimizer.step(lambda: 0.0)


class HoldsBackInAContext(nn.Linear):
    def no_sync(self): ...


def bad_arguments():
    model = linear()
    bare = SGD(model.parameters(), lr=0.1)
    scheduler = torch_schedulers.ConstantLR(bare)
    gated = GradientAccumulationOptimizer(bare, model, 1)
    other = SGD(linear().parameters(), lr=0.1)
    context = HoldsBackInAContext(1, 1)
    static = linear()
    static.require_backward_grad_sync = static.static_graph = True
    of = GradientAccumulationOptimizer
    over = GradientAccumulationLRScheduler
    return [
        (lambda: of(bare, model, 0), ValueError, "whole number of at least 1, got 0"),
        (lambda: of(bare, model, 2.0), ValueError, "whole number of at least 1, got 2.0"),
        (lambda: of(model, bare, 2), TypeError, "optimizer must be .* got Sequential"),
        (lambda: of(bare, bare, 2), TypeError, "model must be .* got SGD"),
        (lambda: of(gated, model, 2), TypeError, "accumulates gradients already"),
        (lambda: of(other, model, 2), ValueError, "holds no parameter of model"),
        (lambda: of(bare, model, 2, precision="fp8"), ValueError, "fp32, bf16, fp16, got 'fp8'"),
        (lambda: of(bare, model, 2, grad_scaler={"init_scale": 1.0}), ValueError, "no effect with precision 'fp32'"),
        (lambda: of(SGD(context.parameters()), context, 2), ValueError, r"HoldsBackInAContext.*gradient_sync\(model"),
        (lambda: of(SGD(static.parameters()), static, 2), ValueError, "static_graph=True.* cannot accumulate"),
        (lambda: over(scheduler, True), ValueError, "whole number of at least 1, got True"),
        (lambda: over(over(scheduler, 2), 2), TypeError, "scheduler is gated already: give its"),
        (lambda: over("cosine", 2), TypeError, "must have step, state_dict and load_state_dict.* got str"),
        (lambda: over(torch_schedulers.ReduceLROnPlateau(bare), 2), ValueError, r"its own step\(metric\)"),
        (lambda: initialize(model, bare, None), TypeError, "needs a scheduler: .* alone"),
        (lambda: initialize(model, bare, torch_schedulers.ConstantLR(other), 2), ValueError, "over another optimizer"),
    ]


@pytest.mark.parametrize("case", range(len(bad_arguments())))
def test_a_wrong_argument_is_one_clear_sentence(case):
    make, kind, message = bad_arguments()[case]

    with pytest.raises(kind, match=message) as error:
        make()
    assert "\n" not in str(error.value) and str(error.value).endswith(".")
