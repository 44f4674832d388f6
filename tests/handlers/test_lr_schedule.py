"""LRs are exact numbers; a schedule moves with the optimizer and with nothing else."""

from __future__ import annotations

import io
import math
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from ignite.engine import Engine, Events
from ignite.handlers.param_scheduler import (
    ConcatScheduler,
    CosineAnnealingScheduler,
    LinearCyclicalScheduler,
    ParamGroupScheduler,
    ParamScheduler,
    PiecewiseLinear,
    ReduceLROnPlateauScheduler,
    create_lr_scheduler_with_warmup,
)
from ignite.handlers.param_scheduler import LRScheduler as IgniteTorchScheduler
from torch import nn
from torch.optim import SGD, Optimizer
from torch.optim import lr_scheduler as torch_schedulers

from ignite_engine import Trainer, Update, loader
from ignite_engine.errors import StateMismatch
from ignite_engine.events import EVENT_COUNTERS, TrainingEvents
from ignite_engine.handlers import Checkpoint, MetricLogger
from ignite_engine.handlers.lr_schedule import LRSchedule
from ignite_engine.schedules import (
    Schedule,
    constant,
    warmup_constant,
    warmup_cosine,
    warmup_linear,
    warmup_wsd,
)
from tests.builders import Numbers, Passes, linear, mse
from tests.ranks.forkserver import on_ranks

BASE = 0.5


def sgd(lr: Any = BASE, groups: int = 1) -> Optimizer:
    return SGD([{"params": [nn.Parameter(torch.ones(2))]} for _ in range(groups)], lr=lr, foreach=False)


def factors(schedule: Schedule, steps: int) -> list[float]:
    return [schedule.factor_at(step) for step in range(steps)]


def run(
    handler: LRSchedule, steps: int, skipped: tuple[int, ...] = (), publish: tuple[int, ...] = (), load: Any = None
) -> tuple[list[list[float]], list[dict[str, float]]]:
    """LRs with which each iteration's update was made, and what stood in ``state.metrics`` where it was published.

    A bare Ignite engine with our events: the update really steps the optimizer, but for the ``skipped`` iterations.
    """
    optimizer = handler._optimizer
    used: list[list[float]] = []
    published: list[dict[str, float]] = []

    def update(engine: Engine, batch: Any) -> None:
        used.append([float(group["lr"]) for group in optimizer.param_groups])
        if engine.state.iteration in skipped:
            engine.fire_event(TrainingEvents.OPTIMIZER_STEP_SKIPPED)
            return
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        engine.fire_event(TrainingEvents.OPTIMIZER_STEP_COMPLETED)

    engine = Engine(update)
    engine.register_events(*TrainingEvents, event_to_attr=EVENT_COUNTERS)
    handler.attach(engine)
    if load is not None:
        load()

    @engine.on(Events.ITERATION_COMPLETED)
    def _(engine: Engine) -> None:
        engine.state.metrics = {}
        if engine.state.iteration in publish:
            engine.fire_event(TrainingEvents.METRICS_READY)
        published.append(dict(engine.state.metrics))

    if steps:
        engine.run(range(steps))
    return used, published


def used_lrs(handler: LRSchedule, steps: int, **options: Any) -> list[list[float]]:
    return run(handler, steps, **options)[0]


# --- setting the LR ---------------------------------------------------------------------------------------------------


def test_every_group_is_scheduled_from_its_own_base() -> None:
    optimizer = SGD([{"params": [nn.Parameter(torch.ones(1))], "lr": lr} for lr in (0.5, 2.0)], lr=1.0)
    schedule = warmup_linear(optimizer, 2, total=6)
    assert used_lrs(LRSchedule(schedule), 8) == [schedule.lrs_at(step) for step in range(8)]


def test_a_tensor_lr_is_filled_in_place() -> None:
    optimizer = sgd(torch.tensor(0.5, dtype=torch.float64))
    held = optimizer.param_groups[0]["lr"]
    assert used_lrs(LRSchedule(warmup_linear(optimizer, 2, total=6)), 7) == [
        [0.25], [0.5], [0.5], [0.375], [0.25], [0.125], [0.0]
    ]  # fmt: skip
    assert optimizer.param_groups[0]["lr"] is held


# --- moving with the optimizer ----------------------------------------------------------------------------------------


def test_update_k_is_made_with_the_lr_of_step_k() -> None:
    optimizer = sgd()
    schedule = warmup_cosine(optimizer, 3, total=10)
    assert used_lrs(LRSchedule(schedule), 12) == [schedule.lrs_at(step) for step in range(12)]
    assert schedule.lrs_at(0) == [BASE / 3]


@pytest.mark.parametrize("make", [lambda o: warmup_constant(o, 4), lambda o: warmed_up(o)], ids=["ours", "ignite"])
def test_the_lr_of_the_first_update_is_set_when_the_schedule_is_attached(make: Callable[[Any], Any]) -> None:
    optimizer = sgd()
    handler = LRSchedule(make(optimizer))
    used_lrs(handler, 0)
    first = optimizer.param_groups[0]["lr"]
    assert first != BASE
    assert used_lrs(LRSchedule(make(sgd())), 1) == [[first]]


def test_schedule_waits_for_skipped_steps() -> None:
    used = used_lrs(LRSchedule(warmup_constant(sgd(), 4)), 7, skipped=(1, 4, 5))
    assert used == [[0.125], [0.125], [0.25], [0.375], [0.375], [0.375], [0.5]]


def torch_scheduler_makers() -> dict[str, Callable[[Optimizer], Any]]:
    s = torch_schedulers
    return {
        "LambdaLR": lambda o: s.LambdaLR(o, lambda step: 1 / (1 + step)),
        "MultiplicativeLR": lambda o: s.MultiplicativeLR(o, lambda step: 0.9),
        "StepLR": lambda o: s.StepLR(o, 3),
        "MultiStepLR": lambda o: s.MultiStepLR(o, [2, 5]),
        "ConstantLR": lambda o: s.ConstantLR(o, 0.5, 4),
        "LinearLR": lambda o: s.LinearLR(o, 0.1, 1.0, 5),
        "ExponentialLR": lambda o: s.ExponentialLR(o, 0.9),
        "PolynomialLR": lambda o: s.PolynomialLR(o, 8, 2.0),
        "CosineAnnealingLR": lambda o: s.CosineAnnealingLR(o, 8),
        "CosineAnnealingWarmRestarts": lambda o: s.CosineAnnealingWarmRestarts(o, 3, 2),
        "CyclicLR": lambda o: s.CyclicLR(o, 0.1, 1.0, 4, cycle_momentum=False),
        "OneCycleLR": lambda o: s.OneCycleLR(o, 1.0, 20, cycle_momentum=False),
        "SequentialLR": lambda o: s.SequentialLR(
            o, [s.LinearLR(o, 0.1, 1.0, 4), s.CosineAnnealingLR(o, 8)], milestones=[4]
        ),
        "ChainedScheduler": lambda o: s.ChainedScheduler([s.ConstantLR(o, 0.1, 3), s.ExponentialLR(o, 0.9)]),
    }


def bare_torch_lrs(make: Callable[[Optimizer], Any], steps: int) -> list[list[float]]:
    optimizer = sgd(groups=2)
    scheduler, lrs = make(optimizer), []
    for _ in range(steps):
        lrs.append([float(group["lr"]) for group in optimizer.param_groups])
        optimizer.step()
        scheduler.step()
    return lrs


@pytest.mark.parametrize("wrapped", [False, True], ids=["torch", "in Ignite's LRScheduler"])
@pytest.mark.parametrize("name", torch_scheduler_makers())
def test_torch_schedulers_give_the_lrs_of_a_hand_written_loop(name: str, wrapped: bool) -> None:
    make = torch_scheduler_makers()[name]
    scheduler = make(sgd(groups=2))
    if wrapped:
        scheduler = IgniteTorchScheduler(scheduler)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch warns when the schedule moves before the optimizer
        assert used_lrs(LRSchedule(scheduler), 12) == bare_torch_lrs(make, 12)


def linear_cyclical(optimizer: Optimizer) -> ParamScheduler:
    return LinearCyclicalScheduler(optimizer, "lr", 1.0, 0.0, 6, cycle_mult=2.0)


def cosine_annealing(optimizer: Optimizer) -> ParamScheduler:
    return CosineAnnealingScheduler(optimizer, "lr", 0.0, 1.0, 5, start_value_mult=0.5)


