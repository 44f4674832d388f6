"""The stall benchmark runs, and measures every contender in every round."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.checkpoint_stall import main


def test_every_contender_saves_in_every_round(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = tmp_path / "report.json"
    assert main(["--rounds", "2", "--width", "16", "--json", str(report), "--directory", str(tmp_path)]) == 0

    stalls = json.loads(report.read_text())["stall"]
    assert {name: len(values) for name, values in stalls.items()} == dict.fromkeys(stalls, 2) and len(stalls) == 7
    assert all(value > 0 for values in stalls.values() for value in values)
    assert "ours, background, lost while copying / the stall of the memory copy" in capsys.readouterr().out
