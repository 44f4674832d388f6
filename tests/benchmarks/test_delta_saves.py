"""The benchmark of saves by rows saves and restores both ways, with the same bits. Contents, never times."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import delta_saves


def test_both_ways_are_saved_and_restored(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "numbers.json"
    arguments = ["--mib", "2", "--rounds", "2", "--touched", "0.2", "--directory", str(tmp_path), "--json", str(target)]
    assert delta_saves.main(arguments) == 0
    found = json.loads(target.read_text())
    assert found["same_bits"] and len(found["seconds"]["base"]) == 1
    assert len(found["seconds"]["rows"]) == len(found["taking"]) == 4  # five times a fifth and its numbers is too much
    assert [len(found["restoring"][name]) for name in ("full", "rows")] == [2, 2]
    assert "the same bits: True" in capsys.readouterr().out
