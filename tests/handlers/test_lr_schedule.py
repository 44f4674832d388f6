"""LRs are exact numbers; a schedule moves with the optimizer and with nothing else."""

import io
import math
import warnings
from functools import partial

import pytest
import torch
from ignite.engine import Engine, Events
from ignite.handlers.param_scheduler import (
    ConcatScheduler,
    CosineAnnealingScheduler,
    LinearCyclicalScheduler,
    ParamGroupScheduler,
    create_lr_scheduler_with_warmup,
)
from ignite.handlers.param_scheduler import LRScheduler as IgniteTorchScheduler
from torch import nn
from torch.optim import SGD
from torch.optim import lr_scheduler as torch_schedulers

from ignite_engine import Trainer, Update, loader
from ignite_engine.events import EVENT_COUNTERS, TrainingEvents
from ignite_engine.handlers import Checkpoint, MetricLogger
from ignite_engine.handlers.lr_schedule import LRSchedule
from ignite_engine.schedules import (
    constant,
    warmup_constant,
    warmup_cosine,
    warmup_linear,
    warmup_wsd,
)
from tests.kit.tiny import Numbers, linear, mse
from tests.ranks.forkserver import on_ranks

BASE = 0.5


def sgd(lr=BASE, groups=1):
    return SGD([{"params": [nn.Parameter(torch.ones(2))]} for _ in range(groups)], lr=lr, foreach=False)


def factors(schedule, steps):
    return [schedule.factor_at(step) for step in range(steps)]


def run(handler, steps, skipped=(), publish=(), load=None):
    """LRs with which each iteration's update was made, and what stood in ``state.metrics`` where it was published.

    A bare Ignite engine with our events: the update really steps the optimizer, but for the ``skipped`` iterations.
    """
    optimizer = handler._optimizer
    used = []
    published = []

    def update(engine, batch):
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
    def _(engine):
        engine.state.metrics = {}
        if engine.state.iteration in publish:
            engine.fire_event(TrainingEvents.METRICS_READY)
        published.append(dict(engine.state.metrics))

    if steps:
        engine.run(range(steps))
    return used, published


def used_lrs(handler, steps, **options):
    return run(handler, steps, **options)[0]


# --- setting the LR ---------------------------------------------------------------------------------------------------


def test_every_group_is_scheduled_from_its_own_base():
    optimizer = SGD([{"params": [nn.Parameter(torch.ones(1))], "lr": lr} for lr in (0.5, 2.0)], lr=1.0)
    schedule = warmup_linear(optimizer, 2, total=6)
    assert used_lrs(LRSchedule(schedule), 8) == [schedule.lrs_at(step) for step in range(8)]


def test_a_tensor_lr_is_filled_in_place():
    optimizer = sgd(torch.tensor(0.5, dtype=torch.float64))
    held = optimizer.param_groups[0]["lr"]
    assert used_lrs(LRSchedule(warmup_linear(optimizer, 2, total=6)), 7) == [
        [0.25], [0.5], [0.5], [0.375], [0.25], [0.125], [0.0]
    ]  # fmt: skip
    assert optimizer.param_groups[0]["lr"] is held


# --- moving with the optimizer ----------------------------------------------------------------------------------------


def test_update_k_is_made_with_the_lr_of_step_k():
    optimizer = sgd()
    schedule = warmup_cosine(optimizer, 3, total=10)
    assert used_lrs(LRSchedule(schedule), 12) == [schedule.lrs_at(step) for step in range(12)]
    assert schedule.lrs_at(0) == [BASE / 3]


@pytest.mark.row("B7", "E2")
def test_schedule_waits_for_skipped_steps():
    used = used_lrs(LRSchedule(warmup_constant(sgd(), 4)), 7, skipped=(1, 4, 5))
    assert used == [[0.125], [0.125], [0.25], [0.375], [0.375], [0.375], [0.5]]


def torch_scheduler_makers():
    s = torch_schedulers
    return {
        "LambdaLR": lambda o: s.LambdaLR(o, lambda step: 1 / (1 + step)),
        "CosineAnnealingWarmRestarts": lambda o: s.CosineAnnealingWarmRestarts(o, 3, 2),
        "OneCycleLR": lambda o: s.OneCycleLR(o, 1.0, 20, cycle_momentum=False),
        "SequentialLR": lambda o: s.SequentialLR(
            o, [s.LinearLR(o, 0.1, 1.0, 4), s.CosineAnnealingLR(o, 8)], milestones=[4]
        ),
        "ChainedScheduler": lambda o: s.ChainedScheduler([s.ConstantLR(o, 0.1, 3), s.ExponentialLR(o, 0.9)]),
    }


