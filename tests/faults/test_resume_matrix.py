"""Stopped anywhere, resumed, equal to the last bit: each setting meets each other one."""

import pytest

from tests.faults.fork_server import ForkServer, shared
from tests.faults.matrix.cases import Case, Setup, pairwise
from tests.faults.matrix.resuming import MODULES, Difference, Matrix
from tests.faults.matrix.training import FORGOTTEN

Servers = tuple[ForkServer, ForkServer]
CASES = pairwise()


@pytest.fixture(scope="module")
def servers():
    return shared(MODULES), shared(MODULES, number=1)


@pytest.fixture(scope="module")
def matrix(tmp_path_factory, servers):
    return Matrix(tmp_path_factory.mktemp("matrix"), servers)


def in_matrix(case, long=False):
    marks = [pytest.mark.long] if long else []
    return pytest.param(case, id=case.key.replace(" | ", "-").replace(" ", "-"), marks=marks)


def those(*workers):
    return [case for case in CASES if case.workers in workers]


# where the workers of a loader import torch two cases of each kind
TESTED = [in_matrix(case) for case in those("0", "fork")]
TESTED += [in_matrix(case, long=True) for workers in ("spawn", "forkserver") for case in those(workers)[:2]]


@pytest.mark.slow
@pytest.mark.faults
@pytest.mark.parametrize("case", TESTED)
def test_stopped_and_resumed_run_ends_with_the_bits_of_the_whole_one(matrix, case):
    matrix.run(case)


# the case in which a part that is not restored makes a difference, and the message (a pattern) that reports it
MISSED = {
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
def test_what_is_not_restored_is_missed(part, tmp_path, servers):
    case, where = MISSED[part]
    with pytest.raises(Difference, match=where):
        Matrix(tmp_path, servers, forget=part).run(case)


@pytest.mark.slow
@pytest.mark.faults
def test_fault_that_does_not_happen_is_not_a_success(tmp_path, servers):
    with pytest.raises(Difference, match="not stopped as intended: code 0"):
        Matrix(tmp_path, servers).run(Case(Setup(early_stopping=True), "late", "stop"))
