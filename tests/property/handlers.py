"""The handlers of cases: schedules, those of a user, and Ignite's own."""

import random

import numpy as np
import torch
from ignite.engine import Events
from ignite.handlers import EMAHandler, TerminateOnNan
from ignite.handlers.param_scheduler import (
    LinearCyclicalScheduler,
    LRScheduler,
    PiecewiseLinear,
    create_lr_scheduler_with_warmup,
)
from ignite.handlers.state_param_scheduler import ExpStateScheduler
from ignite.metrics import Accuracy, Average, RunningAverage
from torch.optim.swa_utils import AveragedModel

from ignite_engine import TrainingEvents
from ignite_engine.checkpoint.sources import LoadSource
from ignite_engine.events import Phase
from ignite_engine.handlers import LRSchedule
from ignite_engine.handlers.model_bank import ModelBank
from ignite_engine.schedules import (
    constant,
    warmup_cosine,
    warmup_inverse_sqrt,
    warmup_linear,
    warmup_polynomial,
    warmup_wsd,
)
from tests.property.models import Net


def early(handler):
    """Before the evaluation of the same event: one that is interrupted runs again on the weights as they are then."""
    handler.phase = Phase.PREPARE
    return handler


class Decay:
    """A user's handler with a state: the more it has seen, the more it shrinks the weights."""

    phase = Phase.PREPARE

    def __init__(self, model):
        self.model, self.seen, self.mean = model, 0, torch.zeros(())

    def __call__(self, trainer):
        self.seen += 1
        self.mean = 0.9 * self.mean + 0.1 * trainer.state.output["loss"]
        with torch.no_grad():
            self.model.stem.weight.mul_(1.0 - 0.001 * self.seen - 0.001 * float(self.mean))

    def state_dict(self):
        return {"seen": self.seen, "mean": self.mean}

    def load_state_dict(self, state):
        self.seen, self.mean = state["seen"], state["mean"]


class Counter:
    """An object with a state that a function beside it uses."""

    def __init__(self):
        self.count, self.generator = 0, torch.Generator().manual_seed(4)

    def state_dict(self):
        return {"count": self.count, "generator": self.generator.get_state()}

    def load_state_dict(self, state):
        self.count = state["count"]
        self.generator.set_state(state["generator"])


