"""The benchmark of the captured update runs, and times every contender in every round."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from benchmarks.captured_update import main
from benchmarks.workload import LOG_EVERY


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler, which torch.compile calls")
@pytest.mark.long  # compiles a graph
def test_every_contender_is_timed_in_every_round(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    assert main(["--rounds", "2", "--micro-batches", str(LOG_EVERY), "--json", str(report)]) == 0

    contenders = json.loads(report.read_text())["contenders"]
    assert list(contenders) == ["plain", "compiled", "Update", "captured"]
    assert all(len(each["us"]) == 2 and min(each["us"]) > 0 for each in contenders.values())
    assert contenders["captured"]["ratios"]["plain"]["value"] > 0
