"""Images, texts and histograms of a run, on its page."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from ignite.engine import Events

from ignite_engine.handlers import Histogram, Image, MetricLogger
from ignite_engine.report import media, write_report
from tests.builders import numbers_loader, trainer_of
from tests.report.test_pages import Page


def run_with(folder: Path, put: Any, epochs: int = 1) -> Path:
    trainer = trainer_of()
    MetricLogger(folder, console=False).attach(trainer, Events.ITERATION_COMPLETED(every=2))
    trainer.add_event_handler(Events.EPOCH_COMPLETED, put)
    trainer.run(numbers_loader(), max_epochs=epochs)
    return folder


def test_what_was_logged_is_on_the_page(tmp_path: Path) -> None:
    def put(trainer: Any) -> None:
        trainer.state.media["val/worst"] = Image(torch.rand(3, 4, 5))
        trainer.state.media["val/text"] = "<b>said</b>"
        trainer.state.media["weights"] = Histogram(torch.arange(10.0))

    page = Page(write_report(run_with(tmp_path / "run", put)))
    (image,) = [attributes for tag, attributes in page.tags if tag == "img"]
    kept = (tmp_path / "run" / "media" / "val" / "worst" / "00000006.png").read_bytes()

    assert image["src"] == f"data:image/png;base64,{base64.b64encode(kept).decode()}"
    assert "<b>said</b>" in page.words["pre"] and "<b>said" not in page.text.partition("</main>")[0].replace("&lt;", "")
    assert {"val/worst", "val/text", "weights", "Media"} <= {*page.words["h3"], *page.words["h2"]}
    assert ("svg", "bars") in [(tag, attributes.get("class")) for tag, attributes in page.tags]
    assert "data-views" not in page.text.partition("<script")[0], "one point in time needs no slider"


def test_name_of_a_media_is_text_on_the_page(tmp_path: Path) -> None:
    def put(trainer: Any) -> None:
        trainer.state.media["a<script>alert(1)<b>&amp;"] = "text"

    page = Page(write_report(run_with(tmp_path / "run", put)))

    assert "a<script>alert(1)<b>&amp;" in page.words["h3"]
    assert "a<script>" not in page.text


def test_of_many_points_in_time_some_are_shown_the_last_one_first(tmp_path: Path) -> None:
    def put(trainer: Any) -> None:
        trainer.state.media["note"] = f"after {trainer.state.iteration}"

    page = Page(write_report(run_with(tmp_path / "run", put, epochs=20)))
    views = [attributes for tag, attributes in page.tags if tag == "div" and "data-view" in attributes]

    assert len(views) == media.SHOWN and ["hidden" in each for each in views] == [True] * 7 + [False]
    assert page.words["pre"][0] == "after 6" and page.words["pre"][-1] == "after 120"


def test_page_stays_small_and_what_is_broken_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def put(trainer: Any) -> None:
        trainer.state.media["large"] = Image(torch.randint(256, (3, 64, 64), dtype=torch.uint8))
        trainer.state.media["small"] = "kept"

    run = run_with(tmp_path / "run", put, epochs=3)
    (tmp_path / "secret.txt").write_text("secret")
    lines = ["torn {", json.dumps({"iteration": 7, "out": "../../secret.txt", "gone": "no.png"}), "[]", '{"small": 1}']
    with (run / "media" / "index.jsonl").open("a") as file:
        file.write("\n".join(lines) + "\n")
    (run / "media" / "bad").mkdir()
    (run / "media" / "bad" / "1.json").write_text('{"counts": "no"}')
    with (run / "media" / "index.jsonl").open("a") as file:
        file.write(json.dumps({"iteration": 8, "bad": "bad/1.json"}) + "\n")
    monkeypatch.setattr(media, "BUDGET", 40_000)
    page = Page(write_report(run))

    assert "secret" not in page.text and not {"out", "gone", "bad"} & set(page.words["h3"])
    assert sum(tag == "img" for tag, _ in page.tags) == 2 and page.words["pre"].count("kept") == 3
