"""Sparse tables and dense layers under one update: one accumulation, one scaler, one clip, one decision to step."""

import copy

import pytest
import torch
from ignite.engine import Events

from ignite_engine import Trainer, TrainingEvents, Update
from ignite_engine.handlers import LRSchedule, warmup_constant, warmup_linear
from tests.kit.resume import Program, assert_resumes
from tests.sparse_and_dense import Net, Sized, batches, by_hand, loss_fn, optimizers_of, samples, values

SCALER = {"init_scale": 256.0, "growth_interval": 3}


def trainer_of(model, steps=None, **options):
    return Trainer(Update(model, optimizers_of(model), loss_fn, **options), steps)


def dense_gradients(model):
    return [each.grad.to_dense() for each in model.parameters() if each.grad is not None]


@pytest.mark.parametrize("clip_norm", [None, 0.05])
def test_gradient_of_5_micro_batches_of_2_is_that_of_one_of_10(clip_norm):
    small, big = Net(), Net()
    accumulated = trainer_of(small, 5, clip_norm=clip_norm, log_grad_norm=True).run(batches(5, 2))
    whole = trainer_of(big, clip_norm=clip_norm, log_grad_norm=True).run([samples(10)])

    assert small.words.weight.grad is not None and small.words.weight.grad.is_sparse
    assert len(dense_gradients(small)) == 4
    for one, other in zip(dense_gradients(small), dense_gradients(big), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-6)
    for one, other in zip(small.parameters(), big.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-6)
    torch.testing.assert_close(accumulated.output["grad_norm"], whole.output["grad_norm"], rtol=1e-6, atol=0)


def test_no_optimizer_steps_within_a_group():
    model = Net()
    trainer = trainer_of(model, 5)
    optimizers, seen = trainer.update.optimizers, []

    def look():
        seen.append((trainer.state.micro_batches, values(model), copy.deepcopy([o.state for o in optimizers.values()])))

    trainer.add_event_handler(TrainingEvents.BACKWARD_COMPLETED, look)
    trainer.run(batches(10, 2))

    assert [count for count, _, _ in seen] == list(range(1, 11))
    assert all(weights == seen[0][1] and not any(states) for _, weights, states in seen[:5])
    assert all(weights == seen[5][1] != seen[0][1] for _, weights, _ in seen[5:])
    assert all([int(s["step"]) for s in states[0].values()] == [1] for _, _, states in seen[5:])


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_weights_have_the_bits_of_the_loop_written_by_hand(precision):
    data, model, written = batches(12, 2), Net(), Net()
    options = {"grad_scaler": SCALER} if precision == "fp16" else {}
    state = trainer_of(model, 3, precision=precision, clip_norm=0.5, **options).run(data, max_epochs=3)
    scaler = torch.amp.GradScaler("cpu", **SCALER) if precision == "fp16" else None
    by_hand(written, [data[i : i + 3] for i in range(0, 12, 3)], clip_norm=0.5, scaler=scaler, passes=3)

    assert values(model) == values(written) != values(Net())
    assert state.optimizer_steps == 12


@pytest.mark.parametrize("part", ["a table", "the dense layer"])
def test_overflow_of_either_kind_of_gradient_stops_all_optimizers(part):
    model = Net()
    with torch.no_grad():  # backward of a table is scaled by the head's weights, and that of the head by the rows
        (model.head.weight if part == "a table" else model.words.weight).fill_(60.0)
    update = Update(model, optimizers_of(model), loss_fn, precision="fp16", grad_scaler={"init_scale": 2.0**126})
    trainer = Trainer(update, 2)
    schedule = warmup_constant(update.optimizers["tables"], 10)
    LRSchedule(schedule, name="tables").attach(trainer)
    before = values(model)
    state = trainer.run(batches(2, 2))

    assert values(model) == before and not any(optimizer.state for optimizer in update.optimizers.values())
    assert (state.skipped_steps, state.optimizer_steps, schedule.steps) == (1, 0, 0)
    assert update.scaler is not None and update.scaler.get_scale() == 2.0**125


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_iteration_that_touches_no_row_leaves_the_table_alone(precision):
    """An EmbeddingBag over empty bags has a gradient without entries."""
    model, before = Net(), Net()
    words, ids, targets = samples(4)
    options = {"grad_scaler": SCALER} if precision == "fp16" else {}
    state = trainer_of(model, precision=precision, clip_norm=0.01, **options).run([(words, ids[:, :0], targets)])

    assert model.bags.weight.grad is not None and model.bags.weight.grad._nnz() == 0
    assert torch.equal(model.bags.weight, before.bags.weight)
    assert not torch.equal(model.words.weight, before.words.weight)
    assert not torch.equal(model.head.weight, before.head.weight)
    assert torch.isfinite(state.output["grad_norm"]) and state.optimizer_steps == 1


def test_each_optimizer_has_a_schedule_of_its_own():
    model = Net()
    trainer = trainer_of(model)
    optimizers = trainer.update.optimizers
    LRSchedule(warmup_linear(optimizers["sparse"], total=4), name="sparse").attach(trainer)
    LRSchedule(warmup_constant(optimizers["tables"], 2), name="tables").attach(trainer)
    rates = []
    trainer.add_event_handler(
        Events.ITERATION_STARTED, lambda: rates.append([o.param_groups[0]["lr"] for o in optimizers.values()])
    )
    trainer.run(batches(3, 2))

    assert rates == [pytest.approx(each) for each in ([0.05, 0.05, 0.01], [0.0375, 0.1, 0.01], [0.025, 0.1, 0.01])]


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_resumed_run_ends_with_the_same_bits(tmp_path, precision):
    def build():
        options = {"grad_scaler": SCALER} if precision == "fp16" else {}
        trainer = trainer_of(Net(), 2, precision=precision, clip_norm=0.5, **options)
        for name, optimizer in trainer.update.optimizers.items():
            LRSchedule(warmup_linear(optimizer, 2, total=20), name=name).attach(trainer)
        return trainer

    made = Program(build, lambda: Sized(batches(6, 2)), {"max_iters": 8})
    assert_resumes(made, tmp_path, at=(3, 4), how=["stop", "same process"])
