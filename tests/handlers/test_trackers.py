"""TensorBoard, Weights & Biases and MLflow get each value once, over failures and resumes.

The stand-ins have what the libraries document of the functions that are called; the last tests use the libraries
themselves where they are installed.
"""

import importlib.util
import json
import math
import resource
import signal
import sys
import threading
from collections import Counter
from types import ModuleType, SimpleNamespace

import pytest
from ignite.engine import Events
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

from ignite_engine.handlers import MemoryLogger, MetricLogger, MLflowSink, TensorBoardSink, WandBSink
from tests.kit.processes import ranks
from tests.kit.tiny import logging_to, numbers_loader, trainer_of

CONFIG = {"optimizer": {"lr": 0.5, "betas": [1, 2]}, "name": "a", "no": None}


class WandB(ModuleType):
    """Runs by id on a server, which takes no step that is not later than the last one."""

    def __init__(self):
        super().__init__("wandb")
        self.server = {}
        self.inits = []
        self.ended = []
        self.Settings = lambda **given: given
        self.run = None

    def init(self, **given):
        self.inits.append(given)
        name = given["id"] or f"run{len(self.server)}"
        points = self.server.setdefault(name, [])
        assert not points or given["resume"] == "allow"
        summary = {}
        self.run = SimpleNamespace(
            id=name,
            starting_step=points[-1][0] + 1 if points else 0,
            log=lambda values, step: points.append((step, values)),
            summary=summary,
            finish=lambda exit_code: self.ended.append((summary, exit_code)),
        )


class MLflow(ModuleType):
    """Runs by id; every point that is logged is kept, as in its store."""

    def __init__(self):
        super().__init__("mlflow")
        self.points = {}
        self.params = []
        self.settings = []
        self.ended = []
        self.tags = {}
        self._active = None
        self.set_tracking_uri = self.set_experiment = self.settings.append
        self.flush_async_logging = lambda: None
        self.MlflowClient = lambda: self

    def active_run(self):
        return self._active

    def start_run(self, run_id=None, run_name=None):
        name = run_id or f"run{len(self.points)}"
        self.points.setdefault(name, [])
        self._active = SimpleNamespace(info=SimpleNamespace(run_id=name, run_name=run_name))
        return self._active

    def end_run(self, status="FINISHED"):
        self._active = None
        self.ended.append(status)

    def set_tag(self, key, value):
        self.tags[key] = value

    def log_params(self, params):
        self.params.append(params)

    def log_metrics(self, values, step, synchronous, run_id):
        assert not synchronous
        self.points[run_id] += [(name, step, value) for name, value in values.items()]

    def get_run(self, run_id):
        return SimpleNamespace(data=SimpleNamespace(metrics={name: value for name, _, value in self.points[run_id]}))

    def get_metric_history(self, run_id, key):
        return [SimpleNamespace(step=step) for name, step, _ in self.points[run_id] if name == key]


