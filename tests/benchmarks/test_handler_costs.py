"""The benchmark of handlers' costs runs and measures every contender."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import handler_costs


def test_every_contender_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "costs.json"
    assert handler_costs.main(["--rounds", "2", "--iterations", "60", "--json", str(target)]) == 0

    times = json.loads(target.read_text())["us_per_iteration"]
    assert {len(values) for values in times.values()} == {2} and min(map(min, times.values())) > 0
    assert {handler_costs.BARE, handler_costs.LOGGED, handler_costs.ALL} <= set(times)
    assert "goal 0.5:" in capsys.readouterr().out
