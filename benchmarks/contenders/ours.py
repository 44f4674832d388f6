"""This project's engine, as in its README. Imported when run, so that no other contender loads it."""

from __future__ import annotations

import io
import tempfile
from contextlib import ExitStack, redirect_stderr
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from benchmarks.contenders.ignite_engines import add_quiet_handlers
from benchmarks.workload import ACCUMULATION, CLIP_NORM, HANDLER_PERIOD, LOG_EVERY, TOTAL, WARMUP, Batch, Workload


def loss_fn(model: nn.Module, batch: Batch) -> Tensor:
    inputs, targets = batch
    return cross_entropy(model(inputs), targets)


def bare(work: Workload, handlers: int = 0, *, real: bool = False) -> None:
    from ignite_engine import Trainer, Update

    trainer = Trainer(Update(work.model, work.optimizer, loss_fn))
    add_quiet_handlers(trainer, handlers, micro_batches_per_update=1)
    with ExitStack() as stack:
        if real:
            add_real_handlers(trainer, work, stack, LOG_EVERY)
        trainer.run(work.batches, max_epochs=work.epochs)


def full(work: Workload, handlers: int = 0, *, real: bool = False) -> None:
    from ignite.engine import Events

    from ignite_engine import Trainer, TrainingEvents, Update
    from ignite_engine.handlers import LRSchedule, MetricLogger, warmup_cosine

    def record() -> None:
        """What the hand-written loops record."""
        if "loss" in trainer.state.metrics.fresh:
            work.log.append(trainer.state.metrics["loss"])

    update = Update(work.model, work.optimizer, loss_fn, precision="bf16", clip_norm=CLIP_NORM)
    trainer = Trainer(update, accumulation_steps=ACCUMULATION)
    LRSchedule(warmup_cosine(work.optimizer, warmup=WARMUP, total=TOTAL)).attach(trainer)
    add_quiet_handlers(trainer, handlers, micro_batches_per_update=1)
    trainer.add_event_handler(TrainingEvents.METRICS_READY, record)
    with ExitStack() as stack:
        if real:
            add_real_handlers(trainer, work, stack, LOG_EVERY // ACCUMULATION)
        else:
            logger = MetricLogger(console=False)
            logger.attach(trainer, Events.ITERATION_COMPLETED(every=LOG_EVERY // ACCUMULATION))
        trainer.run(work.batches, max_epochs=work.epochs)


def add_real_handlers(trainer: Any, work: Workload, stack: ExitStack, log_every: int) -> None:
    """Ten handlers as a user has them: what is measured is logged to a file, saves and evaluations are far apart.

    Args:
        stack: removes the files.
        log_every: iterations between log points.
    """
    from ignite.engine import Events
    from ignite.metrics import Loss

    from ignite_engine import create_evaluator
    from ignite_engine.handlers import (
        Checkpoint,
        EarlyStopping,
        Evaluation,
        GracefulStop,
        MemoryLogger,
        MetricLogger,
        Progress,
        Throughput,
        WallClockLimit,
    )
    from ignite_engine.handlers.limits import StopFile

    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    stack.enter_context(redirect_stderr(io.StringIO()))  # the bar
    log, far = Events.ITERATION_COMPLETED(every=log_every), Events.ITERATION_COMPLETED(every=HANDLER_PERIOD)
    metrics = {"loss": Loss(cross_entropy)}
    evaluator = create_evaluator(work.model, lambda model, batch: (model(batch[0]), batch[1]), metrics)
    Evaluation(evaluator, work.batches.batches[:4]).attach(trainer, far)
    MetricLogger(folder, console=False).attach(trainer, log)
    Throughput().attach(trainer, log)
    MemoryLogger().attach(trainer, log)
    Progress().attach(trainer)
    EarlyStopping("loss", patience=1000).attach(trainer)
    Checkpoint(folder / "checkpoints", background=True).attach(trainer, far)
    GracefulStop().attach(trainer)
    WallClockLimit(hours=100).attach(trainer)
    StopFile(folder / "stop").attach(trainer)
