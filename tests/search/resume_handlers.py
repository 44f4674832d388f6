"""The handlers of drawn cases: those of a user, and Ignite's own."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from ignite.engine import Events
from ignite.handlers import EarlyStopping, EMAHandler, TerminateOnNan
from ignite.handlers.param_scheduler import (
    LinearCyclicalScheduler,
    LRScheduler,
    PiecewiseLinear,
    create_lr_scheduler_with_warmup,
)
from ignite.handlers.state_param_scheduler import ExpStateScheduler, LambdaStateScheduler
from ignite.metrics import Accuracy, Average, RunningAverage
from torch.optim.swa_utils import AveragedModel

from ignite_engine import Phase, TrainingEvents
from ignite_engine.handlers import (
    LRSchedule,
    constant,
    warmup_cosine,
    warmup_inverse_sqrt,
    warmup_linear,
    warmup_polynomial,
    warmup_wsd,
)

Note = Callable[[str], None]
State = Callable[[], Any]


def _early(handler):
    """Run before the evaluation of the same event: one that is interrupted runs again on the weights as they are then,
    with what later handlers of the event made of them, as docs/checkpoints.md says."""
    handler.phase = Phase.PREPARE
    return handler


class Decay:
    """A user's handler with a state: the more it has seen, the more it shrinks the weights."""

    phase = Phase.PREPARE

    def __init__(self, model, note):
        self.model, self.note, self.seen, self.mean = model, note, 0, torch.zeros(())

    def __call__(self, trainer):
        self.note("handlers: callable with a state")
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
        self.count = 0
        self.generator = torch.Generator().manual_seed(4)

    def state_dict(self):
        return {"count": self.count, "generator": self.generator.get_state()}

    def load_state_dict(self, state):
        self.count = state["count"]
        self.generator.set_state(state["generator"])


def attach_users(plan, trainer, model, note, states):
    """Attach what the plan draws of a user's own handlers; ``states`` gets what must be equal at the end."""
    names, numbers = plan["handlers"], plan["numbers"]
    often = Events.ITERATION_COMPLETED(every=numbers["act every"])
    optimizer = next(iter(trainer.update.optimizers.values()))
    weight = model.head.weight

    def on(name, event, action):
        if name in names:
            trainer.add_event_handler(event, _early(lambda engine: (note(f"handlers: {name}"), action(engine))))

    @torch.no_grad()
    def scale(tensor, factor):
        tensor.mul_(factor)

    on("weights by .data", often, lambda engine: weight.data.mul_(0.99))

    def scale_by_numpy(engine):
        values = weight.detach().cpu().numpy()  # on the CPU the weight's own memory
        np.multiply(values, 0.99, out=values)
        if weight.device.type != "cpu":
            weight.data.copy_(torch.from_numpy(values))

    on("weights by NumPy", often, scale_by_numpy)
    on("weights by no_grad", often, lambda engine: scale(weight, 0.99))
    at_start = Events.ITERATION_STARTED(every=numbers["act every"])
    on("weights at ITERATION_STARTED", at_start, lambda engine: weight.data.add_(0.001))
    if "buffers" in names:
        layer = next(each for name, each in model.layers.items() if name.endswith("own"))
        on("buffers", often, lambda engine: layer.mean.mul_(0.5))
    if "callable with a state" in names:
        decay = Decay(model, note)
        trainer.add_event_handler(often, decay)
        states["callable with a state"] = decay.state_dict
    for name in ("registered object", "object registered at STARTED"):
        if name in names:
            counter = Counter()
            if name == "registered object":
                trainer.register("counter", counter)
            else:
                trainer.add_event_handler(Events.STARTED, lambda engine, it: engine.register("late", it), counter)

            def use(engine, counter=counter):
                counter.count += 1
                noise = 0.001 * torch.randn((), generator=counter.generator)
                scale(model.stem.bias, 1.0 + float(noise) + 0.001 * (counter.count % 3))

            on(name, Events.ITERATION_COMPLETED, use)
            states[name] = counter.state_dict

    def draw(engine):
        noise = torch.randn(()) + random.random() + float(np.random.standard_normal())
        scale(model.stem.bias, 1.0 + 0.001 * float(noise))

    on("random numbers", often, draw)

    def another_batch(engine, shift):
        batch = engine.state.batch
        grouped = engine.accumulation_steps is not None
        shifted = [
            (inputs + shift(inputs), words, targets) for inputs, words, targets in (batch if grouped else [batch])
        ]
        engine.state.batch = shifted if grouped else shifted[0]  # a plain list, where the loop had a group

    arrives = Events.GET_BATCH_COMPLETED
    on("another batch", arrives, lambda engine: another_batch(engine, lambda inputs: 0.1 * inputs.roll(1, 0)))
    on("a batch of random numbers", arrives, lambda engine: another_batch(engine, lambda x: 0.1 * torch.randn(x.shape)))

    def add_noise(engine):
        for parameter in model.head.parameters():
            if parameter.grad is not None and not parameter.grad.is_sparse:
                parameter.grad.add_(0.01 * torch.randn_like(parameter.grad))

    on("gradient noise", TrainingEvents.OPTIMIZER_STEP_STARTED, add_noise)

    def unfreeze(engine):
        if engine.state.epoch >= 2 and model.frozen is not None:
            model.frozen.requires_grad_(True)
            note("happened: parameters unfrozen")

    on("unfreezing by flag", Events.EPOCH_STARTED, unfreeze)

    def add_group(engine):
        if engine.state.epoch >= 2 and model.frozen is not None:
            known = {id(each) for group in optimizer.param_groups for each in group["params"]}
            new = [each for each in model.frozen[0].parameters() if id(each) not in known]
            if new:
                model.frozen[0].requires_grad_(True)
                optimizer.add_param_group({"params": new})
                note("happened: parameters unfrozen")

    on("unfreezing by group", Events.EPOCH_STARTED, add_group)
    cut = Events.ITERATION_COMPLETED(every=numbers["act every"] + 2)
    on("terminate_epoch", cut, lambda engine: engine.terminate_epoch())
    on("request_save", often, lambda engine: engine.request_save())
    if "torch scheduler by epoch" in names:
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
        trainer.register("epoch scheduler", scheduler)
        on("torch scheduler by epoch", Events.EPOCH_COMPLETED, lambda engine: scheduler.step())
    if "AveragedModel" in names:
        averaged = AveragedModel(model)
        trainer.register("averaged", averaged)
        on("AveragedModel", often, lambda engine: averaged.update_parameters(model))
        states["AveragedModel"] = averaged.state_dict

    def set_option(engine):
        for group in optimizer.param_groups:
            for name in ("weight_decay", "lambd"):
                if name in group and plan["embedding"] != "sparse":  # torch refuses to decay sparse gradients
                    group[name] = 0.001 * engine.state.iteration

    on("optimizer's settings", often, set_option)
    if "frozen part in eval mode" in names and model.frozen is not None:
        frozen = model.frozen
        on("frozen part in eval mode", Events.EPOCH_STARTED, lambda engine: frozen.eval())


