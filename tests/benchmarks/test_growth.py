"""The benchmark of growth times equal work: the weights of each plain loop. Contents, never times."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks import growth
from benchmarks.turns import TimedBatches


@pytest.mark.slow
def test_every_row_is_timed_in_every_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(growth, "TENSORS", (10, 20, 30))
    monkeypatch.setattr(growth, "HANDLERS", (1, 2, 3))
    target = tmp_path / "report.json"
    assert growth.main(["--rounds", "2", "--micro-batches", "16", "--json", str(target)]) == 0
    report = json.loads(target.read_text())

    times = report["us_per_micro_batch"]
    assert all(len(values) == 2 and min(values) > 0 for values in times.values())
    assert len(times) == 3 + 3 * 2 + 2 * 2 + 2 * 2 + 2 * 2 and report["equal_work"]
    assert [goal["what"] for goal in report["goals"]] == [
        "no handler: ours / plain",
        "3 handlers that rarely fire: ours / plain",
        "30 tensors: ours / plain",
        "accumulation 16: ours / plain",
    ]
    assert "all ended with the weights of their plain loop" in capsys.readouterr().out


def test_other_weights_are_the_exit_code(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    names = ["no handler", "1000 handlers that rarely fire", "1000 tensors", "accumulation 16"]
    times = {f"{name}: {each}": [1.0] for name in names for each in (growth.PLAIN, growth.OURS)}
    digests = dict.fromkeys(times, "a") | {"1000 tensors: ours": "b"}
    monkeypatch.setattr(growth, "measure", lambda rounds, micro_batches: (times, digests))
    assert growth.main([]) == 1
    assert "THE WEIGHTS DIFFER" in capsys.readouterr().out


def test_only_groups_between_the_first_and_the_last_are_timed() -> None:
    now = iter(range(100))
    data = TimedBatches([(torch.empty(0), torch.empty(0))] * 16, 4, lambda: float(next(now)))
    starts = [next(now) for _ in iter(data)]  # one at each batch
    assert len(data) == len(starts) == 16
    assert data.seconds == (13 - 4) / 8  # from the fifth batch to the thirteenth, which starts the last group
