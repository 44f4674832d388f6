"""An update, trained by the engine and by a loop that uses nothing of it; all bits of both are compared.

Rules that the loop follows, as every loop has to choose: a micro-batch that weighs nothing is left out, a group that
weighs nothing is skipped, with several optimizers an overflow in one skips all, and reported values are the weighted
means of the group.
"""

import math
import tempfile
from dataclasses import dataclass, field

import torch
from ignite.engine import Engine, Events
from torch import nn

from ignite_engine import Trainer, TrainingEvents, Update, seed_everything
from ignite_engine.handlers import Checkpoint
from ignite_engine.update.micro_batches import Group
from tests.kit.resume import leaves, same_bits
from tests.property.case import WRITING
from tests.property.models import LossFn, Net, optimizers_of, samples_of, weight_fn_of

DTYPES = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
TOLERANCE = {"fp32": 1e-3, "bf16": 5e-2, "fp16": 2e-2}
"""Of the losses of captured updates, relative."""


@dataclass
class Built:
    """What is trained."""

    model: Net
    loss_fn: LossFn
    optimizers: dict
    epochs: list
    scheduler: object = None

    def parameters(self):
        """Of the optimizers, each once, in their order; in the model's where all are the model's, as a loop clips."""
        groups = [group for optimizer in self.optimizers.values() for group in optimizer.param_groups]
        held = {id(each): each for group in groups for each in group["params"]}
        in_order = [each for each in self.model.parameters() if id(each) in held]
        return in_order if len(in_order) == len(held) else list(held.values())


@dataclass
class Trained:
    """What a loop left behind."""

    state: dict = field(default_factory=dict)
    outputs: list = field(default_factory=list)
    norms: list = field(default_factory=list)
    skipped: list = field(default_factory=list)
    happened: set = field(default_factory=set)
    error: str | None = None

    def finish(self, built, scaler):
        optimizers = {name: state_of(each) for name, each in built.optimizers.items()}
        outside = list(built.loss_fn.parameters())
        scale = None if scaler is None else scaler.get_scale()
        found = {"model": built.model.state_dict(), "outside": outside, "optimizers": optimizers, "scale": scale}
        found["random numbers"] = torch.get_rng_state()
        self.state = {
            path: value.clone() if isinstance(value, torch.Tensor) else value for path, value in leaves(found)
        }


