"""A handful of the judge's cases, and that it can fail."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.search.common import PASSED, REFUSED
from tests.search.resume_plan import CHOICES, LISTS, draw, settled
from tests.search.resume_search import ANNOUNCED, ANNOUNCED_EQUAL, FAILED, Judge

pytestmark = [pytest.mark.faults, pytest.mark.long]
SEEDS = (5, 7, 11, 16, 20, 22, 25, 38)
PLANTED = ("handler counter", "handler generator", "module attribute", "module buffer")


@pytest.fixture(scope="module")
def judge() -> Iterator[Judge]:
    with Judge() as made:
        yield made


def plain(**drawn: Any) -> dict[str, Any]:
    """The plainest case, stopped in its second epoch."""
    plan = draw(0) | {name: values[0] for name, values in CHOICES.items()} | {name: [] for name in LISTS}
    stop = {"how": "request_stop", "event": "ITERATION_COMPLETED", "after": 0.5}
    return settled(plan | {"stops": [stop]} | drawn)


@pytest.mark.parametrize("seed", SEEDS)
def test_stopped_and_resumed_run_ends_with_the_bits_of_the_whole_one_or_said_it_would_not(
    judge: Judge, seed: int
) -> None:
    verdict = judge.judge(draw(seed))
    assert verdict.outcome != FAILED, verdict.reason


@pytest.mark.parametrize("planted", PLANTED)
def test_state_that_matters_and_is_not_saved_is_found_or_announced(judge: Judge, planted: str) -> None:
    assert judge.judge(plain()).outcome == PASSED
    verdict = judge.judge(plain(planted=planted))
    assert verdict.outcome in (FAILED, ANNOUNCED) and verdict.reason.startswith("iteration")


@pytest.mark.parametrize(
    ("planted", "drawn"),
    [
        ("random numbers stay", {"handlers": ["a batch of random numbers"]}),
        ("generators stay", {"layers": ["generator of its own"]}),
        ("reported values stay where they are", {"extras": "a parameter", "log": "every 3", "saves": "iterations"}),
        ("reported values stay where they are", {"extras": "a buffer", "log": "every 3", "saves": "iterations"}),
    ],
)
def test_mistake_of_the_engine_is_found(judge: Judge, planted: str, drawn: dict[str, Any]) -> None:
    stop = {"how": "request_stop", "event": "ITERATION_COMPLETED", "after": 0.4}  # within an interval of the log
    drawn |= {"stops": [stop]}
    assert judge.judge(plain(**drawn)).outcome == PASSED
    assert judge.judge(plain(**drawn, planted=planted)).outcome == FAILED


@pytest.mark.parametrize(
    ("drawn", "feature"),
    [
        ({"data": "windows"}, "data: windows"),
        ({"calls": "refused ones before"}, "calls: refused ones before"),
        ({"damage": "newest checkpoint", "saves": "iterations"}, "damage: newest checkpoint"),
    ],
)
def test_what_is_drawn_takes_part(judge: Judge, drawn: dict[str, Any], feature: str) -> None:
    verdict = judge.judge(plain(**drawn))
    assert verdict.outcome == PASSED, verdict.reason
    assert feature in verdict.features


def test_refused_call_that_changes_the_run_is_found(judge: Judge) -> None:
    drawn: dict[str, Any] = {"layers": ["dropout"], "planted": "each call draws"}
    assert judge.judge(plain(**drawn)).outcome == PASSED
    assert judge.judge(plain(**drawn, calls="refused ones before")).outcome == FAILED


def test_run_that_is_refused_at_construction_is_no_pass(judge: Judge) -> None:
    assert judge.judge(plain(optimizer="SGD", precision="fp12")).outcome == REFUSED


def test_a_case_is_a_function_of_its_number() -> None:
    assert draw(5) == draw(5) and draw(5) != draw(6)


def test_announced_data_is_no_pass(judge: Judge) -> None:
    verdict = judge.judge(plain(data="batch_sampler"))
    assert verdict.outcome in (ANNOUNCED, ANNOUNCED_EQUAL)