def piecewise(optimizer: Optimizer) -> ParamScheduler:
    return PiecewiseLinear(optimizer, "lr", milestones_values=[(2, 0.5), (4, 0.45), (5, 0.3), (9, 0.1)])


def warmed_up(optimizer: Optimizer) -> ParamScheduler:
    return create_lr_scheduler_with_warmup(
        CosineAnnealingScheduler(optimizer, "lr", 0.5, 0.0, 9), warmup_start_value=0.0, warmup_duration=4
    )


def warmed_up_torch(optimizer: Optimizer) -> ParamScheduler:
    exponential = torch_schedulers.ExponentialLR(optimizer, 0.9)
    return create_lr_scheduler_with_warmup(exponential, warmup_start_value=0.0, warmup_duration=4)


IGNITE = {
    "linear": (
        linear_cyclical,
        lambda n: LinearCyclicalScheduler.simulate_values(
            n, param_name="lr", start_value=1.0, end_value=0.0, cycle_size=6, cycle_mult=2.0
        ),
    ),
    "cosine": (
        cosine_annealing,
        lambda n: CosineAnnealingScheduler.simulate_values(
            n, param_name="lr", start_value=0.0, end_value=1.0, cycle_size=5, start_value_mult=0.5
        ),
    ),
    "piecewise": (
        piecewise,
        lambda n: PiecewiseLinear.simulate_values(
            n, param_name="lr", milestones_values=[(2, 0.5), (4, 0.45), (5, 0.3), (9, 0.1)]
        ),
    ),
    "warmed up": (
        warmed_up,
        lambda n: ConcatScheduler.simulate_values(n, *_parts(warmed_up(sgd()))),
    ),
    "warmed up torch": (
        warmed_up_torch,
        lambda n: ConcatScheduler.simulate_values(n, *_parts(warmed_up_torch(sgd()))),
    ),
}


def _parts(scheduler: Any) -> tuple[Any, Any]:
    return scheduler.schedulers, scheduler.durations


@pytest.mark.parametrize("name", IGNITE)
def test_ignite_schedulers_give_the_values_that_ignite_simulates_one_per_applied_step(name: str) -> None:
    make, simulate = IGNITE[name]
    simulated = [value for _, value in simulate(12)]
    assert [lr for (lr,) in used_lrs(LRSchedule(make(sgd())), 12)] == simulated
    skipping = [lr for (lr,) in used_lrs(LRSchedule(make(sgd())), 14, skipped=(1, 6))]
    assert skipping == [simulated[0], *simulated[:5], *simulated[4:]]


def test_ignite_schedulers_of_single_groups_are_moved_together() -> None:
    optimizer = sgd(groups=2)
    both = ParamGroupScheduler(
        [LinearCyclicalScheduler(optimizer, "lr", 1.0, end, 4, param_group_index=i) for i, end in enumerate((0.0, 2.0))]
    )
    assert used_lrs(LRSchedule(both), 4) == [[1.0, 1.0], [0.5, 1.5], [0.0, 2.0], [0.5, 1.5]]


@pytest.mark.parametrize(
    "make",
    [lambda o: torch_schedulers.ReduceLROnPlateau(o), lambda o: ReduceLROnPlateauScheduler(o, "loss")],
    ids=["torch", "ignite"],
)
def test_a_schedule_that_needs_a_metric_is_refused_in_one_line(make: Callable[[Optimizer], Any]) -> None:
    with pytest.raises(ValueError, match=r"^ReduceLROnPlateau(Scheduler)? (needs the name of|reads) .* metric.*\.$"):
        LRSchedule(make(sgd()))


def test_a_metric_for_a_schedule_that_takes_none_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^metric='val/loss' has no effect on a Schedule, .*: remove it, or"):
        LRSchedule(constant(sgd()), metric="val/loss")


def test_what_is_not_a_scheduler_is_refused_with_the_remedy() -> None:
    with pytest.raises(TypeError, match=r"got SGD; make one for instance with warmup_cosine\("):
        LRSchedule(sgd())


def test_a_schedule_over_another_optimizer_is_refused() -> None:
    engine = Engine(lambda engine, batch: None)
    engine.update = type("U", (), {"optimizers": {"dense": sgd()}})()  # type: ignore[attr-defined]  # what a Trainer has
    with pytest.raises(
        ValueError, match=r"optimizer of LRSchedule 'lr_schedule' is not one of the trainer's \(dense\)"
    ):
        LRSchedule(constant(sgd())).attach(engine)


# --- resume -----------------------------------------------------------------------------------------------------------


def through_a_file(state: Any) -> Any:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


def load_both(optimizer: Optimizer, handler: LRSchedule, saved: Any, optimizer_first: bool) -> None:
    if optimizer_first:
        optimizer.load_state_dict(saved["optimizer"])
    handler.load_state_dict(saved["schedule"])
    if not optimizer_first:
        optimizer.load_state_dict(saved["optimizer"])


RESUMABLE: dict[str, Callable[[Optimizer], Any]] = {
    "ours": lambda o: warmup_wsd(o, 3, total=12, decay=4),
    **torch_scheduler_makers(),
    **{f"ignite {name}": make for name, (make, _) in IGNITE.items()},
}


@pytest.mark.parametrize("optimizer_first", [True, False])
@pytest.mark.parametrize("name", RESUMABLE)
def test_resumed_at_any_step_the_lrs_continue_exactly(name: str, optimizer_first: bool) -> None:
    make, total = RESUMABLE[name], 11
    whole = used_lrs(LRSchedule(make(sgd())), total)
    for cut in (0, 1, 4, 7):
        handler = LRSchedule(make(sgd()))
        before = used_lrs(handler, cut)
        saved = through_a_file({"schedule": handler.state_dict(), "optimizer": handler._optimizer.state_dict()})

        optimizer = sgd()
        resumed = LRSchedule(make(optimizer))
        load = partial(load_both, optimizer, resumed, saved, optimizer_first)
        after = used_lrs(resumed, total - cut, load=load)
        assert before + after == whole


@pytest.mark.parametrize("name", RESUMABLE)
def test_the_lrs_continue_exactly_even_if_the_optimizer_starts_fresh(name: str) -> None:
    make = RESUMABLE[name]
    handler = LRSchedule(make(sgd()))
    before = used_lrs(handler, 6)
    resumed = LRSchedule(make(sgd()))
    resumed.load_state_dict(through_a_file(handler.state_dict()))  # before it is attached, too
    assert before + used_lrs(resumed, 5) == used_lrs(LRSchedule(make(sgd())), 11)


def test_a_schedule_made_over_an_already_loaded_optimizer_keeps_its_base_lrs() -> None:
    handler = LRSchedule(warmup_linear(sgd(), 2, total=10))
    whole = used_lrs(LRSchedule(warmup_linear(sgd(), 2, total=10)), 10)
    before = used_lrs(handler, 6)
    optimizer = sgd()
    optimizer.load_state_dict(handler._optimizer.state_dict())  # its lr is that of step 6 now
    resumed = LRSchedule(warmup_linear(optimizer, 2, total=10))
    assert before + used_lrs(resumed, 4, load=lambda: resumed.load_state_dict(handler.state_dict())) == whole


def test_an_optimizer_loaded_without_the_schedule_does_not_keep_its_old_lr() -> None:
    old = sgd(9.0)
    optimizer = sgd()
    schedule = warmup_linear(optimizer, 2, total=10)
    used = used_lrs(LRSchedule(schedule), 2, load=lambda: optimizer.load_state_dict(old.state_dict()))
    assert used == [schedule.lrs_at(0), schedule.lrs_at(1)]


def test_a_state_with_other_groups_is_refused() -> None:
    state = LRSchedule(constant(sgd(groups=3))).state_dict()
    with pytest.raises(ValueError, match="has 3 parameter groups and the optimizer has 1: build the same"):
        LRSchedule(constant(sgd())).load_state_dict(state)


# --- what is written --------------------------------------------------------------------------------------------------


def test_lr_is_that_of_the_update_just_made_and_nothing_is_written_on_quiet_iterations() -> None:
    used, published = run(LRSchedule(warmup_constant(sgd(), 8)), 6, publish=(1, 4))
    assert published == [{"lr": used[0][0]}, {}, {}, {"lr": used[3][0]}, {}, {}]
    assert used[3] == [0.25]