def attach_ignite(plan, trainer, model, evaluator, note, states):
    """Attach what the plan draws of Ignite's metrics and handlers, as its documentation does."""
    names = plan["ignite"]
    optimizer = next(iter(trainer.update.optimizers.values()))

    def on_loss(output):
        return output["loss"].item()

    if "RunningAverage" in names:
        RunningAverage(output_transform=on_loss).attach(trainer, "running_loss")
    if "Average" in names:
        Average(output_transform=on_loss).attach(trainer, "average_loss")
    if "Accuracy" in names:

        def halves(output):
            value = torch.tensor([output["loss"].item() * 100 % 1])
            return value.round(), torch.ones(1)

        Accuracy(output_transform=halves).attach(trainer, "halves")
    if "TerminateOnNan" in names:
        trainer.add_event_handler(Events.ITERATION_COMPLETED, TerminateOnNan())
    if "EMAHandler" in names:
        ema = EMAHandler(model, momentum=0.1)
        ema.attach(trainer, event=Events.ITERATION_COMPLETED)
        trainer.register("ema model", ema.ema_model)
        states["EMAHandler"] = ema.ema_model.state_dict
    if "PiecewiseLinear" in names:
        scheduler = PiecewiseLinear(optimizer, "lr", [(0, 0.001), (5, 0.02), (15, 0.001)])
        trainer.add_event_handler(Events.ITERATION_STARTED, scheduler)
    if "create_lr_scheduler_with_warmup" in names:
        inner = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
        warmup = create_lr_scheduler_with_warmup(inner, warmup_start_value=0.0, warmup_duration=4)
        trainer.add_event_handler(Events.ITERATION_STARTED, warmup)
    if "ExpStateScheduler" in names or "LambdaStateScheduler" in names:
        shrinking = ExpStateScheduler(1.0, 0.9, "shrink")
        if "LambdaStateScheduler" in names:
            shrinking = LambdaStateScheduler(lambda index: 0.9**index, "shrink")
        shrinking.phase = Phase.PREPARE  # before the handler below, which reads it
        shrinking.attach(trainer, Events.ITERATION_COMPLETED)
        trainer.add_event_handler(
            Events.ITERATION_COMPLETED, _early(lambda engine: _scaled(model, engine.state.shrink))
        )
    if "EarlyStopping" in names and evaluator is not None:
        stopping = EarlyStopping(2, lambda engine: -engine.state.metrics["loss"], trainer, min_delta=0.01)
        evaluator.add_event_handler(Events.COMPLETED, stopping)
        trainer.register("ignite's early stopping", stopping)
        states["EarlyStopping"] = stopping.state_dict
    for name in names:
        trainer.add_event_handler(
            Events.ITERATION_COMPLETED(once=1), lambda engine, name: note(f"ignite: {name}"), name
        )


@torch.no_grad()
def _scaled(model, factor):
    model.stem.bias.mul_(1.0 - 0.01 * factor)


def attach_schedule(plan, trainer):
    """Attach the schedule of the learning rate, by LRSchedule."""
    kind = plan["schedule"]
    if kind == "none":
        return
    optimizer = next(iter(trainer.update.optimizers.values()))
    scheduler, lr = torch.optim.lr_scheduler, plan["numbers"]["lr"]
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
    }
    metric = "val/loss" if kind == "ReduceLROnPlateau" else None
    LRSchedule(made[kind](), metric=metric).attach(trainer)
