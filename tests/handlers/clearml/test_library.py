"""The library clearml itself: its offline session, over a failure and a resume."""

import json
import zipfile

import pytest
from ignite.engine import Events

from ignite_engine import TrainingEvents
from ignite_engine.handlers import Checkpoint, ClearMLLogger, MetricLogger
from tests.kit.tiny import numbers_loader, trainer_of

pytestmark = pytest.mark.nightly


def run_twice(run):
    """It dies after iteration 6, and resumes from 4; the losses in its log."""
    for dies in (True, False):
        trainer = trainer_of()
        sink = ClearMLLogger(run, config={"optimizer": {"lr": 0.25}}, close_within_s=60.0)
        MetricLogger(run, sinks=[sink], console=False).attach(trainer)
        checkpoint = Checkpoint(run / "checkpoints")
        checkpoint.attach(trainer, Events.ITERATION_COMPLETED(every=4))
        checkpoint.resume()
        if dies:
            trainer.add_event_handler(TrainingEvents.RESUME_POINT(once=6), lambda: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                trainer.run(numbers_loader(24))
        else:
            trainer.run(numbers_loader(24))
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [(line["iteration"], line["loss"]) for line in lines]


def test_offline_session_can_be_imported(tmp_path, monkeypatch):
    monkeypatch.setenv("CLEARML_CONFIG_FILE", str(tmp_path / "none.conf"))
    expected = run_twice(tmp_path)
    (zipped,) = tmp_path.glob("clearml/offline/*.zip")
    with zipfile.ZipFile(zipped) as archive:
        task = json.loads(archive.read("task.json"))
        lines = archive.read("metrics.jsonl").decode().splitlines()
    points = [event for line in lines for event in json.loads(line) if event.get("metric") == "loss"]
    assert [(point["iter"], point["value"]) for point in points] == expected and len(expected) == 12
    properties = task["hyperparams"]["properties"]
    assert (properties["status"]["value"], properties["reason"]["value"]) == ("completed", "max_epochs")
    assert task["hyperparams"]["optimizer"]["lr"]["value"] == "0.25"
    assert task["configuration"].keys() >= {"config", "environment"}
    uris = [
        (model["weights"]["register_uri"], model["weights"]["iteration"]) for model in task["offline_output_models"]
    ]
    assert uris[-1] == ((tmp_path / "checkpoints" / "iteration_00000012").as_uri(), 12)