def bare_torch_lrs(make, steps):
    optimizer = sgd(groups=2)
    scheduler, lrs = make(optimizer), []
    for _ in range(steps):
        lrs.append([float(group["lr"]) for group in optimizer.param_groups])
        optimizer.step()
        scheduler.step()
    return lrs


@pytest.mark.parametrize("wrapped", [False, True], ids=["torch", "in Ignite's LRScheduler"])
@pytest.mark.parametrize("name", torch_scheduler_makers())
def test_torch_schedulers_give_the_lrs_of_a_hand_written_loop(name, wrapped):
    make = torch_scheduler_makers()[name]
    scheduler = make(sgd(groups=2))
    if wrapped:
        scheduler = IgniteTorchScheduler(scheduler)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch warns when the schedule moves before the optimizer
        assert used_lrs(LRSchedule(scheduler), 12) == bare_torch_lrs(make, 12)


def linear_cyclical(optimizer):
    return LinearCyclicalScheduler(optimizer, "lr", 1.0, 0.0, 6, cycle_mult=2.0)


def warmed_up(optimizer):
    return create_lr_scheduler_with_warmup(
        CosineAnnealingScheduler(optimizer, "lr", 0.5, 0.0, 9), warmup_start_value=0.0, warmup_duration=4
    )


IGNITE = {
    "linear": (
        linear_cyclical,
        lambda n: LinearCyclicalScheduler.simulate_values(
            n, param_name="lr", start_value=1.0, end_value=0.0, cycle_size=6, cycle_mult=2.0
        ),
    ),
    "warmed up": (
        warmed_up,
        lambda n: ConcatScheduler.simulate_values(n, *_parts(warmed_up(sgd()))),
    ),
}


def _parts(scheduler):
    return scheduler.schedulers, scheduler.durations


@pytest.mark.parametrize("name", IGNITE)
def test_ignite_schedulers_give_the_values_that_ignite_simulates_one_per_applied_step(name):
    make, simulate = IGNITE[name]
    simulated = [value for _, value in simulate(12)]
    assert [lr for (lr,) in used_lrs(LRSchedule(make(sgd())), 12)] == simulated
    skipping = [lr for (lr,) in used_lrs(LRSchedule(make(sgd())), 14, skipped=(1, 6))]
    assert skipping == [simulated[0], *simulated[:5], *simulated[4:]]


def test_ignite_schedulers_of_single_groups_are_moved_together():
    optimizer = sgd(groups=2)
    both = ParamGroupScheduler(
        [LinearCyclicalScheduler(optimizer, "lr", 1.0, end, 4, param_group_index=i) for i, end in enumerate((0.0, 2.0))]
    )
    assert used_lrs(LRSchedule(both), 4) == [[1.0, 1.0], [0.5, 1.5], [0.0, 2.0], [0.5, 1.5]]


def test_a_metric_for_a_schedule_that_takes_none_is_refused():
    with pytest.raises(ValueError, match=r"^metric='val/loss' has no effect on a Schedule, .*: remove it, or"):
        LRSchedule(constant(sgd()), metric="val/loss")


def test_a_schedule_over_another_optimizer_is_refused():
    engine = Engine(lambda engine, batch: None)
    engine.update = type("U", (), {"optimizers": {"dense": sgd()}})()
    with pytest.raises(
        ValueError, match=r"optimizer of LRSchedule 'lr_schedule' is not one of the trainer's \(dense\)"
    ):
        LRSchedule(constant(sgd())).attach(engine)


# --- resume -----------------------------------------------------------------------------------------------------------


def through_a_file(state):
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


def load_both(optimizer, handler, saved, optimizer_first):
    if optimizer_first:
        optimizer.load_state_dict(saved["optimizer"])
    handler.load_state_dict(saved["schedule"])
    if not optimizer_first:
        optimizer.load_state_dict(saved["optimizer"])