@pytest.fixture(autouse=True)
def nothing_configured(monkeypatch, tmp_path):
    for name in ("WANDB_MODE", "WANDB_API_KEY", "WANDB_BASE_URL", "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))


def stand_in(monkeypatch, package):
    package.__spec__ = SimpleNamespace()
    monkeypatch.setitem(sys.modules, package.__name__, package)
    return package


def twice(run, make, die_at=6):
    """A run that dies and is resumed; the id of its tracker, the same for both."""
    first, second = make(run), make(run)
    with pytest.raises(ZeroDivisionError):
        logging_to(first, run, die_at).run(numbers_loader(24))
    logging_to(second, run).run(numbers_loader(24))
    assert first.run_id == second.run_id
    return first.run_id


@pytest.mark.row("F2", "F9")
@pytest.mark.parametrize("die_at", [6, 8])
def test_wandb_run_is_resumed_and_has_each_value_once(die_at, tmp_path, monkeypatch):
    wandb = stand_in(monkeypatch, WandB())
    name = twice(tmp_path, lambda run: WandBSink(run, config=CONFIG, project="p", offline=False), die_at)

    assert [name] == list(wandb.server) == ["run0"]
    points = wandb.server["run0"]
    assert [step for step, values in points if "loss" in values] == list(range(1, 13))
    assert [step for step, _ in points] == sorted(step for step, _ in points)
    assert [(each["project"], each["config"], each["mode"]) for each in wandb.inits] == [("p", CONFIG, None)] * 2
    assert [each["resume"] for each in wandb.inits] == [None, "allow"]
    failed, completed = wandb.ended
    assert failed == ({"status": "failed", "reason": "ZeroDivisionError: division by zero"}, 1)
    assert completed == ({"status": "completed", "reason": "max_epochs"}, 0)


@pytest.mark.row("F2")
@pytest.mark.parametrize("die_at", [6, 8])
def test_mlflow_run_is_resumed_and_has_each_value_once(die_at, tmp_path, monkeypatch):
    mlflow = stand_in(monkeypatch, MLflow())
    name = twice(tmp_path, lambda run: MLflowSink(run, config=CONFIG, experiment="e"), die_at)

    assert [name] == list(mlflow.points) == ["run0"]
    counts = Counter((name, step) for name, step, _ in mlflow.points["run0"])
    assert sorted(step for name, step in counts if name == "loss") == list(range(1, 13))
    assert set(counts.values()) == {1}
    assert mlflow.params == [{"optimizer.lr": 0.5, "optimizer.betas": "[1, 2]", "name": "a"}]
    assert mlflow.settings == [f"sqlite:///{tmp_path}/mlflow.db", "e"] * 2
    assert mlflow.ended == ["FAILED", "FINISHED"] and mlflow.tags == {"reason": "max_epochs"}


def test_mlflow_run_of_the_user_is_used_and_left_open(tmp_path, monkeypatch):
    mlflow = stand_in(monkeypatch, MLflow())
    mlflow.start_run(run_id="mine")
    logging_to(MLflowSink(tmp_path), tmp_path).run(numbers_loader(4))
    assert len(mlflow.points["mine"]) == 4 and mlflow.settings == [] and mlflow.ended == []


def test_interrupted_run_is_killed_for_mlflow(tmp_path, monkeypatch):
    mlflow = stand_in(monkeypatch, MLflow())
    trainer = logging_to(MLflowSink(tmp_path), tmp_path)
    trainer.add_event_handler(Events.ITERATION_COMPLETED(once=2), lambda: trainer.request_stop("enough"))
    trainer.run(numbers_loader(24))
    assert mlflow.ended == ["KILLED"] and mlflow.tags == {"reason": "enough"}


@pytest.mark.parametrize(
    ("variables", "netrc", "mode"),
    [
        ({}, "", "offline"),
        ({}, "machine api.wandb.ai login user password k", None),
        ({}, "machine elsewhere.org login user password k", "offline"),
        ({"WANDB_BASE_URL": "https://elsewhere.org"}, "machine elsewhere.org login user password k", None),
        ({"WANDB_API_KEY": "k", "WANDB_MODE": "offline"}, "", "offline"),
    ],
)
def test_wandb_is_online_where_it_has_a_key_and_never_asks_for_one(variables, netrc, mode, tmp_path, monkeypatch):
    wandb = stand_in(monkeypatch, WandB())
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    (tmp_path / ".netrc").write_text(netrc)
    (tmp_path / ".netrc").chmod(0o600)
    logging_to(WandBSink(tmp_path), tmp_path).run(numbers_loader(4))
    assert [each["mode"] for each in wandb.inits] == [mode]


def read(run):
    return EventAccumulator(str(run / "tensorboard"), size_guidance={"scalars": 0, "tensors": 0}).Reload()


def scalars(run):
    found = read(run)
    return {tag: [(event.step, event.value) for event in found.Scalars(tag)] for tag in found.Tags()["scalars"]}


def steps(run):
    return [step for step, _ in scalars(run)["loss"]]


def built(run, die_at=None, **options):
    return logging_to(TensorBoardSink(run, **options), run, die_at)


def logged(run):
    """The losses in the log; TensorBoard keeps fp32."""
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [(line["iteration"], pytest.approx(line["loss"], rel=1e-6)) for line in lines]


def names_of_threads():
    return {thread.name for thread in threading.enumerate()}


@pytest.mark.row("F1")
def test_tensorboard_reads_what_was_logged(tmp_path):
    trainer, before, threads = built(tmp_path), names_of_threads(), set()
    MemoryLogger().attach(trainer, Events.ITERATION_COMPLETED(every=6))
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: threads.update(names_of_threads()))
    trainer.run(numbers_loader())
    trainer.run(numbers_loader(), max_epochs=2)  # continues

    found = scalars(tmp_path)
    assert found["loss"] == logged(tmp_path) and len(found["loss"]) == 12
    assert [step for step, _ in found["memory/host_rss_mib"]] == [6, 12]
    assert threads - {"checkpoint-pruning"} == before


