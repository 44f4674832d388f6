"""Every handler that has a state, by name: a run that was interrupted goes on as if it had not been."""

import functools
import os
import tempfile

import pytest
import torch
from ignite.engine import Events
from ignite.metrics import Average, RunningAverage
from ignite.metrics.metric import SingleEpochRunningBatchWise
from torch import nn
from torch.optim import lr_scheduler as of_torch

import ignite_engine
from ignite_engine import TrainingEvents, create_evaluator, handlers
from ignite_engine.checkpoint.sources import LoadSource
from ignite_engine.handlers.limits import StopFile
from ignite_engine.handlers.meters import Meter
from ignite_engine.handlers.model_bank import ModelBank
from ignite_engine.handlers.profiler import Profiler
from tests.kit.floors import needs
from tests.kit.processes import ranks
from tests.kit.resume import assert_resumes, program
from tests.kit.tiers import tiered
from tests.kit.tiny import linear, mse, numbers_loader
from tests.test_schedules import OwnSchedule, cyclical, warmed_up

EVERY_3 = Events.ITERATION_COMPLETED(every=3)
LOSSES = (5.0, 4.0, 4.5, 4.5, 3.0, 3.5, 3.25, 3.0)
"""A metric at each of the iterations."""


def of(*made, **options):
    """A row: what ``program`` takes, with the names of the parts that it must save."""
    return functools.partial(program, made, **options)


def schedule(make, *event, metric=None):
    """A row of a schedule, which is made from the optimizer."""

    def attach(trainer):
        optimizer = trainer.update.optimizers["optimizer"]
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))], "lr": 2.0})  # some are of two groups
        handlers.LRSchedule(make(optimizer), metric=metric).attach(trainer, *event)
        handlers.MetricLogger(console=False).attach(trainer)  # where the rate is written

    return of(measure, attach, parts=("lr_schedule",))


def measure(trainer):
    """An evaluation would: ``val/loss`` at each iteration."""

    def write():
        trainer.state.metrics["val/loss"] = LOSSES[trainer.state.iteration - 1]

    trainer.add_event_handler(Events.ITERATION_COMPLETED, write)


def attached_to_iterations(make):
    """A scheduler of Ignite, as its documentation says."""

    def attach(trainer):
        scheduler = make(trainer.update.optimizers["optimizer"])
        trainer.add_event_handler(Events.ITERATION_STARTED, scheduler)

    return of(attach)


def loss_of(output):
    return float(output["loss"])


class Remembering:
    """Its state is all that was measured: a value that is lost or given twice shows in a checkpoint."""

    def __init__(self):
        self.got = []

    def attach(self, trainer):
        trainer.register("remembering", self)
        trainer.add_event_handler(TrainingEvents.METRICS_READY, self.write)

    def write(self, trainer):
        self.got.append([trainer.state.iteration, dict(trainer.state.metrics.fresh)])

    def state_dict(self):
        return {"got": self.got}

    def load_state_dict(self, state):
        self.got = list(state["got"])


def logger():
    return handlers.MetricLogger(console=False), EVERY_3


def meters(trainer):
    """Those of a handler: one is in the checkpoint before it is there."""
    trainer.state.meters["largest"] = Meter("max", of="grad_norm")
    given = trainer.state.meters["given"] = Meter("sum")

    def give():
        for meter in (given, trainer.state.meters.setdefault("late", Meter("sum"))):
            meter.update(0.1 * trainer.state.iteration)

    trainer.add_event_handler(Events.ITERATION_STARTED, give)


def averaged(trainer):
    """The average, and an evaluation of it: its loss is that of the average."""
    handlers.EMA(0.8).attach(trainer)
    evaluator = create_evaluator(trainer.update.model, lambda model, batch: mse(model, batch), {"loss": Average()})
    handlers.Evaluation(evaluator, numbers_loader(4, 4)).attach(trainer, Events.ITERATION_COMPLETED(every=2))


def evaluated(trainer):
    """Two sets at paces of their own, one of which goes on where it was stopped; their predictions are random."""
    for name, every, resumes in (("val", 2, False), ("other", 4, True)):
        evaluator = create_evaluator(
            trainer.update.model, lambda model, batch: model(batch[0]) * torch.rand(1), {"mean": Average()}
        )
        evaluation = handlers.Evaluation(evaluator, numbers_loader(6), name=name, resumes=resumes)
        evaluation.attach(trainer, Events.ITERATION_COMPLETED(every=every))


@pytest.fixture(autouse=True)
def source(monkeypatch, tmp_path_factory):
    """Weights of another run, for this process and those that it starts."""
    path = tmp_path_factory.mktemp("source") / "weights.pt"
    torch.save(linear().state_dict(), path)
    monkeypatch.setenv("TEST_SOURCE", str(path))


def bank():
    """It loads them when it looks for the first time."""
    source = LoadSource(os.environ["TEST_SOURCE"], rename={"2.": "3."}, dynamic=True)
    return ModelBank([source]), Events.ITERATION_COMPLETED(every=2)


