"""Each tracker has each value once, over kills, resumes and roll-backs.

The stand-ins of W&B and MLflow have what the libraries document of the functions that are called; the last tests use
the libraries themselves where they are installed.
"""

import importlib.util
import json
import os
import signal
import sys
import time
from collections import Counter

import pytest
import torch
from ignite.engine import Events
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

from ignite_engine.cli import main
from ignite_engine.handlers import Checkpoint, ClearML, MemoryLogger, MetricLogger, MLflow, TensorBoard, WandB
from ignite_engine.handlers.trackers.tracker import Tracker
from tests.handlers.trackers.sent import settled
from tests.kit.processes import start, wait_until
from tests.kit.tiny import logging_to, numbers_loader, trainer_of

CONFIG = {"optimizer": {"lr": 0.5, "betas": [1, 2]}, "name": "a", "no": None}
FLAT = {"optimizer.lr": 0.5, "optimizer.betas": "[1, 2]", "name": "a"}
RECORDS = """
import json, os, pathlib
def record(call, *given):
    with open(pathlib.Path(__file__).with_name("calls.jsonl"), "a") as file:
        file.write(json.dumps([call, *given], default=str) + "\\n")
"""
STAND_INS = {
    "wandb": """
from types import SimpleNamespace
def Settings(**given):
    return given
class Run:
    starting_step = 0
    def __init__(self, name):
        self.id, self.summary = name, {}
    def log(self, values, step):
        record("point", self.id, step, values)
    def finish(self, exit_code):
        record("end", self.summary, exit_code)
def init(**given):
    record("init", given)
    return Run(given["id"] or "run0")
""",
    "mlflow": """
from types import SimpleNamespace
class MlflowClient:
    def __init__(self, uri):
        record("init", uri)
    def get_experiment_by_name(self, name):
        return None
    def create_experiment(self, name):
        return name
    def create_run(self, experiment, run_name):
        record("run", experiment, run_name)
        return SimpleNamespace(info=SimpleNamespace(run_id="run0"))
    def log_metric(self, run, name, value, step):
        record("point", run, step, {name: value})
    def __getattr__(self, name):
        return lambda *given, **named: record(name, *given, *named.values())
""",
}


