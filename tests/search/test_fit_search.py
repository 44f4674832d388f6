"""A handful of the judge's cases, and that it finds what is planted."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ignite_engine import evaluator
from ignite_engine.runs import recipe
from ignite_engine.step.accumulate import forward_backward
from ignite_engine.update import one
from tests.search import fit_search
from tests.search.fit_cases import CHOICES, Plan, draw, settled
from tests.search.fit_search import judge
from tests.search.update_search import quiet

pytestmark = pytest.mark.long
SEEDS = (3, 6, 12, 19, 27, 30, 53, 59)


@pytest.fixture(autouse=True)
def silence() -> Iterator[None]:
    with quiet():
        yield


def plain(**drawn: Any) -> Plan:
    """The plainest case, of two updates and a short one in each of three epochs."""
    numbers = {"batch size": 4, "samples": 11, "epochs": 3, "iterations": 7, "first share": 0.5, "lr": 0.05}
    return settled(draw(0) | {name: values[0] for name, values in CHOICES.items()} | numbers | drawn)


@pytest.mark.parametrize("number", SEEDS)
def test_fit_trains_as_the_loop_by_hand(number: int) -> None:
    assert judge(draw(number))[0] is None


def test_a_case_is_a_function_of_its_number() -> None:
    assert draw(5) == draw(5) != draw(6)


Plant = Callable[[pytest.MonkeyPatch], None]


def forgotten(argument: str) -> Plant:
    """``fit`` does not use one of its arguments."""

    def plant(monkeypatch: pytest.MonkeyPatch) -> None:
        fit = fit_search.fit

        def forgetful(*given: Any, **arguments: Any) -> Any:
            arguments.pop(argument, None)
            return fit(*given, **arguments)

        monkeypatch.setattr(fit_search, "fit", forgetful)

    return plant


def evaluates_in_training_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluator.nn.Module, "eval", lambda module: module)


def steps_every_scheduler_with_the_optimizer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recipe, "steps_per_epoch", lambda *given: False)


def divides_a_short_group_as_a_full_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(one, "micro_batch_scales", lambda batches, **options: [0.5] * len(batches))


def keeps_reported_values_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forward_backward, "scalar", lambda value: value.detach().float())


def writes_when_it_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    fit = fit_search.fit

    def writing(*given: Any, directory: Path, **arguments: Any) -> Any:
        try:
            return fit(*given, directory=directory, **arguments)
        except (TypeError, ValueError):
            with contextlib.suppress(OSError):
                (directory / "config.yaml").write_text("of the refused call")
            raise

    monkeypatch.setattr(fit_search, "fit", writing)


def trains_without_the_optimizers_state_after_a_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    load = torch.optim.Optimizer.load_state_dict

    def forget(optimizer: Any, state: Any) -> None:
        load(optimizer, state)
        optimizer.state.clear()

    monkeypatch.setattr(torch.optim.Optimizer, "load_state_dict", forget)


@pytest.mark.parametrize(
    ("plant", "drawn"),
    [
        (forgotten("clip_norm"), {"clip": "0.1"}),
        (forgotten("weight_fn"), {"weights": "samples", "accumulation": "2"}),
        (forgotten("resume"), {"calls": "stopped, other rate"}),
        (forgotten("sampler"), {"data": "sampler"}),
        (forgotten("precision"), {"precision": "bf16"}),
        (forgotten("schedule"), {"schedule": "linear"}),
        (forgotten("optimizer"), {"optimizer": "two"}),
        (forgotten("schedule_per"), {"schedule": "LambdaLR per step"}),
        (forgotten("accumulation_steps"), {"accumulation": "2"}),
        (forgotten("metrics"), {"metrics": "one number and a vector"}),
        (evaluates_in_training_mode, {"model": "batch norm"}),
        (steps_every_scheduler_with_the_optimizer, {"schedule": "StepLR"}),
        (divides_a_short_group_as_a_full_one, {"accumulation": "2"}),
        (keeps_reported_values_where_they_are, {"extras": "a parameter", "log": "epochs"}),
        (keeps_reported_values_where_they_are, {"extras": "a buffer", "log": "epochs"}),
        (writes_when_it_refuses, {"calls": "refused between"}),
        (trains_without_the_optimizers_state_after_a_stop, {"calls": "stopped"}),
    ],
)
def test_what_is_planted_is_found(plant: Plant, drawn: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plain(**drawn)
    assert judge(plan)[0] is None
    plant(monkeypatch)
    assert judge(plan)[0] is not None
