"""A handful of the judge's cases on 3 ranks, and that it can fail."""

from __future__ import annotations

from typing import Any

import pytest

from tests.search.common import Result
from tests.search.ranks_search import SILENCE, judged, plan_of
from tests.search.resume_plan import CHOICES, LISTS
from tests.search.resume_search import ANNOUNCED

pytestmark = [pytest.mark.distributed, pytest.mark.long, pytest.mark.timeout(180)]
DRAWN = [number for number in range(1000, 1030) if plan_of(number)["ranks"] == "3"][:9]


PLANTED = [1, 20, 21, 22, 23, 24]


def plain(**drawn: Any) -> dict[str, Any]:
    """The plainest case on 3 ranks, stopped in its middle."""
    plan = plan_of(0) | {name: values[0] for name, values in CHOICES.items()} | {name: [] for name in LISTS}
    stop = {"how": "request_stop", "event": "ITERATION_COMPLETED", "after": 0.5}
    ranks = {
        "ranks": "3",
        "ddp": "default",
        "update": "Update",
        "wrapping": "all",
        "stop rank": 1,
        "rewinds": False,
        "votes at once": True,
    }
    return plan | ranks | {"stops": [stop]} | drawn


@pytest.fixture(scope="module")
def result() -> Result:
    added = {
        0: plain(),
        1: plain(planted="handler counter"),
        2: plain(update="own function"),
        3: plain(update="own function, trained apart"),
    }
    apart: list[dict[str, Any]] = [
        {"wrapping": "nothing"},
        {"wrapping": "a part"},
        {"wrapping": "bypassed"},
        {"outside": "temperature"},
        {"layers": ["frozen"], "handlers": ["unfreezing by flag"]},
    ]
    late = {"stops": [{"how": "request_stop", "event": "ITERATION_COMPLETED", "after": 0.8}]}
    added |= {10 + place: plain(**drawn, **late) for place, drawn in enumerate(apart)}
    added |= {20 + place: plain(**drawn, **late, planted=SILENCE) for place, drawn in enumerate(apart)}
    return judged({number: plan_of(number) for number in DRAWN} | added)


def test_stopped_and_resumed_run_ends_with_the_bits_of_the_whole_one_or_said_it_would_not(result: Result) -> None:
    assert [each for each in result.failures if each.case not in PLANTED] == []
    assert result.outcomes["passed"] >= 4 and result.outcomes[ANNOUNCED] >= 1


def test_state_that_matters_and_is_not_saved_is_found(result: Result) -> None:
    assert sorted(each.case for each in result.failures) == PLANTED
