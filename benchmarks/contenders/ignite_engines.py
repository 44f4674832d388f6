"""Ignite's own engine: with a hand-written step, and as ``create_supervised_trainer`` makes it."""

from __future__ import annotations

import torch
from ignite.engine import Engine, Events, create_supervised_trainer
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_
from torch.optim.lr_scheduler import LambdaLR

from benchmarks.contenders.schedule import lr_factor
from benchmarks.workload import ACCUMULATION, CLIP_NORM, HANDLER_PERIOD, LOG_EVERY, Batch, Workload


def bare(work: Workload, handlers: int = 0) -> None:
    model, optimizer = work.model, work.optimizer
    model.train()

    def step(engine: Engine, batch: Batch) -> Tensor:
        inputs, targets = batch
        optimizer.zero_grad()
        loss = cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
        return loss.detach()

    trainer = Engine(step)
    add_quiet_handlers(trainer, handlers, micro_batches_per_update=1)
    trainer.run(work.batches, max_epochs=work.epochs)


def full(work: Workload, handlers: int = 0) -> None:
    model, optimizer = work.model, work.optimizer
    scheduler = LambdaLR(optimizer, lr_factor)
    model.train()
    running_loss = 0.0

    def step(engine: Engine, batch: Batch) -> None:
        nonlocal running_loss
        inputs, targets = batch
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = cross_entropy(model(inputs), targets)
        (loss / ACCUMULATION).backward()
        running_loss += loss.item()
        if engine.state.iteration % ACCUMULATION == 0:
            clip_grad_norm_(model.parameters(), CLIP_NORM)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()

    def log() -> None:
        nonlocal running_loss
        work.log.append(running_loss / LOG_EVERY)
        running_loss = 0.0

    trainer = Engine(step)
    trainer.add_event_handler(Events.ITERATION_COMPLETED(every=LOG_EVERY), log)
    add_quiet_handlers(trainer, handlers, micro_batches_per_update=ACCUMULATION)
    trainer.run(work.batches, max_epochs=work.epochs)


def supervised_bare(work: Workload) -> None:
    trainer = create_supervised_trainer(work.model, work.optimizer, cross_entropy)
    trainer.run(work.batches, max_epochs=work.epochs)


def supervised_full(work: Workload) -> None:
    """Clipping and the schedule are attached, because it has neither; its own amp mode is for CUDA only."""
    scheduler = LambdaLR(work.optimizer, lr_factor)
    running_loss = 0.0

    def forward(model: nn.Module, inputs: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits: Tensor = model(inputs)
        return logits.float()  # as autocast itself does for a cross entropy

    def clip(*_: object) -> None:
        clip_grad_norm_(work.model.parameters(), CLIP_NORM)

    def accumulate(engine: Engine) -> None:
        nonlocal running_loss
        running_loss += engine.state.output  # type: ignore[operator]  # a float, by its output_transform

    def log() -> None:
        nonlocal running_loss
        work.log.append(running_loss / LOG_EVERY)
        running_loss = 0.0

    work.optimizer.register_step_pre_hook(clip)
    trainer = create_supervised_trainer(
        work.model,
        work.optimizer,
        cross_entropy,
        gradient_accumulation_steps=ACCUMULATION,
        model_fn=forward,
    )
    trainer.add_event_handler(Events.ITERATION_COMPLETED(every=ACCUMULATION), lambda: scheduler.step())
    trainer.add_event_handler(Events.ITERATION_COMPLETED, accumulate)
    trainer.add_event_handler(Events.ITERATION_COMPLETED(every=LOG_EVERY), log)
    trainer.run(work.batches, max_epochs=work.epochs)


def add_quiet_handlers(trainer: Engine, handlers: int, micro_batches_per_update: int) -> None:
    """Attach handlers that rarely fire, at the same updates for every contender."""
    for index in range(handlers):
        period = (HANDLER_PERIOD + index) * micro_batches_per_update
        trainer.add_event_handler(Events.ITERATION_COMPLETED(every=period), quiet)


def quiet() -> None:
    """Does nothing: the bus is measured, not its handlers."""
