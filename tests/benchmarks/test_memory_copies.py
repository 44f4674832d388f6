"""The benchmark of copies in memory runs, and times every contender in every round."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import memory_copies
from benchmarks.gpt import Shape


@pytest.mark.slow
def test_every_contender_is_timed_in_every_round(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_copies, "SHAPE", Shape(layers=1, heads=1, width=8, context=8, vocabulary=256))
    report = tmp_path / "report.json"
    assert memory_copies.main(["--rounds", "2", "--iterations", "2", "--json", str(report)]) == 0

    contenders = json.loads(report.read_text())["contenders"]
    assert list(contenders) == list(memory_copies.CONTENDERS)
    assert all(len(contender["ms"]) == 2 and min(contender["ms"]) > 0 for contender in contenders.values())
