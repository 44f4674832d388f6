"""A handful of the judge's cases, and that it can fail."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import ignite_engine.update.one
from ignite_engine import Update
from ignite_engine.step.parameters import Parameters
from tests.search.common import PASSED
from tests.search.update_cases import CHOICES, Case, draw
from tests.search.update_search import FAILED, judge, quiet, run

SEEDS = (0, 100, 200, 300)


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with quiet():
        yield


def plain(**drawn: Any) -> Case:
    """The plainest case."""
    return replace(draw(0), **({name: values[0] for name, values in CHOICES.items()} | {"listeners": ()} | drawn))


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
def test_update_trains_as_the_loop_written_by_hand(seed: int) -> None:
    result = run(seed, 40, None)

    assert not result.failures, "\n".join(map(str, result.failures))
    assert result.outcomes[PASSED] >= 35


@pytest.mark.slow
def test_each_feature_takes_part_in_a_passing_case() -> None:
    """Each value of each dimension alone, in two updates of two micro-batches."""
    for name, values in CHOICES.items():
        for value in values[1:]:
            case = plain(**({"steps": 2, "precision": "fp16"} | {name: value}))
            if name in ("dtype", "grouping"):
                case = replace(case, precision="fp32")
            assert judge(case)[1] == PASSED, (name, value, judge(case)[0])


def test_a_case_is_a_function_of_its_number() -> None:
    assert draw(5) == draw(5) and draw(5) != draw(6)


def keep_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Parameters, "clear_gradients", lambda self: None)


def clip_each_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def clip(parameters: list[Any], max_norm: float) -> Tensor:
        for parameter in parameters:
            norm = torch.nn.utils.clip_grad_norm_([parameter], max_norm)
        return norm

    monkeypatch.setattr(ignite_engine.update.one, "clip_gradients", clip)


def share_one_cast(monkeypatch: pytest.MonkeyPatch) -> None:
    accumulate = Update.accumulate

    def shared(self: Update, *arguments: Any) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return accumulate(self, *arguments)

    monkeypatch.setattr(Update, "accumulate", shared)


def step_on_overflow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ignite_engine.step.precision.LossScaler.unscale_all", lambda self, optimizers: True)


@pytest.mark.parametrize(
    ("plant", "drawn"),
    [
        (keep_gradients, {}),
        (clip_each_alone, {"clip": 1e-2}),
        (share_one_cast, {"precision": "bf16", "middle": "fp32 island", "steps": 2}),
        (step_on_overflow, {"precision": "fp16", "scale": 2.0**120}),
    ],
)
def test_a_defect_that_is_planted_is_found(
    plant: Callable[..., None], drawn: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert judge(plain(**drawn))[1] == PASSED
    plant(monkeypatch)

    assert judge(plain(**drawn))[1] == FAILED
