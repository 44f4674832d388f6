"""A handful of the judge's cases, and that it can fail."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.search.windows_search import drawn, judged, run


@pytest.mark.slow
def test_stopped_and_resumed_runs_over_windows_end_with_the_bits_of_the_whole_ones() -> None:
    result = run(5000, 40, None)
    assert result.failures == [] and result.outcomes["passed"] >= 12


def test_state_that_matters_and_is_not_saved_is_found() -> None:
    case = replace(
        drawn(0), stop="iteration", stops=(2,), way="stopped", counts=[8, 3], planted=True, evaluation="none"
    )
    assert len(judged({0: case}).failures) == 1
