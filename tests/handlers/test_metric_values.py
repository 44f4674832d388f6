"""A metric that is not one number is logged as a list, and returned."""

import json
import sys

import numpy as np
import pandas
import pytest
import torch
from ignite.engine import Events
from ignite.metrics import Accuracy, ClassificationReport, ConfusionMatrix, Precision, PrecisionRecallCurve, RocCurve

from ignite_engine.handlers.metric_values import number_of, publish
from ignite_engine.run_directory import json_values
from ignite_engine.state import TrainingState
from tests.handlers.evaluation.test_sanity import trained
from tests.kit.fitting import QUIET


def first_class(output):
    return torch.softmax(output[0], 1)[:, 0], (output[1] == 0).long()


METRICS = {
    "accuracy": lambda: Accuracy(),
    "precision": lambda: Precision(average=False),
    "confusion": lambda: ConfusionMatrix(3),
    "report": lambda: ClassificationReport(),
    "details": lambda: ClassificationReport(output_dict=True),
    "curve": lambda: PrecisionRecallCurve(output_transform=first_class),
    "roc": lambda: RocCurve(output_transform=first_class),
}


def test_run_logs_lists_and_evaluate_returns_the_values(tmp_path):
    pytest.importorskip("sklearn")
    logging = {**QUIET["logging"], "report": True, "tensorboard": True}
    metrics = {name: make() for name, make in METRICS.items()}
    run = trained(tmp_path, metrics=metrics, best="val/accuracy", logging=logging)

    line, values = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1]), run.evaluate()
    assert len(line["val/precision"]) == 3 and all(isinstance(value, float) for value in line["val/precision"])
    assert np.array(line["val/confusion"]).sum() == 12 and np.array(line["val/roc"][0]).ndim == 1
    assert line["val/details"]["macro avg"].keys() >= {"precision", "recall"}
    for name in METRICS:
        assert line[f"val/{name}"] == json_values(values[f"val/{name}"]), name
    assert json.loads(json.dumps(values))["val/accuracy"] == run.metrics["val/accuracy"]


def test_metric_of_very_many_numbers_is_not_logged(tmp_path):
    with pytest.warns(UserWarning, match=r"'val/large' is 1001 numbers, and a log takes 1,000: it is not logged\.$"):
        publish(state := TrainingState(), {"val/large": torch.zeros(1001), "val/small": torch.zeros(2), "a": object()})

    assert state.metrics == {"val/small": [0.0, 0.0]}


def test_history_is_a_list_of_what_was_logged_and_a_table_with_pandas(tmp_path, monkeypatch):
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


def test_number_that_no_float_holds_is_refused_with_its_name(tmp_path):
    with pytest.raises(
        ValueError, match=r"^The metric 'val/big' must fit into a float, got a larger int: give its log"
    ):
        number_of(10**5000, "val/big")

    def write(trainer):
        trainer.state.metrics["big"] = 10**400

    with pytest.raises(
        ValueError, match=r"^state.metrics\['big'\] must fit into a float, got a larger int: give its log"
    ):
        trained(tmp_path, handlers=[(write, Events.ITERATION_COMPLETED)])
