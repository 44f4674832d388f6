"""What LRSchedule writes, over which length, and what a plateau does; values are in tests/test_schedules.py."""

import math

import pytest
from ignite.engine import Events
from ignite.handlers import LinearCyclicalScheduler
from torch.optim import SGD
from torch.optim.lr_scheduler import (
    ConstantLR,
    ExponentialLR,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
    StepLR,
)

from ignite_engine import Trainer, TrainingEvents, Update
from ignite_engine.handlers import Checkpoint, LRSchedule, MetricLogger
from ignite_engine.schedules import warmup_constant, warmup_cosine, warmup_linear
from tests.kit.tiny import linear, mse, numbers_loader

BASE = 0.5
LOSSES = (5.0, 4.0, 4.5, 4.5, 4.5, 3.0, 3.5, 3.5, math.nan, 3.5, 3.5, 2.0)


class Run:
    """A trainer of 4 batches an epoch with one schedule: the rates of its updates, and what is written.

    Args:
        groups: settings of each parameter group.
        values: of ``val/loss``, by epoch.
    """

    def __init__(self, make, *event, folder=None, groups=({},), values=LOSSES, steps=None, ignore=(), **options):
        model = linear()
        layers = [{"params": [*layer.parameters()], **group} for layer, group in zip((model[0], model[2]), groups)]
        self.optimizer = SGD(layers if len(groups) > 1 else model.parameters(), lr=BASE)
        self.schedule = make(self.optimizer)
        self.trainer = trainer = Trainer(Update(model, self.optimizer, mse), steps)
        self.used, self.written = [], []
        trainer.add_event_handler(TrainingEvents.OPTIMIZER_STEP_STARTED, self._note)
        trainer.add_event_handler(
            Events.EPOCH_COMPLETED,
            lambda: trainer.state.metrics.update({"val/loss": values[trainer.state.epoch - 1]}),
        )
        LRSchedule(self.schedule, **options).attach(trainer, *event)
        MetricLogger(console=False).attach(trainer)
        trainer.add_event_handler(TrainingEvents.METRICS_READY, self._note_written)
        if folder is not None:
            checkpoint = Checkpoint(folder)
            checkpoint.attach(trainer)
            checkpoint.resume(ignore=ignore)

    def _note(self):
        self.used.append(self.optimizer.param_groups[0]["lr"])

    def _note_written(self):
        fresh = self.trainer.state.metrics.fresh
        self.written.append({name: value for name, value in fresh.items() if name.startswith("lr")})

    def train(self, **length):
        self.trainer.run(numbers_loader(8, 2), **length)
        return self.used


def rates(schedule, updates):
    return [schedule.lrs_at(k)[0] for k in updates]


def sgd():
    return Run(warmup_constant).optimizer


# -- what is written ---------------------------------------------------------------------------------------------------


@pytest.mark.row("E3")
@pytest.mark.parametrize("make", [lambda o: warmup_constant(o, 8), lambda o: ExponentialLR(o, 0.5)])
def test_rate_that_is_written_is_that_of_the_update_just_made(make):
    run = Run(make)
    run.train(max_epochs=1)

    assert run.written == [{"lr": rate} for rate in run.used] and len(set(run.used)) == 4


@pytest.mark.row("E3")
def test_each_group_is_written_by_name_or_index_and_a_schedule_of_ones_own_under_its():
    run = Run(lambda o: warmup_constant(o, 2), groups=({"name": "decay"}, {"lr": 2.0}))
    run.train(max_iters=1)
    named = Run(lambda o: warmup_constant(o, 2), name="sparse")
    named.train(max_iters=1)

    assert run.written == [{"lr": 0.25, "lr/decay": 0.25, "lr/1": 1.0}]
    assert named.written == [{"lr/sparse": 0.25}]


# -- the length of the run, and schedules per epoch --------------------------------------------------------------------


@pytest.mark.parametrize("length", [{"max_iters": 9}, {"max_epochs": 3}], ids=["iterations", "epochs"])
@pytest.mark.parametrize("steps", [None, 3], ids=["plain", "accumulating"])
def test_schedule_without_a_total_is_one_over_the_run(steps, length):
    updates = length.get("max_iters", 12 if steps is None else 6)
    run = Run(lambda o: warmup_cosine(o, 0.25), steps=steps)

    assert run.train(**length) == rates(warmup_cosine(sgd(), 0.25, total=updates), range(updates))
    assert run.schedule.get_last_lr() == [0.0]


