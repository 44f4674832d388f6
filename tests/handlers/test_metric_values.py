"""A metric that is not one number is logged as a table or a picture, and returned."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
import torch
from ignite.engine import Events
from ignite.metrics import Accuracy, ClassificationReport, ConfusionMatrix, Precision, PrecisionRecallCurve, RocCurve

from ignite_engine import Trainer
from ignite_engine.handlers.glyphs import brief, drawn
from ignite_engine.handlers.metric_values import SIDE, media_of, number_of
from tests.handlers.evaluation.test_sanity import trained
from tests.runs.test_fit import QUIET


def first_class(output: Any) -> Any:
    return torch.softmax(output[0], 1)[:, 0], (output[1] == 0).long()


METRICS: dict[str, Any] = {
    "accuracy": lambda: Accuracy(),
    "precision": lambda: Precision(average=False),
    "confusion": lambda: ConfusionMatrix(3),
    "report": lambda: ClassificationReport(),
    "details": lambda: ClassificationReport(output_dict=True),
    "curve": lambda: PrecisionRecallCurve(output_transform=first_class),
    "roc": lambda: RocCurve(output_transform=first_class),
}


def test_run_logs_tables_and_pictures_and_evaluate_returns_the_values(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    logging = {**QUIET["logging"], "report": True, "tensorboard": True}
    metrics = {name: make() for name, make in METRICS.items()}
    run = trained(tmp_path, metrics=metrics, best="val/accuracy", logging=logging)

    media = tmp_path / "media" / "val"
    precision = run.evaluate()["val/precision"]
    assert len(precision) == 3 and all(isinstance(value, float) for value in precision)
    table = (media / "precision" / "00000012.txt").read_text().splitlines()
    assert [line.split()[0] for line in table] == ["0", "1", "2"]
    confusion = run.evaluate()["val/confusion"]
    assert np.array(confusion).sum() == 12
    written = (media / "confusion" / "table" / "00000012.txt").read_text().splitlines()
    assert [[int(cell) for cell in line.split()[1:]] for line in written[1:]] == confusion
    assert (media / "confusion" / "00000012.png").read_bytes().startswith(b"\x89PNG")
    for name in ("report", "details"):
        text = (media / name / "00000012.txt").read_text()
        assert "precision" in text.splitlines()[0] and any(line.startswith("macro avg") for line in text.splitlines())
    assert {path.name for path in media.iterdir()} == {"precision", "confusion", "report", "details", "curve", "roc"}
    page = (tmp_path / "report.html").read_text()
    assert "val/confusion" in page and "macro avg" in page
    logged = b"".join(path.read_bytes() for path in (tmp_path / "tensorboard").rglob("events*"))
    assert b"val/confusion/table" in logged and b"val/curve" in logged
    assert set(run.metrics) >= {"val/accuracy", "loss"} and "val/precision" not in run.metrics
    assert json.loads(json.dumps(run.evaluate()))["val/accuracy"] == run.metrics["val/accuracy"]


def test_curves_and_matrices_are_drawn_where_they_are() -> None:
    (_, picture), *more = media_of("roc", (torch.tensor([0.0, 0.0, 1.0]), torch.tensor([0.0, 1.0, 1.0]), torch.ones(3)))
    dark = picture.pixels[:, :, 0] == 0
    assert not more and dark[:, 0].all() and dark[0].all() and dark.sum() == 2 * SIDE - 1  # up, then right
    precision, recall = torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0])
    ((_, picture),) = media_of("curve", (precision, recall, torch.ones(1)))
    dark = picture.pixels[:, :, 0] == 0
    assert dark[0, 0] and dark[-1, -1] and not dark[-1, 0]  # precision falls as recall grows
    (_, picture), (name, table) = media_of("matrix", torch.tensor([[3, 1], [0, 4]]))
    assert name == "matrix/table" and table.splitlines()[1].split() == ["0", "3", "1"]
    cells = picture.pixels[-SIDE:, -SIDE:, 0]
    corners = [cells[row, column] for row in (0, -1) for column in (0, -1)]
    assert corners == [64, 191, 255, 0]


def test_matrix_has_its_numbers_and_the_names_of_its_axes() -> None:
    (_, picture), _ = media_of("matrix", torch.tensor([[3, 1200], [0, 41_000]]))
    pixels, side = picture.pixels[:, :, 0], SIDE // 2

    def is_drawn(text: str, part: Any, size: int, dark: bool = True) -> bool:
        letters = drawn(text, size)
        rows, columns = letters.shape
        shade = 0 if dark else 255
        return any(
            bool((part[top : top + rows, left : left + columns][letters] == shade).all())
            and not bool((part[top : top + rows, left : left + columns][~letters] == shade).any())
            for top in range(part.shape[0] - rows + 1)
            for left in range(part.shape[1] - columns + 1)
        )

    axes, cells = pixels[:-SIDE], pixels[-SIDE:, -SIDE:]
    assert is_drawn("predicted", axes, 2) and is_drawn("true", axes, 2)
    assert is_drawn("0", axes, 2) and is_drawn("1", axes, 2)
    assert is_drawn("3", cells[:side, :side], 3) and is_drawn("41k", cells[side:, side:], 3, dark=False)
    assert is_drawn("1200", cells[:side, side:], 3, dark=False) and not is_drawn("1200", cells[side:], 3)
    wide = [picture for _, picture in media_of("many", torch.eye(300)) if hasattr(picture, "pixels")]
    assert (wide[0].pixels[-300:, -300:, 0] == 255 - 255 * torch.eye(300).numpy()).all()  # no room for numbers


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (9999, "9999"), (10_000, "10k"), (2.5e6, "2M"), (0.25, ".25"), (-0.5, "-.50"), (12.3, "12"), (1.0, "1")],
)
def test_numbers_are_brief(value: float, text: str) -> None:
    assert brief(value) == text


@pytest.mark.parametrize("value", [None, object(), torch.empty(0), torch.ones(2, 2, 2), ["a"], [[1], [2, 3]]])
def test_what_is_not_known_is_left_out(value: Any) -> None:
    assert list(media_of("x", value)) == []


def test_history_is_a_list_of_what_was_logged_and_a_table_with_pandas(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = trained(tmp_path, logging={**QUIET["logging"], "every": 4})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"iteration": 13, "loss": "nan"}\n')
    history = run.history
    assert [point["iteration"] for point in history] == [4, 8, 12, 13]
    assert history[2]["val/loss"] == run.metrics["val/loss"] and history[3]["loss"] != history[3]["loss"]
    frame = history.to_pandas()
    assert isinstance(frame, pandas.DataFrame) and frame["iteration"].tolist() == [4, 8, 12, 13]
    assert frame["val/loss"].tolist()[2] == run.metrics["val/loss"] and frame["val/loss"].isna()[0]
    assert frame["loss"].isna().tolist() == [False, False, False, True]
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ModuleNotFoundError, match=r"^to_pandas\(\) needs pandas: pip install pandas\.$"):
        history.to_pandas()


def test_number_that_no_float_holds_is_refused_with_its_name(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"^The metric 'val/big' must fit into a float, got a larger int: give its log"
    ):
        number_of(10**5000, "val/big")

    def write(trainer: Trainer) -> None:
        trainer.state.metrics["big"] = 10**400

    with pytest.raises(
        ValueError, match=r"^state.metrics\['big'\] must fit into a float, got a larger int: give its log"
    ):
        trained(tmp_path, handlers=[(write, Events.ITERATION_COMPLETED)])
