"""The judge of ``Update``: it trains a random program, and so does a loop written by hand; all bits are compared.

What is compared bit for bit: parameters, buffers, the optimizers' states, the scale of the loss, the norms before
clipping, and which updates were skipped. The reported loss and extras are compared to rounding: the loop sums them one
by one, ``Update`` at once.

Rules of ``Update`` that the loop follows, as every loop has to choose: a micro-batch that weighs nothing is left out, a
group that weighs nothing is skipped, and with several optimizers an overflow in one skips all.
"""

from __future__ import annotations

import logging
import time
import warnings
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace

import torch
from ignite.engine import Engine, Events
from torch import Tensor

from ignite_engine import Group, Trainer, TrainingEvents, Update
from ignite_engine.events import EVENT_COUNTERS
from tests.search.common import PASSED, REFUSED, Failure, Result, case_seeds, device_kind
from tests.search.update_cases import CHOICES, FEATURES, HABITS, WRITING, build, change, draw

FAILED = "failed"
NO_FUNCTION = "no function of its seed"
"""The loop written by hand differs from itself: torch, not the engine, gives other bits each time."""
DTYPES = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass
class Trained:
    """What a loop left behind."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    outputs: list[dict[str, float]] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    skipped: list[int] = field(default_factory=list)
    happened: set[str] = field(default_factory=set)
    error: str | None = None

    def finish(self, built, scale):
        self.tensors = {f"model.{name}": value for name, value in built.model.state_dict().items()}
        for name, optimizer in built.optimizers.items():
            for index, parameter in enumerate(each for group in optimizer.param_groups for each in group["params"]):
                self.tensors[f"{name}.{index}"] = parameter.detach()
                for key, value in optimizer.state.get(parameter, {}).items():
                    if isinstance(value, Tensor):
                        self.tensors[f"{name}.{index}.{key}"] = value
            lrs = [float(group["lr"]) for group in optimizer.param_groups]
            self.tensors[f"{name}.lr"] = torch.tensor(lrs, dtype=torch.float64)
        if scale is not None:
            self.tensors["scale"] = torch.tensor(scale, dtype=torch.float64)
        self.tensors = {name: value.clone() for name, value in self.tensors.items()}


def run(seed, cases, minutes):
    """Judge the cases ``seed``, ``seed + 1``, ...; each failure is printed as it is found."""
    result, started = Result("update", seed, FEATURES), time.monotonic()
    with quiet():
        for number in case_seeds(seed, cases, minutes):
            reason, outcome, features = judge(draw(number))
            if outcome == FAILED:
                assert reason is not None
                result.failures.append(Failure("update", number, reason))
                print(result.failures[-1], flush=True)
            else:
                result.outcomes[outcome] += 1
            if outcome in (REFUSED, NO_FUNCTION):
                result.reasons[f"{outcome}: {reason}"] += 1
            else:
                result.exercised.update(features)
    result.seconds = time.monotonic() - started
    return result


def judge(case):
    """What differs first, or why the case is refused; the outcome; and the features that took part."""
    hand, engine = by_hand(case), by_trainer(case)
    features = case.features() | {f"happened: {name}" for name in hand.happened}
    if hand.error is not None and engine.error is not None:  # the program itself is wrong, e.g. for torch's autograd
        return hand.error, REFUSED, features
    reason = difference(hand, engine)
    if reason is None:
        return None, PASSED, features
    unstable = any(difference(hand, by_hand(case)) is not None for _ in range(5))
    return reason, NO_FUNCTION if unstable else FAILED, features


def show(number):
    """The case of a number, a line for each field."""
    return "\n".join(f"{name}: {value}" for name, value in asdict(draw(number)).items())


def simplified(number):
    """Of a case that fails what it needs to fail: every other field is made plain."""
    case = draw(number)
    if judge(case)[1] != FAILED:
        return f"Case {number}: {judge(case)[1]}."
    plain = {name: values[0] for name, values in CHOICES.items()} | {"listeners": (), "epochs": 1}
    for name, value in plain.items():
        simpler = replace(case, **{name: value})
        if simpler != case and judge(simpler)[1] == FAILED:
            case = simpler
    needed = [f"{name}: {value}" for name, value in asdict(case).items() if plain.get(name, value) != value]
    return f"{judge(case)[0]}\nneeds {'; '.join(needed) or 'nothing'} (sizes {case.sizes}, change_at {case.change_at})"


def difference(hand, engine):
    """What differs between two loops, in one line."""
    if hand.error != engine.error:
        return f"the loop: {hand.error or 'trains'}; Update: {engine.error or 'trains'}"
    if hand.skipped != engine.skipped:
        return f"the loop skips updates {hand.skipped}, Update {engine.skipped}"
    if list(hand.tensors) != list(engine.tensors):
        return f"names differ: {sorted(set(hand.tensors) ^ set(engine.tensors))[:3]}"
    for index, (one, other) in enumerate(zip(hand.norms, engine.norms, strict=True)):
        if one != other and not (one != one and other != other):
            return f"grad_norm of update {index + 1} is {one!r}, Update's {other!r}"
    for name, value in hand.tensors.items():
        own = engine.tensors[name]
        if value.shape != own.shape or value.stride() != own.stride() or value.dtype != own.dtype:
            return f"{name}: {value.shape} {value.dtype}, Update's {own.shape} {own.dtype} or other strides"
        if not torch.equal(value.nan_to_num(nan=123.0), own.nan_to_num(nan=123.0)):
            return f"{name} differs by up to {(value.double() - own.double()).abs().max().item():.3g}"
    for index, (ours, theirs) in enumerate(zip(hand.outputs, engine.outputs, strict=True)):
        if list(ours) != list(theirs):
            return f"output of update {index + 1} has {list(ours)}, Update's {list(theirs)}"
        for name, number in ours.items():
            try:
                torch.testing.assert_close(theirs[name], number, rtol=2e-2, atol=1e-2, equal_nan=True)
            except AssertionError:
                return f"{name} of update {index + 1} is {number}, Update's {theirs[name]}"
    return None


def by_trainer(case):
    """Trained by ``Trainer`` and ``Update``."""
    trained, built = Trained(), build(case)
    try:
        update = Update(
            built.model,
            built.optimizers if len(built.optimizers) > 1 else built.optimizers["optimizer"],
            built.loss_fn,
            precision=case.precision,
            clip_norm=case.clip,
            weight_fn=built.weight_fn,
            grad_scaler=_scaler_options(case) if case.precision == "fp16" else None,
            log_grad_norm=case.log_grad_norm,
        )
        trainer = Trainer(update, case.steps)
        if case.engine != "Trainer":
            trainer = Engine(update)
            trainer.register_events(*TrainingEvents, event_to_attr=EVENT_COUNTERS)
        state = trainer.state

        def after():
            output = dict(state.output)
            if "grad_norm" in output:
                trained.norms.append(output.pop("grad_norm").item())
            trained.outputs.append({name: value.item() for name, value in output.items()})
            if state.iteration == case.change_at:
                change(case, built)

        trainer.add_event_handler(Events.ITERATION_COMPLETED, after)
        trainer.add_event_handler(
            TrainingEvents.OPTIMIZER_STEP_SKIPPED, lambda: trained.skipped.append(state.iteration)
        )
        if built.scheduler is not None:
            trainer.add_event_handler(TrainingEvents.OPTIMIZER_STEP_COMPLETED, lambda: built.scheduler.step())
        for name in case.listeners:
            trainer.add_event_handler(TrainingEvents[name], lambda: HABITS[case.habit](built.model))
        torch.manual_seed(case.number % 2**31)
        data = Passes(built.epochs)
        if case.engine != "Trainer" and case.steps is not None:
            data = Passes([[Group(each) for each in groups_of(batches, case.steps)] for batches in built.epochs])
        trainer.run(data, max_epochs=case.epochs)
        trained.finish(built, None if update.scaler is None else update.scaler.get_scale())
    except Exception as error:
        trained.error = _named(error)
    return trained


def groups_of(batches, size):
    """The micro-batches of each update."""
    return [batches[start : start + size] for start in range(0, len(batches), size)]


class Passes:
    """The batches of each epoch, without a length."""

    def __init__(self, epochs):
        self.epochs = iter(epochs)

    def __iter__(self):
        return iter(next(self.epochs))


def by_hand(case, built=None):
    """Trained by a loop that uses nothing of the engine; ``built`` from the case if it is not given."""
    trained, built = Trained(), built or build(case)
    dtype, optimizers = DTYPES[case.precision], list(built.optimizers.values())
    scaler = torch.amp.GradScaler(device_kind(), enabled=case.precision == "fp16", **_scaler_options(case))
    size, iteration = case.steps or 1, 0
    torch.manual_seed(case.number % 2**31)
    try:
        for batches in built.epochs:
            for group in groups_of(batches, size):
                iteration += 1
                if len(group) < size:
                    trained.happened.add("short group")
                output = one_update(case, built, group, trained, scaler, dtype, optimizers, iteration)
                trained.outputs.append(output)
                if iteration == case.change_at:
                    change(case, built)
                    trained.happened.add("changed")
        trained.finish(built, scaler.get_scale() if scaler.is_enabled() else None)
    except Exception as error:
        trained.error = _named(error)
    return trained


def one_update(
    case,
    built,
    group,
    trained,
    scaler,
    dtype,
    optimizers,
    iteration,
):
    """Forward, backward, clip and step, as in torch's examples; the reported means."""

    def after(event):
        if case.habit in WRITING and event.name in case.listeners:
            HABITS[case.habit](built.model)

    weights = [1.0 if built.weight_fn is None else float(built.weight_fn(batch)) for batch in group]
    total = sum(weights)
    for optimizer in optimizers:
        optimizer.zero_grad()
    if not total:
        trained.skipped.append(iteration)
        trained.happened.add("group without weight")
        after(TrainingEvents.OPTIMIZER_STEP_SKIPPED)
        return {"loss": 0.0}
    means = {}
    for batch, weight in zip(group, weights, strict=True):
        if not weight:
            continue
        moved = {name: tensor.to(device_kind()) for name, tensor in batch.items()}
        with torch.autocast(device_kind(), dtype=dtype, enabled=dtype is not None):
            result = built.loss_fn(built.model, moved)
        loss, extras = result if isinstance(result, tuple) else (result, {})
        scaler.scale(loss / len(group) if built.weight_fn is None else loss * (weight / total)).backward()
        for name, value in {"loss": loss, **extras}.items():
            means[name] = means.get(name, 0.0) + value.item() * weight / total
        after(TrainingEvents.BACKWARD_COMPLETED)
    finite = True
    if scaler.is_enabled():
        for optimizer in optimizers:
            if any(p.grad is not None for each in optimizer.param_groups for p in each["params"]):
                scaler.unscale_(optimizer)
        gradients = [p.grad for p in built.parameters() if p.grad is not None]
        finite = all(
            bool(torch.isfinite(each.coalesce().values() if each.is_sparse else each).all()) for each in gradients
        )
    after(TrainingEvents.OPTIMIZER_STEP_STARTED)
    if case.clip is not None or case.log_grad_norm:
        trained.norms.append(clip(built.parameters_of_the_norm(), case.clip, trained))
    if finite:
        for optimizer in optimizers:
            optimizer.step()
        if built.scheduler is not None:
            built.scheduler.step()
        after(TrainingEvents.OPTIMIZER_STEP_COMPLETED)
    else:
        trained.skipped.append(iteration)
        trained.happened.add("overflow")
        after(TrainingEvents.OPTIMIZER_STEP_SKIPPED)
    scaler.update()
    return means


def clip(parameters, limit, trained):
    """By torch's own function; where it refuses sparse gradients, by its formula on their values."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    if any(each.is_sparse for each in gradients):
        for parameter in parameters:
            if parameter.grad is not None and parameter.grad.is_sparse:
                parameter.grad = parameter.grad.coalesce()
        values = [p.grad.values() if p.grad.is_sparse else p.grad for p in parameters if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(values)
        if limit is not None:
            for value in values:
                value.mul_((limit / (norm + 1e-6)).clamp(max=1.0))
    elif limit is None:
        norm = torch.nn.utils.get_total_norm(gradients)
    else:
        norm = torch.nn.utils.clip_grad_norm_(parameters, limit)
    if limit is not None and norm.item() > limit:
        trained.happened.add("clipped")
    return norm.item()


def _scaler_options(case):
    return {"init_scale": case.scale, "growth_interval": 2}


def _named(error):
    lines = str(error).splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:120]}"


@contextmanager
def quiet():
    """One thread, as tensors are tiny; no warnings and no log, as programs that torch refuses are drawn too."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.set_num_threads(threads)
        logging.disable(logging.NOTSET)
