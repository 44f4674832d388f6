"""Runs that belong together: a mean with a band, and what a sweep has shown."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from ignite_engine.cli import main
from ignite_engine.report import NoSuchKey, read_run, write_comparison, write_report
from ignite_engine.report.groups import groups_of, mean_and_band
from ignite_engine.report.pages import names_of
from tests.report.test_pages import Page, run_directory


def sweep(folder: Path, *settings: Mapping[str, Any]) -> list[Path]:
    """A run for each rate and seed; its losses are ``rate + seed`` times 1, 2 and 3."""
    paths = []
    for place, one in enumerate(settings):
        lr, seed = one["lr"], one.get("seed", 0)
        name = one.get("name", f"lr{lr}_seed{seed}")
        config = {"run": {"name": name, "seed": seed, "directory": name}, "optimizer": {"lr": lr}}
        rows = [{"iteration": n, "loss": (lr + seed) * n, "val/accuracy": (lr + seed) * n / 100} for n in (1, 2, 3)]
        paths.append(run_directory(folder / str(place), rows, config, {"status": "completed", "iteration": 3}))
    return paths


SETTINGS = [{"lr": lr, "seed": seed} for lr in (0.5, 1.0) for seed in (1, 2, 3)]


def names_and_members(runs: list[Path], key: str | None = None) -> list[tuple[str, list[int]]]:
    records = [read_run(run) for run in runs]
    return [(group.name, list(group.members)) for group in groups_of(records, names_of(records), key)]


def test_seeds_of_one_config_are_a_group(tmp_path: Path) -> None:
    runs = sweep(tmp_path, *SETTINGS, {"lr": 2.0, "seed": 1, "name": "alone"})
    expected = [("lr0.5, 3 seeds", [0, 1, 2]), ("lr1.0, 3 seeds", [3, 4, 5]), ("alone", [6])]
    assert names_and_members(runs) == expected


def test_runs_with_the_same_seed_are_no_seeds_of_one_config(tmp_path: Path) -> None:
    runs = sweep(tmp_path, {"lr": 0.5, "seed": 1, "name": "a"}, {"lr": 0.5, "seed": 1, "name": "b"})
    assert names_and_members(runs) == [("a", [0]), ("b", [1])]
    assert names_and_members([runs[0]]) == [("a", [0])]


def test_runs_are_grouped_by_any_key(tmp_path: Path) -> None:
    runs = sweep(tmp_path, *SETTINGS)
    assert names_and_members(runs, "run.seed") == [("seed 1", [0, 3]), ("seed 2", [1, 4]), ("seed 3", [2, 5])]
    assert len(names_and_members(runs, "run.name")) == 6
    with pytest.raises(
        NoSuchKey, match=re.escape("--group-by: got 'optimizer.lrr', which no config has; did you mean")
    ):
        names_and_members(runs, "optimizer.lrr")
    with pytest.raises(NoSuchKey, match=r"got 'lr', which no config has; did you mean 'optimizer\.lr'\?"):
        names_and_members(runs, "lr")


def test_a_folder_of_runs_stands_for_the_runs_in_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sweep(tmp_path / "sweep", *SETTINGS)
    (tmp_path / "sweep" / "plots").mkdir()
    page, by_name = tmp_path / "compare.html", tmp_path / "by_name.html"
    assert main(["compare", str(tmp_path / "sweep"), "-o", str(page)]) == 0
    runs = [str(tmp_path / "sweep" / str(place)) for place in range(6)]
    assert main(["compare", *runs, "-o", str(by_name)]) == 0
    assert page.read_text(encoding="utf-8") == by_name.read_text(encoding="utf-8")
    capsys.readouterr()
    assert main(["report", str(tmp_path / "sweep")]) == 2
    assert capsys.readouterr().err.endswith("; give one of the runs in it: 0, 1, 2 and 3 more.\n")
    assert main(["compare", str(tmp_path / "sweep" / "plots"), str(tmp_path)]) == 2
    assert "plots is not the directory of a run: it has neither metrics.jsonl nor" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (("lr0.1-1", "lr0.1-2"), "lr0.1"),
        (("lr0.1_s1", "lr0.1_s12"), "lr0.1"),
        (("gpt seed=0", "gpt seed=1"), "gpt"),
        (("losses", "losses2"), "losses"),
        (("a", "b"), "a"),
    ],
)
def test_a_group_has_what_the_names_have_in_common(tmp_path: Path, names: tuple[str, str], expected: str) -> None:
    runs = sweep(tmp_path, *({"lr": 1, "seed": seed, "name": name} for seed, name in enumerate(names)))
    assert names_and_members(runs) == [(f"{expected}, 2 seeds", [0, 1])]


def test_mean_and_band_where_all_curves_are() -> None:
    means, band = mean_and_band([[(0, 0.0), (10, 10.0)], [(0, 4.0), (5, 9.0), (8, 12.0)]])

    assert means == [(0, 2.0), (5, 7.0), (8, 10.0)]
    assert band == [(0, 0.0, 4.0), (5, 5.0, 9.0), (8, 8.0, 12.0)]
    assert mean_and_band([[(0, 1.0), (1, 1.0)], [(5, 1.0), (6, 1.0)]]) == ([], [])
    long = [(float(x), float(x)) for x in range(100_000)]
    means, _ = mean_and_band([long, long])
    assert len(means) <= 501 and means[-1] == (99_999.0, 99_999.0)


def test_page_draws_the_mean_of_each_group(tmp_path: Path) -> None:
    page = Page(write_comparison(sweep(tmp_path, *SETTINGS), tmp_path / "compare.html"))

    assert page.curves["loss"] == {
        "lr0.5, 3 seeds": [[1, 2.5], [2, 5], [3, 7.5]],
        "lr1.0, 3 seeds": [[1, 3], [2, 6], [3, 9]],
    }
    assert '"band":[[1,1.5,3.5],[2,3,7],[3,4.5,10.5]]' in page.text
    cells = page.words["td"]
    assert cells[cells.index("lr0.5, 3 seeds") :][:3] == ["lr0.5, 3 seeds", "3", "2.5 (1.5 to 3.5)"]
    assert page.text.count('<span class="swatch c1">') == 4  # three runs and their group


def test_a_sweep_is_a_point_for_each_run_over_each_setting(tmp_path: Path) -> None:
    runs = sweep(tmp_path, *SETTINGS)
    text = write_comparison(runs, tmp_path / "compare.html", metric="val/accuracy", mode="max").read_text()
    section = text[text.index("What made the difference") : text.index("<h2>Curves")]

    assert "val/accuracy, best of each run" in section and "<h4>optimizer.lr</h4>" in section
    assert "<h4>run.seed</h4>" not in section and "<h4>run.name</h4>" not in section
    circles = re.findall(r'<circle class="c(\d)" cx="([\d.]+)" cy="([\d.]+)" r="5"><title>(.+?)</title>', section)
    assert len(circles) == 6 and circles[0][3] == "lr0.5_seed1: optimizer.lr 0.5, 0.045"
    xs, ys = [float(circle[1]) for circle in circles], [float(circle[2]) for circle in circles]
    assert xs[0] == xs[1] < xs[3] and ys[0] > ys[1] > ys[2]

    two = write_comparison(runs[:2], tmp_path / "two.html").read_text()
    assert "What made the difference" not in two


@pytest.mark.parametrize("values", [(1, "<b>", 2.5), (True, False, None), (0.001, 1.0, 100.0), (-1, 0, 5)])
def test_settings_of_any_type_are_drawn(tmp_path: Path, values: tuple[Any, ...]) -> None:
    runs = sweep(tmp_path, *({"lr": 1, "name": f"run {place}"} for place in range(3)))
    for run, value in zip(runs, values):
        config = yaml.safe_load((run / "config.yaml").read_text())
        (run / "config.yaml").write_text(yaml.safe_dump({**config, "x": {"y": value}}))
    page = Page(write_comparison(runs, tmp_path / "compare.html"))
    assert sum(tag == "circle" for tag, _ in page.tags) == 3


def test_runs_are_linked_with_their_notes_and_tags(tmp_path: Path) -> None:
    runs = sweep(tmp_path / "a b", *SETTINGS[:2])
    write_report(runs[0])
    (runs[1] / "notes.md").write_text("# Plan\n#tried Too <slow>\n\nMore.\n")
    page = Page(write_comparison(runs, tmp_path / "pages.html"))

    assert [tag for tag in page.tags if tag[0] == "a"] == [("a", {"href": "a%20b/0/report.html"})]
    assert "tags" in page.words["th"] and "notes" in page.words["th"]
    assert "tried" in page.words["td"] and "Plan" in page.words["td"]


def test_command_groups_and_writes_where_it_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [str(run) for run in sweep(tmp_path, *SETTINGS)]
    for option in ("-o", "--output"):
        page = tmp_path / f"page{option}.html"
        assert main(["compare", *runs, "--group-by", "optimizer.lr", option, str(page)]) == 0
        assert capsys.readouterr().out == f"{page}\n"
        assert list(Page(page).curves["loss"]) == ["lr 0.5", "lr 1"]
    assert main(["compare", *runs, "--group-by", "optimizer.rate", "-o", str(page)]) == 2
    assert "--group-by: got 'optimizer.rate', which no config has" in capsys.readouterr().err
