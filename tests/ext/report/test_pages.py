"""The pages: every curve is there as it was measured, nothing is loaded from anywhere, any run can be shown."""

import json
import math
import re
from html.parser import HTMLParser

import pytest
import yaml

from ignite_engine.ext.report import read_run, write_comparison, write_report
from tests.kit.refusals import CommandRefused, command, refusals

VOID = {"meta", "br", "path"}


class Page(HTMLParser):
    """A page's tags, checked for balance, and the text of each kind of element."""

    def __init__(self, path):
        super().__init__()
        self.text = path.read_text(encoding="utf-8")
        self.open = []
        self.tags = []
        self.words = {}
        self.feed(self.text)
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    @property
    def runs(self):
        """What the script knows of each run: epochs, hours, marks."""
        return json.loads(next(dict(found)["data-runs"] for _, found in self.tags if "data-runs" in found))

    def handle_data(self, data):
        if self.open:
            self.words.setdefault(self.open[-1], []).append(data)

    @property
    def curves(self):
        """The points of each line by the title of its picture, as the page's script has them."""
        titles = self.words["h3"][: len(self.charts)]
        return {
            title: {line["name"]: line["points"] for line in found["lines"]}
            for title, found in zip(titles, self.charts, strict=True)
        }

    @property
    def charts(self):
        """What the page's script draws."""
        return json.loads(next(text for text in self.words["script"] if text.startswith("[")))


def run_directory(
    path,
    rows,
    config=None,
    summary=None,
):
    path.mkdir(parents=True)
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if config is not None:
        (path / "config.yaml").write_text(yaml.safe_dump(config))
    if summary is not None:
        (path / "summary.json").write_text(json.dumps(summary))
    return path


def row(iteration, **more):
    values = {"iteration": iteration, "epoch": 1, "loss": 4 / iteration, "lr": 0.5, "grad_norm": 1.0 + iteration % 2}
    values |= {"throughput/tokens_per_s": 1000.0 * iteration}
    values |= {
        "time/step_ms": 10.0,
        "time/data_wait_ms": 1.0,
        "time/forward_ms": 4.0,
        "time/backward_ms": 2.0,
        "time/optimizer_ms": 2.5,
    }
    return values | {"memory/host_rss_mib": 500.0 + iteration, "memory/peak_mib": 10240.0} | more


ROWS = [
    row(n, **({"val/loss": 5 / n, "val/accuracy": n / 10, "still/one": 3.0} if n % 2 == 0 else {})) for n in range(1, 7)
]
SUMMARY = {"status": "completed", "reason": "max_iters", "iteration": 6, "epoch": 1, "wall_s": 125.0, "parameters": 17}


def test_page_has_every_curve_as_it_was_measured(tmp_path):
    page = Page(write_report(run_directory(tmp_path / "run", ROWS, {"run": {"name": "mine"}}, SUMMARY)))

    assert page.curves == {
        "loss": {
            "train": [[n, pytest.approx(4 / n, rel=1e-4)] for n in range(1, 7)],
            "val": [[2, 2.5], [4, 1.25], [6, 0.83333]],
        },
        "accuracy": {"val": [[2, 0.2], [4, 0.4], [6, 0.6]]},
        "lr": {"lr": [[n, 0.5] for n in range(1, 7)]},
        "grad_norm": {"train": [[n, 1 + n % 2] for n in range(1, 7)]},
        "tokens/s": {"all ranks": [[n, 1000 * n] for n in range(1, 7)]},
        "time, ms": {
            "step": [[n, 10] for n in range(1, 7)],
            "data_wait": [[n, 1] for n in range(1, 7)],
            "forward": [[n, 4] for n in range(1, 7)],
            "backward": [[n, 2] for n in range(1, 7)],
            "optimizer": [[n, 2.5] for n in range(1, 7)],
        },
        "memory, MiB": {
            "host_rss": [[n, 500 + n] for n in range(1, 7)],
            "peak": [[n, 10240] for n in range(1, 7)],
        },
    }
    assert sum(tag == "figure" for tag, _ in page.tags) == 7
    assert page.words["h1"] == ["mine"] and "completed" in page.words["b"]
    assert {"2 min 05 s ", "0.8333 "} <= set(page.words["dd"])


