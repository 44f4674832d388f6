"""Images, texts and histograms reach each sink that takes them, once, and are nowhere kept."""

from __future__ import annotations

import gc
import io
import json
import logging
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ignite.engine import Events
from PIL import Image as PILImage

from ignite_engine import Trainer, TrainingEvents
from ignite_engine.handlers import Checkpoint, Histogram, Image, MediaFiles, MetricLogger
from ignite_engine.handlers.media import png
from tests.builders import numbers_loader, on_two_ranks, trainer_of
from tests.handlers.test_sinks import lines


def counting(*sinks: Any, directory: Path | None = None) -> Trainer:
    trainer = Trainer(lambda engine, batch: float(batch))
    MetricLogger(directory, sinks=sinks, console=False).attach(trainer, Events.EPOCH_COMPLETED)
    return trainer


class Recorder:
    """A sink that takes images and texts, but no histograms."""

    def __init__(self) -> None:
        self.got: list[Any] = []

    def write(self, iteration: int, values: Any) -> None:
        self.got.append((iteration, dict(values)))

    def image(self, name: str, iteration: int, pixels: Any) -> None:
        self.got.append((iteration, name, pixels.tolist()))

    def text(self, name: str, iteration: int, text: str) -> None:
        self.got.append((iteration, name, text))


def test_media_reach_the_sinks_that_take_them_at_the_step_boundary() -> None:
    sink = Recorder()
    trainer = counting(sink)

    @trainer.on(Events.ITERATION_COMPLETED(once=2))
    def log() -> None:
        trainer.state.media |= {"a": "hello", "b": Image(torch.eye(2)), "c": Histogram([1.0, 2.0])}

    trainer.add_event_handler(Events.ITERATION_STARTED(once=3), lambda: sink.got.append(dict(trainer.state.media)))
    trainer.run(range(3))

    pixels = [[[255], [0]], [[0], [255]]]
    assert sink.got == [(2, "a", "hello"), (2, "b", pixels), {}, (3, {"epoch": 1, "loss": 1.0})]


@pytest.mark.slow
def test_nothing_keeps_an_image_that_was_logged(tmp_path: Path) -> None:
    trainer, alive = counting(directory=tmp_path), list[int]()
    references: list[weakref.ref[Any]] = []

    @trainer.on(Events.ITERATION_COMPLETED)
    def log() -> None:
        image = Image(np.zeros((2, 2)))
        references.append(weakref.ref(image))
        trainer.state.media["a"] = image

    @trainer.on(Events.ITERATION_STARTED)
    def count() -> None:
        gc.collect()
        alive.append(sum(each() is not None for each in references))

    trainer.run(range(3))
    assert alive == [0, 0, 0]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (torch.tensor([[0.0, 0.5], [1.0, 2.0]]), [[[0], [128]], [[255], [255]]]),
        (torch.tensor([[0.5, float("nan")]], dtype=torch.bfloat16, requires_grad=True), [[[128], [0]]]),
        (np.array([[[1, 2, 3]]], dtype=np.uint8), [[[1, 2, 3]]]),
        (torch.arange(12, dtype=torch.uint8).reshape(3, 2, 2), [[[0, 4, 8], [1, 5, 9]], [[2, 6, 10], [3, 7, 11]]]),
        (np.array([[True, False]]), [[[255], [0]]]),
    ],
)
def test_pixels_are_bytes_with_the_channels_last(given: Any, expected: Any) -> None:
    pixels = Image(given).pixels
    assert pixels.dtype == np.uint8 and pixels.tolist() == expected


@pytest.mark.parametrize("shape", [(3,), (2, 5, 5), (5, 5, 2), (1, 1, 5, 5), (0, 5)])
def test_image_of_another_shape_is_refused_where_it_is_made(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"Image got the shape .* expected"):
        Image(torch.zeros(shape))


@pytest.mark.parametrize("channels", [1, 3, 4])
def test_png_is_read_by_others(channels: int) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (5, 7, channels), dtype=np.uint8)
    read = PILImage.open(io.BytesIO(png(pixels)))

    assert read.mode == {1: "L", 3: "RGB", 4: "RGBA"}[channels]
    assert (np.asarray(read).reshape(5, 7, channels) == pixels).all()


def test_histogram_counts_the_finite_values() -> None:
    counts, edges = Histogram(torch.tensor([0.0, 1.0, 1.0, float("nan"), float("inf")], dtype=torch.bfloat16)).bins
    assert (counts[0], counts[-1], sum(counts)) == (1, 2, 3)
    assert (edges[0], edges[-1], len(edges)) == (0.0, 1.0, len(counts) + 1)
    assert sum(Histogram([2.0, 2.0]).bins[0]) == 2 and sum(Histogram([float("nan")]).bins[0]) == 0


