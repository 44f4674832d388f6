"""One JSON object per iteration, whatever happened before."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
import torch

from ignite_engine.handlers import ConsoleSink, JSONLSink


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_line_is_on_disk_when_it_is_written(tmp_path: Path) -> None:
    sink = JSONLSink(tmp_path / "new" / "metrics.jsonl")
    sink.write(1, {"epoch": 1, "b": 0.1 + 0.2, "a": 2})

    assert (tmp_path / "new" / "metrics.jsonl").read_text() == (
        '{"iteration": 1, "epoch": 1, "a": 2, "b": 0.30000000000000004}\n'
    )


def test_values_of_one_iteration_share_a_line(tmp_path: Path) -> None:
    sink = JSONLSink(tmp_path / "metrics.jsonl")
    sink.write(1, {"a": 1.0})
    sink.write(2, {"a": 2.0, "long name": 5.0})
    sink.write(2, {"a": 3.0})
    sink.write(3, {"a": 4.0})

    assert lines(tmp_path / "metrics.jsonl") == [
        {"iteration": 1, "a": 1.0},
        {"iteration": 2, "a": 3.0, "long name": 5.0},
        {"iteration": 3, "a": 4.0},
    ]


@pytest.mark.parametrize(
    ("value", "written"),
    [
        (float("nan"), "nan"),
        (float("inf"), "inf"),
        (float("-inf"), "-inf"),
        (torch.tensor(float("nan")), "nan"),
        (torch.tensor(1.5), 1.5),
        (True, True),
        ("word", "word"),
    ],
)
def test_every_line_is_strict_json(value: object, written: object, tmp_path: Path) -> None:
    JSONLSink(tmp_path / "metrics.jsonl").write(1, {"a": value})

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    line = json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=refuse)
    assert line["a"] == written and type(line["a"]) is type(written)


def test_file_is_cut_back_to_the_saved_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    sink = JSONLSink(path)
    sink.write(1, {"a": 1.0})
    sink.write(2, {"a": 2.0})
    saved = sink.state_dict()
    sink.write(2, {"joined": 9.0})
    sink.write(3, {"a": 3.0})
    with path.open("a") as file:
        file.write('{"iteration": 4, "a"')  # killed while writing
    resumed = JSONLSink(path)
    resumed.load_state_dict(saved)
    resumed.write(3, {"a": 30.0})

    assert lines(path) == [{"iteration": 1, "a": 1.0}, {"iteration": 2, "a": 2.0}, {"iteration": 3, "a": 30.0}]


def test_checkpoint_from_before_the_first_line_empties_the_file(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    sink = JSONLSink(path)
    saved = sink.state_dict()
    sink.write(1, {"a": 1.0})
    resumed = JSONLSink(path)
    resumed.load_state_dict(saved)

    assert path.read_text() == ""


def test_resuming_without_the_file_leaves_no_hole(tmp_path: Path) -> None:
    sink = JSONLSink(tmp_path / "old.jsonl")
    sink.write(1, {"a": 1.0})
    sink.write(2, {"a": 2.0})
    resumed = JSONLSink(tmp_path / "new.jsonl")
    resumed.load_state_dict(sink.state_dict())
    resumed.write(3, {"a": 3.0})

    assert lines(tmp_path / "new.jsonl") == [{"iteration": 2, "a": 2.0}, {"iteration": 3, "a": 3.0}]


def test_run_that_starts_over_in_the_same_file_doubles_no_line(tmp_path: Path) -> None:
    """Killed before its first checkpoint, the same command starts at iteration 1 again."""
    path = tmp_path / "metrics.jsonl"
    first = JSONLSink(path)
    for iteration in (1, 2, 3):
        first.write(iteration, {"a": float(iteration)})
    with path.open("a") as file:
        file.write('{"iterat')
    second = JSONLSink(path)
    second.write(1, {"a": 10.0})
    second.write(2, {"a": 20.0})

    assert lines(path) == [{"iteration": 1, "a": 10.0}, {"iteration": 2, "a": 20.0}]


def test_run_that_goes_on_without_a_saved_position_keeps_the_lines_before(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    first = JSONLSink(path)
    for iteration in (1, 2, 3):
        first.write(iteration, {"a": float(iteration)})
    JSONLSink(path).write(3, {"b": 1.0})

    assert lines(path) == [{"iteration": 1, "a": 1.0}, {"iteration": 2, "a": 2.0}, {"iteration": 3, "b": 1.0}]


def test_other_ranks_write_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ignite.distributed.get_rank", lambda: 1)
    stream = io.StringIO()
    JSONLSink(tmp_path / "metrics.jsonl").write(1, {"a": 1.0})
    ConsoleSink(stream).write(1, {"a": 1.0})

    assert not (tmp_path / "metrics.jsonl").exists() and stream.getvalue() == ""


def test_console_rounds_for_reading(capsys: pytest.CaptureFixture[str]) -> None:
    ConsoleSink().write(7, {"epoch": 2, "loss": 0.123456789})

    assert capsys.readouterr().out == "iteration 7  epoch 2  loss 0.12346\n"


def test_console_shows_the_loss_before_the_groups(capsys: pytest.CaptureFixture[str]) -> None:
    ConsoleSink().write(7, {"epoch": 2, "memory/peak_mib": 3.0, "loss": 0.5, "val/loss": 1.0, "lr": 0.25})

    assert capsys.readouterr().out == "iteration 7  epoch 2  loss 0.5  lr 0.25  memory/peak_mib 3  val/loss 1\n"
