"""The ledger and the verdict on the pages of a run and of a comparison."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from ignite_engine.report import write_comparison, write_report
from ignite_engine.report.goodput import goodput_line, read_ledger
from ignite_engine.report.panels import panels_of
from ignite_engine.report.records import read_run
from tests.report.goodput.test_ledger import line


def run_directory(path: Path, *lines: object, rows: int = 3) -> Path:
    path.mkdir()
    parts = {"data_wait": 1.0, "forward": 2.0, "backward": 3.0, "forward_backward": 5.0, "optimizer": 0.5, "step": 6.5}
    parts |= {"step_p50": 6.0, "step_p99": 9.0, "evaluation": 4.0}
    values = {f"time/{name}_ms": value for name, value in parts.items()}
    text = "".join(json.dumps({"iteration": at, "loss": 1.0, **values}) + "\n" for at in range(1, rows + 1))
    (path / "metrics.jsonl").write_text(text)
    if lines:
        (path / "goodput.jsonl").write_text("".join(json.dumps(each) + "\n" for each in lines))
    return path


def test_bar_has_each_part_at_its_length_and_the_verdict_is_below(tmp_path: Path) -> None:
    verdict = "The run was limited by <b>data</b>."
    lines = (line(50.0, 10, startup=10.0), line(50.0, 20, 10, 1070.0, data_wait=25.0, startup=5.0, verdict=verdict))
    page = write_report(run_directory(tmp_path / "run", *lines)).read_text()

    section = page[page.index("Where the time went") :]
    section = section[: section.index("</figure>")]
    widths = re.findall(r'<rect x="([\d.]+)" width="([\d.]+)".*?<title>([^:]+): ([\d.]+) %', section)
    assert widths == [
        ("0.00", "500.00", "training that was kept", "50"),
        ("500.00", "208.33", "waiting for data", "21"),
        ("708.33", "83.33", "start-up", "8.3"),
        ("791.67", "41.67", "start-up of later starts", "4.2"),
        ("833.33", "166.67", "no process ran", "17"),
    ]
    assert "120.0 s in 2 starts" in section or "2 min in 2 starts" in section
    assert "limited by &lt;b&gt;data&lt;/b&gt;." in section
    assert "<dt>Goodput</dt><dd>50 %" in page


def test_without_a_ledger_there_is_none_and_a_comparison_names_those_that_have_one(tmp_path: Path) -> None:
    timed, other = run_directory(tmp_path / "timed", line(10.0, 5, startup=4.0)), run_directory(tmp_path / "other")
    page = write_report(other).read_text()
    assert "Where the time went" not in page and "Goodput" not in page

    page = write_comparison([timed, other], tmp_path / "compare.html").read_text()
    table = page[: page.index("</table>")]
    assert ">goodput<" in table and table.count("60 %") == 1
    page = write_comparison([other, other], tmp_path / "compare.html").read_text()
    assert ">goodput<" not in page


def test_parts_of_a_step_are_stacked_to_all_of_it(tmp_path: Path) -> None:
    panels = {panel.title: panel for panel in panels_of(read_run(run_directory(tmp_path / "run")))}

    split = panels["Time per iteration"]
    assert [each.name for each in split.lines] == ["data wait", "forward", "backward", "optimizer"]
    assert sum(each.points[0][1] for each in split.lines) == pytest.approx(6.5)
    assert [each.name for each in panels["Steps"].lines] == ["median", "99 %"]
    assert [each.name for each in panels["Other times"].lines] == ["evaluation"]


def test_one_line_of_it(tmp_path: Path) -> None:
    path = run_directory(tmp_path / "run", line(100.0, 5, startup=10.0, evaluation=30.0, checkpoint=0.5))
    ledger = read_ledger(path / "goodput.jsonl")
    assert ledger is not None
    assert goodput_line(ledger.as_values()) == "Goodput 60 %; 30 % evaluation, 10 % start-up."
