"""The benchmark of evaluation runs, and its contenders measure the same values."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import evaluation


def test_contenders_have_the_same_values_and_are_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "evaluation.json"
    assert evaluation.main(["--rounds", "2", "--batches", "5", "--json", str(target)]) == 0

    times = json.loads(target.read_text())["us_per_batch"]
    assert set(times) == {evaluation.PLAIN, evaluation.IGNITE, evaluation.OURS}
    assert {len(values) for values in times.values()} == {2}
    assert "goal 1.3:" in capsys.readouterr().out