@pytest.mark.row("F11")
def test_speed_times_and_memory_are_folded_below_what_the_user_measured(tmp_path):
    def folded(path):
        text = path.read_text()
        before, _, after = text.partition("<details data-folded")
        inside = after.partition("</details>")[0]
        return re.findall("<h3>(.+?)</h3>", before), inside.startswith(" open"), re.findall("<h3>(.+?)</h3>", inside)

    run = run_directory(tmp_path / "run", ROWS)
    users_own = ["loss", "accuracy", "lr", "grad_norm"]
    engines = ["tokens/s", "time, ms", "memory, MiB"]
    assert folded(write_report(run)) == (users_own, False, engines)
    before, is_open, inside = folded(write_comparison([run, run], tmp_path / "compare.html"))
    assert before == ["loss", "val/loss", "val/accuracy", "lr", "grad_norm"] and not is_open and len(inside) == 8

    times = [{"iteration": n, "time/step_ms": 1.0 * n} for n in (1, 2)]
    assert folded(write_report(run_directory(tmp_path / "times", times))) == ([], True, ["time, ms"])


def test_page_loads_nothing_from_anywhere(tmp_path):
    run = run_directory(tmp_path / "run", ROWS, {"run": {"name": "mine"}}, SUMMARY)
    (run / "environment.json").write_text(json.dumps({"command": ["train"], "packages": {"torch": "2"}}))
    for path in (write_report(run), write_comparison([run, run], tmp_path / "compare.html")):
        page = Page(path)
        loading = {"src", "href", "srcset", "data", "action", "poster", "xlink:href"}
        assert [tag for tag in page.tags if loading & tag[1].keys() and tag[0] != "a"] == []
        assert {tag[1]["href"] for tag in page.tags if tag[0] == "a"} <= {"run/report.html"}
        assert re.findall(r"https?://|url\(|@import|\bfetch\(|XMLHttp|import\s*\(", page.text) == []
        policy = dict(page.tags)["meta"]  # the last one
        assert "default-src 'none'" in str(policy["content"])
        assert ("meta", {"name": "viewport", "content": "width=device-width, initial-scale=1"}) in page.tags


def test_no_word_of_a_run_becomes_a_tag_or_a_script(tmp_path):
    evil = "</script><script>alert(1)</script><img src=x>&"
    config = {"run": {"name": evil, evil: evil}}
    run = run_directory(tmp_path / "run", [row(n, **{evil: n / 2, f"val/{evil}": n}) for n in (1, 2, 3)], config)
    (run / "summary.json").write_text(
        json.dumps({"status": "failed", "reason": evil, "iteration": 3, "metrics": {evil: 1}})
    )
    (run / "logs").mkdir()
    (run / "logs" / "rank_0.log").write_text(evil)
    for path in (write_report(run), write_comparison([run, run], tmp_path / "compare.html")):
        page = Page(path)
        assert [tag for tag, _ in page.tags if tag in ("script", "img")] == ["script", "script"]
        assert any("img src=x" in title for title in page.words["h3"])


@pytest.mark.parametrize(
    ("summary", "said"),
    [
        (
            {"status": "interrupted", "reason": "SIGINT", "iteration": 1234},
            "at iteration 1,234: SIGINT. The same command resumes",
        ),
        ({"status": "failed", "reason": "ValueError: no", "iteration": 3}, "at iteration 3: ValueError: no."),
        ({"status": "running", "reason": None, "iteration": 3}, "at iteration 6. It is still running, or was killed."),
        (None, "There is no summary.json."),
    ],
)
def test_page_says_how_the_run_ended(tmp_path, summary, said):
    page = Page(write_report(run_directory(tmp_path / "run", ROWS, summary=summary)))

    assert said in " ".join(page.words["p"])
    assert ('http-equiv="refresh"' in page.text) == (summary is not None and summary["status"] == "running")


def test_failed_run_shows_the_end_of_its_log(tmp_path):
    run = run_directory(tmp_path / "run", ROWS, summary={"status": "failed", "reason": "x", "iteration": 1})
    (run / "logs").mkdir()
    (run / "logs" / "rank_0.log").write_text("\n".join(f"line {n}" for n in range(1000)) + "\nValueError: no\n")
    page = Page(write_report(run))

    assert page.words["pre"][-1].endswith("line 999\nValueError: no") and "line 900" not in page.words["pre"][-1]
    assert ("details", {"open": None}) in page.tags


