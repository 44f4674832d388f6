"""A handful of the judge's cases, and that it can fail."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from tests.search.uneven_cases import Case, draw
from tests.search.uneven_search import Pool, judge, pool

pytestmark = [pytest.mark.distributed, pytest.mark.long]


@pytest.fixture(scope="module")
def processes() -> Iterator[Pool]:
    with pool() as made:
        yield made


@pytest.mark.timeout(300)
def test_ranks_train_as_one_process_and_resume(processes: Pool) -> None:
    happened = set[str]()
    for number in (1, 3, 6, 19, 38, 41, 56, 72):
        reason, took_part = judge(draw(number), processes)
        assert reason is None, f"{draw(number)}: {reason}"
        happened |= {each for each in took_part if each.startswith("happened")}
    assert len(happened) == 5, happened


def plain(**drawn: object) -> Case:
    case = replace(draw(0), ranks=2, batches=(4, 2), batch_size=2, accumulation=None, weighted=False, epochs=2)
    return replace(case, model="linear", stop_at=0.5, ranks_after=2, batch_size_after=2, data="own state", **drawn)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("plant", "reason"), [("ahead is consumed", "resumed from 4"), ("each for itself", "0.weight is ")]
)
def test_a_defect_that_is_planted_is_found(processes: Pool, plant: str, reason: str) -> None:
    assert judge(plain(), processes)[0] is None
    processes.plant = plant
    try:
        assert (judge(plain(), processes)[0] or "").startswith(reason)
    finally:
        processes.plant = None


def test_a_case_is_a_function_of_its_number() -> None:
    assert draw(5) == draw(5) != draw(6)