RESUMABLE = {
    "ours": lambda o: warmup_wsd(o, 3, total=12, decay=4),
    **torch_scheduler_makers(),
    **{f"ignite {name}": make for name, (make, _) in IGNITE.items()},
}


@pytest.mark.row("E2")
@pytest.mark.parametrize("optimizer_first", [True, False])
@pytest.mark.parametrize("name", RESUMABLE)
def test_resumed_at_any_step_the_lrs_continue_exactly(name, optimizer_first):
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


def test_an_optimizer_loaded_without_the_schedule_does_not_keep_its_old_lr():
    old = sgd(9.0)
    optimizer = sgd()
    schedule = warmup_linear(optimizer, 2, total=10)
    used = used_lrs(LRSchedule(schedule), 2, load=lambda: optimizer.load_state_dict(old.state_dict()))
    assert used == [schedule.lrs_at(0), schedule.lrs_at(1)]


def test_a_state_with_other_groups_is_refused():
    state = LRSchedule(constant(sgd(groups=3))).state_dict()
    with pytest.raises(ValueError, match="has 3 parameter groups and the optimizer has 1: build the same"):
        LRSchedule(constant(sgd())).load_state_dict(state)


# --- what is written --------------------------------------------------------------------------------------------------


@pytest.mark.row("E3")
def test_lr_is_that_of_the_update_just_made_and_nothing_is_written_on_quiet_iterations():
    used, published = run(LRSchedule(warmup_constant(sgd(), 8)), 6, publish=(1, 4))
    assert published == [{"lr": used[0][0]}, {}, {}, {"lr": used[3][0]}, {}, {}]
    assert used[3] == [0.25]


def test_the_lr_written_for_a_torch_scheduler_is_that_of_the_update_too():
    scheduler = torch_schedulers.ExponentialLR(sgd(torch.tensor(BASE, dtype=torch.float64)), 0.5)
    _, published = run(LRSchedule(scheduler), 4, publish=(1, 3))
    assert published == [{"lr": 0.5}, {}, {"lr": 0.125}, {}]


@pytest.mark.row("E3")
def test_with_several_groups_each_is_written_under_its_name_or_index():
    optimizer = SGD(
        [
            {"params": [nn.Parameter(torch.ones(1))], "lr": 0.5, "name": "decay"},
            {"params": [nn.Parameter(torch.ones(1))]},
        ],
        lr=2.0,
    )
    _, published = run(LRSchedule(warmup_constant(optimizer, 2)), 1, publish=(1,))
    assert published == [{"lr": 0.25, "lr/decay": 0.25, "lr/1": 1.0}]


def test_a_schedule_with_a_name_of_its_own_writes_under_it():
    _, published = run(LRSchedule(warmup_constant(sgd(), 2), name="sparse"), 1, publish=(1,))
    assert published == [{"lr/sparse": 0.25}]


# --- in a Trainer -----------------------------------------------------------------------------------------------------


def real_trainer(steps, weights):
    model = nn.Linear(2, 1)
    optimizer = SGD(model.parameters(), lr=BASE)
    used = []

    def loss_fn(model, batch):
        used.append(optimizer.param_groups[0]["lr"])
        loss = model(batch[1]).mean()
        return loss

    trainer = Trainer(Update(model, optimizer, loss_fn, weight_fn=lambda batch: weights[batch[0]]))
    schedule = warmup_linear(optimizer, 2, total=steps)
    LRSchedule(schedule).attach(trainer)
    return trainer, schedule, used


def test_in_a_trainer_an_update_without_weight_moves_nothing():
    trainer, schedule, used = real_trainer(5, [1, 1, 0, 1, 0, 1])
    trainer.run([(index, torch.ones(3, 2)) for index in range(6)], max_epochs=1)
    assert used == [schedule.lrs_at(step)[0] for step in range(4)]  # a skipped update runs no forward
    assert (trainer.state.skipped_steps, schedule.steps) == (2, 4)


