"""Epochs, hours, stops: found in what a run has logged."""

import json
import time
from pathlib import Path

import pytest

from ignite_engine.ext.report.records import Record, read_run
from ignite_engine.ext.report.timeline import PLACES, hours, iterations_per_epoch, marks, seconds
from ignite_engine.run_directory import RunDirectory


def run(**series):
    return Record(Path("run"), {name.replace("__", "/"): list(each) for name, each in series.items()})


def test_length_of_an_epoch_is_that_of_all_log_points():
    assert iterations_per_epoch(run(epoch=[(n, -(-n // 34)) for n in range(50, 2000, 50)])) == pytest.approx(
        34, rel=0.01
    )
    assert iterations_per_epoch(run(epoch=[(34, 1), (68, 2), (102, 3)])) == 34
    assert iterations_per_epoch(run(epoch=[(10, 1), (20, 1)])) is None
    assert iterations_per_epoch(run(epoch=[(10, 1), (100, 2), (150, 9)])) is None, "epochs of other lengths"
    assert iterations_per_epoch(run(loss=[(1, 1.0)])) is None


def test_hours_are_the_time_of_all_iterations():
    assert hours(run(time__step_ms=[(10, 3600.0), (20, 7200.0)])) == [(0, 0.0), (10, 0.01), (20, 0.03)]
    assert hours(run(throughput__steps_per_s=[(3600, 1.0), (7200, 0.5)])) == [(0, 0.0), (3600, 1.0), (7200, 3.0)]
    assert hours(run(loss=[(1, 1.0)])) == []
    many = hours(run(time__step_ms=[(n, 36.0) for n in range(1, 10_001)]))
    assert len(many) <= PLACES + 1 and many[-1] == (10_000, pytest.approx(0.1))


def test_stops_kills_and_resumes_are_marked(tmp_path):
    folder = RunDirectory(tmp_path)
    folder.note("started", 0)
    folder.note("completed", 9)
    folder.note("started", 0)  # afresh
    folder.note("interrupted", 40, "SIGINT")
    folder.note("resumed", 40)
    folder.note("resumed", 60)
    folder.note("completed", 90, "max_epochs")
    with folder.history.open("a") as file:
        file.write("torn {")
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"iteration": 1, "loss": 1.0}) + "\n")
    found = read_run(tmp_path)

    assert marks(found) == [(40, "SIGINT, resumed"), (60, "resumed after a kill")]
    assert [entry["what"] for entry in found.history] == ["started", "interrupted", "resumed", "resumed", "completed"]


def test_time_of_a_short_run_is_no_whole_second(tmp_path):
    folder = RunDirectory(tmp_path)
    folder.note("started", 0)
    time.sleep(0.05)
    folder.note("completed", 9)
    took = seconds(Record(tmp_path, {}, history=folder.read_history()))
    assert took is not None and took > 0.04 and took % 1


def test_time_is_that_of_all_starts_without_the_time_between():
    times = [("started", "10:00:00"), ("interrupted", "10:01:00"), ("resumed", "12:00:00"), ("completed", "12:00:30")]
    history = [{"what": what, "iteration": 1, "at": f"2026-01-01T{at}+00:00"} for what, at in times]

    assert seconds(Record(Path("run"), {}, history=history)) == 90.0
    assert seconds(Record(Path("run"), {}, summary={"wall_s": 5})) == 5.0
    assert seconds(Record(Path("run"), {})) is None
