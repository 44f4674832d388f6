"""Whom a rank says to have failed, from the rows that three ranks write."""

import pytest

from ignite_engine.ranks.watch import BEAT_S, Row, verdict

TIMED_OUT = "Timed out waiting 3000ms"


def failure(*, broken=(), silent=None, left=None, timeout_s=60.0, seconds=100.0):
    """Of three ranks that write twice a second, and what one that reads all rows says first; None: nothing."""
    lost = {rank: TIMED_OUT if rank in broken else None for rank in range(3)}
    rows = {rank: Row(f"iteration {rank}", lost[rank]) for rank in range(3)}
    if left is not None:
        rows[1] = Row(left, lost[1], left=True)
    for count in range(int(seconds / BEAT_S)):
        now = count * BEAT_S
        silent_s = {rank: now if rank == silent else 0.0 for rank in range(3)}
        if (found := verdict(rows, silent_s, now if broken else None, timeout_s)) is not None:
            return found, now


@pytest.mark.row("G5")
@pytest.mark.parametrize(
    ("how", "expected", "words", "within_s"),
    [
        ({"silent": 1, "timeout_s": 5.0}, ([1], "lost"), "rank 1 for 5 s heartbeat: iteration 1", 6),
        ({"silent": 1, "broken": [0]}, ([1], "lost"), "rank 1 heartbeat: iteration 1", 3),
        ({"broken": [0, 2]}, ([1], "lost"), "rank 1 ranks 0, 2 3000ms heartbeat: iteration 1", 4),
        ({"broken": [0, 1, 2]}, ([], "lost"), "0: 1: iteration 1; 2: iteration 2", 4),  # they wait for each other
        ({"broken": [0], "left": "raised SystemExit(3)"}, ([1], "left"), "rank 1 SystemExit(3) rank 0 waited", 4),
    ],
)
def test_rank_that_others_waited_for_is_named_with_what_it_did_last(how, expected, words, within_s):
    found, after_s = failure(**how)
    assert (found.ranks, found.kind) == expected and after_s <= within_s
    assert not [word for word in words.split() if word not in found.line], found.line


@pytest.mark.parametrize("how", [{}, {"left": "returned from its function"}, {"silent": 1, "left": "returned"}])
def test_ranks_that_live_or_have_left_have_not_failed(how):
    assert failure(**how) is None
