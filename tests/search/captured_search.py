"""The judge of ``Update(capture=True)``: losses are the hand-written loop's up to rounding, a resume is exact.

A case is one of the update judge's, of few models and shapes, as each graph takes seconds to compile the first time and
tenths from torch's cache. Two cases of five are also stopped after some update and resumed by what a new process would
build; every loss, norm, weight, buffer and state must then have the bits of the captured run that was not stopped.
"""

from __future__ import annotations

import math
import random
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from ignite.engine import Events

from ignite_engine import Trainer, TrainingEvents, Update
from ignite_engine.handlers import Checkpoint
from tests.search import update_cases
from tests.search.common import PASSED, REFUSED, Failure, Result, case_seeds
from tests.search.update_cases import HABITS, HAPPENED, LISTENERS, Built, Case, build, change
from tests.search.update_search import DTYPES, FAILED, Passes, Trained, by_hand, groups_of, quiet

PROGRAMS = (
    ("linear", "plain", "mean", "none"),
    ("linear", "batch norm", "shape (1,)", "scalar"),
    ("linear", "dropout", "mean", "none"),
    ("embedding", "plain", "mean", "scalar"),
    ("tied", "plain", "mean", "view"),
)
"""Trunk, middle, loss and what is reported."""
CHOICES: dict[str, tuple[Any, ...]] = {
    "frozen": ("nothing", "trunk"),
    "optimizer": ("SGD", "momentum", "Adam", "AdamW", "RMSprop"),
    "grouping": ("one group", "two groups", "two optimizers"),
    "precision": ("fp32", "bf16", "fp16"),
    "scale": (2.0**10, 2.0**120),
    "steps": (None, 1, 2, 3),
    "clip": (None, 1e-2, 1.0),
    "log_grad_norm": (False, True),
    "weights": ("none", "samples", "some zero"),
    "change": ("nothing", "freeze", "unfreeze", "options", "add group"),
    "attached": ("nothing", "LR scheduler"),
}
_FIXED: dict[str, Any] = {"dtype": "fp32", "outside": "nothing", "implementation": "default", "engine": "Trainer"}
RESUMED = "resumed: bit for bit"
FEATURES = (
    *(f"program: {trunk}, {middle}" for trunk, middle, _, _ in PROGRAMS),
    *(f"{name}: {value}" for name, values in CHOICES.items() for value in values),
    *(f"listener: {event.name}" for event in LISTENERS),
    *(f"habit: {name}" for name in HABITS),
    *(f"happened: {name}" for name in HAPPENED if name != "group without weight"),
    RESUMED,
)
TOLERANCE = {"fp32": 1e-4, "bf16": 2e-2, "fp16": 2e-3}
"""Of losses, relative, as docs/captured_updates.md has them; of norms ten times, as early differences have grown."""

DECIDED_BY_ROUNDING = 0.1


def draw(number: int) -> Case:
    """The case of a number."""
    random_ = random.Random(f"captured {number}")
    drawn = {
        name: values[0] if random_.random() < 1 / 3 else random_.choice(values) for name, values in CHOICES.items()
    }
    drawn |= dict(zip(("trunk", "middle", "loss", "extras"), random_.choice(PROGRAMS), strict=True)) | _FIXED
    if drawn["precision"] != "fp16":
        drawn["scale"] = CHOICES["scale"][0]
    count = random_.randint(4, 8)
    case = update_cases.draw(number)
    sizes = (*[4] * count, *([3] if random_.random() < 0.5 else []))
    return replace(case, **drawn, sizes=sizes, epochs=1, change_at=random_.randint(1, 3))


def is_resumed(case: Case) -> bool:
    return case.number % 5 < 2 and len(updates_of(case)) > 1


def updates_of(case: Case) -> list[list[int]]:
    return groups_of(list(case.sizes), case.steps or 1)