def test_in_a_trainer_its_state_is_one_copy_for_all_ranks_and_takes_up_the_lr():
    trainer, schedule, _ = real_trainer(10, [1] * 6)
    trainer.run([(index, torch.ones(3, 2)) for index in range(6)], max_epochs=1)
    shared, own = trainer.registry.capture()
    assert "lr_schedule" in shared and "lr_schedule" not in own
    again, resumed, used = real_trainer(10, [1] * 6)
    again.registry.load(through_a_file({**shared, **own}), source="here")
    again.run([(index, torch.ones(3, 2)) for index in range(6)], max_epochs=2)
    assert used == [resumed.lrs_at(step)[0] for step in range(6, 12)]
    assert resumed.lrs_at(7) == schedule.lrs_at(7)


def test_two_schedules_need_two_names():
    trainer, schedule, _ = real_trainer(5, [1])
    with pytest.raises(ValueError, match="'lr_schedule' is taken"):
        LRSchedule(schedule).attach(trainer)


# --- a plateau --------------------------------------------------------------------------------------------------------

LOSSES = (5.0, 4.0, 4.5, 4.5, 4.5, 3.0, 3.5, 3.5, math.nan, 3.5, 3.5, 2.0)


def torchs_plateau_lrs(**options):
    """LR of each epoch by torch itself, stepped at the end of each epoch with its loss."""
    optimizer = sgd()
    plateau = torch_schedulers.ReduceLROnPlateau(optimizer, **options)
    lrs = []
    for loss in LOSSES:
        lrs.append(optimizer.param_groups[0]["lr"])
        plateau.step(loss)
    return lrs


def plateau_trainer(values=LOSSES, **options):
    """Epochs of two updates; at each epoch's end its value becomes ``val/loss``. Collects the LR of each update."""
    model = nn.Linear(2, 1)
    optimizer = SGD(model.parameters(), lr=BASE)
    used = []

    def loss_fn(model, batch):
        used.append(optimizer.param_groups[0]["lr"])
        loss = model(batch).mean()
        return loss

    trainer = Trainer(Update(model, optimizer, loss_fn))

    @trainer.on(Events.EPOCH_COMPLETED)
    def _(trainer):
        trainer.state.metrics["val/loss"] = values[trainer.state.epoch - 1]

    @trainer.on(Events.ITERATION_COMPLETED)
    def _(trainer):
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
def test_plateau_lrs_are_those_of_torch_stepped_once_per_value(options):
    trainer, used = plateau_trainer(**options)
    trainer.run(TWO_BATCHES, max_epochs=len(LOSSES))
    expected = torchs_plateau_lrs(**options)

    assert len(set(expected)) > 2
    assert used == [lr for lr in expected for _ in range(2)]


@pytest.mark.parametrize("options", PLATEAUS)
def test_plateau_resumed_at_any_step_continues_exactly(options):
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


def test_lr_written_beside_the_metric_that_lowers_it_is_the_one_that_was_used():
    trainer, used = plateau_trainer([1.0, 1.0, 1.0, 1.0], patience=0)
    written = []
    trainer.add_event_handler(Events.ITERATION_STARTED, lambda: written.append(trainer.state.metrics.get("lr", BASE)))
    trainer.run(TWO_BATCHES, max_epochs=4)

    assert used == pytest.approx([0.5, 0.5, 0.5, 0.5, 0.05, 0.05, 0.005, 0.005])
    assert written[1:] == used[:-1]


def _one_of_two_ranks(rank, folder):
    # alone, rank 0 would keep its LR and rank 1 would lower it at its third value
    trainer, used = plateau_trainer([4.0 - epoch if rank == 0 else 4.0 + epoch for epoch in range(5)], patience=1)
    trainer.run(TWO_BATCHES, max_epochs=5)
    torch.save(used, f"{folder}/{rank}.pt")


@pytest.mark.distributed
def test_plateau_lr_is_the_same_on_two_ranks_with_values_of_their_own(tmp_path):
    on_ranks(2, _one_of_two_ranks, tmp_path)
    first, second = (torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(2))

    assert first == second == pytest.approx([0.5] * 6 + [0.05] * 4)


# --- the length of the run, and schedules per epoch -------------------------------------------------------------------