def attach_users(case, trainer, model, folder):
    """What the case has of a user's own handlers; returns what to call where nothing was resumed."""
    often = Events.ITERATION_COMPLETED(every=1 + case.every % 3)
    optimizer, weight = next(iter(trainer.update.optimizers.values())), model.head.weight
    begin = []

    def on(name, event, action):
        if name in case.handlers:
            trainer.add_event_handler(event, early(lambda engine: action(engine)))

    @torch.no_grad()
    def scale(tensor, factor):
        tensor.mul_(factor)

    def by_numpy(engine):
        values = weight.detach().numpy()  # the weight's own memory
        np.multiply(values, 0.99, out=values)

    on("weights by .data", often, lambda engine: weight.data.mul_(0.99))
    on("weights by NumPy", often, by_numpy)
    on("weights by no_grad", often, lambda engine: scale(weight, 0.99))
    started = Events.ITERATION_STARTED(every=1 + case.every % 3)
    on("weights at ITERATION_STARTED", started, lambda engine: weight.data.add_(0.001))
    on("buffers", often, lambda engine: model.layer("own").mean.mul_(0.5))
    if "callable with a state" in case.handlers:
        trainer.add_event_handler(often, Decay(model))
    for name in ("registered object", "object registered at STARTED"):
        if name in case.handlers:
            counter = Counter()
            if name == "registered object":
                trainer.register("counter", counter)
            else:
                trainer.add_event_handler(Events.STARTED, lambda engine, it: engine.register("late", it), counter)

            def use(engine, counter=counter):
                counter.count += 1
                drawn = 0.001 * torch.randn((), generator=counter.generator)
                scale(model.stem.bias, 1.0 + float(drawn) + 0.001 * (counter.count % 3))

            on(name, Events.ITERATION_COMPLETED, use)

    def draw(engine):
        drawn = torch.randn(()) + random.random() + float(np.random.standard_normal())
        scale(model.stem.bias, 1.0 + 0.001 * float(drawn))

    on("random numbers", often, draw)

    def another_batch(engine, shift):
        batch = engine.state.batch
        grouped = isinstance(batch, list) and not isinstance(batch[0], torch.Tensor)
        shifted = [(inputs + shift(inputs), *rest) for inputs, *rest in (batch if grouped else [batch])]
        engine.state.batch = shifted if grouped else shifted[0]

    arrives = Events.GET_BATCH_COMPLETED
    on("another batch", arrives, lambda engine: another_batch(engine, lambda inputs: 0.1 * inputs.roll(1, 0)))
    on("a batch of random numbers", arrives, lambda engine: another_batch(engine, lambda x: 0.1 * torch.randn(x.shape)))

    def add_noise(engine):
        for parameter in model.head.parameters():
            if parameter.grad is not None:
                parameter.grad.add_(0.01 * torch.randn_like(parameter.grad))

    on("gradient noise", TrainingEvents.OPTIMIZER_STEP_STARTED, add_noise)

    def unfreeze(engine):
        if engine.state.epoch >= 2:
            model.layer("frozen").inner.requires_grad_(True)

    def add_group(engine):
        known = {id(each) for group in optimizer.param_groups for each in group["params"]}
        new = [each for each in model.layer("frozen").inner.parameters() if id(each) not in known]
        if engine.state.epoch >= 2 and new:
            unfreeze(engine)
            optimizer.add_param_group({"params": new})

    on("unfreezing by flag", Events.EPOCH_STARTED, unfreeze)
    on("unfreezing by group", Events.EPOCH_STARTED, add_group)
    on("terminate_epoch", Events.ITERATION_COMPLETED(every=case.every + 2), lambda engine: engine.terminate_epoch())
    on("request_save", often, lambda engine: engine.request_save())
    if "torch scheduler by epoch" in case.handlers:
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
        trainer.register("epoch scheduler", scheduler)
        on("torch scheduler by epoch", Events.EPOCH_COMPLETED, lambda engine: scheduler.step())
    if "AveragedModel" in case.handlers:
        averaged = AveragedModel(model)
        trainer.register("averaged", averaged)
        on("AveragedModel", often, lambda engine: averaged.update_parameters(model))

    def set_option(engine):
        for group in optimizer.param_groups:
            for name in ("weight_decay", "lambd"):
                if name in group:
                    group[name] = 0.001 * engine.state.iteration

    on("optimizer's settings", often, set_option)
    on("frozen part in eval mode", Events.EPOCH_STARTED, lambda engine: model.layer("frozen").eval())
    calls, generator = [0], torch.Generator().manual_seed(5)

    def shrink(engine):
        calls[0] += 1
        scale(model.stem.weight, 1.0 - 0.001 * calls[0])

    # planted mistakes: what these keep matters, and is in no checkpoint
    on("unsaved counter", Events.ITERATION_COMPLETED, shrink)
    jitter = lambda engine: model.stem.bias.data.add_(0.001 * torch.randn(8, generator=generator))  # noqa: E731
    on("unsaved generator", Events.ITERATION_COMPLETED, jitter)
    if "ModelBank" in case.handlers:
        path = folder / "start.pt"
        if not path.exists():
            torch.manual_seed(99)
            torch.save({f"stem.{name}": each for name, each in Net(case).stem.state_dict().items()}, path)
        bank = ModelBank([LoadSource(path, parts=["model:stem.*"])])
        bank.attach(trainer, Events.EPOCH_COMPLETED)
        begin.append(bank.load)
    return begin


