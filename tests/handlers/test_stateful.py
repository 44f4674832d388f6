"""Every handler that has a state, by name: a run that was interrupted goes on as if it had not been."""

import functools
import os
import tempfile

import pytest
import torch
from ignite import handlers as of_ignite
from ignite.engine import Events
from ignite.metrics import Average, MeanAbsoluteError, RunningAverage
from ignite.metrics.metric import SingleEpochRunningBatchWise
from torch import nn
from torch.optim import lr_scheduler as of_torch

from ignite_engine import create_evaluator, handlers
from ignite_engine.checkpointing import LoadSource
from tests.kit.processes import ranks
from tests.kit.resume import assert_resumes, program
from tests.kit.tiny import linear, mse, numbers_loader, one
from tests.test_schedules import SCHEDULES, cyclical, warmed_up

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
    """A sink whose state is all that it was given: a value that is lost or given twice shows in a checkpoint."""

    name = "remembering"

    def __init__(self):
        self.got = []

    def write(self, iteration, values):
        self.got.append([iteration, dict(values)])

    def state_dict(self):
        return {"got": self.got}

    def load_state_dict(self, state):
        self.got = list(state["got"])


def logger():
    return handlers.MetricLogger(console=False, sinks=[Remembering()]), EVERY_3


def meters(trainer):
    trainer.state.meters["largest"] = handlers.Meter("max", of="grad_norm")
    given = trainer.state.meters["given"] = handlers.Meter("sum")
    trainer.add_event_handler(Events.ITERATION_STARTED, lambda: given.update(0.1 * trainer.state.iteration))


def late_meter(trainer):
    """Made by a handler: in the checkpoint it is before it is there."""

    def give():
        trainer.state.meters.setdefault("late", handlers.Meter("sum")).update(0.1 * trainer.state.iteration)

    trainer.add_event_handler(Events.ITERATION_STARTED, give)


def training_metrics(trainer):
    metrics = handlers.TrainingMetrics({"mae": MeanAbsoluteError()})

    def loss_fn(model, batch):
        predictions = model(batch[0])
        metrics.record((predictions, batch[1]))
        return nn.functional.mse_loss(predictions, batch[1])

    trainer.update.loss_fn = loss_fn
    metrics.attach(trainer, EVERY_3)


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
    return handlers.ModelBank([source]), Events.ITERATION_COMPLETED(every=2)


def stopping_of_ignite(trainer):
    stopping = of_ignite.EarlyStopping(
        patience=3, score_function=lambda engine: -LOSSES[engine.state.iteration - 1], trainer=trainer
    )
    trainer.add_event_handler(Events.ITERATION_COMPLETED, stopping)


def average_of_ignite(trainer):
    ema = of_ignite.EMAHandler(trainer.update.model, momentum=0.25)
    ema.attach(trainer, name="momentum", event=Events.ITERATION_COMPLETED)
    trainer.register("ema_model", ema.ema_model, shared=True)
    norm = lambda: trainer.state.metrics.update(norm=one(ema.ema_model).norm())  # noqa: E731
    trainer.add_event_handler(Events.ITERATION_COMPLETED, norm)


def metrics_of_ignite(trainer):
    RunningAverage(alpha=0.5, output_transform=loss_of).attach(trainer, "slow")
    RunningAverage(output_transform=loss_of).attach(trainer, "of the epoch", usage=SingleEpochRunningBatchWise())
    Average(output_transform=loss_of).attach(trainer, "mean")
    Average(output_transform=lambda output: -loss_of(output)).attach(trainer, "minus")


def exponential(optimizer):
    return of_ignite.LRScheduler(of_torch.ExponentialLR(optimizer, 0.5))