def metrics_of_ignite(trainer):
    RunningAverage(alpha=0.5, output_transform=loss_of).attach(trainer, "slow")
    RunningAverage(output_transform=loss_of).attach(trainer, "of the epoch", usage=SingleEpochRunningBatchWise())
    Average(output_transform=loss_of).attach(trainer, "mean")
    Average(output_transform=lambda output: -loss_of(output)).attach(trainer, "minus")


STATEFUL = {
    "EMA": of(averaged, parts=("ema",)),
    "EarlyStopping": of(
        measure, lambda: handlers.EarlyStopping("val/loss", mode="max", patience=5), parts=("early_stopping",)
    ),
    "MetricLogger": of(meters, logger, Remembering, log_grad_norm=True, parts=("metric_logger", "remembering")),
    "Throughput": of(lambda: (handlers.Throughput(), EVERY_3), measured=("throughput/samples_per_s",)),
    "StepTimes": of(
        lambda: (handlers.StepTimes(), EVERY_3),
        measured=tuple(
            f"time/{part}_ms" for part in ("step", "data_wait", "forward", "backward", "optimizer", "other")
        ),
    ),
    "Checkpoint of the best": of(measure, checkpoint={"best": "val/loss"}, parts=("checkpoint",)),
    "Evaluation": of(evaluated, parts=("evaluation/val", "evaluation/other")),
    "what saves and stops": of(
        lambda: handlers.WallClockLimit(hours=1),
        lambda: StopFile("no such file"),
        lambda: handlers.GracefulStop(exit=False),
    ),
    "what looks on": of(
        lambda: (handlers.MemoryLogger(), EVERY_3),
        lambda: Profiler(tempfile.mkdtemp(), wait=1, warmup=1, active=1),
        lambda: (handlers.Export(tempfile.mkdtemp()), EVERY_3),
        measured=("memory/host_rss_mib",),
    ),
    "ModelBank": of(bank, parts=("model_bank",)),
    "metrics of Ignite": of(metrics_of_ignite, parts=("ignite/RunningAverage/slow", "ignite/Average/mean")),
    "schedulers of Ignite, one after another": attached_to_iterations(warmed_up),
    "LRSchedule": schedule(lambda o: handlers.warmup_cosine(o, 0.25)),
    "LRSchedule per epoch": schedule(cyclical, Events.EPOCH_COMPLETED),
    "LRSchedule of a plateau": schedule(
        lambda o: of_torch.ReduceLROnPlateau(o, patience=0, factor=0.5, cooldown=1), metric="val/loss"
    ),
    "LRSchedule of another library": schedule(OwnSchedule),
}
ON_TWO_RANKS = ("EMA", "EarlyStopping", "MetricLogger", "ModelBank", "LRSchedule of a plateau")


@pytest.mark.row("E2", "F4")
@pytest.mark.parametrize("name", STATEFUL)
def test_resumes(name, tmp_path):
    assert_resumes(STATEFUL[name](), tmp_path, how=("stop",) if name.startswith(DRAWN) else ("stop", "same process"))


DRAWN = ("EMA", "EarlyStopping", "LRSchedule", "MetricLogger", "metrics")
"""By tests/property, which breaks off in all ways."""


@pytest.mark.parametrize(
    "name", tiered([name for name in STATEFUL if not name.startswith(DRAWN)], "Checkpoint of the best", "Evaluation")
)
def test_resumes_however_it_was_broken_off(name, tmp_path):
    assert_resumes(STATEFUL[name](), tmp_path, how=("raise", "kill"))


def test_a_mean_has_the_same_bits_wherever_its_interval_was_cut(tmp_path):
    def log(trainer):
        handlers.MetricLogger(console=False).attach(trainer, Events.EPOCH_COMPLETED)
        trainer.state.meters["sum"] = Meter("sum", of="loss")

    each = program([log], data=lambda: numbers_loader(144, 2), limits={"max_epochs": 1}, parts=("metric_logger",))
    assert_resumes(each, tmp_path, at=(63, 64, 65), how=("stop",))


@needs("windows")
def test_a_bank_that_loads_between_windows_resumes(tmp_path):
    """That iteration has a boundary already, at which it was saved without what is loaded now."""

    def load(trainer):
        bank()[0].attach(trainer, TrainingEvents.WINDOW_COMPLETED)

    windows = lambda: ignite_engine.Windows(range(2), lambda name: numbers_loader(8, 2))  # noqa: E731
    each = program([load], data=windows, limits={"max_epochs": 1}, parts=("model_bank",))
    assert_resumes(each, tmp_path, at=(4, 5), how=("stop", "raise"))


@pytest.mark.row("C7")
@pytest.mark.parametrize("name", tiered(ON_TWO_RANKS, "EMA", "MetricLogger", "LRSchedule of a plateau"))
def test_resumes_on_two_ranks(name, tmp_path):
    ranks(2, resumes, name, tmp_path)


def resumes(rank, name, folder):
    wrapped = lambda: nn.parallel.DistributedDataParallel(linear(dropout=True))  # noqa: E731
    each = STATEFUL[name](model=wrapped, data=lambda: numbers_loader(16, 2, shuffle=True))
    assert_resumes(each, folder, at=(3,), how=("stop",))