@pytest.fixture(autouse=True)
def nothing_configured(monkeypatch, tmp_path):
    for name in ("WANDB_MODE", "WANDB_API_KEY", "WANDB_BASE_URL", "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))


@pytest.fixture
def library(tmp_path, monkeypatch):
    """Stand-ins in a folder, and what was called: its name and arguments."""
    folder = tmp_path / "library"
    folder.mkdir()
    for name, text in STAND_INS.items():
        (folder / f"{name}.py").write_text(RECORDS + text)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setenv("PYTHONPATH", str(folder))

    def calls(name):
        path = folder / "calls.jsonl"
        lines = map(json.loads, path.read_text().splitlines() if path.exists() else ())
        return [given for call, *given in lines if call == name]

    return calls


def twice(run, make):
    """A run that dies and is resumed."""
    with pytest.raises(ZeroDivisionError):
        logging_to(make(run), run, die_at=6).run(numbers_loader(24))
    settled(run)
    logging_to(make(run), run).run(numbers_loader(24))
    settled(run)


def points(calls, name="loss"):
    return [step for _, step, values in calls("point") if name in values]


@pytest.mark.row("F2", "F9")
def test_wandb_run_is_resumed_and_has_each_value_once(tmp_path, library):
    twice(run := tmp_path / "run", lambda run: WandB(run, config=CONFIG, project="p"))
    assert points(library) == list(range(1, 13))
    inits = [given for (given,) in library("init")]
    assert [(each["project"], each["config"], each["mode"]) for each in inits] == [("p", CONFIG, "offline")] * 2
    assert [each["id"] for each in inits] == [None, "run0"] and inits[0]["name"] == run.name
    failed, completed = library("end")
    assert failed == [{"status": "failed", "reason": "ZeroDivisionError: division by zero"}, 1]
    assert completed == [{"status": "completed", "reason": "max_epochs"}, 0]


@pytest.mark.row("F2")
def test_mlflow_run_is_resumed_and_has_each_value_once(tmp_path, library):
    twice(run := tmp_path / "run", lambda run: MLflow(run, config=CONFIG, experiment="e"))
    assert points(library) == list(range(1, 13)) and library("run") == [["e", "run"]]
    assert {key: value for _, key, value in library("log_param")} == FLAT
    assert library("init") == [[f"sqlite:///{run}/mlflow.db"]] * 2
    assert library("set_terminated") == [["run0", "FAILED"], ["run0", "FINISHED"]]
    assert library("set_tag")[-1] == ["run0", "reason", "max_epochs"]


@pytest.mark.parametrize(
    ("variables", "netrc", "mode"),
    [
        ({}, "machine api.wandb.ai login user password k", None),
        ({}, "machine elsewhere.org login user password k", "offline"),
        ({"WANDB_BASE_URL": "https://elsewhere.org"}, "machine elsewhere.org login user password k", None),
        ({"WANDB_API_KEY": "k", "WANDB_MODE": "offline"}, "", "offline"),
    ],
)
def test_wandb_is_online_where_it_has_a_key_and_never_asks_for_one(
    variables, netrc, mode, tmp_path, library, monkeypatch
):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    (tmp_path / ".netrc").write_text(netrc)
    (tmp_path / ".netrc").chmod(0o600)
    logging_to(WandB(tmp_path), tmp_path).run(numbers_loader(4))
    assert [given["mode"] for (given,) in library("init")] == [mode]


@pytest.mark.parametrize("kind", [WandB, MLflow])
def test_package_that_is_missing_is_one_line_with_its_extra(kind, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, kind.extra, None)
    with pytest.raises(ValueError, match=rf"ignite-engine\[{kind.extra}\]"):
        logging_to(kind(tmp_path), tmp_path)


# -- TensorBoard ------------------------------------------------------------------------------------------------------


def read(run):
    return EventAccumulator(str(run / "tensorboard"), size_guidance={"scalars": 0, "tensors": 0}).Reload()


def scalars(run):
    found = read(run)
    return {tag: [(event.step, event.value) for event in found.Scalars(tag)] for tag in found.Tags()["scalars"]}


def logged(run):
    """The losses in the log; TensorBoard keeps fp32."""
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [(line["iteration"], pytest.approx(line["loss"], rel=1e-6)) for line in lines]


@pytest.mark.row("F1")
def test_tensorboard_has_what_was_logged_and_the_config(tmp_path):
    trainer = logging_to(TensorBoard(tmp_path, config=CONFIG), tmp_path)
    MemoryLogger().attach(trainer, Events.ITERATION_COMPLETED(every=6))
    trainer.run(numbers_loader())
    trainer.run(numbers_loader(), max_epochs=2)  # continues

    found = scalars(tmp_path)
    assert found["loss"] == logged(tmp_path) and len(found["loss"]) == 12
    assert [step for step, _ in found["memory/host_rss_mib"]] == [6, 12]
    assert "optimizer:" in read(tmp_path).Tensors("config/text_summary")[-1].tensor_proto.string_val[0].decode()
    content = read(tmp_path).SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    hparams = HParamsPluginData.FromString(content).session_start_info.hparams
    assert {key: getattr(value, value.WhichOneof("kind")) for key, value in hparams.items()} == FLAT


def train_until_killed(run, at, others):
    sys.path.insert(0, os.environ["PYTHONPATH"])
    trainer = logging_to(WandB(run), run)
    for kind in others:
        kind(run).attach(trainer)
    MemoryLogger().attach(trainer, Events.ITERATION_COMPLETED(every=3))  # other values in each start
    if at:
        sent = run / "trackers" / "wandb.sent"
        trainer.add_event_handler(
            Events.ITERATION_COMPLETED(once=at),
            lambda: wait_until(lambda: sent.exists() and sent.stat().st_size >= 16 * (at - 2)),
        )
        trainer.add_event_handler(Events.ITERATION_COMPLETED(once=at), lambda: os.kill(os.getpid(), signal.SIGKILL))
    trainer.run(numbers_loader(24))


@pytest.mark.row("F2")
def test_after_a_kill_the_process_ends_by_itself_and_each_point_is_there_once(tmp_path, library):
    run = tmp_path / "run"
    for at in (7, None):
        assert start(train_until_killed, run, at, ()).wait() == (-signal.SIGKILL if at else 0)
        settled(run)
    assert points(library) == list(range(1, 13)) and [code for _, code in library("end")] == [1, 0]


@pytest.mark.nightly  # of the libraries themselves
def test_after_two_kills_each_point_is_there_once(tmp_path, library, monkeypatch):
    monkeypatch.setenv("CLEARML_CONFIG_FILE", str(tmp_path / "none.conf"))
    run = tmp_path / "run"
    for at in (7, 11, None):
        assert start(train_until_killed, run, at, (TensorBoard, ClearML)).wait() == (-signal.SIGKILL if at else 0)
    settled(run)

    assert scalars(run)["loss"] == logged(run) and len(logged(run)) == 12
    assert points(library) == list(range(1, 13))
    (session,) = (run / "clearml" / "offline").glob("offline-*/metrics.jsonl")
    events = [event for line in session.read_text().splitlines() for event in json.loads(line)]
    assert sorted(event["iter"] for event in events if event["metric"] == "loss") == list(range(1, 13))
    assert max(Counter((event["metric"], event["variant"], event["iter"]) for event in events).values()) == 1


# -- one of the user's own --------------------------------------------------------------------------------------------

OWN = """
import json, os, time
from ignite_engine.handlers.trackers.tracker import Tracker

class Listing(Tracker):
    def __init__(self, directory, *, hangs=False, name="listing"):
        super().__init__(directory, name=name)
        self.hangs = hangs

    def begin(self, first, kept, run):
        self.write(["begin", first])

    def push(self, rows):
        if self.hangs:
            self.write(["hangs", os.getpid()])
            time.sleep(1000)
        self.write([row["iteration"] for row in rows])

    def end(self, outcome):
        with (self.directory / "ends").open("a") as file:
            file.write(outcome["status"] + "\\n")

    def write(self, what):
        with (self.directory / "listing.jsonl").open("a") as file:
            file.write(json.dumps(what) + "\\n")
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    (tmp_path / "own_tracker.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    yield importlib.import_module("own_tracker").Listing
    del sys.modules["own_tracker"]


def listed(run):
    return list(map(json.loads, (run / "listing.jsonl").read_text().splitlines()))


def rewrite(run, *losses):
    """A log of other losses from the first iteration on that has one."""
    lines = [json.dumps({"iteration": number, "loss": loss}) + "\n" for number, loss in enumerate(losses, start=1)]
    (run / "metrics.jsonl").write_text("".join(lines))


def test_tracker_of_the_users_own_begins_anew_where_the_log_has_changed(own, tmp_path):
    logging_to(own(tmp_path), tmp_path).run(numbers_loader(8))
    assert [step for each in listed(tmp_path) if "begin" not in each for step in each] == [1, 2, 3, 4]
    (tmp_path / "listing.jsonl").unlink()
    assert main(["track", str(tmp_path)]) == 0 and not (tmp_path / "listing.jsonl").exists(), "it lacks nothing"

    rewrite(tmp_path, 1.0, 2.0, 3.0)
    assert main(["track", str(tmp_path)]) == 0
    rewrite(tmp_path, 1.0, 2.0, 3.5, 4.0)
    assert main(["track", str(tmp_path)]) == 0
    assert listed(tmp_path) == [["begin", 1], [1, 2, 3], ["begin", 3], [3, 4]]
    rewrite(tmp_path, 1.0)
    assert main(["track", str(tmp_path)]) == 0
    assert main(["track", str(tmp_path)]) == 0


def test_run_that_goes_back_to_a_checkpoint_is_one_run_of_its_tracker(own, tmp_path):
    trainer, damaged = trainer_of(non_finite="rollback"), []
    MetricLogger(tmp_path, console=False).attach(trainer)
    own(tmp_path).attach(trainer)
    Checkpoint(tmp_path / "checkpoints").attach(trainer, Events.ITERATION_COMPLETED(every=2))

    @trainer.on(Events.ITERATION_STARTED)
    def damage():
        if trainer.state.iteration == 4 and not damaged:
            damaged.append(trainer.state.batch[0].fill_(torch.nan))

    trainer.run(numbers_loader(16))
    assert damaged and (tmp_path / "ends").read_text() == "completed\n"
    assert listed(tmp_path)[-1][-1] == trainer.state.iteration


def test_tracker_that_hangs_costs_a_stopped_run_less_than_a_second(own, tmp_path, caplog):
    caplog.set_level("INFO")
    trainer, began = logging_to(own(tmp_path, hangs=True), tmp_path), []

    @trainer.on(Events.ITERATION_COMPLETED(once=3))
    def stop():
        began.append(time.monotonic())
        trainer.request_stop("enough")

    trainer.run(numbers_loader(24))
    (pid,) = [number for what, number in listed(tmp_path) if what == "hangs"]
    os.kill(pid, signal.SIGKILL)
    assert time.monotonic() - began[0] < 5 and "ends by itself" in caplog.text


def test_run_that_is_sent_already_is_refused_in_one_line(own, tmp_path, capsys):
    trainer = logging_to(own(tmp_path), tmp_path)
    codes = []

    @trainer.on(Events.ITERATION_COMPLETED(once=3))
    def second():
        wait_until((tmp_path / "trackers" / "listing.lock").exists)
        codes.append(main(["track", str(tmp_path)]))

    trainer.run(numbers_loader(8))
    assert codes == [1] and "sends it already" in capsys.readouterr().err


def test_folder_without_trackers_is_one_line(tmp_path, capsys):
    assert main(["track", str(tmp_path)]) != 0 and "no trackers" in capsys.readouterr().err


def test_tracker_of_a_script_is_refused_where_it_is_attached(tmp_path, monkeypatch):
    class Mine(Tracker):
        pass

    monkeypatch.setattr(Mine, "__module__", "__main__")
    with pytest.raises(ValueError, match="define it in a module"):
        logging_to(Mine(tmp_path, name="mine"), tmp_path)


@pytest.mark.nightly
@pytest.mark.skipif(importlib.util.find_spec("wandb") is None, reason="wandb is not installed")
def test_wandb_itself_writes_offline_under_one_id(tmp_path):
    twice(tmp_path, WandB)
    name = json.loads((tmp_path / "trackers" / "wandb.json").read_text())["id"]
    folders = sorted(path.name for path in (tmp_path / "wandb").glob("offline-run-*"))
    assert len(folders) == 2 and all(each.endswith(f"-{name}") for each in folders)


@pytest.mark.nightly
@pytest.mark.skipif(importlib.util.find_spec("mlflow") is None, reason="mlflow is not installed")
def test_mlflow_itself_has_each_value_once(tmp_path):
    import mlflow

    twice(tmp_path, lambda run: MLflow(run, config=CONFIG))
    name = json.loads((tmp_path / "trackers" / "mlflow.json").read_text())["id"]
    client = mlflow.MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    run = client.get_run(name)
    assert [each.step for each in client.get_metric_history(name, "loss")] == list(range(1, 13))
    assert (run.info.status, run.data.tags["reason"]) == ("FINISHED", "max_epochs")
    assert run.data.params == {key: str(value) for key, value in FLAT.items()}
