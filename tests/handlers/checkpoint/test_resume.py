"""A run that was cut off goes on with the bits of one that was not; from which checkpoint, and with what of it."""

import functools

import pytest
import torch
from ignite.engine import Events
from ignite.metrics import Average
from torch import nn

from ignite_engine import TrainingEvents, create_evaluator
from ignite_engine.errors import CheckpointError, StateMismatch
from ignite_engine.handlers import Checkpoint, Evaluation, LRSchedule, MetricLogger, warmup_cosine
from tests.kit import saved
from tests.kit.refusals import refusals, refuses
from tests.kit.resume import assert_resumes, program
from tests.kit.tiers import tiered
from tests.kit.tiny import linear, numbers_loader, trainer_of, weights

EACH = Events.ITERATION_COMPLETED


def schedule(trainer):
    LRSchedule(warmup_cosine(trainer.update.optimizers["optimizer"], warmup=3, total=20)).attach(trainer)


def evaluation(trainer):
    evaluator = create_evaluator(trainer.update.model, lambda model, batch: model(batch[0]), {"mean": Average()})
    Evaluation(evaluator, numbers_loader(4)).attach(trainer, EACH(every=2))


def means(trainer):
    MetricLogger(console=False).attach(trainer, EACH(every=2))


def drawing(trainer):
    """As who samples from the model there."""
    trainer.add_event_handler(TrainingEvents.RESUME_POINT, lambda: torch.rand(1))
    trainer.add_event_handler(TrainingEvents.CHECKPOINT_SAVED, lambda: torch.rand(1))


FULL = program(
    [schedule, evaluation, means],
    accumulation_steps=2,
    clip_norm=1.0,
    data=lambda: numbers_loader(14, 2, shuffle=True, seed=2),  # 4 updates an epoch, the last one of one micro-batch
)
EXACT = {
    "all at once": FULL,
    "drawn": program([drawing]),
    "drawn beside a save": program([drawing], checkpoint={"background": True}),
    "batch norm": program(
        model=lambda: nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 1)),
        checkpoint={"background": True},
    ),
}


@pytest.mark.parametrize("name", tiered(EXACT, "all at once", "drawn beside a save"))
def test_stopped_run_ends_with_the_bits_of_the_whole_one(name, tmp_path):
    assert_resumes(EXACT[name], tmp_path, how=("stop", "raise", "same process"))


def test_killed_run_ends_with_the_bits_of_the_whole_one(tmp_path):
    assert_resumes(FULL, tmp_path, at=(1, 3, 4, 7), how=("kill",))


@pytest.mark.row("D15")
@pytest.mark.parametrize("ignore", [[], ["rng"]])
def test_random_numbers_go_on_from_the_checkpoint(ignore, tmp_path):
    """Without them the bits are others: else the tests above would pass where they are not restored."""

    def run(folder, seed, last):
        trainer, checkpoint = trainer_of(linear(dropout=True)), Checkpoint(folder)
        checkpoint.attach(trainer)
        torch.manual_seed(seed)
        checkpoint.resume(ignore)
        trainer.run(numbers_loader(), max_iters=last)
        return weights(trainer)

    whole = run(tmp_path / "whole", 1, 9)
    run(tmp_path / "cut", 1, 4)
    assert torch.equal(run(tmp_path / "cut", 2, 9), whole) == (not ignore)


def trained(folder, last=4, **options):
    trainer, checkpoint = trainer_of(), Checkpoint(folder, **options)
    checkpoint.attach(trainer, EACH(every=2))
    trainer.run(numbers_loader(), max_iters=last)
    return trainer


def attached(folder, **options):
    trainer, checkpoint = trainer_of(), Checkpoint(folder, **options)
    checkpoint.attach(trainer)
    return trainer, checkpoint


def resumes_all_damaged(tmp_path):
    trained(tmp_path)
    for iteration in saved.iterations(tmp_path):
        saved.damage(tmp_path, iteration)
    attached(tmp_path)[1].resume()


def has_two_handlers(tmp_path):
    trainer, _ = attached(tmp_path)
    Checkpoint(tmp_path, name="best").attach(trainer)


def resumes_without_a_counter(tmp_path):
    trainer, checkpoint = attached(tmp_path)
    trainer.register("counter", torch.optim.SGD([torch.zeros(1)]))
    trainer.run(numbers_loader(), max_iters=2)
    again, checkpoint = attached(tmp_path)
    checkpoint.resume()
    again.run(numbers_loader(), max_iters=4)


def restores(tmp_path, **options):
    trainer, checkpoint = attached(tmp_path, **options)
    trainer.run(numbers_loader(), max_iters=2)
    checkpoint.restore_best()


def starts_in(folder):
    trainer, _ = attached(folder)
    try:
        trainer.run(numbers_loader(), max_epochs=1)
    finally:
        assert trainer.state.iteration == 0


test_refusals = refusals(
    [
        ("all are damaged", resumes_all_damaged, CheckpointError, "none of the valid shared"),
        ("no trainer", lambda tmp_path: Checkpoint(tmp_path).resume(), RuntimeError, "attach(trainer, event) before"),
        ("no trainer to save", lambda tmp_path: Checkpoint(tmp_path).save(), RuntimeError, "attach(trainer, event)"),
        ("one name", lambda tmp_path: attached(tmp_path)[1].resume("data"), ValueError, "ignore list ['data']"),
        ("two in a folder", has_two_handlers, ValueError, "'checkpoint' 'best' directory"),
        ("a part that went", resumes_without_a_counter, StateMismatch, "resume(ignore=['counter']) config"),
        ("no metric", restores, CheckpointError, "follows no metric best="),
        ("no value", functools.partial(restores, best="loss/none"), CheckpointError, "valid checkpoint loss/none"),
        ("no folder", lambda: starts_in("/proc/nowhere/saved"), CheckpointError, "/proc/nowhere/saved cannot another"),
    ]
)


def test_parts_that_are_left_out_keep_what_they_are(tmp_path):
    trainer = trained(tmp_path)
    tuned, checkpoint = attached(tmp_path)
    checkpoint.resume(ignore=["trainer", "data", "rng", "optimizer", "checkpoint"])

    assert torch.equal(weights(tuned), weights(trainer)) and tuned.state.iteration == 0
    assert tuned.run(numbers_loader(), max_iters=2).iteration == 2


def test_a_part_that_went_is_left_out_at_each_start_again(tmp_path, caplog):
    """The second time the newest checkpoint does not hold it any more."""
    refuses(resumes_without_a_counter, StateMismatch, "counter", tmp_path)
    for last in (4, 6):
        trainer, checkpoint = attached(tmp_path)
        checkpoint.resume(ignore=["counter"])
        assert trainer.run(numbers_loader(), max_iters=last).iteration == last
    told = [line for line in caplog.messages if "holds no counter to leave out" in line]
    assert len(told) == 1 and "iteration_00000004" in told[0]