def test_what_is_not_finite_is_noted_and_does_not_change_the_axis(tmp_path):
    rows = [row(n, loss="nan" if n in (2, 3, 4, 6) else 1.0 / n) for n in range(1, 8)]
    rows[4]["grad_norm"] = "inf"
    page = Page(write_report(run_directory(tmp_path / "run", rows)))

    assert [point[0] for point in page.curves["loss"]["train"]] == [1, 5, 7]
    assert "train is not finite at iteration 2, 3, 4 and 1 more" in page.words["p"]
    assert "train is not finite at iteration 5" in page.words["p"]


def test_comparison_lays_runs_over_one_another_and_tells_what_differs(tmp_path):
    config = {"task": "a.py:build", "run": {"name": "same", "seed": 0}, "optimizer": {"lr": 0.1, "betas": [0.9, 0.99]}}
    first = run_directory(tmp_path / "one", ROWS, config, SUMMARY)
    other = {**config, "optimizer": {"lr": 0.2, "betas": [0.9, 0.99]}, "schedule": {"name": "cosine"}}
    second = run_directory(
        tmp_path / "two", [row(n, loss=9.0 / n) for n in (1, 2)], other, {**SUMMARY, "status": "failed"}
    )
    page = Page(write_comparison([first, second], tmp_path / "compare.html"))

    names = ["one", "two"]
    assert list(page.curves["loss"]) == names and page.curves["loss"][names[1]] == [[1, 9], [2, 4.5]]
    assert list(page.curves) == [
        "loss",
        "val/loss",
        "val/accuracy",
        "lr",
        "grad_norm",
        "throughput/tokens_per_s",
        "time/step_ms",
        "time/data_wait_ms",
        "time/forward_ms",
        "time/backward_ms",
        "time/optimizer_ms",
        "memory/host_rss_mib",
        "memory/peak_mib",
    ]
    cells = page.words["td"]
    differences = cells[cells.index("optimizer.lr") :]
    assert differences[:6] == ["optimizer.lr", "0.1", "0.2", "schedule.name", "not set", '"cosine"']
    assert cells[:5] == [names[0], "completed", "6", "0.66667", "0.83333"]
    marks = {line["name"]: line["mark"] for line in json.loads(page.words["script"][0])[0]["lines"]}
    assert marks == {names[0]: 0, names[1]: 1}


