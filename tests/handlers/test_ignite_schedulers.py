"""Ignite's parameter schedulers and metrics on our bus: values that Ignite itself or arithmetic predicts."""

import copy
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ignite.engine import Events
from ignite.handlers import (
    ConcatScheduler,
    CosineAnnealingScheduler,
    LinearCyclicalScheduler,
    LRScheduler,
    PiecewiseLinear,
    create_lr_scheduler_with_warmup,
)
from ignite.metrics import (
    Average,
    Frequency,
    MetricsLambda,
    RunningAverage,
)
from ignite.metrics.metric import SingleEpochRunningBatchWise
from torch.optim import SGD, Optimizer

from ignite_engine import TrainingEvents
from tests.handlers.test_ignite_handlers import loss_of
from tests.kit.tiny import numbers_loader, trainer_of, weights

Make = Callable[[Optimizer], Any]


def piecewise(optimizer):
    return PiecewiseLinear(optimizer, "lr", [(2, 0.5), (6, 0.1), (10, 0.3)])


def cyclical(optimizer):
    return LinearCyclicalScheduler(optimizer, "lr", 0.1, 0.9, cycle_size=8)


def cosine(optimizer):
    return CosineAnnealingScheduler(optimizer, "lr", 0.8, 0.1, cycle_size=10)


def concatenated(optimizer):
    return ConcatScheduler([cosine(optimizer), cyclical(optimizer)], durations=[5])


def warmed_up(optimizer):
    return create_lr_scheduler_with_warmup(
        cosine(optimizer), warmup_start_value=0.0, warmup_end_value=0.8, warmup_duration=4
    )


def of_torch(optimizer):
    return LRScheduler(torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5))


SCHEDULERS = [piecewise, cyclical, cosine, concatenated, warmed_up, of_torch]


def foretold(make, count):
    """The rate of each of ``count`` iterations, as Ignite's scheduler gives them to a bare loop."""
    optimizer, rates = SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.7), list[float]()
    scheduler = make(optimizer)
    for _ in range(count):
        scheduler(None)
        rates.append(optimizer.param_groups[0]["lr"])
    return rates


def rates_used(trainer):
    update = trainer.update
    rates = []
    trainer.add_event_handler(
        TrainingEvents.OPTIMIZER_STEP_STARTED,
        lambda: rates.append(update.optimizers["optimizer"].param_groups[0]["lr"]),
    )
    return rates


def scheduled(make, accumulation_steps=None):
    trainer = trainer_of(accumulation_steps=accumulation_steps, lr=0.7)
    update = trainer.update
    trainer.add_event_handler(Events.ITERATION_STARTED, make(update.optimizers["optimizer"]))
    return trainer, rates_used(trainer)


@pytest.mark.parametrize("accumulation_steps", [None, 3])
@pytest.mark.parametrize("make", SCHEDULERS, ids=lambda make: make.__name__)
def test_scheduler_moves_once_per_optimizer_step(make, accumulation_steps):
    trainer, rates = scheduled(make, accumulation_steps)
    trainer.run(numbers_loader(12 * (accumulation_steps or 1), 1), max_iters=12)

    assert rates == pytest.approx(foretold(make, 12)) and len(set(rates)) > 4


@pytest.mark.parametrize("make", SCHEDULERS, ids=lambda make: make.__name__)
def test_scheduler_is_saved_and_resumed(make):
    """Attached with no word more, it is in every checkpoint of ours, and the resumed run has the same rates."""
    whole, rates = scheduled(make)
    saved = {}

    def save():
        shared, local = whole.registry.capture()
        saved.update(copy.deepcopy({**shared, **local}))

    whole.add_event_handler(TrainingEvents.RESUME_POINT(once=7), save)
    whole.run(numbers_loader(12, 1))
    resumed, rest = scheduled(make)
    resumed.registry.load(saved, source="memory")
    resumed.run(numbers_loader(12, 1), max_epochs=1)

    assert rest == rates[7:] and len(rest) == 5
    assert torch.equal(weights(resumed), weights(whole))


# -- metrics -----------------------------------------------------------------------------------------------------------