def run(seed: int, cases: int | None, minutes: float | None) -> Result:
    """Judge the cases ``seed``, ``seed + 1``, ...; each failure is printed as it is found."""
    result, started = Result("captured", seed, FEATURES, reasons=Counter()), time.monotonic()
    with quiet():
        for number in case_seeds(seed, cases, minutes):
            reason, outcome, features = judge(draw(number))
            if outcome == FAILED:
                assert reason is not None
                result.failures.append(Failure("captured", number, reason))
                print(result.failures[-1], flush=True)
                continue
            result.outcomes[outcome] += 1
            if outcome == REFUSED:
                result.reasons[f"{outcome}: {reason}"] += 1
            else:
                result.exercised.update(features)
    result.seconds = time.monotonic() - started
    return result


def judge(case: Case) -> tuple[str | None, str, set[str]]:
    """What differs first, or why the case is refused; the outcome; and the features that took part."""
    hand, whole = by_hand(case), by_capture(case)
    features = case.features() | {f"happened: {name}" for name in hand.happened}
    features.add(f"program: {case.trunk}, {case.middle}")
    if hand.error is not None and whole.error is not None:
        return whole.error, REFUSED, features
    reason = difference(case, hand, whole)
    if reason is not None and case.precision != "fp32":
        reason = difference(case, hand, whole, [by_hand(replace(case, precision="fp32")), *by_hand_rounded(case)])
    if reason is None and is_resumed(case):
        features.add(RESUMED)
        at = random.Random(f"stopped {case.number}").randint(1, len(updates_of(case)) - 1)
        with tempfile.TemporaryDirectory() as folder:
            stopped = by_capture(case, Path(folder), stop_at=at)
            resumed = by_capture(case, Path(folder), resumed_at=at)
        reason = exact_difference(at, whole, stopped, resumed)
    return reason, PASSED if reason is None else FAILED, features


def by_hand_rounded(case: Case) -> Iterator[Trained]:
    """The loop from weights that are as far away as rounding to the case's precision moves a number."""
    epsilon = torch.finfo(DTYPES[case.precision] or torch.float32).eps / 4
    for seed in range(3):
        built, generator = build(case), torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in built.model.parameters():
                parameter.mul_(1 + epsilon * torch.randn(parameter.shape, generator=generator))
        yield by_hand(case, built)


def by_capture(
    case: Case, folder: Path | None = None, *, stop_at: int | None = None, resumed_at: int | None = None
) -> Trained:
    """Trained by a captured ``Update``; stopped after an update, or resumed there from the checkpoint in ``folder``."""
    trained, built = Trained(), build(case)
    if resumed_at is not None and resumed_at >= case.change_at:
        change(case, built)
    try:
        trainer = trainer_of(case, built)
        note(case, built, trainer, trained)
        if folder is not None:
            checkpoint = Checkpoint(folder)
            checkpoint.attach(trainer)
            if resumed_at is not None:
                checkpoint.resume()
        if stop_at is not None:
            trainer.add_event_handler(
                Events.ITERATION_COMPLETED(once=stop_at), lambda: trainer.request_stop("the search")
            )
        torch.manual_seed(case.number % 2**31)
        data: Any = built.epochs[0] if folder is not None else Passes(built.epochs)
        trainer.run(data, max_epochs=1)
        scaler = trainer.update.scaler  # type: ignore[attr-defined]
        trained.finish(built, None if scaler is None else scaler.get_scale())
    except Exception as error:
        trained.error = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"
    return trained


def trainer_of(case: Case, built: Built) -> Trainer:
    update = Update(
        built.model,
        built.optimizers if len(built.optimizers) > 1 else built.optimizers["optimizer"],
        built.loss_fn,
        precision=case.precision,
        clip_norm=case.clip,
        weight_fn=built.weight_fn,
        grad_scaler={"init_scale": case.scale, "growth_interval": 2} if case.precision == "fp16" else None,
        log_grad_norm=case.log_grad_norm,
        capture=True,
    )
    trainer = Trainer(update, case.steps)
    if built.scheduler is not None:
        trainer.register("scheduler", built.scheduler)
        trainer.add_event_handler(TrainingEvents.OPTIMIZER_STEP_COMPLETED, lambda: built.scheduler.step())
    for name in case.listeners:
        trainer.add_event_handler(TrainingEvents[name], lambda: HABITS[case.habit](built.model))
    return trainer


