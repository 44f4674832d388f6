"""Weights & Biases and MLflow get each value once, over failures and resumes.

The stand-ins have what the libraries document of the functions that are called; the last tests use the libraries
themselves where they are installed.
"""

import importlib.util
import sys
from collections import Counter
from types import ModuleType, SimpleNamespace

import pytest
from ignite.engine import Events

from ignite_engine import TrainingEvents
from ignite_engine.handlers import Checkpoint, MetricLogger, MLflowSink, WandBSink
from tests.kit.processes import ranks
from tests.kit.tiny import numbers_loader, trainer_of

CONFIG = {"optimizer": {"lr": 0.5, "betas": [1, 2]}, "no": None}


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


def built(run, sink, die_at=None):
    trainer, checkpoint = trainer_of(), Checkpoint(run / "checkpoints")
    MetricLogger(sinks=[sink], console=False).attach(trainer)
    checkpoint.attach(trainer, Events.ITERATION_COMPLETED(every=4))
    if die_at is not None:
        trainer.add_event_handler(TrainingEvents.RESUME_POINT(once=die_at), lambda: 1 / 0)
    checkpoint.resume()
    return trainer


def twice(run, make, die_at=6):
    """A run that dies and is resumed; the id of its tracker, the same for both."""
    first, second = make(run), make(run)
    with pytest.raises(ZeroDivisionError):
        built(run, first, die_at).run(numbers_loader(24))
    built(run, second).run(numbers_loader(24))
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
    assert mlflow.params == [{"optimizer.lr": 0.5, "optimizer.betas": "[1, 2]"}]
    assert mlflow.settings == [f"sqlite:///{tmp_path}/mlflow.db", "e"] * 2
    assert mlflow.ended == ["FAILED", "FINISHED"] and mlflow.tags == {"reason": "max_epochs"}


def test_mlflow_run_of_the_user_is_used_and_left_open(tmp_path, monkeypatch):
    mlflow = stand_in(monkeypatch, MLflow())
    mlflow.start_run(run_id="mine")
    built(tmp_path, MLflowSink(tmp_path)).run(numbers_loader(4))
    assert len(mlflow.points["mine"]) == 4 and mlflow.settings == [] and mlflow.ended == []


def test_interrupted_run_is_killed_for_mlflow(tmp_path, monkeypatch):
    mlflow = stand_in(monkeypatch, MLflow())
    trainer = built(tmp_path, MLflowSink(tmp_path))
    trainer.add_event_handler(Events.ITERATION_COMPLETED(once=2), lambda: trainer.request_stop("enough"))
    trainer.run(numbers_loader(24))
    assert mlflow.ended == ["KILLED"] and mlflow.tags == {"reason": "enough"}


@pytest.mark.parametrize(
    ("variables", "netrc", "mode"),
    [
        ({}, "", "offline"),
        ({"WANDB_API_KEY": "k"}, "", None),
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
    built(tmp_path, WandBSink(tmp_path)).run(numbers_loader(4))
    assert [each["mode"] for each in wandb.inits] == [mode]


SINKS = [(WandBSink, WandB), (MLflowSink, MLflow)]


@pytest.mark.parametrize(("sink", "package"), SINKS)
def test_failure_is_one_warning_and_training_continues(sink, package, tmp_path, monkeypatch, caplog):
    stand = stand_in(monkeypatch, package())
    stand.init = stand.start_run = lambda **_: 1 / 0
    state = built(tmp_path, sink(tmp_path)).run(numbers_loader(24))
    warned = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert state.status == "completed" and len(warned) == 1 and "ZeroDivisionError" in warned[0]


def started(rank, folder):
    found = []
    for sink, package in SINKS:
        with pytest.MonkeyPatch.context() as patch:
            stand = stand_in(patch, package())
            built(folder / stand.__name__, sink(folder)).run(numbers_loader(8))
            found.append(len(getattr(stand, "server", None) or getattr(stand, "points", ())))
    return found


def test_other_ranks_start_nothing(tmp_path):
    assert ranks(2, started, tmp_path) == [[1, 1], [0, 0]]


# -- the libraries themselves -----------------------------------------------------------------------------------------


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
    assert run.data.params == {"optimizer.lr": "0.5", "optimizer.betas": "[1, 2]"}