def attach_ignite(case, trainer, model):
    """What the case has of Ignite's metrics and handlers, as its documentation attaches them."""
    names, optimizer = case.ignite, next(iter(trainer.update.optimizers.values()))

    def loss_of(output):
        return output["loss"].item()

    def halves(output):
        return torch.tensor([output["loss"].item() * 100 % 1]).round(), torch.ones(1)

    if "RunningAverage" in names:
        RunningAverage(output_transform=loss_of).attach(trainer, "running_loss")
    if "Average" in names:
        Average(output_transform=loss_of).attach(trainer, "average_loss")
    if "Accuracy" in names:
        Accuracy(output_transform=halves).attach(trainer, "halves")
    if "TerminateOnNan" in names:
        trainer.add_event_handler(Events.ITERATION_COMPLETED, TerminateOnNan())
    if "EMAHandler" in names:
        ema = EMAHandler(model, momentum=0.1)
        ema.attach(trainer, event=Events.ITERATION_COMPLETED)
        trainer.register("ema model", ema.ema_model)
    if "PiecewiseLinear" in names:
        scheduler = PiecewiseLinear(optimizer, "lr", [(0, 0.001), (5, 0.02), (15, 0.001)])
        trainer.add_event_handler(Events.ITERATION_STARTED, scheduler)
    if "create_lr_scheduler_with_warmup" in names:
        inner = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
        warmup = create_lr_scheduler_with_warmup(inner, warmup_start_value=0.0, warmup_duration=4)
        trainer.add_event_handler(Events.ITERATION_STARTED, warmup)
    if "ExpStateScheduler" in names:
        shrinking = ExpStateScheduler(1.0, 0.9, "shrink")
        shrinking.phase = Phase.PREPARE  # before the handler below, which reads it
        shrinking.attach(trainer, Events.ITERATION_COMPLETED)
        shrink = early(lambda engine: model.stem.bias.data.mul_(1.0 - 0.01 * engine.state.shrink))
        trainer.add_event_handler(Events.ITERATION_COMPLETED, shrink)


def attach_schedule(case, trainer, lr=0.02):
    if case.schedule == "none":
        return
    optimizer = next(iter(trainer.update.optimizers.values()))
    scheduler = torch.optim.lr_scheduler
    cycled = any("momentum" in group for group in optimizer.param_groups)
    made = {
        "warmup_cosine": lambda: warmup_cosine(optimizer, warmup=3, total=12),
        "warmup_linear": lambda: warmup_linear(optimizer, warmup=0.2, total=12),
        "warmup_wsd": lambda: warmup_wsd(optimizer, warmup=2, total=12, decay=0.5),
        "warmup_inverse_sqrt": lambda: warmup_inverse_sqrt(optimizer, warmup=2),
        "warmup_polynomial": lambda: warmup_polynomial(optimizer, warmup=2, total=12),
        "constant": lambda: constant(optimizer),
        "StepLR": lambda: scheduler.StepLR(optimizer, 3, 0.7),
        "OneCycleLR": lambda: scheduler.OneCycleLR(optimizer, lr, total_steps=500, cycle_momentum=cycled),
        "CosineAnnealingWarmRestarts": lambda: scheduler.CosineAnnealingWarmRestarts(optimizer, 4),
        "LinearLR": lambda: scheduler.LinearLR(optimizer, 0.2, total_iters=7),
        "SequentialLR": lambda: scheduler.SequentialLR(
            optimizer, [scheduler.ConstantLR(optimizer, 0.5, 3), scheduler.ExponentialLR(optimizer, 0.9)], [3]
        ),
        "LambdaLR": lambda: scheduler.LambdaLR(optimizer, lambda step: 0.9**step),
        "CyclicLR": lambda: scheduler.CyclicLR(optimizer, lr / 5, lr, step_size_up=3, cycle_momentum=cycled),
        "ReduceLROnPlateau": lambda: scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.05),
        "Ignite PiecewiseLinear": lambda: PiecewiseLinear(optimizer, "lr", [(0, 0.001), (5, 0.02), (15, 0.001)]),
        "Ignite LinearCyclicalScheduler": lambda: LinearCyclicalScheduler(optimizer, "lr", lr / 5, lr, 6),
        "Ignite LRScheduler": lambda: LRScheduler(scheduler.StepLR(optimizer, 3, 0.7)),
    }[case.schedule]()
    LRSchedule(made, metric="val/loss" if case.schedule == "ReduceLROnPlateau" else None).attach(trainer)
