"""Handlers of a run by their labels: the usual ones, others, second ones, and those of the user."""

import hashlib

import pytest
import yaml
from ignite.engine import Events

from ignite_engine import TrainingEvents
from ignite_engine.runs.config import ConfigError
from tests.kit import runs
from tests.kit.fitting import VAL, at, digest, fitted, log, manifest, points, read, saved, stop
from tests.kit.refusals import CommandRefused, command, refusals, refuses

OWN = """
import torch

class Noise:
    def __init__(self, scale, directory, evaluator=None, data=None, name="noise"):
        self.scale, self.directory, self.batches, self.name, self.calls = scale, directory, len(data), name, 0

    def attach(self, trainer, event):
        trainer.add_event_handler(event, self)

    def __call__(self, trainer):
        self.calls += 1
        trainer.state.metrics[f"{self.name}/calls"] = self.calls * self.scale
        trainer.state.metrics[f"{self.name}/batches"] = self.batches

    def state_dict(self):
        return {"calls": self.calls}

    def load_state_dict(self, state):
        self.calls = state["calls"]

def count(trainer, by=1):
    trainer.state.metrics["count"] = trainer.state.metrics.get("count", 0.0) + by
"""


def own(folder, **entries):
    """A config beside the user's own handlers."""
    folder.mkdir(exist_ok=True)
    (folder / "mine.py").write_text(OWN)
    return runs.write_config(folder, **{"MetricLogger": {"every": 1}, **entries})


def test_ones_own_handler_is_named_by_its_file_and_kept_under_its_label(tmp_path):
    noise = {"use": "mine.py:Noise", "every": 2, "scale": 10.0}
    count = {"use": "mine.py:count", "at": "ITERATION_COMPLETED", "by": 2}
    config = own(tmp_path, Noise_a=noise, Count=count)
    command("train", config, "run.max_iterations=6")
    written = runs.summary(tmp_path)
    assert written["metrics"]["Noise_a/calls"] == 30.0 and written["metrics"]["count"] == 12.0
    assert written["metrics"]["Noise_a/batches"] > 0
    assert any("Noise_a" in names for names in manifest(tmp_path / "run", 6)["parts"].values())
    command("train", config, "run.max_iterations=8")
    assert runs.summary(tmp_path)["metrics"]["Noise_a/calls"] == 40.0  # its state has come back


def test_a_second_one_of_a_kind_has_its_label_as_name_and_its_own_event(tmp_path):
    second = {"test": {"use": "Evaluation", "data": "other", "every": {"epochs": 2}, "at_end": False}}
    fitted(tmp_path, val={"val": VAL, "other": VAL}, handlers=second, max_epochs=4, Evaluation=None)
    assert points(tmp_path, "test/loss") == [12, 24] and not points(tmp_path, "val/loss")


def test_a_list_of_intervals_is_any_of_them_and_an_event_may_be_named(tmp_path):
    fitted(tmp_path, MetricLogger={"every": [5, {"epochs": 1}]}, Evaluation={"every": None}, max_epochs=2)
    assert points(tmp_path) == [5, 6, 10, 12]
    fitted(tmp_path / "at", MetricLogger={"at": "EVALUATION_COMPLETED"}, Evaluation={"every": 4}, max_epochs=2)
    assert points(tmp_path / "at") == [4, 8, 12]


def test_any_of_the_usual_handlers_may_be_turned_off(tmp_path):
    usual = ("Checkpoint", "Evaluation", "GracefulStop", "MetricLogger", "Progress", "Report", "StopFile")
    run = fitted(tmp_path, **dict.fromkeys(usual))
    assert run.summary["status"] == "completed" and run.checkpoint is None
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        *("config.yaml", "environment.json", "logs", "summary.json"),
    ]
    assert set(run.config["handlers"].values()) == {None}


def test_the_written_config_is_the_config_of_the_run(tmp_path):
    config = runs.write_config(tmp_path, EMA={"decay": 0.9}, Progress=None)
    command("train", config, "run.max_epochs=1")
    before = digest_of_weights(tmp_path)
    command("train", tmp_path / "run" / "config.yaml", f"run.directory={tmp_path / 'again' / 'run'}")
    assert digest_of_weights(tmp_path / "again") == before
    first, second = (yaml.safe_load((tmp_path / part / "run" / "config.yaml").read_text()) for part in ("", "again"))
    assert {**second, "run": first["run"]} == first


def test_a_setting_of_a_call_may_be_a_function_which_the_written_config_names(tmp_path):
    def head(part, name, value):
        return part != "model" or name.startswith("2")

    run = fitted(tmp_path, Checkpoint={"keep_fn": head}, max_epochs=1)
    assert run.config["handlers"]["Checkpoint"]["keep_fn"] == head.__qualname__
    assert "model is saved without" in run.trainer.reproducibility()[0]


def digest_of_weights(folder):
    return runs.summary(folder)["weights_sha256"]


def test_objects_of_a_call_are_attached_last_under_their_labels(tmp_path):
    class Counts:
        def __init__(self):
            self.calls = 0

        def attach(self, trainer):
            trainer.add_event_handler(TrainingEvents.EVALUATION_COMPLETED, self)

        def __call__(self):
            self.calls += 1

        def state_dict(self):
            return {"calls": self.calls}

        def load_state_dict(self, state):
            self.calls = state["calls"]

    def run(*others):
        counts = Counts()
        own = {"counts": counts, **{f"own {place}": each for place, each in enumerate(others)}}
        return fitted(tmp_path, handlers=own), counts

    run(at(8, stop))
    finished, counts = run()
    assert counts.calls == 3 and any("counts" in names for names in manifest(tmp_path, 18)["parts"].values())
    assert digest(finished) == digest(fitted(tmp_path / "whole"))