class Run:
    """A trainer with one schedule over 8 samples a pass; ``used`` are the LRs of its updates."""

    def __init__(self, make, event=None, folder=None, **options):
        model = linear()
        self.optimizer = SGD(model.parameters(), lr=BASE)
        self.schedule = make(self.optimizer)
        self.trainer = Trainer(Update(model, self.optimizer, mse), **options)
        LRSchedule(self.schedule).attach(self.trainer, *([] if event is None else [event]))
        self.used = []
        self.logged = []
        self.trainer.add_event_handler(TrainingEvents.OPTIMIZER_STEP_STARTED, self._note)
        MetricLogger(console=False).attach(self.trainer)
        self.trainer.add_event_handler(TrainingEvents.METRICS_READY, self._note_logged)
        if folder is not None:
            self.checkpoint = Checkpoint(folder)
            self.checkpoint.attach(self.trainer, Events.COMPLETED)

    def _note(self, trainer):
        self.used.append(self.optimizer.param_groups[0]["lr"])

    def _note_logged(self, trainer):
        self.logged.append(trainer.state.metrics["lr"])

    def train(self, **length):
        self.trainer.run(loader(Numbers(8), 2), **length)
        return self.used

    def stop_after(self, iteration):
        self.trainer.add_event_handler(
            Events.ITERATION_COMPLETED(once=iteration), lambda trainer: trainer.request_stop("asked")
        )
        return self


@pytest.mark.parametrize("length", [{"max_iters": 9}, {"max_epochs": 3}], ids=["iterations", "epochs"])
@pytest.mark.parametrize("steps", [None, 3], ids=["plain", "accumulating"])
@pytest.mark.parametrize("warmup", [2, 0.25])
def test_schedule_without_a_total_is_one_over_the_run(warmup, steps, length):
    updates = length.get("max_iters", 12 if steps is None else 6)
    expected = warmup_cosine(sgd(), warmup, total=updates)
    run = Run(lambda optimizer: warmup_cosine(optimizer, warmup), accumulation_steps=steps)

    assert run.train(**length) == [expected.lrs_at(step)[0] for step in range(updates)]
    assert run.schedule.get_last_lr() == [0.0]


@pytest.mark.parametrize("stop", [1, 4, 5, 11])
def test_resumed_schedule_over_the_run_continues_exactly_and_silently(tmp_path, stop, caplog):
    whole = Run(warmup_cosine).train(max_epochs=3)
    first = Run(warmup_cosine, folder=tmp_path).stop_after(stop).train(max_epochs=3)
    second = Run(warmup_cosine, folder=tmp_path)
    second.checkpoint.resume()

    assert first + second.train(max_epochs=3) == whole
    assert "The run now ends" not in caplog.text


def test_resume_that_changes_the_length_says_what_becomes_of_the_rate(tmp_path, caplog):
    Run(warmup_linear, folder=tmp_path).train(max_epochs=1)
    longer = Run(warmup_linear, folder=tmp_path)
    longer.checkpoint.resume()

    assert longer.train(max_epochs=2) == [warmup_linear(sgd(), total=8).lrs_at(step)[0] for step in range(4, 8)]
    lines = [record.message for record in caplog.records if "The run now ends" in record.message]
    assert lines == [
        "The run now ends after update 8, not 4, and its schedule with it: from here on the LR follows the new curve, "
        "0.25 in place of 0. A total given to the schedule keeps the old one."
    ]


PER_EPOCH = {
    "torch": (lambda o: torch_schedulers.StepLR(o, 1, 0.5), lambda update: BASE * 0.5 ** (update // 4)),
    "ours": (
        lambda o: warmup_linear(o, 1),
        lambda update: warmup_linear(sgd(), 1, total=3).lrs_at(update // 4)[0],
    ),
    "ignite": (
        lambda o: LinearCyclicalScheduler(o, "lr", 1.0, 0.0, 6),
        lambda update: 1.0 - 2.0 / 6 * (update // 4),
    ),
}


@pytest.mark.parametrize("name", PER_EPOCH)
@pytest.mark.parametrize("stop", [3, 4, 5, 8])
def test_schedule_per_epoch_moves_at_the_end_of_each_and_resumes_exactly(tmp_path, stop, name):
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


def test_event_that_a_scheduler_cannot_use_is_refused():
    plateau = LRSchedule(torch_schedulers.ReduceLROnPlateau(sgd()), metric="val/loss")
    with pytest.raises(ValueError, match="steps at each new value of its metric: attach it without an event"):
        plateau.attach(Engine(lambda engine, batch: None), Events.EPOCH_COMPLETED)


# -- a rate that was changed for a resumed run -------------------------------------------------------------------------
