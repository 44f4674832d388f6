"""Weights, optimizer state and every line of the log have the same bits on 1, 2, 3 and 4 ranks."""

import json

import pytest

from tests.ext.rank_invariant.runs import KILLED, MODULES, START, Case, arguments, end_of
from tests.faults.fork_server import shared

pytestmark = pytest.mark.distributed

PAIRS = (
    Case("fp32", tokens=True, clip_norm=0.5),
    Case("bf16", tokens=False, micro_batches=7, log_every=3, limit=7),
    Case("fp32", tokens=False, micro_batches=6, batch_size=2, workers=2),
    Case("fp16", tokens=True, micro_batches=4, clip_norm=0.5),
)


@pytest.fixture(scope="module")
def server():
    return shared(MODULES)


def train(server, folder, ranks, case, kill_at=None):
    code = server.call(START, *arguments(folder, ranks, case, kill_at), output=folder.with_suffix(".txt"))
    assert code == (0 if kill_at is None else KILLED), folder.with_suffix(".txt").read_text()
    return code


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "others"),
    [
        # slow: the tests below kill the first, and train on 2 to 4 ranks too
        pytest.param(PAIRS[0], (2, 3, 4), marks=pytest.mark.long),
        (PAIRS[1], (3,)),
        pytest.param(PAIRS[2], (4,), marks=pytest.mark.long),
        (PAIRS[3], (2,)),
    ],
)
def test_bits_do_not_depend_on_the_number_of_ranks(server, tmp_path, case, others):
    for ranks in (1, *others):
        train(server, tmp_path / f"{ranks}", ranks, case)

    for ranks in others:
        assert end_of(tmp_path / f"{ranks}") == end_of(tmp_path / "1"), f"on {ranks} ranks"


@pytest.mark.row("K4")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "starts"),
    [
        (PAIRS[0], ((2, 3), (4, 5), (1, 7), (3, None))),
        # rank 1 begins with a tail in which it has nothing to do
        (Case("fp16", micro_batches=8, evaluate=False), ((1, 3), (2, None))),
    ],
    ids=["2 to 4 to 1 to 3", "1 to 2 before a tail"],
)
def test_run_killed_and_restarted_on_other_ranks_ends_with_the_same_bits(server, tmp_path, case, starts):
    train(server, tmp_path / "whole", 1, case)
    for ranks, kill_at in starts:
        train(server, tmp_path / "restarted", ranks, case, kill_at)

    restarted, whole = end_of(tmp_path / "restarted"), end_of(tmp_path / "whole")
    assert restarted | {"gradients": None} == whole | {"gradients": None}


@pytest.mark.slow
def test_usual_reduction_has_other_bits(server, tmp_path):
    """Else the comparisons above would prove nothing."""
    case = Case(invariant=False)
    for ranks in (1, 2):
        train(server, tmp_path / f"{ranks}", ranks, case)

    ends = [end_of(tmp_path / f"{ranks}") for ranks in (1, 2)]
    assert ends[0]["model"] != ends[1]["model"]
    assert [json.loads(line)["iteration"] for line in ends[0]["lines"]] == [
        json.loads(line)["iteration"] for line in ends[1]["lines"]
    ]