# ------------------------------------------------------------------------ mistakes: one line, code 2, nothing lost

YAML = {
    "range": ({"EMA": {"decay": 1.5}}, "handlers.EMA.decay 1.5 below 1"),
    "excluding": ({"Checkpoint": {"strict": True, "on_exception": True}}, "handlers.Checkpoint strict on_exception"),
    "no event of its own": ({"ClearML": {"every": 5}}, "handlers.ClearML events leave"),
    "no mode": ({"Checkpoint": {"best": "val/kappa"}}, "handlers.Checkpoint.best 'val/kappa' mode='max'"),
    "metric": ({"Checkpoint": {"best": "val/acuracy"}}, "handlers.Checkpoint.best 'val/accuracy'?"),
    "set": ({"Test": {"use": "Evaluation", "data": "tset"}}, "handlers.Test.data 'tset' val"),
    "tokens": ({"MetricLogger": {"every": {"tokens": 5}}}, "handlers.MetricLogger.every 5 tokens tokens_fn"),
    "file": ({"Mine": {"use": "mien.py:Noise"}}, "handlers.Mine.use 'mien.py' no such file"),
    "class": ({"Mine": {"use": "mine.py:Nois", "scale": 1.0}}, "handlers.Mine.use 'Nois' 'Noise'?"),
    "own argument": ({"Mine": {"use": "mine.py:Noise", "scale": 1.0, "sclae": 2}}, "handlers.Mine.sclae 'scale'?"),
    "function without event": ({"Mine": {"use": "mine.py:count"}}, "handlers.Mine function event"),
    "two in one folder": ({"Second": {"use": "Checkpoint"}}, "handlers.Second directory"),
    "a source": ({"load": [{"path": "runs/nowhere"}]}, "load runs/nowhere"),
}
OVERRIDES = {
    "handlers.MetricLogger.every.x=1": "handlers.MetricLogger.every 1 keys of its own",
    "optimizer.lr=-1": "optimizer AdamW learning rate -1",
    "optimizer.betas=[0.9, 2]": "command line optimizer.betas [0.9, 2] AdamW",
    "schedule={name: cosine, warmup: 1.5}": "command line schedule.warmup 1.5 fraction",
    "schedule={name: plateau, metric: loss, factor: 1.0}": "command line schedule.factor 1.0",
    "update={accumulation_steps: 2, global_micro_batches: 8}": "command line update global_micro_batches both",
}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run that has ended, and its files."""
    folder = tmp_path_factory.mktemp("finished")
    command("train", own(folder), "run.max_iterations=4")
    return folder, contents(folder / "run")


def contents(folder):
    return {path: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.rglob("*")) if path.is_file()}


def without_logs(files):
    return {path: content for path, content in files.items() if path.parent.name != "logs"}


@pytest.mark.row("J1")
@pytest.mark.parametrize("name", YAML)
def test_a_mistake_in_a_file_is_one_line_and_loses_nothing(name, finished, tmp_path):
    folder, before = finished
    entries, words = YAML[name]
    path = own(tmp_path, **entries)
    directory = tmp_path / "new" if name == "a source" else folder / "run"  # of a run that resumes it is not asked for
    refuses(lambda: command("train", path, f"run.directory={directory}"), CommandRefused, f"{words}")
    assert without_logs(contents(folder / "run")) == without_logs(before)


@pytest.mark.row("J1")
@pytest.mark.parametrize("override", OVERRIDES)
def test_a_mistake_in_an_override_is_one_line_and_loses_nothing(override, finished):
    folder, before = finished
    refuses(lambda: command("train", folder / "config.yaml", override), CommandRefused, OVERRIDES[override])
    assert without_logs(contents(folder / "run")) == without_logs(before)


def of(**arguments):
    return lambda folder: fitted(folder / "run", **arguments)


test_mistakes_in_a_call = refusals(
    [
        ("the argument is named", of(batch_size="x"), ConfigError, "fit() batch_size: 'x' number"),
        ("its best", of(best="val/acc", metrics={}), ConfigError, "fit() best 'val/acc'"),
        (
            "twice",
            of(best="val/loss", handlers={"Checkpoint": {"best": "loss"}}),
            ConfigError,
            "best handlers.Checkpoint.best give",
        ),
        ("turned off", of(best="val/loss", handlers={"Checkpoint": None}), ConfigError, "best Checkpoint off"),
        ("class", of(handlers={"mine": dict}), ConfigError, "handlers['mine'] class object"),
        ("pair", of(handlers={"mine": (Events.STARTED, print)}), ConfigError, "handlers['mine'] order"),
    ]
)


def test_logs_of_two_kinds_of_events_stay_in_order(tmp_path):
    fitted(tmp_path, MetricLogger={"every": 4}, Evaluation={"every": 6}, MemoryLogger={}, handlers=[at(9, stop)])
    assert saved(tmp_path) and read(tmp_path)["iteration"] == 9
    assert [line["iteration"] for line in log(tmp_path)] == sorted({line["iteration"] for line in log(tmp_path)})