@pytest.mark.parametrize("die_at", [2, 6, 8])
def test_killed_and_resumed_no_point_and_no_config_is_lost_or_appears_twice(die_at, tmp_path):
    """At 2 before the first checkpoint, at 8 right after one."""
    with pytest.raises(ZeroDivisionError):
        built(tmp_path, die_at, config=CONFIG).run(numbers_loader(24))
    assert steps(tmp_path) == list(range(1, die_at + 1))
    built(tmp_path, config=CONFIG).run(numbers_loader(24))
    once, goal = scalars(tmp_path), logged(tmp_path)
    assert once["loss"] == goal and [step for step, _ in goal] == list(range(1, 13))

    trainer = built(tmp_path, config=CONFIG)
    trainer.add_event_handler(Events.STARTED, lambda: trainer.state.metrics.update(loss=9.0))
    trainer.run(numbers_loader(24), max_epochs=1)  # at its end already
    assert scalars(tmp_path) == once

    found = read(tmp_path)
    assert "optimizer:" in found.Tensors("config")[-1].tensor_proto.string_val[0].decode()
    content = found.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    hparams = HParamsPluginData.FromString(content).session_start_info.hparams
    values = {key: getattr(value, value.WhichOneof("kind")) for key, value in hparams.items()}
    assert values == {"optimizer.lr": 0.5, "optimizer.betas": "[1, 2]", "name": "a"}


def test_nan_is_written_and_what_is_not_a_number_is_left_out(tmp_path):
    TensorBoardSink(tmp_path).write(1, {"loss": math.nan, "word": "good", "flag": True, "epoch": 1})
    assert scalars(tmp_path).keys() == {"loss", "epoch"} and math.isnan(scalars(tmp_path)["loss"][0][1])


def test_a_full_disk_is_a_warning_and_costs_the_points_of_that_time_only(tmp_path, caplog):
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    size, limits = 230, resource.getrlimit(resource.RLIMIT_FSIZE)
    trainer = trainer_of()
    MetricLogger(sinks=[TensorBoardSink(tmp_path)], console=False).attach(trainer)
    for iteration, most in ((1, size), (9, limits[0])):
        trainer.add_event_handler(
            Events.ITERATION_STARTED(once=iteration),
            lambda *, most=most: resource.setrlimit(resource.RLIMIT_FSIZE, (most, limits[1])),
        )
    try:
        assert trainer.run(numbers_loader(24)).status == "completed"
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)

    found = steps(tmp_path)
    assert found[-4:] == [9, 10, 11, 12] and 4 < len(found) < 12
    assert any("disk space" in line for line in caplog.messages)


SINKS = [(WandBSink, WandB), (MLflowSink, MLflow)]


def started(rank, folder):
    TensorBoardSink(folder / str(rank)).write(1, {"loss": 1.0})
    found = []
    for sink, package in SINKS:
        with pytest.MonkeyPatch.context() as patch:
            stand = stand_in(patch, package())
            logging_to(sink(folder), folder / stand.__name__).run(numbers_loader(8))
            found.append(len(getattr(stand, "server", None) or getattr(stand, "points", ())))
    return found


def test_other_ranks_start_nothing(tmp_path):
    assert ranks(2, started, tmp_path) == [[1, 1], [0, 0]]
    assert (tmp_path / "0").exists() and not (tmp_path / "1").exists()


@pytest.mark.nightly
@pytest.mark.skipif(importlib.util.find_spec("wandb") is None, reason="wandb is not installed")
def test_wandb_itself_writes_offline_under_one_id(tmp_path):
    import wandb

    name = twice(tmp_path, WandBSink)
    folders = sorted(path.name for path in (tmp_path / "wandb").glob("offline-run-*"))
    assert len(folders) == 2 and all(each.endswith(f"-{name}") for each in folders) and wandb.run is None


@pytest.mark.nightly
@pytest.mark.skipif(importlib.util.find_spec("mlflow") is None, reason="mlflow is not installed")
def test_mlflow_itself_has_each_value_once(tmp_path):
    import mlflow

    name = twice(tmp_path, lambda run: MLflowSink(run, config=CONFIG))
    client = mlflow.MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    run = client.get_run(name)
    assert [each.step for each in client.get_metric_history(name, "loss")] == list(range(1, 13))
    assert (run.info.status, run.data.tags["reason"]) == ("FINISHED", "max_epochs")
    assert run.data.params == {"optimizer.lr": "0.5", "optimizer.betas": "[1, 2]", "name": "a"}
