"""The benchmark of a follower measures a run beside one that has evaluated, and one alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import follower
from benchmarks.beside import EVERY

SMALL = ["--rounds", "1", "--iterations", str(60 * EVERY), "--mib", "0.1", "--batches", "2"]


@pytest.mark.long
def test_both_kinds_are_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "report.json"
    assert follower.main([*SMALL, "--json", str(target)]) == 0
    report = json.loads(target.read_text())

    assert {kind: len(times) for kind, times in report["times"].items()} == {follower.WITH: 1, follower.WITHOUT: 1}
    assert max(report["evaluated"]) > 0
    assert "iteration with a follower / without" in capsys.readouterr().out