def note(case: Case, built: Built, trainer: Trainer, trained: Trained) -> None:
    """Keep what each update reports, and change the program where the case says so."""
    state = trainer.state

    def after() -> None:
        output = dict(state.output)
        if "grad_norm" in output:
            trained.norms.append(output.pop("grad_norm").item())
        trained.outputs.append({name: value.item() for name, value in output.items()})
        if state.iteration == case.change_at:
            change(case, built)

    trainer.add_event_handler(Events.ITERATION_COMPLETED, after)
    trainer.add_event_handler(TrainingEvents.OPTIMIZER_STEP_SKIPPED, lambda: trained.skipped.append(state.iteration))


def difference(case: Case, hand: Trained, captured: Trained, others: Sequence[Trained] = ()) -> str | None:
    """What is not the same up to rounding, in one line.

    Args:
        others: the loop again, where rounding alone makes it another one; as far as one of them has come from it, a
            captured update may have come, too. An optimizer that divides a gradient by its own size makes a large
            difference of a small one: from where it is more than a tenth, rounding decides what the losses are, and
            nothing is compared.
    """
    if hand.error != captured.error:
        return f"the loop: {hand.error or 'trains'}; captured: {captured.error or 'trains'}"
    if hand.skipped != captured.skipped:
        return f"the loop skips updates {hand.skipped}, the captured update {captured.skipped}"
    for name, value in hand.tensors.items():  # whatever the precision
        if not value.is_floating_point() and not torch.equal(value, captured.tensors[name]):
            return f"{name} is {value.tolist()}, captured {captured.tensors[name].tolist()}"
    if case.middle == "dropout":  # other numbers are drawn
        return None
    tolerance = TOLERANCE[case.precision]
    runs = (hand, captured, *others)
    numbers = {
        "loss": [[output["loss"] for output in each.outputs] for each in runs],
        "grad_norm": [each.norms for each in runs],
    }
    for name, (expected, found, *rounded) in numbers.items():
        if len(expected) != len(found):
            return f"{name}: {len(expected)} values of the loop, {len(found)} of the captured update"
        allowed = tolerance if name == "loss" else 10 * tolerance
        rounded = [values for values in rounded if len(values) == len(expected)]  # else other updates were skipped
        by_rounding = 0.0
        for index, (one, other) in enumerate(zip(expected, found, strict=True)):
            size = abs(one) + 1e-2
            if math.isfinite(one):
                changes = [abs(one - values[index]) / size for values in rounded if math.isfinite(values[index])]
                by_rounding = max([by_rounding, *changes])
            if by_rounding > DECIDED_BY_ROUNDING:
                break
            if one == one != other and not abs(one - other) <= (allowed + by_rounding) * size:
                return f"{name} of update {index + 1} is {one!r}, captured {other!r}"
    return None


def exact_difference(at: int, whole: Trained, stopped: Trained, resumed: Trained) -> str | None:
    """What is not the same bit for bit, in one line."""
    error = stopped.error or resumed.error
    if error is not None:
        return f"stopped after update {at}: {error}"
    for name in ("outputs", "norms"):
        expected, found = getattr(whole, name), getattr(stopped, name) + getattr(resumed, name)
        if repr(expected) != repr(found):
            return f"stopped after update {at} and resumed: {name} differ"
    for name, value in whole.tensors.items():
        if not torch.equal(value.nan_to_num(nan=123.0), resumed.tensors[name].nan_to_num(nan=123.0)):
            return f"stopped after update {at} and resumed: {name} differs"
    return None
