"""``python -m benchmarks`` runs what its table names, keeps the reports, and its page tells failures and misses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import benchmarks
from benchmarks import __main__ as everything
from benchmarks.__main__ import BENCHMARKS, Benchmark, main, page_of
from benchmarks.goals import Goal
from benchmarks.ratios import Ratio

NOT_IN_THE_TABLE = {"gpu", "checkpoint_format", "goodput"}  # needs another machine; measures nothing; `make goodput`


def test_every_program_is_in_the_table() -> None:
    folder = Path(benchmarks.__file__).parent
    programs = {path.stem for path in folder.glob("*.py") if '__name__ == "__main__"' in path.read_text()}
    assert sorted(programs - {"__main__"} - NOT_IN_THE_TABLE) == sorted(each.name for each in BENCHMARKS)


@pytest.mark.slow
def test_reports_are_kept_and_measured_again_one_by_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    table = (
        Benchmark("handler_costs", "handlers", "--rounds 2 --iterations 20", "--rounds 1 --iterations 20"),
        Benchmark("no_such_module", "fails", "", ""),
    )
    monkeypatch.setattr(everything, "BENCHMARKS", table)
    monkeypatch.setattr(everything, "busy_cores", lambda: 3.0)
    folder, page = tmp_path / "reports", tmp_path / "page.md"
    where = ["--reports", str(folder), "--page", str(page)]

    assert main([*where, "--only", "handler_costs"]) == 0
    report = json.loads((folder / "handler_costs.json").read_text())
    assert len(report["report"]["us_per_iteration"]["nothing"]) == 2 and report["command"].endswith("--iterations 20")
    assert report["machine"]["commit"] and report["busy_cores"] == 3.0
    assert "other programs use 3.0 of" in capsys.readouterr().out

    assert main([*where, "--quick", "--only", "no_such_module"]) == 1
    printed, text = capsys.readouterr().out, page.read_text()
    assert "no_such_module FAILED" in printed and "No module named" in printed
    assert "| no_such_module | **failed** |" in text and "## handler_costs: handlers" in text
    assert "a check that the benchmarks run" in text and "busy with other programs before: handler_costs" in text

    with pytest.raises(SystemExit):
        main([*where, "--only", "other"])


def test_page_names_what_is_missed() -> None:
    goals = [
        Goal.of("a / b", Ratio(1.2, 1.1, 1.3), 1.1),
        Goal.of("c / d", Ratio(1.0, 0.9, 1.1), 1.0),
        Goal("bytes", 3.0, None),
        Goal("nothing measured", float("nan"), 1.0),
    ]
    assert [goal.verdict for goal in goals] == ["missed", "met", "-", "missed"]
    page = page_of([_report(goals=[vars(goal) for goal in goals])])
    assert "| one | c / d | 1.000 [0.900, 1.100] | 1 | met |" in page
    missed = page.split("## Missed")[1].split("##")[0]
    assert "a / b (1.200 [1.100, 1.300], goal 1.1)" in missed and "c / d" not in missed and "nothing measured" in missed
    unmeasured = page_of([_report(goals=[vars(goals[0])], quick=True)])
    assert "| not measured |" in unmeasured and "- a / b" not in unmeasured
    assert "busy" not in page and "a check" not in page and "its table" in page


def test_targets_of_the_overhead_are_goals() -> None:
    row = {"setting": "full", "contender": "ours", "baseline": "plain", "goal": 0.9, "limit": 1.0, "verdict": "met"}
    (goal,) = Goal.read({"targets": [row | {"value": 0.8, "low": 0.7, "high": 0.9}]})
    assert (goal.what, goal.figure, goal.verdict) == ("full: ours / plain", "0.800 [0.700, 0.900]", "met")


def _report(**values: Any) -> dict[str, Any]:
    report = {"name": "one", "what": "what it is", "command": "c", "quick": False, "code": 0, "date": "today"}
    return (
        report
        | {"seconds": 1.0, "busy_cores": 0.0, "machine": {"cpu": "x"}, "output": "its table", "goals": []}
        | values
    )
