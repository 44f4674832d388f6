"""The benchmark of stop votes runs every contender in every round. Contents, never times."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import stop_vote


@pytest.mark.distributed
@pytest.mark.usefixtures("forked_ranks")
def test_every_contender_is_timed_in_every_round(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "numbers.json"
    assert stop_vote.main(["--rounds", "2", "--steps", "3", "--width", "8", "--json", str(target)]) == 0
    times = json.loads(target.read_text())["seconds_per_step"]
    assert set(times) == {stop_vote.NONE, stop_vote.ENGINE, stop_vote.EVERY}
    assert all(len(values) == 2 for values in times.values())
    assert capsys.readouterr().out.count("to no vote") == 3
