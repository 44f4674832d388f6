"""The table of a sweep: which run is the best, and what it was given."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ignite_engine.report.pages import duration
from ignite_engine.report.records import Record
from ignite_engine.report.sweep import NotLogged, ordered, sweep_table


def run(name: str, *values: float, mode: str | None = None, **settings: Any) -> Record:
    points = [(10 * at, value) for at, value in enumerate(values, 1)]
    config = {"run": {"name": "same", "directory": name}, "optimizer": settings}
    if mode is not None:
        config["checkpoint"] = {"best": "val/score", "mode": mode}
    series = {"loss": [(1, 1.0)], **({"val/score": points} if points else {})}
    return Record(Path(name), series, config=config, summary={"status": "completed", "wall_s": 30.0})


def test_the_best_run_comes_first_with_what_it_was_given() -> None:
    runs = [run("a", 0.2, 0.5, 0.4, lr=0.1), run("b", lr=0.2), run("c", 0.3, 0.7, lr=0.3)]
    table = sweep_table(ordered(runs, "val/score", "max"), "val/score", "max")

    assert [line.split() for line in table] == [
        ["run", "lr", "val/score", "(max)", "at", "last", "time", "status"],
        ["c", "0.3", "0.7", "20", "0.7", "30.0", "s", "completed"],
        ["a", "0.1", "0.5", "20", "0.4", "30.0", "s", "completed"],
        ["b", "0.2", "-", "-", "-", "30.0", "s", "completed"],
    ]


def test_times_of_runs_that_differ_by_a_hundredth_differ() -> None:
    shown = ["0.0421 s", "3.21 s", "30.0 s", "120 s", "2 min 05 s", "12 min 40 s", "1 h 06 min"]
    assert [duration(took) for took in (0.04211, 3.214, 30, 119.6, 125, 760, 4000)] == shown


def test_which_value_is_the_best_is_as_the_runs_followed_it_or_as_its_name_says() -> None:
    followed = [run("a", 1.0, 2.0, mode="max"), run("b", 0.5, 3.0, mode="max")]
    assert [each.path.name for each in ordered(followed, "val/score")] == ["b", "a"]
    assert [each.path.name for each in ordered(followed, "val/score", "min")] == ["b", "a"]
    named = [run("a", 1.0), run("b", 0.5)]
    assert [each.path.name for each in ordered(named, "val/score")] == ["b", "a"], "a loss by default"
    assert "(min)" in sweep_table(named, "val/score")[0] and "(max)" in sweep_table(followed, "val/score")[0]


def test_many_settings_are_counted_not_shown() -> None:
    many = [
        run(name, 1.0, **{f"s{at:02}": at * number for at in range(1, 15)}) for number, name in ((1, "a"), (2, "b"))
    ]
    table = sweep_table(many, "val/score")

    assert "s08" in table[0] and "s09" not in table[0]
    assert table[-1].startswith("6 more settings differ: optimizer.s09, ")


def test_metric_that_no_run_has_logged_is_named() -> None:
    with pytest.raises(NotLogged, match=r"--sort: got 'val/scor', which no run has logged; did you mean 'val/score'\?"):
        ordered([run("a", 1.0)], "val/scor")


def test_a_rest_of_a_log_interval_is_neither_the_last_nor_the_best_loss() -> None:
    points = [(10, 0.9), (20, 0.5), (30, 0.4), (31, 0.1)]
    record = Record(Path("a"), {"loss": points, "val/loss": points, "loss/kl": points[:3]})

    assert (record.last("loss"), record.best("loss")) == (0.4, (30, 0.4))
    assert (record.last("val/loss"), record.best("val/loss")) == (0.1, (31, 0.1)), "an evaluation is whole"
    assert record.last("loss/kl") == 0.4