def test_files_and_their_index(tmp_path: Path) -> None:
    trainer = counting(directory=tmp_path)

    @trainer.on(Events.ITERATION_COMPLETED(every=2))
    def log() -> None:
        trainer.state.media["val/image"] = Image(np.full((1, 1), 1.0))
        trainer.state.media["../../out: side"] = "text"
        trainer.state.media["weights"] = Histogram(torch.arange(64.0))

    trainer.run(range(4))
    media = tmp_path / "media"
    files = {"../../out: side": "out_ side/00000002.txt", "val/image": "val/image/00000002.png"}

    assert lines(media / "index.jsonl")[0] == {"iteration": 2, **files, "weights": "weights/00000002.json"}
    assert [line["iteration"] for line in lines(media / "index.jsonl")] == [2, 4]
    assert PILImage.open(media / "val/image/00000004.png").getpixel((0, 0)) == 255
    assert (media / "out_ side/00000004.txt").read_text() == "text"
    assert json.loads((media / "weights/00000004.json").read_text())["counts"] == [1.0] * 64
    assert [line["iteration"] for line in lines(tmp_path / "metrics.jsonl")] == [4], "media make no line of numbers"


def test_without_media_there_is_no_folder(tmp_path: Path) -> None:
    trainer = counting(directory=tmp_path)
    trainer.run(range(2))
    assert list(trainer.state.sink_seconds) == ["jsonl"]
    assert not (tmp_path / "media").exists()


@pytest.mark.parametrize("die_at", [3, 8, 11])
def test_resumed_run_lists_nothing_twice(die_at: int, tmp_path: Path) -> None:
    def run(directory: Path, die_at: int | None = None) -> None:
        trainer = trainer_of()
        MetricLogger(directory, console=False).attach(trainer)

        @trainer.on(Events.ITERATION_COMPLETED)
        def log() -> None:
            trainer.state.media["a"] = f"at {trainer.state.iteration}"

        checkpoint = Checkpoint(directory / "checkpoints")
        checkpoint.attach(trainer, Events.ITERATION_COMPLETED(every=4))
        if die_at is not None:
            trainer.add_event_handler(TrainingEvents.RESUME_POINT(once=die_at), lambda: 1 / 0)
        checkpoint.resume()
        trainer.run(numbers_loader(24))

    run(tmp_path / "whole")
    with pytest.raises(ZeroDivisionError):
        run(tmp_path / "cut", die_at)
    run(tmp_path / "cut")
    whole, cut = (sorted((tmp_path / name / "media").rglob("*.*")) for name in ("whole", "cut"))

    assert [path.read_bytes() for path in cut] == [path.read_bytes() for path in whole] and len(whole) == 13


def test_index_loses_the_lines_after_the_checkpoint_when_it_is_loaded(tmp_path: Path) -> None:
    sink = MediaFiles(tmp_path)
    sink.text("a", 1, "first")
    state = sink.state_dict()
    sink.text("a", 2, "second")
    MediaFiles(tmp_path).load_state_dict(state)

    assert lines(tmp_path / "media" / "index.jsonl") == [{"iteration": 1, "a": "a/00000001.txt"}]


def test_sink_that_cannot_take_one_warns_once_and_gets_the_rest(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(Recorder):
        def image(self, name: str, iteration: int, pixels: Any) -> None:
            raise RuntimeError("no colours")

    sink = Broken()
    trainer = counting(sink)

    @trainer.on(Events.ITERATION_COMPLETED)
    def log() -> None:
        trainer.state.media |= {"a": Image(torch.eye(2)), "b": 3, "c": "text"}

    state = trainer.run(range(2))
    warned = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]

    assert state.status == "completed" and [each[2] for each in sink.got if len(each) == 3] == ["text"] * 2
    assert len(warned) == 1 and "no colours" in warned[0]


def test_what_is_no_medium_is_named(caplog: pytest.LogCaptureFixture) -> None:
    trainer = counting(Recorder())
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: trainer.state.media.update(a=3))
    trainer.run(range(1))

    assert "state.media['a'] is 3, expected a str, an Image or a Histogram" in caplog.text


def _cases(rank: int, folder: Path) -> dict[str, Any]:
    trainer = counting(directory=folder / "run")
    read = list[str]()

    class Counted(Image):
        def content(self) -> tuple[Any, ...]:
            read.append("read")
            return super().content()

    @trainer.on(Events.ITERATION_COMPLETED(every=2))
    def log() -> None:
        trainer.state.media["a"] = Counted(torch.full((1, 1), float(rank)))

    trainer.run(range(4))
    return {"read": len(read), "left": len(trainer.state.media)}


@pytest.mark.distributed
def test_on_two_ranks_rank_0s_is_logged_and_no_other_is_read(tmp_path: Path) -> None:
    answers = on_two_ranks(lambda rank: _cases(rank, tmp_path), tmp_path / "store")

    assert answers == {"read": [2, 0], "left": [0, 0]}
    assert PILImage.open(tmp_path / "run/media/a/00000004.png").getpixel((0, 0)) == 0