def state_of(optimizer):
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    groups = [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
    return {"parameters": parameters, "state": [optimizer.state.get(each, {}) for each in parameters], "groups": groups}


def build(case):
    seed_everything(case.seed)
    model, loss_fn = Net(case), LossFn(case)
    if "frozen" in case.layers and case.change == "freeze":
        model.layer("frozen").requires_grad_(False)
    optimizers = optimizers_of(case, model, loss_fn)
    columns = samples_of(sum(case.sizes) * case.epochs)
    if case.non_finite:
        columns[0][-1] = math.nan
    batches = list(zip(*(column.split(list(case.sizes) * case.epochs) for column in columns), strict=True))
    count = len(case.sizes)
    built = Built(model, loss_fn, optimizers, [batches[at * count : (at + 1) * count] for at in range(case.epochs)])
    first = optimizers["main"]
    if case.hooked == "LR scheduler":
        built.scheduler = torch.optim.lr_scheduler.ExponentialLR(first, 0.9)
    elif case.hooked == "step hook":
        first.register_step_pre_hook(
            lambda optimizer, *_: [g.update(lr=g["lr"] * 0.95) for g in optimizer.param_groups] and None
        )
    elif case.hooked == "gradient hook":
        model.stem.weight.register_hook(lambda gradient: gradient * 2)
    return built


def change(case, built):
    """What a handler, or the loop, does after update ``change_at``."""
    optimizer, model = list(built.optimizers.values())[-1], built.model
    if case.change == "add group":
        optimizer.add_param_group({"params": [model.spare], "lr": 0.03})
    elif case.change == "append":
        optimizer.param_groups[-1]["params"].append(model.spare)
    elif case.change == "clear and add":
        kept = [each for group in optimizer.param_groups for each in group["params"]]
        optimizer.param_groups.clear()
        optimizer.add_param_group({"params": [*kept[::-1], model.spare]})
    elif case.change == "replace":
        old, model.stem.weight = model.stem.weight, nn.Parameter(model.stem.weight.detach() * 0.5)
        for each in built.optimizers.values():
            for group in each.param_groups:
                group["params"][:] = [model.stem.weight if one is old else one for one in group["params"]]
    elif case.change == "freeze":
        model.stem.requires_grad_(False)
    elif case.change == "unfreeze":
        model.requires_grad_(True)
    elif case.change == "options":
        for group in optimizer.param_groups:
            group["lr"] *= 0.5


def form_habit(case, model):
    gradients = [each.grad for each in model.parameters() if each.grad is not None]
    if case.habit == "reads gradients":
        [each.sum() for each in gradients]
    elif case.habit == "computes under autocast":
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
            model.head(torch.ones(1, 8))
    elif case.habit == "halves gradients":
        [each.mul_(0.5) for each in gradients]
    else:
        [each.data.mul_(0.99) for each in model.parameters()]


def groups_of(batches, size):
    return [batches[start : start + size] for start in range(0, len(batches), size)]


def scaler_options(case):
    return {"init_scale": case.scale, "growth_interval": 2}


class Passes:
    """The batches of each epoch, without a length."""

    def __init__(self, epochs):
        self.epochs = iter(epochs)

    def __iter__(self):
        return iter(next(self.epochs))


def by_engine(case, *, kind=Update, capture=False, folder=None, stop_at=None):
    """Trained by ``Update``; of a captured one in ``folder`` stopped after an update, and resumed where it has one."""
    trained, built = Trained(), build(case)
    try:
        update = kind(
            built.model,
            built.optimizers if len(built.optimizers) > 1 else built.optimizers["main"],
            built.loss_fn,
            precision=case.precision,
            clip_norm=case.clip,
            weight_fn=weight_fn_of(case),
            grad_scaler=scaler_options(case) if case.precision == "fp16" else None,
            log_grad_norm=case.grad_norm,
            non_finite=case.non_finite,
            accumulate="capture" if capture else None,
        )
        trainer = Trainer(update, case.steps)
        if case.engine != "Trainer":
            trainer = Engine(update)
            counters = {TrainingEvents[name]: "micro_batches" for name in ("BACKWARD_COMPLETED",)}
            steps = {each: "iteration" for each in TrainingEvents if each not in counters}
            trainer.register_events(*TrainingEvents, event_to_attr=counters | steps)
            trainer.state.micro_batches = 0
        state = trainer.state

        def after():
            output = dict(state.output)
            if "grad_norm" in output:
                trained.norms.append(output.pop("grad_norm").item())
            trained.outputs.append({name: value.item() for name, value in output.items()})
            if state.iteration == case.change_at:
                change(case, built)
            if state.iteration == stop_at:
                trainer.request_stop("here")

        trainer.add_event_handler(Events.ITERATION_COMPLETED, after)
        skipped = TrainingEvents.OPTIMIZER_STEP_SKIPPED
        trainer.add_event_handler(skipped, lambda: trained.skipped.append(state.iteration))
        if built.scheduler is not None:
            if folder is not None:
                trainer.register("scheduler", built.scheduler)
            trainer.add_event_handler(TrainingEvents.OPTIMIZER_STEP_COMPLETED, lambda: built.scheduler.step())
        for name in case.listeners:
            trainer.add_event_handler(TrainingEvents[name], lambda: form_habit(case, built.model))
        data = Passes(built.epochs)
        if case.engine != "Trainer" and case.steps is not None:
            data = Passes([[Group(each) for each in groups_of(batches, case.steps)] for batches in built.epochs])
        if folder is not None:
            checkpoint, data = Checkpoint(folder), built.epochs[0]
            checkpoint.attach(trainer)
            if stop_at is None:
                checkpoint.resume()
        seed_everything(case.seed)
        trainer.run(data, max_epochs=case.epochs)
        trained.finish(built, update.scaler)
    except Exception as error:
        trained.error = _named(error)
    return trained


def by_hand(case):
    """Trained by a loop as in torch's examples."""
    trained, built = Trained(), build(case)
    scaler = torch.amp.GradScaler("cpu", enabled=case.precision == "fp16", **scaler_options(case))
    iteration = 0
    seed_everything(case.seed)
    try:
        for batches in built.epochs:
            for group in groups_of(batches, case.steps or 1):
                iteration += 1
                if len(group) < (case.steps or 1):
                    trained.happened.add("short group")
                _update(case, built, group, trained, scaler, iteration)
                if iteration == case.change_at and case.change != "nothing":
                    change(case, built)
                    trained.happened.add("changed")
        trained.finish(built, scaler if scaler.is_enabled() else None)
    except Exception as error:
        trained.error = _named(error)
    return trained


def _update(case, built, group, trained, scaler, iteration):
    def after(name):
        if case.habit in WRITING and name in case.listeners:
            form_habit(case, built.model)

    dtype, weight_fn, optimizers = DTYPES[case.precision], weight_fn_of(case), list(built.optimizers.values())
    weights = [1.0 if weight_fn is None else float(weight_fn(batch)) for batch in group]
    total = sum(weights)
    buffers = {name: each.clone() for name, each in built.model.named_buffers()}
    for optimizer in optimizers:
        optimizer.zero_grad()
    if not total:
        trained.skipped.append(iteration)
        trained.happened.add("group without weight")
        after("OPTIMIZER_STEP_SKIPPED")
        trained.outputs.append({"loss": 0.0})
        return
    means = {}
    for batch, weight in zip(group, weights, strict=True):
        if not weight:
            continue
        with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
            result = built.loss_fn(built.model, batch)
        loss, extras = result if isinstance(result, tuple) else (result, {})
        scaler.scale(loss / len(group) if weight_fn is None else loss * (weight / total)).backward()
        for name, value in {"loss": loss, **extras}.items():
            means[name] = means.get(name, 0.0) + value.item() * weight / total
        after("BACKWARD_COMPLETED")
    trained.outputs.append(means)
    gradients = [each for each in built.parameters() if each.grad is not None]
    finite = True
    if scaler.is_enabled():
        for optimizer in optimizers:
            if any(each.grad is not None for one in optimizer.param_groups for each in one["params"]):
                scaler.unscale_(optimizer)
        values = [each.grad.coalesce().values() if each.grad.is_sparse else each.grad for each in gradients]
        finite = all(bool(torch.isfinite(each).all()) for each in values)
    after("OPTIMIZER_STEP_STARTED")
    if case.clip is not None or case.grad_norm or case.non_finite:
        norm = clip(built.parameters(), case.clip, trained)
        trained.norms.append(norm)
        if case.non_finite and not math.isfinite(norm):
            finite = False
            for name, each in built.model.named_buffers():
                each.copy_(buffers[name])
    if finite:
        for optimizer in optimizers:
            optimizer.step()
        if built.scheduler is not None:
            built.scheduler.step()
    else:
        trained.skipped.append(iteration)
        trained.happened.add("not finite")
    scaler.update()
    after("OPTIMIZER_STEP_COMPLETED" if finite else "OPTIMIZER_STEP_SKIPPED")


def clip(parameters, limit, trained):
    """By torch's own function; where it refuses sparse gradients, by its formula on their values."""
    gradients = [each.grad for each in parameters if each.grad is not None]
    if any(each.is_sparse for each in gradients):
        for each in parameters if limit is not None else ():
            if each.grad is not None and each.grad.is_sparse:
                each.grad = each.grad.coalesce()
        gradients = [each.grad for each in parameters if each.grad is not None]
        values = [each.coalesce().values() if each.is_sparse else each for each in gradients]
        norm = nn.utils.get_total_norm(values)
        if limit is not None:
            for value in values:
                value.mul_((limit / (norm + 1e-6)).clamp(max=1.0))
    elif limit is None:
        norm = nn.utils.get_total_norm(gradients)
    else:
        norm = nn.utils.clip_grad_norm_(parameters, limit)
    if limit is not None and norm.item() > limit:
        trained.happened.add("clipped")
    return norm.item()


def difference(hand, engine, *, exact=True):
    """What differs first between two loops: bits but for reported values, which are summed in another order."""
    if hand.error != engine.error:
        return f"the loop: {hand.error or 'trains'}; Update: {engine.error or 'trains'}"
    if hand.skipped != engine.skipped:
        return f"the loop skips updates {hand.skipped}, Update {engine.skipped}"
    for at, (one, other) in enumerate(zip(hand.norms, engine.norms, strict=True), 1):
        if exact and repr(one) != repr(other):
            return f"grad_norm of update {at} is {one!r}, Update's {other!r}"
    if hand.state.keys() != engine.state.keys():
        return f"other names: {sorted(map(str, hand.state.keys() ^ engine.state.keys()))[:3]}"
    for path, value in hand.state.items() if exact else ():
        own = engine.state[path]
        if not same_bits(value, own):
            return f"{path} is {value}, Update's {own}"
        if isinstance(value, torch.Tensor) and not value.is_sparse and value.stride() != own.stride():
            return f"{path} has the strides {value.stride()}, Update's {own.stride()}"
    for at, (ours, theirs) in enumerate(zip(hand.outputs, engine.outputs, strict=True), 1):
        if list(ours) != list(theirs):
            return f"update {at} reports {list(ours)}, Update {list(theirs)}"
        for name, number in ours.items():
            if not math.isclose(number, theirs[name], rel_tol=2e-2, abs_tol=1e-2) and not (
                math.isnan(number) and math.isnan(theirs[name])
            ):
                return f"{name} of update {at} is {number}, Update's {theirs[name]}"
    return None


def capture_difference(case):
    """What differs between a captured update and the loop, up to rounding; and a resumed one and itself, in any bit."""
    hand, whole = by_hand(case), by_engine(case, capture=True)
    if hand.error or whole.error:
        return None if hand.error and whole.error else f"the loop: {hand.error}; captured: {whole.error}"
    if hand.skipped != whole.skipped:
        return f"the loop skips updates {hand.skipped}, captured {whole.skipped}"
    if not {"dropout", "checkpointed"} & set(case.layers):  # others draw the same numbers
        for at, (ours, theirs) in enumerate(zip(hand.outputs, whole.outputs, strict=True), 1):
            if not math.isclose(ours["loss"], theirs["loss"], rel_tol=TOLERANCE[case.precision], abs_tol=1e-3):
                return f"the loss of update {at} is {ours['loss']}, captured {theirs['loss']}"
    with tempfile.TemporaryDirectory() as folder:
        at = max(1, len(whole.outputs) // 2)
        by_engine(case, capture=True, folder=folder, stop_at=at)
        resumed = by_engine(case, capture=True, folder=folder)
    if resumed.error or resumed.outputs != whole.outputs[at:]:
        return f"resumed after update {at}: {resumed.error} {resumed.outputs}, not {whole.outputs[at:]}"
    differ = [path for path, value in whole.state.items() if not same_bits(value, resumed.state.get(path))]
    return f"resumed after update {at} there differ {differ[:3]}" if differ else None


def _named(error):
    lines = str(error).splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:120]}"