STATEFUL = {
    "EMA": of(averaged, parts=("ema",)),
    "EarlyStopping": of(
        measure, lambda: handlers.EarlyStopping("val/loss", mode="max", patience=5), parts=("early_stopping",)
    ),
    "MetricLogger": of(logger, parts=("metric_logger", "remembering")),
    "MetricLogger with meters": of(meters, late_meter, logger, log_grad_norm=True, parts=("metric_logger",)),
    "TrainingMetrics": of(training_metrics, parts=("training_metrics/train", "training_metrics/train/mae")),
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
        lambda: handlers.SaveEvery(minutes=60),
        lambda: handlers.WallClockLimit(hours=1),
        lambda: handlers.StopFile(os.devnull),
        lambda: handlers.GracefulStop(exit=False),
    ),
    "what looks on": of(
        lambda: (handlers.MemoryLogger(), EVERY_3),
        lambda: handlers.Profiler(tempfile.mkdtemp(), wait=1, warmup=1, active=1),
        lambda: (handlers.Export(tempfile.mkdtemp()), EVERY_3),
        measured=("memory/host_rss_mib",),
    ),
    "ModelBank": of(bank, parts=("model_bank",)),
    "EarlyStopping of Ignite": of(stopping_of_ignite, parts=("ignite/EarlyStopping",)),
    "EMAHandler of Ignite": of(average_of_ignite, parts=("ema_model",)),
    "metrics of Ignite": of(metrics_of_ignite, parts=("ignite/RunningAverage/slow", "ignite/Average/mean")),
    "scheduler of Ignite": attached_to_iterations(cyclical),
    "schedulers of Ignite, one after another": attached_to_iterations(warmed_up),
    "scheduler of torch in one of Ignite": attached_to_iterations(
        lambda o: of_ignite.LRScheduler(of_torch.ExponentialLR(o, 0.5))
    ),
}
PLATEAUS = {
    "ReduceLROnPlateau": lambda o: of_torch.ReduceLROnPlateau(o, patience=1, factor=0.5),
    "ReduceLROnPlateau with a cooldown": lambda o: of_torch.ReduceLROnPlateau(o, patience=0, cooldown=1, mode="max"),
}
OF_A_SCHEDULE = {
    **{name: schedule(make) for name, make in SCHEDULES.items()},
    "warmup_cosine over the run": schedule(lambda o: handlers.warmup_cosine(o, 0.25)),
    **{name: schedule(make, metric="val/loss") for name, make in PLATEAUS.items()},
    "StepLR per epoch": schedule(lambda o: of_torch.StepLR(o, 1, 0.5), Events.EPOCH_COMPLETED),
    "warmup_linear per epoch": schedule(lambda o: handlers.warmup_linear(o, 1), Events.EPOCH_COMPLETED),
    "LinearCyclicalScheduler per epoch": schedule(cyclical, Events.EPOCH_COMPLETED),
}
ON_TWO_RANKS = {
    **{name: STATEFUL[name] for name in ("EMA", "EarlyStopping", "MetricLogger with meters", "TrainingMetrics")},
    **{name: STATEFUL[name] for name in ("ModelBank", "metrics of Ignite")},
    "plateau": OF_A_SCHEDULE["ReduceLROnPlateau"],
}


@pytest.mark.row("F4")
@pytest.mark.parametrize("name", STATEFUL)
def test_resumes(name, tmp_path):
    assert_resumes(STATEFUL[name](), tmp_path)


@pytest.mark.row("E2")
@pytest.mark.parametrize("name", OF_A_SCHEDULE)
def test_schedule_resumes(name, tmp_path):
    assert_resumes(OF_A_SCHEDULE[name](), tmp_path, how=("stop",))


@pytest.mark.row("C7")
@pytest.mark.parametrize("name", ON_TWO_RANKS)
def test_resumes_on_two_ranks(name, tmp_path):
    ranks(2, resumes, name, tmp_path)


def resumes(rank, name, folder):
    wrapped = lambda: nn.parallel.DistributedDataParallel(linear(dropout=True))  # noqa: E731
    each = ON_TWO_RANKS[name](model=wrapped, data=lambda: numbers_loader(16, 2, shuffle=True))
    assert_resumes(each, folder, at=(3,), how=("stop",))
