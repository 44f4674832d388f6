"""The benchmark of start and exit runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import start_and_exit


@pytest.mark.long  # each process imports torch
def test_processes_are_measured_from_their_start_to_their_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "start.json"
    given = ["--rounds", "1", "--contenders", "plain,handlers", "--json", str(target)]
    assert start_and_exit.main(given) == 0

    rounds = json.loads(target.read_text())["rounds"]
    assert set(rounds) == {"plain", "handlers"}
    for (row,) in rounds.values():
        assert len(row) == len(start_and_exit.COLUMNS) and min(row) > 0
    assert "exit of handlers above plain" in capsys.readouterr().out