def test_the_lr_written_for_a_torch_scheduler_is_that_of_the_update_too() -> None:
    scheduler = torch_schedulers.ExponentialLR(sgd(torch.tensor(BASE, dtype=torch.float64)), 0.5)
    _, published = run(LRSchedule(scheduler), 4, publish=(1, 3))
    assert published == [{"lr": 0.5}, {}, {"lr": 0.125}, {}]


def test_with_several_groups_each_is_written_under_its_name_or_index() -> None:
    optimizer = SGD(
        [
            {"params": [nn.Parameter(torch.ones(1))], "lr": 0.5, "name": "decay"},
            {"params": [nn.Parameter(torch.ones(1))]},
        ],
        lr=2.0,
    )
    _, published = run(LRSchedule(warmup_constant(optimizer, 2)), 1, publish=(1,))
    assert published == [{"lr": 0.25, "lr/decay": 0.25, "lr/1": 1.0}]


def test_a_schedule_with_a_name_of_its_own_writes_under_it() -> None:
    _, published = run(LRSchedule(warmup_constant(sgd(), 2), name="sparse"), 1, publish=(1,))
    assert published == [{"lr/sparse": 0.25}]


# --- in a Trainer -----------------------------------------------------------------------------------------------------


def real_trainer(steps: int, weights: list[int]) -> tuple[Trainer, Schedule, list[float]]:
    model = nn.Linear(2, 1)
    optimizer = SGD(model.parameters(), lr=BASE)
    used: list[float] = []

    def loss_fn(model: nn.Module, batch: Any) -> torch.Tensor:
        used.append(optimizer.param_groups[0]["lr"])
        loss: torch.Tensor = model(batch[1]).mean()
        return loss

    trainer = Trainer(Update(model, optimizer, loss_fn, weight_fn=lambda batch: weights[batch[0]]))
    schedule = warmup_linear(optimizer, 2, total=steps)
    LRSchedule(schedule).attach(trainer)
    return trainer, schedule, used


def test_in_a_trainer_an_update_without_weight_moves_nothing() -> None:
    trainer, schedule, used = real_trainer(5, [1, 1, 0, 1, 0, 1])
    trainer.run([(index, torch.ones(3, 2)) for index in range(6)], max_epochs=1)
    assert used == [schedule.lrs_at(step)[0] for step in range(4)]  # a skipped update runs no forward
    assert (trainer.state.skipped_steps, schedule.steps) == (2, 4)


def test_in_a_trainer_its_state_is_one_copy_for_all_ranks_and_takes_up_the_lr() -> None:
    trainer, schedule, _ = real_trainer(10, [1] * 6)
    trainer.run([(index, torch.ones(3, 2)) for index in range(6)], max_epochs=1)
    shared, own = trainer.registry.capture()
    assert "lr_schedule" in shared and "lr_schedule" not in own
    again, resumed, used = real_trainer(10, [1] * 6)
    again.registry.load(through_a_file({**shared, **own}), source="here")
    again.run([(index, torch.ones(3, 2)) for index in range(6)], max_epochs=2)
    assert used == [resumed.lrs_at(step)[0] for step in range(6, 12)]
    assert resumed.lrs_at(7) == schedule.lrs_at(7)


def test_a_schedule_that_never_moves_is_a_warning() -> None:
    trainer = Trainer(lambda engine, batch: None)  # a user's own update that fires nothing
    LRSchedule(constant(sgd())).attach(trainer)
    with pytest.warns(UserWarning, match="did not step in 3 iterations: the update fired no OPTIMIZER_STEP_COMPLETED"):
        trainer.run([0, 1, 2], max_epochs=1)


def test_two_schedules_need_two_names() -> None:
    trainer, schedule, _ = real_trainer(5, [1])
    with pytest.raises(ValueError, match="'lr_schedule' is taken"):
        LRSchedule(schedule).attach(trainer)


# --- a plateau --------------------------------------------------------------------------------------------------------

LOSSES = (5.0, 4.0, 4.5, 4.5, 4.5, 3.0, 3.5, 3.5, math.nan, 3.5, 3.5, 2.0)


def torchs_plateau_lrs(**options: Any) -> list[float]:
    """LR of each epoch by torch itself, stepped at the end of each epoch with its loss."""
    optimizer = sgd()
    plateau = torch_schedulers.ReduceLROnPlateau(optimizer, **options)
    lrs = []
    for loss in LOSSES:
        lrs.append(optimizer.param_groups[0]["lr"])
        plateau.step(loss)
    return lrs


