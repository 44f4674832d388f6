"""A plan is checked where it is made."""

from __future__ import annotations

import re
from typing import Any

import pytest

from ignite_engine.checkpointing import LoadPlan


def test_the_three_plans() -> None:
    assert LoadPlan.resume() == LoadPlan() and LoadPlan().parts is None
    assert LoadPlan.fine_tune().parts == ("model",)
    assert LoadPlan.warm_start().parts == ("model", "optimizer")
    changed = LoadPlan.fine_tune(parts=["model", "ema"], strict=False)
    assert changed.parts == ["model", "ema"] and not changed.strict


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"include": ["model:"]}, "include has the pattern 'model:'"),
        ({"ignore": "model"}, "ignore is a list of patterns, got 'model'"),
        ({"parts": [""]}, "parts has the pattern ''"),
        ({"parts": ["model:head.*"]}, "parts names whole parts, got 'model:head.*': give names inside a part to inclu"),
        ({"parts": ["model", "data"]}, "parts has 'data' without 'counters'"),
        ({"rename": {"re:(": "a"}}, "rename has 're:(', which is not a regular expression: "),
    ],
)
def test_a_malformed_plan_is_refused(changes: dict[str, Any], line: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(line)}"):
        LoadPlan(**changes)


@pytest.mark.parametrize("counters", ["counters", "trainer"])
def test_data_comes_with_the_counters(counters: str) -> None:
    assert LoadPlan(parts=["data", counters]).parts == ["data", counters]


def test_a_prefix_need_not_be_a_regular_expression() -> None:
    assert LoadPlan(rename={"a(": "b."}).rename == {"a(": "b."}