def test_resume_that_changes_the_length_goes_on_with_the_new_curve_and_says_so(tmp_path, caplog):
    Run(warmup_linear, folder=tmp_path).train(max_epochs=1)
    longer = Run(warmup_linear, folder=tmp_path).train(max_epochs=2)

    assert longer == rates(warmup_linear(sgd(), total=8), range(4, 8))
    (line,) = [record.getMessage() for record in caplog.records if "total" in record.message]
    assert "update 8, not 4" in line


@pytest.mark.parametrize("make", [lambda o: warmup_linear(o, 2, total=99), lambda o: ExponentialLR(o, 0.5)])
def test_resumed_without_its_state_it_begins_again(make, tmp_path):
    begun = Run(make, folder=tmp_path).train(max_epochs=1)
    again = Run(make, folder=tmp_path, ignore=["lr_schedule"]).train(max_epochs=2)

    assert again == begun and len(set(begun)) > 2


MADE_OTHERWISE = {
    "StepLR": lambda o, n: StepLR(o, 2 * n),
    "OneCycleLR": lambda o, n: OneCycleLR(o, n, 99),
    "SequentialLR": lambda o, n: SequentialLR(o, [ConstantLR(o, 0.5), StepLR(o, n)], [5]),
    "Ignite's": lambda o, n: LinearCyclicalScheduler(o, "lr", 1.0, 0.0, 8 * n),
}


@pytest.mark.parametrize("name", MADE_OTHERWISE)
def test_resumed_with_other_arguments_it_keeps_those_saved(name, tmp_path):
    make = MADE_OTHERWISE[name]
    whole = Run(lambda o: make(o, 1), folder=tmp_path / "whole").train(max_epochs=3)
    Run(lambda o: make(o, 1), folder=tmp_path / "run").train(max_epochs=1)

    for epochs in (2, 3):  # a second resume, too
        used = Run(lambda o: make(o, 2), folder=tmp_path / "run").train(max_epochs=epochs)
        assert used == whole[4 * (epochs - 1) : 4 * epochs]


PER_EPOCH = {
    "torch": (lambda o: StepLR(o, 1, 0.5), [0.5, 0.25, 0.125]),
    "ours": (lambda o: warmup_linear(o, 1), [0.5, 0.5, 0.25]),  # over the epochs of the run
    "ignite": (lambda o: LinearCyclicalScheduler(o, "lr", 1.0, 0.0, 8), [1.0, 0.75, 0.5]),
}


@pytest.mark.parametrize("name", PER_EPOCH)
def test_schedule_per_epoch_moves_at_the_end_of_each(name):
    make, expected = PER_EPOCH[name]
    run = Run(make, Events.EPOCH_COMPLETED)

    assert run.train(max_epochs=3) == [rate for rate in expected for _ in range(4)]
    assert [each["lr"] for each in run.written] == run.used


# -- a plateau ---------------------------------------------------------------------------------------------------------


def by_torch(**options):
    """The rate of each epoch by torch itself, stepped at its end with its loss."""
    optimizer, lrs = sgd(), []
    plateau = ReduceLROnPlateau(optimizer, **options)
    for loss in LOSSES:
        lrs.append(optimizer.param_groups[0]["lr"])
        plateau.step(loss)
    return lrs


PLATEAUS = [
    {"patience": 1},
    {"patience": 0, "factor": 0.5, "cooldown": 1},
    {"patience": 1, "factor": 0.5, "mode": "max", "threshold": 0.5, "threshold_mode": "abs", "min_lr": 0.1},
]


@pytest.mark.parametrize("options", PLATEAUS)
def test_plateau_has_the_rates_of_torch_stepped_once_per_value(options):
    run = Run(lambda o: ReduceLROnPlateau(o, **options), metric="val/loss")  # the loss is new at each iteration
    expected = by_torch(**options)

    assert run.train(max_epochs=len(LOSSES)) == [lr for lr in expected for _ in range(4)]
    assert len(set(expected)) > 2
    assert [each["lr"] for each in run.written] == run.used  # beside the value that lowers it