def test_tiles_show_the_best_value_of_the_metric_that_the_run_followed(tmp_path):
    rows = [row(n, epoch=(n + 1) // 2, **{"val/accuracy": [0.1, 0.9, 0.3, 0.2][n - 1]}) for n in (1, 2, 3, 4)]
    config = {"handlers": {"Checkpoint": {"best": "val/accuracy"}}}
    page = Page(write_report(run_directory(tmp_path / "run", [{**each} for each in rows], config, SUMMARY)))

    assert page.words["dt"][0] == "val/accuracy, best" and page.words["dd"][0].strip() == "0.9"
    assert page.words["small"][0] == "at 2, epoch 1"


def test_run_of_the_api_is_known_by_its_newest_checkpoint(tmp_path):
    run = run_directory(tmp_path / "run", ROWS)
    for number in (1, 2):
        folder = run / "checkpoints" / f"iteration_{number}"
        folder.mkdir(parents=True)
        best = {"metric": "val/accuracy", "mode": "max"} if number == 2 else None
        manifest = {"sequence": number, "iteration": number, "epoch": 1, "config": {"width": number}, "best": best}
        (folder / "manifest.json").write_text(json.dumps(manifest))
    found = read_run(run)
    page = Page(write_report(run))

    assert found.followed == ("val/accuracy", "max") and found.config == {"width": 2}
    assert page.words["dt"][0] == "val/accuracy, best" and page.words["h1"] == ["run"]
    assert "at iteration 2. There is no summary.json." in " ".join(page.words["p"])


def test_page_carries_the_licence_of_what_draws_its_charts(tmp_path):
    text = write_report(run_directory(tmp_path / "run", ROWS)).read_text()

    assert "var uPlot=" in text and "Copyright (c) 2022 Leon Sorokin" in text
    assert "The above copyright notice and this permission notice shall be included" in text


def page_of(folder, rows, **files):
    return Page(write_report(run_directory(folder / "run", rows, **files)))


def test_long_run_is_thinned_and_keeps_its_extremes(tmp_path):
    rows = [{"iteration": n, "loss": 1.0 + math.sin(n) / 10, "grad_norm": 1.0} for n in range(1, 12_001)]
    rows[8_344]["loss"], rows[7_776]["loss"], rows[4]["grad_norm"] = 7.5, -3.25, 1e4
    rows[0]["time/step_ms"] = rows[-1]["time/step_ms"] = 10.0
    page = page_of(tmp_path, rows)
    loss = page.curves["loss"]["train"]

    assert len(page.text) < 500_000 and len(loss) <= 2400
    assert [7777, -3.25] in loss and [8345, 7.5] in loss
    assert loss[0][0] == 1 and loss[-1][0] == 12_000 and loss == sorted(loss)
    assert [5, 10000] in page.curves["grad_norm"]["train"]


# ---------------------------------------------------------------------------------------- which curves share a chart


def rows_of(**series):
    """Rows of two iterations, with ``name__part`` for ``name/part``."""
    return [{"iteration": n + 1} | {name.replace("__", "/"): both[n] for name, both in series.items()} for n in (0, 1)]


@pytest.mark.row("F11")
def test_sets_share_the_chart_of_a_metric_and_constants_are_left_out(tmp_path):
    series = {"loss": (3, 2), "loss__kl": (2, 1), "loss__pixels": (2, 1), "val__kl": (1, 2), "val__loss": (3, 2)}
    page = page_of(tmp_path, rows_of(**series, val__accuracy=(0, 1), val__still=(0.5, 0.5)))

    shared = {title: list(lines) for title, lines in page.curves.items()}
    assert shared == {"loss": ["train", "val"], "kl": ["loss", "val"], "pixels": ["loss"], "accuracy": ["val"]}


def test_values_far_apart_are_logarithmic(tmp_path):
    loss, _ = page_of(tmp_path, rows_of(loss=(100.0, 1.0), memory__peak_mib=(1024, 16384))).charts

    assert loss["log"] and not page_of(tmp_path / "other", rows_of(loss=(0.0, 100.0))).charts[0]["log"]


# ------------------------------------------------------------------------------------------ epochs, hours, and stops

HISTORY = (
    ("started", 0, "10:00:00", None),
    ("interrupted", 4, "10:01:00", "SIGINT"),
    ("resumed", 4, "12:00:00", None),
    ("resumed", 8, "12:00:20", None),
    ("completed", 12, "12:00:30", "max_epochs"),
)


def test_epochs_hours_stops_and_kills_are_found_in_what_a_run_has_logged(tmp_path):
    rows = [{"iteration": n, "epoch": -(-n // 3), "loss": 1.0 / n, "time/step_ms": 3.6e6} for n in range(1, 13)]
    run = run_directory(tmp_path / "run", rows)
    entries = [
        {"what": what, "iteration": at, "at": f"2026-01-01T{time}+00:00", "reason": why}
        for what, at, time, why in HISTORY
    ]
    (run / "starts.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in entries) + "torn {")
    page = Page(write_report(run))

    (found,) = page.runs
    assert found["epoch"] == 3 and found["hours"][0] == [0, 0] and found["hours"][-1] == [12, 12]
    assert found["marks"] == [[4, "SIGINT, resumed"], [8, "resumed after a kill"]]
    assert "70.0 s " in page.words["dd"], "without the time between, or before a kill"
    assert "in 3 starts" in page.words["small"]


# ------------------------------------------------------------------------------------------------- the command line


def test_watch_writes_the_page_until_the_run_has_ended(tmp_path, clock):
    run, pages = run_directory(tmp_path / "run", ROWS, summary={**SUMMARY, "status": "running"}), []

    def look(seconds):
        assert 1 <= seconds <= 60
        pages.append((run / "report.html").read_text())
        if len(pages) == 2:
            (run / "summary.json").write_text(json.dumps(SUMMARY))

    clock.on_sleep = look
    command("report", run, "--watch")
    assert len(pages) == 2 and all("refresh" in page for page in pages)
    assert "refresh" not in (run / "report.html").read_text()


def test_a_folder_of_runs_is_compared(tmp_path):
    for name in ("one", "two"):
        run_directory(tmp_path / "runs" / name, ROWS, summary=SUMMARY)
    command("compare", tmp_path / "runs", "--output", tmp_path / "page.html")
    assert list(Page(tmp_path / "page.html").curves["loss"]) == ["one", "two"]


test_refusals = refusals(
    [
        ("no folder", lambda folder: command("report", folder / "nothing"), CommandRefused, "nothing"),
        ("no run", lambda folder: command("compare", folder), CommandRefused, "run"),
        ("no place", lambda f: command("report", f, "-o", f / "no" / "x.html"), CommandRefused, "no"),
    ]
)