def test_metrics_on_the_trainer_are_those_of_each_epoch():
    trainer, epochs, losses = trainer_of(), list[tuple[float, float]](), list[float]()
    Average(output_transform=loss_of).attach(trainer, "mean")
    largest = Average(output_transform=lambda output: 2 * loss_of(output))
    MetricsLambda(lambda value: value + 1.0, largest).attach(trainer, "twice")
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: losses.append(loss_of(trainer.state.output)))
    trainer.add_event_handler(
        Events.EPOCH_COMPLETED,
        lambda: epochs.append((trainer.state.metrics["mean"], trainer.state.metrics["twice"])),
    )
    trainer.run(numbers_loader(6, 2), max_epochs=2)

    means = [sum(losses[:3]) / 3, sum(losses[3:]) / 3]
    assert epochs == [pytest.approx((mean, 2 * mean + 1)) for mean in means]


def measured():
    trainer = trainer_of()
    RunningAverage(alpha=0.5, output_transform=loss_of).attach(trainer, "slow")
    RunningAverage(alpha=0.9, output_transform=loss_of).attach(trainer, "quick")
    RunningAverage(output_transform=loss_of).attach(trainer, "of the epoch", usage=SingleEpochRunningBatchWise())
    Average(output_transform=loss_of).attach(trainer, "mean")
    Average(output_transform=lambda output: -loss_of(output)).attach(trainer, "minus")
    return trainer


@pytest.mark.parametrize("iteration", [2, 4, 6, 9])  # in an epoch, at the end of one, and of the run
def test_metrics_are_saved_under_their_names_and_resumed(iteration):
    whole, saved = measured(), dict[str, Any]()

    def save():
        shared, local = whole.registry.capture()
        saved.update(copy.deepcopy({**shared, **local}))

    whole.add_event_handler(TrainingEvents.RESUME_POINT(once=iteration), save)
    expected = dict(whole.run(numbers_loader(6, 2), max_epochs=3).metrics)
    resumed = measured()
    resumed.registry.load(saved, source="memory")
    found = resumed.run(numbers_loader(6, 2), max_epochs=3).metrics

    assert {"ignite/RunningAverage/slow", "ignite/RunningAverage/quick", "ignite/Average/mean"} <= set(saved)
    assert whole.reproducibility() == []
    if iteration < 9:  # else nothing is left to compute
        assert found == expected and len(found) == 5


def test_metric_that_cannot_be_saved_is_in_the_exactness_report():
    class Recent(Average):
        def reset(self):
            super().reset()
            self.recent = deque([0.0])

    trainer = trainer_of()
    Recent(output_transform=loss_of).attach(trainer, "recent")
    Frequency(output_transform=lambda output: 2).attach(trainer, "samples/s")
    trainer.run(numbers_loader(6, 2))

    (name,) = (each for each in trainer.registry.objects if "Recent" in each)
    assert trainer.reproducibility() == [
        f"{name} is not saved, as Recent keeps a collections.deque in recent, which is not plain data"
    ]
    assert trainer.registry.capture()[1][name] == {}


def test_metrics_continue_after_a_stop_in_this_process():
    whole, stopped = measured(), measured()
    expected = dict(whole.run(numbers_loader(6, 2), max_epochs=2).metrics)
    stopped.add_event_handler(Events.ITERATION_COMPLETED(once=5), lambda: stopped.request_stop("for now"))
    stopped.run(numbers_loader(6, 2), max_epochs=2)
    state = stopped.run(numbers_loader(6, 2), max_epochs=2)

    assert state.iteration == 6 and dict(state.metrics) == expected


def test_running_average_is_the_exponential_one():
    trainer, averages, losses = trainer_of(), list[float](), list[float]()
    RunningAverage(alpha=0.75, output_transform=loss_of).attach(trainer, "average")
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: losses.append(loss_of(trainer.state.output)))
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: averages.append(trainer.state.metrics["average"]))
    trainer.run(numbers_loader(8, 2))

    expected = losses[:1]
    for loss in losses[1:]:
        expected.append(0.75 * expected[-1] + 0.25 * loss)
    assert averages == pytest.approx(expected)
