"""The benchmark of rank-invariant updates runs, and times both contenders in every round."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import rank_invariant
from benchmarks.turns import Times

SMALL = {"rounds": 2, "steps": 2, "micro_batches": 2, "batch": 2, "width": 8}


def test_both_contenders_are_timed_in_every_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    times: Times = {}
    measured = rank_invariant.measured
    monkeypatch.setattr(rank_invariant, "measured", lambda *given: times.update(measured(*given)) or times)
    arguments = [f"--{name.replace('_', '-')}={value}" for name, value in SMALL.items()]
    target = tmp_path / "report.json"

    assert rank_invariant.main([*arguments, "--ranks", "1", "--json", str(target)]) == 0
    assert set(times) == {"usual", "invariant"} and all(len(each) == 2 and min(each) > 0 for each in times.values())
    assert "1 rank: ordinary" in capsys.readouterr().out
    (goal,) = json.loads(target.read_text())["goals"]
    assert goal["goal"] == 1.05 and goal["low"] <= goal["value"] <= goal["high"]
