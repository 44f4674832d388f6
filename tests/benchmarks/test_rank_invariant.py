"""The benchmark of rank-invariant updates runs, and times both contenders in every round."""

from __future__ import annotations

import pytest

from benchmarks.rank_invariant import main, measured

SMALL = {"rounds": 2, "steps": 2, "micro_batches": 2, "batch": 2, "width": 8}


def test_both_contenders_are_timed_in_every_round() -> None:
    times = measured(1, SMALL)

    assert set(times) == {"usual", "invariant"} and all(len(each) == 2 and min(each) > 0 for each in times.values())


def test_it_prints_the_ratio(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [f"--{name.replace('_', '-')}={value}" for name, value in SMALL.items()]

    assert main([*arguments, "--ranks", "1"]) == 0
    assert "1 rank: ordinary" in capsys.readouterr().out
