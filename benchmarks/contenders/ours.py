"""This project's engine, as in its README. Imported when run, so that no other contender loads it."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from benchmarks.contenders.ignite_engines import add_quiet_handlers
from benchmarks.workload import ACCUMULATION, CLIP_NORM, LOG_EVERY, TOTAL, WARMUP, Batch, Workload


def loss_fn(model: nn.Module, batch: Batch) -> Tensor:
    inputs, targets = batch
    return cross_entropy(model(inputs), targets)


def bare(work: Workload, handlers: int = 0) -> None:
    from ignite_engine import Trainer, Update

    trainer = Trainer(Update(work.model, work.optimizer, loss_fn))
    add_quiet_handlers(trainer, handlers, micro_batches_per_update=1)
    trainer.run(work.batches, max_epochs=work.epochs)


def full(work: Workload, handlers: int = 0) -> None:
    from ignite.engine import Events

    from ignite_engine import Trainer, Update
    from ignite_engine.handlers import LRSchedule, MetricLogger, warmup_cosine

    class Lines:
        """A sink that records what the hand-written loops record."""

        def write(self, iteration: int, values: Mapping[str, float]) -> None:
            work.log.append(values["loss"])

    update = Update(work.model, work.optimizer, loss_fn, precision="bf16", clip_norm=CLIP_NORM)
    trainer = Trainer(update, accumulation_steps=ACCUMULATION)
    LRSchedule(warmup_cosine(work.optimizer, warmup=WARMUP, total=TOTAL)).attach(trainer)
    logger = MetricLogger(sinks=[Lines()], console=False)
    logger.attach(trainer, Events.ITERATION_COMPLETED(every=LOG_EVERY // ACCUMULATION))
    add_quiet_handlers(trainer, handlers, micro_batches_per_update=1)
    trainer.run(work.batches, max_epochs=work.epochs)
