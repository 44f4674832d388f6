"""Ignite's parameter schedulers and metrics on our bus: values that Ignite itself or arithmetic predicts."""

from __future__ import annotations

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
    ExpStateScheduler,
    LinearCyclicalScheduler,
    LRScheduler,
    ParamGroupScheduler,
    PiecewiseLinear,
    ReduceLROnPlateauScheduler,
    create_lr_scheduler_with_warmup,
)
from ignite.metrics import (
    ROC_AUC,
    Accuracy,
    Average,
    Frequency,
    Loss,
    MeanSquaredError,
    MetricsLambda,
    MutualInformation,
    RunningAverage,
)
from ignite.metrics.metric import BatchWise, SingleEpochRunningBatchWise
from torch import Tensor
from torch.optim import SGD, Optimizer

from ignite_engine import Trainer, TrainingEvents, Update, create_evaluator
from ignite_engine.handlers import Evaluation
from tests.builders import linear, mse, numbers_loader, trainer_of, weights
from tests.handlers.test_ignite_handlers import loss_of, predict

Make = Callable[[Optimizer], Any]


def piecewise(optimizer: Optimizer) -> PiecewiseLinear:
    return PiecewiseLinear(optimizer, "lr", [(2, 0.5), (6, 0.1), (10, 0.3)])


def cyclical(optimizer: Optimizer) -> LinearCyclicalScheduler:
    return LinearCyclicalScheduler(optimizer, "lr", 0.1, 0.9, cycle_size=8)


def cosine(optimizer: Optimizer) -> CosineAnnealingScheduler:
    return CosineAnnealingScheduler(optimizer, "lr", 0.8, 0.1, cycle_size=10)


def concatenated(optimizer: Optimizer) -> ConcatScheduler:
    return ConcatScheduler([cosine(optimizer), cyclical(optimizer)], durations=[5])


def warmed_up(optimizer: Optimizer) -> Any:
    return create_lr_scheduler_with_warmup(
        cosine(optimizer), warmup_start_value=0.0, warmup_end_value=0.8, warmup_duration=4
    )


def of_torch(optimizer: Optimizer) -> LRScheduler:
    return LRScheduler(torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5))


SCHEDULERS: list[Make] = [piecewise, cyclical, cosine, concatenated, warmed_up, of_torch]


def foretold(make: Make, count: int) -> list[float]:
    """The rate of each of ``count`` iterations, as Ignite's scheduler gives them to a bare loop."""
    optimizer, rates = SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.7), list[float]()
    scheduler = make(optimizer)
    for _ in range(count):
        scheduler(None)
        rates.append(optimizer.param_groups[0]["lr"])
    return rates


def rates_used(trainer: Trainer) -> list[float]:
    update: Any = trainer.update
    rates: list[float] = []
    trainer.add_event_handler(
        TrainingEvents.OPTIMIZER_STEP_STARTED,
        lambda: rates.append(update.optimizers["optimizer"].param_groups[0]["lr"]),
    )
    return rates


def scheduled(make: Make, accumulation_steps: int | None = None) -> tuple[Trainer, list[float]]:
    trainer = trainer_of(accumulation_steps=accumulation_steps, lr=0.7)
    update: Any = trainer.update
    trainer.add_event_handler(Events.ITERATION_STARTED, make(update.optimizers["optimizer"]))
    return trainer, rates_used(trainer)


@pytest.mark.parametrize("accumulation_steps", [None, 3])
@pytest.mark.parametrize("make", SCHEDULERS, ids=lambda make: make.__name__)
def test_scheduler_moves_once_per_optimizer_step(make: Make, accumulation_steps: int | None) -> None:
    trainer, rates = scheduled(make, accumulation_steps)
    trainer.run(numbers_loader(12 * (accumulation_steps or 1), 1), max_iters=12)

    assert rates == pytest.approx(foretold(make, 12)) and len(set(rates)) > 4


@pytest.mark.parametrize("make", SCHEDULERS, ids=lambda make: make.__name__)
def test_scheduler_is_saved_and_resumed(make: Make) -> None:
    """Attached with no word more, it is in every checkpoint of ours, and the resumed run has the same rates."""
    whole, rates = scheduled(make)
    saved: dict[str, Any] = {}

    def save() -> None:
        shared, local = whole.registry.capture()
        saved.update(copy.deepcopy({**shared, **local}))

    whole.add_event_handler(TrainingEvents.RESUME_POINT(once=7), save)
    whole.run(numbers_loader(12, 1))
    resumed, rest = scheduled(make)
    resumed.registry.load(saved, source="memory")
    resumed.run(numbers_loader(12, 1), max_epochs=1)

    assert rest == rates[7:] and len(rest) == 5
    assert torch.equal(weights(resumed), weights(whole))


