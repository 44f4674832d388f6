"""Stopped anywhere, resumed, equal to the last bit: each setting meets each other one. The campaign has them all."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from tests.campaign.cases import DIMENSIONS, Case, Setup, campaign_matrix, pairwise
from tests.campaign.resuming import MODULES, Difference, Matrix
from tests.campaign.training import FORGOTTEN
from tests.faults.fork_server import ForkServer, shared

Servers = tuple[ForkServer, ForkServer]
CASES = pairwise()


@pytest.fixture(scope="module")
def servers() -> Servers:
    return shared(MODULES), shared(MODULES, number=1)


@pytest.fixture(scope="module")
def matrix(tmp_path_factory: pytest.TempPathFactory, servers: Servers) -> Matrix:
    return Matrix(tmp_path_factory.mktemp("matrix"), servers)


def in_matrix(case: Case, long: bool = False) -> Any:
    marks = [pytest.mark.long] if long else []
    return pytest.param(case, id=case.key.replace(" | ", "-").replace(" ", "-"), marks=marks)


def those(*workers: str) -> list[Case]:
    return [case for case in CASES if case.workers in workers]


# where the workers of a loader import torch two cases of each kind; the campaign has them all
TESTED = [in_matrix(case) for case in those("0", "fork")]
TESTED += [in_matrix(case, long=True) for workers in ("spawn", "forkserver") for case in those(workers)[:2]]


@pytest.mark.slow
@pytest.mark.faults
@pytest.mark.parametrize("case", TESTED)
def test_stopped_and_resumed_run_ends_with_the_bits_of_the_whole_one(matrix: Matrix, case: Case) -> None:
    matrix.run(case)


# the case in which a part that is not restored makes a difference, and the message (a pattern) that reports it
MISSED: dict[str, tuple[Case, str]] = {
    "random numbers": (Case(Setup(), "middle", "kill"), "metrics.jsonl"),
    "position in the data": (Case(Setup(), "middle", "kill"), "metrics.jsonl"),
    "scaler": (Case(Setup(precision="fp16"), "middle", "kill"), 'metrics.jsonl: .*"grad_norm": "inf".*found .*"nan"'),
    "optimizer": (Case(Setup(), "first", "kill"), 'metrics.jsonl: expected {"iteration": 4, '),
    "schedule": (Case(Setup(), "last", "stop"), "metrics.jsonl"),
    "average": (Case(Setup(ema=True), "last", "stop"), "metrics.jsonl: expected .*val/loss"),
    "early stopping": (Case(Setup(early_stopping=True), "last", "stop"), "metrics.jsonl: expected 12 lines, found 15"),
    "evaluation": (Case(Setup(), "evaluation", "stop"), "metrics.jsonl"),
    "best score": (Case(Setup(), "middle", "stop"), "end"),
    "interval of the log": (Case(Setup(), "middle", "kill"), "metrics.jsonl"),
    "log on disk": (Case(Setup(), "middle", "rewind"), "metrics.jsonl"),
}


@pytest.mark.slow
@pytest.mark.faults
@pytest.mark.parametrize("part", FORGOTTEN)
def test_what_is_not_restored_is_missed(part: str, tmp_path: Path, servers: Servers) -> None:
    case, where = MISSED[part]
    with pytest.raises(Difference, match=where):
        Matrix(tmp_path, servers, forget=part).run(case)


@pytest.mark.slow
@pytest.mark.faults
def test_fault_that_does_not_happen_is_not_a_success(tmp_path: Path, servers: Servers) -> None:
    with pytest.raises(Difference, match="not stopped as intended: code 0"):
        Matrix(tmp_path, servers).run(Case(Setup(early_stopping=True), "late", "stop"))


def test_each_value_meets_each_other_one_and_the_campaign_has_more() -> None:
    rows = [
        {name: getattr(case.setup if hasattr(case.setup, name) else case, name) for name in DIMENSIONS}
        for case in CASES
    ]
    for one, other in itertools.combinations(DIMENSIONS, 2):
        met = {(row[one], row[other]) for row in rows}
        assert met == set(itertools.product(DIMENSIONS[one], DIMENSIONS[other])), (one, other)
    assert len(CASES) < 30
    assert set(CASES) < set(campaign_matrix()) and len(campaign_matrix()) > 1000
