"""A few of the judge's cases, and that mistakes in a captured update are found."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from ignite_engine.capture.capture import Capture
from ignite_engine.capture.gradients import GradientGraph
from ignite_engine.capture.step import StepGraph
from tests.search.captured_search import CHOICES, difference, draw, judge, run
from tests.search.common import PASSED
from tests.search.update_cases import Case
from tests.search.update_search import FAILED, quiet

pytestmark = [
    pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler, which torch.compile calls"),
    pytest.mark.long,
]


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with quiet():
        yield


def plain(**drawn: Any) -> Case:
    """The plainest case, of six updates."""
    named = {name: values[0] for name, values in CHOICES.items()}
    program = {"trunk": "linear", "middle": "plain", "loss": "mean", "extras": "none", "sizes": (4,) * 6}
    return replace(draw(2), **(named | program | {"listeners": ()} | drawn))


def test_a_captured_update_trains_as_the_loop_written_by_hand_and_resumes_exactly() -> None:
    result = run(0, 2, None)

    assert not result.failures, "\n".join(map(str, result.failures))
    assert result.outcomes[PASSED] == 2 and result.exercised["resumed: bit for bit"] == 2


ALL_OF_THEM = {"attached": "LR scheduler", "steps": 2, "weights": "samples", "sizes": (4,) * 12}
NORMED = {"middle": "batch norm", "loss": "shape (1,)", "extras": "scalar"}
CLIPPED = ALL_OF_THEM | {"clip": 1e-2}  # of which each update is small


def gradients_are_kept(patch: pytest.MonkeyPatch) -> None:
    call, kept = GradientGraph.__call__, dict[int, list[Tensor]]()

    def keeping(self: GradientGraph, batch: Any, scale: Tensor) -> Any:
        gradients, *rest = call(self, batch, scale)
        kept[id(self)] = [one + other for one, other in zip(gradients, kept.get(id(self), gradients), strict=True)]
        return kept[id(self)], *rest

    agrees = GradientGraph.agrees
    patch.setattr(GradientGraph, "agrees", lambda self, *arguments: agrees(self, *arguments) or True)
    patch.setattr(GradientGraph, "__call__", keeping)


def the_first_rate_stays(patch: pytest.MonkeyPatch) -> None:
    rate, first = StepGraph._rate, dict[tuple[int, int], Any]()

    def stale(self: StepGraph, number: int, index: int, lr: Any, device: torch.device) -> Tensor:
        return rate(self, number, index, first.setdefault((number, index), lr), device)

    patch.setattr(StepGraph, "_rate", stale)


def micro_batches_weigh_nothing_else(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Capture, "_factor", lambda self, scale: torch.ones(()))


def clipping_is_left_out(patch: pytest.MonkeyPatch) -> None:
    init: Callable[..., None] = StepGraph.__init__
    patch.setattr(StepGraph, "__init__", lambda self, norm, *rest: init(self, 1e9, *rest))


def buffers_stay(patch: pytest.MonkeyPatch) -> None:
    call = GradientGraph.__call__

    def without_buffers(self: GradientGraph, batch: Any, scale: Tensor) -> Any:
        before = {name: buffer.clone() for name, buffer in self.buffers.items()}
        result = call(self, batch, scale)
        for name, buffer in self.buffers.items():
            buffer.copy_(before[name])
        return result

    agrees = GradientGraph.agrees
    patch.setattr(GradientGraph, "agrees", lambda self, *arguments: agrees(self, *arguments) or True)
    patch.setattr(GradientGraph, "__call__", without_buffers)


@pytest.mark.parametrize(
    ("plant", "drawn"),
    [
        (gradients_are_kept, ALL_OF_THEM),
        (the_first_rate_stays, ALL_OF_THEM),
        (micro_batches_weigh_nothing_else, ALL_OF_THEM),
        (clipping_is_left_out, CLIPPED),
        (buffers_stay, NORMED),
    ],
)
def test_a_mistake_that_is_planted_is_found(
    plant: Callable[[pytest.MonkeyPatch], None], drawn: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)

    assert judge(plain(**drawn))[1] == FAILED


@pytest.mark.parametrize("drawn", [ALL_OF_THEM, CLIPPED, NORMED])
def test_without_a_mistake_the_same_case_passes(drawn: dict[str, Any]) -> None:
    reason, outcome, _ = judge(plain(**drawn))
    assert outcome == PASSED, reason


def losses(*values: float) -> Any:
    return SimpleNamespace(error=None, skipped=[], outputs=[{"loss": value} for value in values], norms=[], tensors={})


@pytest.mark.parametrize(
    ("precision", "hand", "captured", "in_fp32", "is_wrong"),
    [
        ("fp16", 2.723, 2.730, None, True),
        ("fp16", 2.723, 2.730, 2.750, False),  # the plain way is further from fp32
        ("fp16", 2.723, 2.760, 2.750, True),
        ("fp16", 2.723, 2.760, float("nan"), True),
        ("fp32", 2.0, float("nan"), None, True),
        ("fp32", float("inf"), float("inf"), None, False),
        ("fp32", float("nan"), 2.0, None, False),
    ],
)
def test_what_a_precision_itself_changes_a_captured_update_may_change(
    precision: str, hand: float, captured: float, in_fp32: float | None, is_wrong: bool
) -> None:
    exact = [] if in_fp32 is None else [losses(in_fp32)]
    assert (difference(plain(precision=precision), losses(hand), losses(captured), exact) is not None) is is_wrong


@pytest.mark.parametrize(
    ("first_in_fp32", "last", "is_wrong"),
    [(6.6, 3.739, False), (6.6, 4.2, True), (6.9, 4.2, False)],  # 7 % by the precision, and 12 %
)
def test_a_difference_that_a_precision_has_made_stays_in_later_updates(
    first_in_fp32: float, last: float, is_wrong: bool
) -> None:
    hand, captured, exact = losses(6.162, 3.465), losses(6.0, last), [losses(first_in_fp32, 3.4)]

    assert (difference(plain(precision="bf16"), hand, captured, exact) is not None) is is_wrong