def test_scheduler_of_each_group_and_of_another_parameter() -> None:
    model = linear()
    first, second = list(model.parameters())[:2], list(model.parameters())[2:]
    optimizer = SGD([{"params": first}, {"params": second}], lr=0.1, momentum=0.9)
    trainer = Trainer(Update(model, optimizer, mse))
    seen: list[tuple[float, ...]] = []
    groups = [
        LinearCyclicalScheduler(optimizer, "lr", 1.0, 0.0, cycle_size=8, param_group_index=0),
        PiecewiseLinear(optimizer, "momentum", [(0, 0.9), (4, 0.5)], param_group_index=1),
    ]
    trainer.add_event_handler(Events.ITERATION_STARTED, ParamGroupScheduler(groups, names=["lr", "momentum"]))
    trainer.add_event_handler(
        Events.ITERATION_COMPLETED,
        lambda: seen.append((optimizer.param_groups[0]["lr"], optimizer.param_groups[1]["momentum"])),
    )
    trainer.run(numbers_loader(4, 1))

    assert seen == [pytest.approx(pair) for pair in [(1.0, 0.9), (0.75, 0.8), (0.5, 0.7), (0.25, 0.6)]]
    assert [group["lr"] for group in optimizer.param_groups][1] == 0.1


def test_plateau_scheduler_follows_a_metric_of_the_evaluator() -> None:
    trainer, given = trainer_of(lr=1.0), iter([3.0, 2.0, 2.0, 2.0, 2.0])
    update: Any = trainer.update
    evaluator = create_evaluator(update.model, lambda model, batch: next(given), {"score": Average()})
    scheduler = ReduceLROnPlateauScheduler(
        update.optimizers["optimizer"], metric_name="score", factor=0.1, patience=0, trainer=trainer
    )
    evaluator.add_event_handler(Events.COMPLETED, scheduler)
    Evaluation(evaluator, [0]).attach(trainer)
    rates = rates_used(trainer)
    trainer.run(numbers_loader(2, 2), max_epochs=5)

    assert rates == pytest.approx([1.0, 1.0, 1.0, 0.1, 0.01])


def test_state_scheduler_writes_into_the_state() -> None:
    trainer, seen = trainer_of(), list[float]()
    scheduler = ExpStateScheduler(initial_value=8.0, gamma=0.5, param_name="temperature")
    scheduler.attach(trainer, Events.EPOCH_STARTED)
    trainer.add_event_handler(Events.EPOCH_COMPLETED, lambda: seen.append(trainer.state.temperature))  # type: ignore[attr-defined]
    trainer.run(numbers_loader(2), max_epochs=3)

    assert seen == [4.0, 2.0, 1.0]


# -- metrics -----------------------------------------------------------------------------------------------------------


def test_metrics_on_the_trainer_are_those_of_each_epoch() -> None:
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


def test_metrics_of_the_trainer_reach_the_sinks() -> None:
    trainer, published = trainer_of(), list[tuple[int, set[str]]]()
    Average(output_transform=loss_of).attach(trainer, "mean")
    trainer.add_event_handler(
        TrainingEvents.METRICS_READY,
        lambda: published.append((trainer.state.iteration, set(trainer.state.metrics.fresh))),
    )
    trainer.run(numbers_loader(6, 2), max_epochs=2)

    assert published == [(3, {"mean"}), (6, {"mean"})]


def measured() -> Trainer:
    trainer = trainer_of()
    RunningAverage(alpha=0.5, output_transform=loss_of).attach(trainer, "slow")
    RunningAverage(alpha=0.9, output_transform=loss_of).attach(trainer, "quick")
    RunningAverage(output_transform=loss_of).attach(trainer, "of the epoch", usage=SingleEpochRunningBatchWise())
    Average(output_transform=loss_of).attach(trainer, "mean")
    Average(output_transform=lambda output: -loss_of(output)).attach(trainer, "minus")
    return trainer


@pytest.mark.parametrize("iteration", [2, 4, 6, 9])  # in an epoch, at the end of one, and of the run
def test_metrics_are_saved_under_their_names_and_resumed(iteration: int) -> None:
    whole, saved = measured(), dict[str, Any]()

    def save() -> None:
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


