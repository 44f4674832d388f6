"""The benchmark of a mirror measures a run with each store and without, and what is uploaded is there."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from benchmarks import mirror
from benchmarks.beside import EVERY, measured

SMALL = ["--rounds", "1", "--iterations", str(EVERY + 5), "--mib", "0.1"]


@pytest.mark.slow
def test_each_store_is_measured_beside_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "report.json"
    assert mirror.main([*SMALL, "--stores", "directory,S3,stopped", "--json", str(target)]) == 0
    report = json.loads(target.read_text())

    assert list(report["times"]) == [mirror.WITHOUT, mirror.DIRECTORY, "S3", "stopped"]
    assert all(len(values["mean"]) == 1 and min(values["mean"]) > 0 for values in report["times"].values())
    assert "iteration with a mirror (stopped) / without, a checkpoint a minute" in capsys.readouterr().out
    assert [goal["goal"] for goal in report["goals"]] == [mirror.GOAL] * 3 + [None] * 3


def test_an_unknown_store_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        mirror.main(["--stores", "ftp"])
    assert "--stores must be of directory" in capsys.readouterr().err


def test_the_run_with_a_mirror_uploads(tmp_path: Path) -> None:
    for iterations in (2 * EVERY, 20 * EVERY):  # it does not wait for its uploads
        measured(tmp_path / "run", iterations, 0.1, mirror=str(tmp_path / "mirror"))
        time.sleep(0.1)
        if names := list((tmp_path / "mirror").glob("iteration_*/manifest.json")):
            break
    assert names