def plateau_trainer(values: Sequence[float] = LOSSES, **options: Any) -> tuple[Trainer, list[float]]:
    """Epochs of two updates; at each epoch's end its value becomes ``val/loss``. Collects the LR of each update."""
    model = nn.Linear(2, 1)
    optimizer = SGD(model.parameters(), lr=BASE)
    used: list[float] = []

    def loss_fn(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        used.append(optimizer.param_groups[0]["lr"])
        loss: torch.Tensor = model(batch).mean()
        return loss

    trainer = Trainer(Update(model, optimizer, loss_fn))

    @trainer.on(Events.EPOCH_COMPLETED)
    def _(trainer: Trainer) -> None:
        trainer.state.metrics["val/loss"] = values[trainer.state.epoch - 1]

    @trainer.on(Events.ITERATION_COMPLETED)
    def _(trainer: Trainer) -> None:
        trainer.state.metrics["other"] = 0.0  # new at every step, and not what the plateau follows

    LRSchedule(torch_schedulers.ReduceLROnPlateau(optimizer, **options), metric="val/loss").attach(trainer)
    return trainer, used


TWO_BATCHES = [torch.ones(3, 2)] * 2
PLATEAUS = [
    {"patience": 1},
    {"patience": 0, "factor": 0.5, "cooldown": 1},
    {"patience": 1, "factor": 0.5, "mode": "max", "threshold": 0.5, "threshold_mode": "abs", "min_lr": 0.1},
]


@pytest.mark.parametrize("options", PLATEAUS)
def test_plateau_lrs_are_those_of_torch_stepped_once_per_value(options: dict[str, Any]) -> None:
    trainer, used = plateau_trainer(**options)
    trainer.run(TWO_BATCHES, max_epochs=len(LOSSES))
    expected = torchs_plateau_lrs(**options)

    assert len(set(expected)) > 2
    assert used == [lr for lr in expected for _ in range(2)]


@pytest.mark.parametrize("options", PLATEAUS)
def test_plateau_resumed_at_any_step_continues_exactly(options: dict[str, Any]) -> None:
    whole = [lr for lr in torchs_plateau_lrs(**options) for _ in range(2)]
    for cut in range(1, 2 * len(LOSSES)):
        first, used = plateau_trainer(**options)
        first.add_event_handler(Events.ITERATION_COMPLETED(once=cut), lambda trainer: trainer.request_stop("enough"))
        first.run(TWO_BATCHES, max_epochs=len(LOSSES))
        shared, own = first.registry.capture()
        resumed, used_after = plateau_trainer(**options)
        resumed.registry.load(through_a_file({**shared, **own}), source="here")
        resumed.run(TWO_BATCHES, max_epochs=len(LOSSES))

        assert "lr_schedule" in shared and len(used) == cut
        assert used + used_after == whole


def test_lr_written_beside_the_metric_that_lowers_it_is_the_one_that_was_used() -> None:
    trainer, used = plateau_trainer([1.0, 1.0, 1.0, 1.0], patience=0)
    written: list[float] = []
    trainer.add_event_handler(Events.ITERATION_STARTED, lambda: written.append(trainer.state.metrics.get("lr", BASE)))
    trainer.run(TWO_BATCHES, max_epochs=4)

    assert used == pytest.approx([0.5, 0.5, 0.5, 0.5, 0.05, 0.05, 0.005, 0.005])
    assert written[1:] == used[:-1]


def test_resumed_plateau_takes_the_patience_that_it_is_given_now() -> None:
    first, _ = plateau_trainer([1.0] * 9, patience=1)
    first.run(TWO_BATCHES, max_epochs=2)
    shared, own = first.registry.capture()
    resumed, used = plateau_trainer([1.0] * 9, patience=3)
    resumed.registry.load({**shared, **own}, source="here")
    resumed.run(TWO_BATCHES, max_epochs=6)

    assert used == pytest.approx([0.5] * 6 + [0.05] * 2)  # values 2 to 5 were no better; the sixth epoch has the new LR


def test_state_of_another_kind_of_schedule_is_a_one_line_error() -> None:
    plateau = LRSchedule(torch_schedulers.ReduceLROnPlateau(sgd()), metric="val/loss")
    moving = LRSchedule(constant(sgd()))
    with pytest.raises(
        StateMismatch, match=r"^The saved state .* is that of a plateau schedule, and this is a schedule"
    ):
        moving.load_state_dict(plateau.state_dict())
    with pytest.raises(StateMismatch, match="is that of a schedule that steps with the optimizer, and this is a pl"):
        plateau.load_state_dict(moving.state_dict())


def warmed_cosine(steps: int) -> Callable[[Optimizer], Any]:
    return lambda o: torch_schedulers.SequentialLR(
        o, [torch_schedulers.LinearLR(o, 0.1, total_iters=2), torch_schedulers.CosineAnnealingLR(o, steps)], [2]
    )


class Falling:
    """A rate function whose settings torch saves with the scheduler."""

    def __init__(self, ratio: float) -> None:
        self.ratio = ratio

    def __call__(self, step: int) -> float:
        return self.ratio**step


@pytest.mark.parametrize(
    ("was", "now"),
    [
        (lambda o: torch_schedulers.StepLR(o, 2, 0.5), lambda o: torch_schedulers.ExponentialLR(o, 0.99)),
        (
            lambda o: torch_schedulers.CosineAnnealingLR(o, 18),
            lambda o: torch_schedulers.LambdaLR(o, lambda step: 0.5**step),
        ),
        (
            lambda o: torch_schedulers.CosineAnnealingLR(o, 18),
            lambda o: torch_schedulers.OneCycleLR(o, 0.1, total_steps=18),
        ),
        (warmed_cosine(16), lambda o: torch_schedulers.CosineAnnealingLR(o, 18)),
        (lambda o: torch_schedulers.CosineAnnealingLR(o, 18), constant),
        (constant, lambda o: torch_schedulers.CosineAnnealingLR(o, 18)),
        (lambda o: torch_schedulers.StepLR(o, 2), lambda o: CosineAnnealingScheduler(o, "lr", 1.0, 0.0, 10)),
        (lambda o: CosineAnnealingScheduler(o, "lr", 1.0, 0.0, 10), lambda o: torch_schedulers.StepLR(o, 2)),
        (
            lambda o: CosineAnnealingScheduler(o, "lr", 1.0, 0.0, 10),
            lambda o: LinearCyclicalScheduler(o, "lr", 1.0, 0.0, 10),
        ),
        (
            lambda o: CosineAnnealingScheduler(o, "lr", 1.0, 0.0, 10),
            lambda o: CosineAnnealingScheduler(o, "weight_decay", 1.0, 0.0, 10),
        ),
    ],
)
def test_another_scheduler_than_the_saved_one_is_a_one_line_error(
    was: Callable[[Optimizer], Any], now: Callable[[Optimizer], Any]
) -> None:
    before = LRSchedule(was(sgd()))
    used_lrs(before, 3)
    with pytest.raises(StateMismatch, match=r"^The saved state of LRSchedule 'lr_schedule' is that of .*, and this is"):
        LRSchedule(now(sgd())).load_state_dict(through_a_file(before.state_dict()))


CHANGED: dict[str, tuple[Callable[[Optimizer], Any], Callable[[Optimizer], Any], list[float], str]] = {
    "gamma": (
        lambda o: torch_schedulers.StepLR(o, 2, 0.5),
        lambda o: torch_schedulers.StepLR(o, 2, 0.1),
        [BASE * 0.1, BASE * 0.01, BASE * 0.01, BASE * 0.001],
        "gamma 0.5 -> 0.1; its LR is 0.05 in place of 0.25.",
    ),
    "milestones": (
        lambda o: torch_schedulers.MultiStepLR(o, [4, 5]),
        lambda o: torch_schedulers.MultiStepLR(o, [5, 6]),
        [BASE, BASE, BASE * 0.1, BASE * 0.01],
        "milestones Counter({4: 1, 5: 1}) -> Counter({5: 1, 6: 1}).",
    ),
    "of an object": (
        lambda o: torch_schedulers.LambdaLR(o, Falling(0.5)),
        lambda o: torch_schedulers.LambdaLR(o, Falling(0.25)),
        [BASE * 0.25**3, BASE * 0.25**4, BASE * 0.25**5, BASE * 0.25**6],
        "0.ratio 0.5 -> 0.25; its LR is",
    ),
    "chained": (
        lambda o: torch_schedulers.ChainedScheduler(
            [torch_schedulers.ExponentialLR(o, 0.5), torch_schedulers.ConstantLR(o, 1.0)]
        ),
        lambda o: torch_schedulers.ChainedScheduler(
            [torch_schedulers.ExponentialLR(o, 0.25), torch_schedulers.ConstantLR(o, 1.0)]
        ),
        [BASE * 0.25**3, BASE * 0.25**4, BASE * 0.25**5, BASE * 0.25**6],
        "0.gamma 0.5 -> 0.25; its LR is",
    ),
}


@pytest.mark.parametrize("name", CHANGED)
def test_settings_of_a_torch_scheduler_are_those_built_now_and_said(
    caplog: pytest.LogCaptureFixture, name: str
) -> None:
    was, now, expected, said = CHANGED[name]
    before = LRSchedule(was(sgd()))
    used_lrs(before, 3)
    saved = through_a_file(before.state_dict())
    resumed = LRSchedule(now(sgd()))
    used = used_lrs(resumed, 4, load=lambda: resumed.load_state_dict(saved))
    assert [lr for (lr,) in used] == pytest.approx(expected)
    (line,) = caplog.messages
    assert line.startswith("lr_schedule goes on as it is built now, not as it was saved: ") and said in line

    caplog.clear()
    again = LRSchedule(now(sgd()))
    again.load_state_dict(through_a_file(resumed.state_dict()))
    assert caplog.messages == []


@pytest.mark.parametrize(
    ("make", "ends"),
    [
        (lambda o, steps: torch_schedulers.CosineAnnealingLR(o, steps), 12),
        (lambda o, steps: warmed_cosine(steps - 2)(o), 12),
        (lambda o, steps: torch_schedulers.OneCycleLR(o, 0.1, total_steps=steps), 11),
    ],
)
def test_a_torch_scheduler_over_a_longer_run_reaches_its_end_there(make: Callable[..., Any], ends: int) -> None:
    before = LRSchedule(make(sgd(), 8))
    used_lrs(before, 5)
    optimizer = sgd()
    resumed = LRSchedule(make(optimizer, 12))
    load = partial(
        load_both, optimizer, resumed, {"schedule": before.state_dict(), "optimizer": before._optimizer.state_dict()}
    )
    lrs = [lr for (lr,) in used_lrs(resumed, ends - 5, load=lambda: load(optimizer_first=True))]
    lrs.append(optimizer.param_groups[0]["lr"])
    assert lrs == sorted(lrs, reverse=True) and lrs[-2] > 1e-6


def in_sequence(warmup: int) -> Callable[[Optimizer], Any]:
    return lambda o: torch_schedulers.SequentialLR(
        o, [torch_schedulers.LinearLR(o, 0.1, total_iters=warmup), torch_schedulers.StepLR(o, 5, 0.1)], [warmup]
    )


def linear_second(milestone: int) -> Callable[[Optimizer], Any]:
    return lambda o: torch_schedulers.SequentialLR(
        o, [torch_schedulers.ConstantLR(o, 0.5, 99), torch_schedulers.LinearLR(o, 0.01, total_iters=3)], [milestone]
    )


def chained(first: Callable[[Optimizer], Any]) -> Callable[[Optimizer], Any]:
    return lambda o: torch_schedulers.ChainedScheduler([first(o), torch_schedulers.ExponentialLR(o, 0.9)])


class OwnConstant(torch_schedulers.ConstantLR):
    def get_lr(self) -> list[Any]:
        return super().get_lr()


class WithFloor(torch_schedulers.StepLR):
    def step(self, epoch: int | None = None) -> None:
        super().step(epoch)
        for group in self.optimizer.param_groups:
            group["lr"] = max(group["lr"], 0.07)


class Decaying(torch_schedulers.StepLR):
    """Sets the weight decay, too."""

    def step(self, epoch: int | None = None) -> None:
        super().step(epoch)
        for group in self.optimizer.param_groups:
            group["weight_decay"] = group["weight_decay"] * self.gamma


class Warmed(torch_schedulers.LRScheduler):
    """A warm-up before another scheduler, which it keeps in an attribute and steps."""

    def __init__(self, optimizer: Optimizer, after: torch_schedulers.LRScheduler) -> None:
        self.after = after
        super().__init__(optimizer)

    def get_lr(self) -> list[Any]:
        if self.last_epoch < 3:
            return [base * (self.last_epoch + 1) / 4 for base in self.base_lrs]
        self.after.step()
        return [group["lr"] for group in self.optimizer.param_groups]

    def state_dict(self) -> dict[str, Any]:
        own = {key: value for key, value in vars(self).items() if key not in ("optimizer", "after")}
        return own | {"after": self.after.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.after.load_state_dict(state_dict["after"])
        vars(self).update({key: value for key, value in state_dict.items() if key != "after"})


class Counted(torch_schedulers.StepLR):
    """Saves its progress and no setting; a factor is a tensor, which one cannot ask whether it is another."""

    def __init__(self, optimizer: Optimizer, size: int, factor: float) -> None:
        self.factor, self.at = torch.tensor([factor, 1.0]), {1, size}
        super().__init__(optimizer, size)

    def get_lr(self) -> list[Any]:
        ratio = float(self.factor[0]) if self.last_epoch in self.at else 1.0
        return [group["lr"] * ratio for group in self.optimizer.param_groups]

    def state_dict(self) -> dict[str, Any]:
        return {"last_epoch": self.last_epoch}


def to_the_power(ratio: float, function: Callable[..., Any] = torch_schedulers.LambdaLR) -> Callable[[Optimizer], Any]:
    return lambda o: function(o, lambda step: ratio**step)


def power(ratio: float, step: int) -> float:
    return ratio**step


one_cycle = partial(torch_schedulers.OneCycleLR, total_steps=11)
cyclic = partial(torch_schedulers.CyclicLR, base_lr=0.01, max_lr=0.1, step_size_up=3)
restarts = torch_schedulers.CosineAnnealingWarmRestarts
REBUILT: dict[str, tuple[Callable[[Optimizer], Any], Callable[[Optimizer], Any]]] = {
    "earlier milestone": (in_sequence(6), in_sequence(3)),
    "later milestone": (in_sequence(3), in_sequence(6)),
    "earlier milestone, linear": (linear_second(6), linear_second(3)),
    "chained constant": (
        chained(lambda o: torch_schedulers.ConstantLR(o, 0.1, 3)),
        chained(lambda o: torch_schedulers.ConstantLR(o, 0.1, 8)),
    ),
    "chained linear": (
        chained(lambda o: torch_schedulers.LinearLR(o, 0.1, total_iters=3)),
        chained(lambda o: torch_schedulers.LinearLR(o, 0.1, total_iters=8)),
    ),
    "subclass": (lambda o: OwnConstant(o, 0.1, 3), lambda o: OwnConstant(o, 0.1, 8)),
    "own step": (lambda o: WithFloor(o, 2, 0.5), lambda o: WithFloor(o, 3, 0.5)),
    "one cycle, end": (lambda o: one_cycle(o, 0.5, final_div_factor=2.0), lambda o: one_cycle(o, 0.5)),
    "one cycle, peak": (lambda o: one_cycle(o, 0.5), lambda o: one_cycle(o, 1.0)),
    "one cycle, same start": (lambda o: one_cycle(o, 0.5, div_factor=25), lambda o: one_cycle(o, 1.0, div_factor=50)),
    "one cycle, momenta": (
        lambda o: one_cycle(o, 0.5),
        lambda o: one_cycle(o, 0.5, base_momentum=0.5, max_momentum=0.9),
    ),
    "cyclic, mode": (cyclic, partial(cyclic, mode="exp_range", gamma=0.5)),
    "cyclic, peak": (cyclic, partial(cyclic, max_lr=0.5)),
    "function": (to_the_power(0.5), to_the_power(0.25)),
    "another function": (to_the_power(0.5), lambda o: torch_schedulers.LambdaLR(o, lambda step: 1 / (1 + step))),
    "partial": (
        lambda o: torch_schedulers.LambdaLR(o, partial(power, 0.5)),
        lambda o: torch_schedulers.LambdaLR(o, partial(power, 0.25)),
    ),
    "method": (
        lambda o: torch_schedulers.LambdaLR(o, Falling(0.5).__call__),
        lambda o: torch_schedulers.LambdaLR(o, Falling(0.25).__call__),
    ),
    "factor": (
        lambda o: torch_schedulers.MultiplicativeLR(o, lambda step: 0.9),
        lambda o: torch_schedulers.MultiplicativeLR(o, lambda step: 0.5),
    ),
    "scale": (
        partial(cyclic, scale_fn=lambda cycle: 1 / cycle),
        partial(cyclic, scale_fn=lambda cycle: 0.5 / cycle),
    ),
    "one inside": (
        lambda o: Warmed(o, torch_schedulers.ExponentialLR(o, 0.9)),
        lambda o: Warmed(o, torch_schedulers.ExponentialLR(o, 0.5)),
    ),
    "not saved": (lambda o: Counted(o, 3, 0.5), lambda o: Counted(o, 3, 0.25)),
    "in a set": (lambda o: Counted(o, 3, 0.5), lambda o: Counted(o, 2, 0.5)),
    "no cycle of the momentum": (partial(one_cycle, max_lr=0.5), partial(one_cycle, max_lr=0.5, cycle_momentum=False)),
    "restarts": (lambda o: restarts(o, 2), lambda o: restarts(o, 5)),
    "longer restarts": (lambda o: restarts(o, 2, T_mult=2), lambda o: restarts(o, 5, T_mult=2)),
}


def stepped_by_hand(
    make: Callable[[Optimizer], Any], steps: int, saved: Any = None
) -> tuple[list[tuple[float, ...]], dict[str, Any]]:
    """Rate, momentum and weight decay of each update, and the states that it ends with."""
    optimizer = SGD([nn.Parameter(torch.ones(2))], lr=BASE, momentum=0.9, weight_decay=0.25)
    handler = LRSchedule(make(optimizer))
    if saved is not None:
        load_both(optimizer, handler, saved, optimizer_first=True)
    used = []
    for _ in range(steps):
        used.append(tuple(optimizer.param_groups[0][key] for key in ("lr", "momentum", "weight_decay")))
        optimizer.step()
        handler(Engine(lambda engine, batch: None))
    return used, through_a_file({"schedule": handler.state_dict(), "optimizer": optimizer.state_dict()})


@pytest.mark.parametrize("stop", [0, 1, 4, 7])
@pytest.mark.parametrize("name", REBUILT)
def test_a_rebuilt_torch_scheduler_goes_on_as_if_it_had_been_so_from_the_start(
    caplog: pytest.LogCaptureFixture, name: str, stop: int
) -> None:
    was, now = REBUILT[name]
    whole, state = stepped_by_hand(now, 10)
    rest, resumed = stepped_by_hand(now, 10 - stop, stepped_by_hand(was, stop)[1])

    assert rest == whole[stop:]
    now_saved = resumed["schedule"]["scheduler"]
    assert now_saved | state["schedule"]["scheduler"] == now_saved
    (line,) = caplog.messages
    assert line.startswith("lr_schedule goes on as it is built now, not as it was saved: ")


def test_another_option_that_a_rebuilt_scheduler_sets_goes_on_with_its_rate() -> None:
    whole, _ = stepped_by_hand(lambda o: Decaying(o, 2, 0.25), 8)
    _, saved = stepped_by_hand(lambda o: Decaying(o, 2, 0.5), 3)
    assert stepped_by_hand(lambda o: Decaying(o, 2, 0.25), 5, saved)[0] == whole[3:]


class Tagged(torch_schedulers.ExponentialLR):
    def __init__(self, optimizer: Optimizer, tag: str) -> None:
        self.tag = tag
        super().__init__(optimizer, 0.9)


def test_an_attribute_that_changes_no_rate_is_named_without_one(caplog: pytest.LogCaptureFixture) -> None:
    whole, _ = stepped_by_hand(lambda o: Tagged(o, "a"), 6)
    _, saved = stepped_by_hand(lambda o: Tagged(o, "a"), 3)
    assert stepped_by_hand(lambda o: Tagged(o, "b"), 3, saved)[0] == whole[3:]
    assert caplog.messages == ["lr_schedule goes on as it is built now, not as it was saved: tag 'a' -> 'b'."]


def test_with_the_same_settings_nothing_is_copied_or_stepped(monkeypatch: pytest.MonkeyPatch) -> None:
    _, saved = stepped_by_hand(in_sequence(3), 5)
    resumed = LRSchedule(in_sequence(3)(sgd()))
    monkeypatch.setattr(torch_schedulers.SequentialLR, "step", lambda scheduler: pytest.fail("stepped"))
    monkeypatch.setattr(torch_schedulers.SequentialLR, "__deepcopy__", lambda *_: pytest.fail("copied"), raising=False)
    resumed.load_state_dict(saved["schedule"])
    assert resumed.scheduler.last_epoch == 5


def warmed_ignite(optimizer: Optimizer, gamma: float) -> Any:
    return create_lr_scheduler_with_warmup(torch_schedulers.ExponentialLR(optimizer, gamma), 0.0, 3)


def begun_at(optimizer: Optimizer, step: int) -> Any:
    optimizer.param_groups[0]["initial_lr"] = BASE
    return torch_schedulers.ExponentialLR(optimizer, 0.5, last_epoch=step)


class Uncopied(torch_schedulers.StepLR):
    def __deepcopy__(self, memo: Any) -> Any:
        raise RuntimeError("It holds a file.")


class Twice(torch_schedulers.StepLR):
    def step(self, epoch: int | None = None) -> None:
        super().step(epoch)
        self.last_epoch = self.last_epoch * 2


@pytest.mark.parametrize(
    ("make", "was", "now", "reason"),
    [
        (lambda o, size: one_cycle(o, 0.5, total_steps=size), 11, 3, "Tried to step 4 times"),
        (lambda o, size: Uncopied(o, size), 2, 3, r"It holds a file\."),
        (lambda o, size: Twice(o, size), 2, 3, "its last_epoch is not the number of its steps"),
        (lambda o, size: CosineAnnealingScheduler(o, "lr", 1.0, 0.0, size), 10, 20, "one of Ignite's is not built"),
        (lambda o, end: PiecewiseLinear(o, "lr", [(1, 1.0), (9, end)]), 0.5, 0.1, "one of Ignite's is not built"),
        (warmed_ignite, 0.5, 0.1, "one of Ignite's is not built again"),
        (begun_at, -1, 10, "it began at another step"),
    ],
)
def test_other_settings_whose_rates_are_not_known_are_refused_in_one_line(
    make: Callable[..., Any], was: Any, now: Any, reason: str
) -> None:
    _, saved = stepped_by_hand(lambda o: make(o, was), 5)
    with pytest.raises(StateMismatch, match=rf"^LRSchedule 'lr_schedule' was saved with .*{reason}.*ignore=\['lr_sch"):
        stepped_by_hand(lambda o: make(o, now), 1, saved)
    assert stepped_by_hand(lambda o: make(o, was), 1, saved)[0]


class Momenta:
    """A trainer with momentum over 10 updates of one pass; ``used`` are the rates and momenta of its updates."""

    def __init__(
        self, folder: Path, make: Callable[[Optimizer], Any], lr: float = BASE, seconds: bool = False, **options: Any
    ) -> None:
        model = linear()
        self.optimizer = SGD(model.parameters(), lr=lr, momentum=0.9)
        self.trainer = Trainer(Update(model, self.optimizer, mse))
        LRSchedule(make(self.optimizer)).attach(self.trainer)
        if seconds:
            LRSchedule(torch_schedulers.ExponentialLR(self.optimizer, 0.9), name="second").attach(self.trainer)
        self.checkpoint = Checkpoint(folder, **options)
        self.checkpoint.attach(self.trainer)
        self.used: list[tuple[float, float]] = []
        self.trainer.add_event_handler(TrainingEvents.OPTIMIZER_STEP_STARTED, self._note)

    def _note(self) -> None:
        (group,) = self.optimizer.param_groups
        self.used.append((group["lr"], group["momentum"]))

    def train(self, stop: int = 10, **options: Any) -> list[tuple[float, float]]:
        self.checkpoint.resume(**options)
        self.trainer.add_event_handler(
            Events.ITERATION_COMPLETED(once=stop), lambda trainer: trainer.request_stop("asked")
        )
        self.trainer.run(loader(Numbers(20), 2), max_epochs=1)
        return self.used


def test_what_a_scheduler_sets_in_the_optimizer_is_not_said_to_have_no_effect(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    now = partial(one_cycle, max_lr=1.0, max_momentum=0.9)
    whole = Momenta(tmp_path / "whole", now).train()
    Momenta(tmp_path / "run", partial(one_cycle, max_lr=0.5)).train(stop=4)
    caplog.clear()
    assert Momenta(tmp_path / "run", now).train() == whole[4:]
    (line,) = [line for line in caplog.messages if "Resumed" not in line]
    assert "max_lr of group 0 0.5 -> 1.0" in line and "max_momentum of group 0 0.95 -> 0.9" in line


def test_one_cycle_that_begins_again_has_the_peak_that_it_is_built_with(tmp_path: Path) -> None:
    now = partial(one_cycle, max_lr=1.0, base_momentum=0.5)
    whole = Momenta(tmp_path / "whole", now).train()
    Momenta(tmp_path / "run", partial(one_cycle, max_lr=0.5)).train(stop=4)
    assert Momenta(tmp_path / "run", now).train(ignore=["schedule"]) == whole[:6]


@pytest.mark.parametrize(
    ("was", "now", "base"),
    [
        (lambda o: torch_schedulers.ExponentialLR(o, 0.9), lambda o: torch_schedulers.ExponentialLR(o, 0.5), 0.25),
        (in_sequence(6), in_sequence(3), 0.25),
        (partial(one_cycle, max_lr=0.5), partial(one_cycle, max_lr=0.5, total_steps=15), 0.25),
        (cyclic, partial(cyclic, step_size_up=4), 0.05),
    ],
)
def test_a_rebuilt_schedule_keeps_the_base_of_an_override(tmp_path: Path, was: Any, now: Any, base: float) -> None:
    """Which halves the highest rate; the rates are in proportion to it."""
    whole = Momenta(tmp_path / "whole", now).train()
    Momenta(tmp_path / "run", was).train(stop=3)
    Momenta(tmp_path / "run", was, override={"optimizer.lr": base}).train(stop=5)
    rest = Momenta(tmp_path / "run", now).train()
    assert [lr for lr, _ in rest] == pytest.approx([lr / 2 for lr, _ in whole[5:]])
    assert [momentum for _, momentum in rest] == [momentum for _, momentum in whole[5:]]


def test_another_base_rate_stays_the_saved_one_beside_other_settings(tmp_path: Path) -> None:
    make = torch_schedulers.ExponentialLR
    whole = Momenta(tmp_path / "whole", lambda o: make(o, 0.5)).train()
    Momenta(tmp_path / "run", lambda o: make(o, 0.9)).train(stop=4)
    rest = Momenta(tmp_path / "run", lambda o: make(o, 0.5), lr=2 * BASE).train()
    assert [lr for lr, _ in rest] == pytest.approx([lr for lr, _ in whole[4:]])


def test_other_settings_of_one_of_two_schedules_are_refused(tmp_path: Path) -> None:
    make = torch_schedulers.ExponentialLR
    Momenta(tmp_path, lambda o: make(o, 0.9), seconds=True).train(stop=4)
    with pytest.raises(StateMismatch, match="another schedule sets the rates of its optimizer"):
        Momenta(tmp_path, lambda o: make(o, 0.5), seconds=True).train()


def test_other_settings_of_a_schedule_whose_rate_the_run_has_changed_are_refused(tmp_path: Path) -> None:
    def changed(gamma: float) -> Momenta:
        run = Momenta(tmp_path, lambda o: torch_schedulers.ExponentialLR(o, gamma))

        @run.trainer.on(Events.ITERATION_COMPLETED(once=2))
        def lower() -> None:
            run.optimizer.param_groups[0]["lr"] *= 0.1

        return run

    changed(0.9).train(stop=4)
    with pytest.raises(StateMismatch, match="the run has changed its rates"):
        changed(0.5).train()
    assert len(changed(0.9).train()) == 6


def test_another_highest_rate_of_ignites_schedules_stays_the_saved_one_and_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def cosine(highest: float) -> Callable[[Optimizer], Any]:
        return lambda o: CosineAnnealingScheduler(o, "lr", highest, 0.1 * highest, 20)

    whole = Momenta(tmp_path / "whole", cosine(1.0)).train()
    Momenta(tmp_path / "run", cosine(1.0)).train(stop=4)
    caplog.clear()
    assert Momenta(tmp_path / "run", cosine(2.0)).train() == whole[4:]
    (line,) = [line for line in caplog.messages if "Resumed" not in line]
    assert line.startswith("lr_schedule restores the base LR 1 and not 2, with which the optimizer was built.")


def test_what_a_schedule_steps_with_is_part_of_its_state(tmp_path: Path) -> None:
    def train(event: Any, stop: int) -> None:
        model = linear()
        optimizer = SGD(model.parameters(), lr=BASE)
        trainer = Trainer(Update(model, optimizer, mse))
        LRSchedule(torch_schedulers.ExponentialLR(optimizer, 0.5)).attach(trainer, *event)
        checkpoint = Checkpoint(tmp_path)
        checkpoint.attach(trainer)
        checkpoint.resume()
        trainer.add_event_handler(Events.ITERATION_COMPLETED(once=stop), lambda trainer: trainer.request_stop("asked"))
        trainer.run(loader(Numbers(20), 2), max_epochs=2)

    train([Events.EPOCH_COMPLETED], 12)
    with pytest.raises(StateMismatch, match="saved as one that steps per epoch, and now it steps per update: attach"):
        train([], 12)
    train([Events.EPOCH_COMPLETED], 15)


@pytest.mark.parametrize(("mode", "metric"), [("max", "val/loss"), ("min", "val/other")])
def test_plateau_of_another_metric_or_mode_forgets_the_best_value_and_says_so(
    mode: Literal["min", "max"], metric: str, caplog: pytest.LogCaptureFixture
) -> None:
    before = LRSchedule(torch_schedulers.ReduceLROnPlateau(sgd(), patience=2), metric="val/loss")
    before.scheduler.step(2.0)
    before.scheduler.step(3.0)
    same = LRSchedule(torch_schedulers.ReduceLROnPlateau(sgd(), patience=2), metric="val/loss")
    same.load_state_dict(through_a_file(before.state_dict()))
    assert (same.scheduler.best, same.scheduler.num_bad_epochs) == (2.0, 1) and not caplog.messages

    other = LRSchedule(torch_schedulers.ReduceLROnPlateau(sgd(), mode, patience=2), metric=metric)
    other.load_state_dict(through_a_file(before.state_dict()))
    assert (abs(other.scheduler.best), other.scheduler.num_bad_epochs) == (math.inf, 0)
    assert caplog.messages == [
        f"lr_schedule follows the {mode} of {metric} now, and followed the min of val/loss when it was saved: its best "
        "value and its patience begin anew."
    ]


def test_a_schedule_is_loaded_after_the_optimizer_whichever_is_registered_first(tmp_path: Path) -> None:
    used: list[float] = []
    for gamma, epochs in ((0.9, 1), (0.5, 2)):
        optimizer = sgd()

        def update(engine: Engine, batch: Any, optimizer: Optimizer = optimizer) -> None:
            used.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            engine.fire_event(TrainingEvents.OPTIMIZER_STEP_COMPLETED)

        trainer = Trainer(update)
        LRSchedule(torch_schedulers.ExponentialLR(optimizer, gamma)).attach(trainer)
        trainer.register("optimizer", optimizer)
        checkpoint = Checkpoint(tmp_path)
        checkpoint.attach(trainer)
        checkpoint.resume()
        trainer.run(TWO_BATCHES, max_epochs=epochs)
    assert used == pytest.approx([BASE, BASE * 0.9, BASE * 0.5**2, BASE * 0.5**3])


def test_what_changed_in_the_run_and_a_state_of_an_older_version_stay_as_they_were_saved() -> None:
    before = LRSchedule(torch_schedulers.StepLR(sgd(), 2, 0.5))
    before.scheduler.gamma = 0.7
    resumed = LRSchedule(torch_schedulers.StepLR(sgd(), 2, 0.1))
    resumed.load_state_dict(before.state_dict())
    assert resumed.scheduler.gamma == 0.7

    older = {key: value for key, value in before.state_dict().items() if key in ("scheduler", "lrs", "used")}
    resumed = LRSchedule(torch_schedulers.StepLR(sgd(), 2, 0.1))
    resumed.load_state_dict(older)
    assert resumed.scheduler.gamma == 0.7


def test_plateau_whose_metric_is_never_written_is_a_warning() -> None:
    trainer, _, _ = real_trainer(5, [1, 1])
    optimizer = trainer.update.optimizers["optimizer"]  # type: ignore[attr-defined]  # an Update
    LRSchedule(torch_schedulers.ReduceLROnPlateau(optimizer), metric="val/los", name="plateau").attach(trainer)
    with pytest.warns(UserWarning, match=r"LRSchedule\(metric='val/los'\) has no effect, as nothing has written"):
        trainer.run([(index, torch.ones(3, 2)) for index in range(2)], max_epochs=1)


def _one_of_two_ranks(rank: int, folder: str) -> None:
    # alone, rank 0 would keep its LR and rank 1 would lower it at its third value
    trainer, used = plateau_trainer([4.0 - epoch if rank == 0 else 4.0 + epoch for epoch in range(5)], patience=1)
    trainer.run(TWO_BATCHES, max_epochs=5)
    torch.save(used, f"{folder}/{rank}.pt")


@pytest.mark.distributed
def test_plateau_lr_is_the_same_on_two_ranks_with_values_of_their_own(tmp_path: Path) -> None:
    on_ranks(2, _one_of_two_ranks, tmp_path)
    first, second = (torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(2))

    assert first == second == pytest.approx([0.5] * 6 + [0.05] * 4)


# --- the length of the run, and schedules per epoch -------------------------------------------------------------------


class Run:
    """A trainer with one schedule over 8 samples a pass; ``used`` are the LRs of its updates."""

    def __init__(
        self, make: Callable[[Optimizer], Any], event: Any = None, folder: Path | None = None, **options: Any
    ) -> None:
        model = linear()
        self.optimizer = SGD(model.parameters(), lr=BASE)
        self.schedule = make(self.optimizer)
        self.trainer = Trainer(Update(model, self.optimizer, mse), **options)
        LRSchedule(self.schedule).attach(self.trainer, *([] if event is None else [event]))
        self.used: list[float] = []
        self.logged: list[float] = []
        self.trainer.add_event_handler(TrainingEvents.OPTIMIZER_STEP_STARTED, self._note)
        MetricLogger(console=False).attach(self.trainer)
        self.trainer.add_event_handler(TrainingEvents.METRICS_READY, self._note_logged)
        if folder is not None:
            self.checkpoint = Checkpoint(folder)
            self.checkpoint.attach(self.trainer, Events.COMPLETED)

    def _note(self, trainer: Trainer) -> None:
        self.used.append(self.optimizer.param_groups[0]["lr"])

    def _note_logged(self, trainer: Trainer) -> None:
        self.logged.append(trainer.state.metrics["lr"])

    def train(self, **length: int) -> list[float]:
        self.trainer.run(loader(Numbers(8), 2), **length)
        return self.used

    def stop_after(self, iteration: int) -> Run:
        self.trainer.add_event_handler(
            Events.ITERATION_COMPLETED(once=iteration), lambda trainer: trainer.request_stop("asked")
        )
        return self


@pytest.mark.parametrize("length", [{"max_iters": 9}, {"max_epochs": 3}], ids=["iterations", "epochs"])
@pytest.mark.parametrize("steps", [None, 3], ids=["plain", "accumulating"])
@pytest.mark.parametrize("warmup", [2, 0.25])
def test_schedule_without_a_total_is_one_over_the_run(warmup: float, steps: int | None, length: dict[str, int]) -> None:
    updates = length.get("max_iters", 12 if steps is None else 6)
    expected = warmup_cosine(sgd(), warmup, total=updates)
    run = Run(lambda optimizer: warmup_cosine(optimizer, warmup), accumulation_steps=steps)

    assert run.train(**length) == [expected.lrs_at(step)[0] for step in range(updates)]
    assert run.schedule.get_last_lr() == [0.0]


def test_length_that_no_one_knows_is_one_sentence() -> None:
    with pytest.raises(ValueError, match=r"^warmup_cosine\(warmup=1, .*has the length of its run.*give it total, or"):
        run = Run(lambda optimizer: warmup_cosine(optimizer, 1))
        run.trainer.run(Passes(3), max_epochs=2)
    with pytest.raises(ValueError, match=r"known when the run starts: attach it by LRSchedule"):
        warmup_cosine(sgd()).lrs_at(0)
    with pytest.raises(ValueError, match="warmup must be at least 0 and at most total=4 updates, got 5"):
        Run(lambda optimizer: warmup_cosine(optimizer, 5)).train(max_iters=4)


@pytest.mark.parametrize("stop", [1, 4, 5, 11])
def test_resumed_schedule_over_the_run_continues_exactly_and_silently(
    tmp_path: Path, stop: int, caplog: pytest.LogCaptureFixture
) -> None:
    whole = Run(warmup_cosine).train(max_epochs=3)
    first = Run(warmup_cosine, folder=tmp_path).stop_after(stop).train(max_epochs=3)
    second = Run(warmup_cosine, folder=tmp_path)
    second.checkpoint.resume()

    assert first + second.train(max_epochs=3) == whole
    assert "The run now ends" not in caplog.text


def test_resume_that_changes_the_length_says_what_becomes_of_the_rate(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    Run(warmup_linear, folder=tmp_path).train(max_epochs=1)
    longer = Run(warmup_linear, folder=tmp_path)
    longer.checkpoint.resume()

    assert longer.train(max_epochs=2) == [warmup_linear(sgd(), total=8).lrs_at(step)[0] for step in range(4, 8)]
    lines = [record.message for record in caplog.records if "The run now ends" in record.message]
    assert lines == [
        "The run now ends after update 8, not 4, and its schedule with it: from here on the LR follows the new curve, "
        "0.25 in place of 0. A total given to the schedule keeps the old one."
    ]


class EpochsAndUpdates:
    """Has the interface of timm's schedulers: told of each epoch, counted from 1 when it ends, and of each update."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer, self.calls = optimizer, [0, 0]

    def step(self, epoch: int, metric: float | None = None) -> None:
        self.calls[0] = epoch
        self._set()

    def step_update(self, num_updates: int, metric: float | None = None) -> None:
        self.calls[1] = num_updates
        self._set()

    def _set(self) -> None:
        self.optimizer.param_groups[0]["lr"] = BASE * 0.5 ** self.calls[0] / (1 + self.calls[1])

    def state_dict(self) -> dict[str, Any]:
        return {"calls": list(self.calls)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.calls = list(state["calls"])


PER_EPOCH: dict[str, tuple[Callable[[Optimizer], Any], Callable[[int], float]]] = {
    "torch": (lambda o: torch_schedulers.StepLR(o, 1, 0.5), lambda update: BASE * 0.5 ** (update // 4)),
    "ours": (
        lambda o: warmup_linear(o, 1),
        lambda update: warmup_linear(sgd(), 1, total=3).lrs_at(update // 4)[0],
    ),
    "ignite": (
        lambda o: LinearCyclicalScheduler(o, "lr", 1.0, 0.0, 6),
        lambda update: 1.0 - 2.0 / 6 * (update // 4),
    ),
    "timm": (EpochsAndUpdates, lambda update: BASE * 0.5 ** (update // 4) / (1 + update)),
}


@pytest.mark.parametrize("name", PER_EPOCH)
@pytest.mark.parametrize("stop", [3, 4, 5, 8])
def test_schedule_per_epoch_moves_at_the_end_of_each_and_resumes_exactly(tmp_path: Path, stop: int, name: str) -> None:
    make, lr_of = PER_EPOCH[name]
    expected = [lr_of(update) for update in range(12)]
    whole = Run(make, Events.EPOCH_COMPLETED)
    first = Run(make, Events.EPOCH_COMPLETED, tmp_path).stop_after(stop)
    assert first.train(max_epochs=3) == pytest.approx(expected[:stop])
    second = Run(make, Events.EPOCH_COMPLETED, tmp_path)
    second.checkpoint.resume()

    assert whole.train(max_epochs=3) == pytest.approx(expected)
    assert first.used + second.train(max_epochs=3) == whole.used
    assert first.logged + second.logged == whole.logged == whole.used


def test_event_that_a_scheduler_cannot_use_is_refused() -> None:
    plateau = LRSchedule(torch_schedulers.ReduceLROnPlateau(sgd()), metric="val/loss")
    with pytest.raises(ValueError, match="steps at each new value of its metric: attach it without an event"):
        plateau.attach(Engine(lambda engine, batch: None), Events.EPOCH_COMPLETED)
    with pytest.raises(ValueError, match="EpochsAndUpdates is told of each update and each epoch"):
        LRSchedule(EpochsAndUpdates(sgd())).attach(Engine(lambda engine, batch: None), Events.STARTED)


# -- a rate that was changed for a resumed run -------------------------------------------------------------------------


def _resumed(
    folder: Path, lr: float, make: Callable[[Optimizer], Any], ignore: Sequence[str], end: int
) -> tuple[float, float | None]:
    """Trains up to update ``end``; the rate of the last update, and a moment of the first parameter."""
    model = linear()
    optimizer = SGD(model.parameters(), lr=lr, momentum=0.9)
    trainer = Trainer(Update(model, optimizer, mse))
    LRSchedule(make(optimizer)).attach(trainer)
    checkpoint = Checkpoint(folder)
    checkpoint.attach(trainer)
    checkpoint.resume(ignore=ignore)
    moments: list[bool] = []
    trainer.add_event_handler(Events.STARTED, lambda: moments.append(bool(optimizer.state)))
    rates: list[float] = []
    trainer.add_event_handler(
        TrainingEvents.OPTIMIZER_STEP_STARTED, lambda: rates.append(optimizer.param_groups[0]["lr"])
    )
    trainer.run(loader(Numbers(40), 2), max_iters=end)
    return rates[-1], moments[0]


CONSTANTS: list[Callable[[Optimizer], Any]] = [
    constant,
    lambda optimizer: warmup_linear(optimizer, total=1000, min_ratio=1.0),
    lambda optimizer: torch_schedulers.ConstantLR(optimizer, factor=1.0),
    lambda optimizer: torch_schedulers.LambdaLR(optimizer, lambda step: 1.0),
]


@pytest.mark.parametrize("make", CONSTANTS)
def test_a_rate_that_the_schedule_brings_back_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, make: Callable[[Optimizer], Any]
) -> None:
    """The optimizer is left out so that its new rate counts; the schedule has the old one."""
    assert _resumed(tmp_path, 0.1, make, [], 2) == (0.1, False)
    caplog.clear()
    assert _resumed(tmp_path, 0.2, make, ["optimizer"], 4) == (0.1, False)
    (line,) = [each for each in caplog.messages if "restores" in each]
    assert "lr_schedule restores the base LR 0.1 and not 0.2" in line
    assert "Checkpoint(..., override={'optimizer.lr': 0.2}), " in line and "checkpoint.override in a config" in line

    caplog.clear()
    assert _resumed(tmp_path, 0.1, make, ["optimizer"], 6)[0] == 0.1
    assert not [each for each in caplog.messages if "restores" in each]


@pytest.mark.parametrize("make", CONSTANTS)
@pytest.mark.parametrize("name", ["schedule", "lr_schedule"])
def test_a_schedule_that_is_left_out_begins_again_from_the_new_rate(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, make: Callable[[Optimizer], Any], name: str
) -> None:
    """By the name of its kind or its own; the optimizer keeps its moments."""
    _resumed(tmp_path, 0.1, make, [], 2)
    caplog.clear()
    assert _resumed(tmp_path, 0.2, make, [name], 4) == (0.2, True)
    assert not [each for each in caplog.messages if "no effect" in each or "holds no" in each]
    assert (
        len([each for each in caplog.messages if "lr_schedule begins at its first step, with the LR 0.2" in each]) == 1
    )


def test_the_rate_that_is_named_is_that_in_force(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for lr, end, said in ((0.1, 2, None), (0.2, 4, "lr 0.1 to 0.2"), (0.3, 6, "lr 0.1 to 0.3"), (0.1, 8, None)):
        caplog.clear()
        assert _resumed(tmp_path, lr, constant, [], end)[0] == 0.1
        lines = [each for each in caplog.messages if "no effect" in each]
        assert len(lines) == (said is not None) and all(str(said) in line for line in lines), (lr, lines)