def test_metric_whose_own_state_ignite_cannot_load_is_resumed() -> None:
    """Ignite's ``load_state_dict`` raises for lists of tensors, and forgets attributes that are no part of its keys."""

    def make() -> Trainer:
        trainer = trainer_of()

        def predicted(_: Any) -> tuple[Tensor, Tensor]:
            iteration = trainer.state.iteration
            return torch.arange(4.0).view(2, 2) * iteration, torch.tensor([0, 1]) ^ (iteration % 2)

        def scored(output: Any) -> tuple[Tensor, Tensor]:
            scores, classes = predicted(output)
            return scores[:, 1], classes

        ROC_AUC(scored).attach(trainer, "auc")
        MutualInformation(predicted).attach(trainer, "information")
        return trainer

    whole, resumed, saved = make(), make(), dict[str, Any]()

    def save() -> None:
        shared, local = whole.registry.capture()
        saved.update(copy.deepcopy({**shared, **local}))

    whole.add_event_handler(TrainingEvents.RESUME_POINT(once=4), save)
    expected = dict(whole.run(numbers_loader(6, 2), max_epochs=2).metrics)
    resumed.registry.load(saved, source="memory")

    assert whole.reproducibility() == []
    assert dict(resumed.run(numbers_loader(6, 2), max_epochs=2).metrics) == expected
    assert {"auc", "information"} <= set(expected)


def test_metric_that_cannot_be_saved_is_in_the_exactness_report() -> None:
    class Recent(Average):
        def reset(self) -> None:
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


def test_metrics_continue_after_a_stop_in_this_process() -> None:
    whole, stopped = measured(), measured()
    expected = dict(whole.run(numbers_loader(6, 2), max_epochs=2).metrics)
    stopped.add_event_handler(Events.ITERATION_COMPLETED(once=5), lambda: stopped.request_stop("for now"))
    stopped.run(numbers_loader(6, 2), max_epochs=2)
    state = stopped.run(numbers_loader(6, 2), max_epochs=2)

    assert state.iteration == 6 and dict(state.metrics) == expected


def test_running_average_is_the_exponential_one() -> None:
    trainer, averages, losses = trainer_of(), list[float](), list[float]()
    RunningAverage(alpha=0.75, output_transform=loss_of).attach(trainer, "average")
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: losses.append(loss_of(trainer.state.output)))
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: averages.append(trainer.state.metrics["average"]))
    trainer.run(numbers_loader(8, 2))

    expected = losses[:1]
    for loss in losses[1:]:
        expected.append(0.75 * expected[-1] + 0.25 * loss)
    assert averages == pytest.approx(expected)


def test_running_average_of_a_metric_over_a_users_own_update() -> None:
    """Such an average refuses a mapping, in any engine: it is for updates that return pairs."""
    trainer = Trainer(lambda engine, batch: (torch.tensor([float(batch)]), torch.zeros(1)))
    RunningAverage(MeanSquaredError(), alpha=0.5).attach(trainer, "average")
    state = trainer.run([1, 2, 3])

    assert state.metrics["average"] == pytest.approx(0.5 * (0.5 * 1 + 0.5 * 4) + 0.5 * 9)


def test_metric_of_each_batch_and_frequency() -> None:
    trainer, each, losses = trainer_of(), list[float](), list[float]()
    Average(output_transform=loss_of).attach(trainer, "batch", usage=BatchWise())
    Frequency(output_transform=lambda output: 2).attach(trainer, "samples/s")
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: losses.append(loss_of(trainer.state.output)))
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: each.append(trainer.state.metrics["batch"]))
    state = trainer.run(numbers_loader(6, 2))

    assert each == pytest.approx(losses) and state.metrics["samples/s"] > 0


def test_metrics_on_the_evaluator_are_those_of_all_samples() -> None:
    trainer = trainer_of()
    update: Any = trainer.update
    data = numbers_loader(7, 3)

    def classes(output: Any) -> tuple[Tensor, Tensor]:
        values, targets = output
        return (values > 0).long().view(-1), (targets > 0).long().view(-1)

    evaluator = create_evaluator(
        update.model,
        predict,
        {"mse": MeanSquaredError(), "loss": Loss(torch.nn.functional.l1_loss), "accuracy": Accuracy(classes)},
    )
    Evaluation(evaluator, data, name="val").attach(trainer)
    state = trainer.run(numbers_loader(6, 2))

    with torch.no_grad():
        samples = [predict(update.model, batch) for batch in data]
    values, targets = (torch.cat(part) for part in zip(*samples, strict=True))
    assert state.metrics["val/mse"] == pytest.approx((values - targets).square().mean().item())
    assert state.metrics["val/loss"] == pytest.approx((values - targets).abs().mean().item())
    assert state.metrics["val/accuracy"] == pytest.approx(((values > 0) == (targets > 0)).float().mean().item())


def test_detached_metric_is_written_no_more() -> None:
    trainer, metric = trainer_of(), Average(output_transform=loss_of)
    metric.attach(trainer, "mean")
    trainer.run(numbers_loader(4, 2))
    metric.detach(trainer)
    before = trainer.state.metrics.pop("mean")
    state = trainer.run(numbers_loader(4, 2), max_epochs=2)

    assert before > 0 and "mean" not in state.metrics and not metric.is_attached(trainer)
