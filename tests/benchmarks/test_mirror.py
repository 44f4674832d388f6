"""The benchmark of a mirror measures both kinds of run, and the one with a mirror has uploaded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import mirror

SMALL = ["--rounds", "2", "--iterations", "45", "--mib", "0.1"]


def test_both_kinds_are_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "report.json"
    assert mirror.main([*SMALL, "--json", str(target)]) == 0
    report = json.loads(target.read_text())

    assert {kind: len(times) for kind, times in report["times"].items()} == {mirror.WITH: 2, mirror.WITHOUT: 2}
    assert all(min(times) > 0 for times in report["times"].values()) and len(report["goals"]) == 1
    assert "iteration with a mirror / without" in capsys.readouterr().out


def test_the_run_with_a_mirror_uploads(tmp_path: Path) -> None:
    mirror.measure(tmp_path / "run", str(tmp_path / "mirror"), 45, 0.1)

    assert [path.name for path in (tmp_path / "mirror").iterdir()] == ["iteration_00000040"]
