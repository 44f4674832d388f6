"""What is reported to ClearML, by its process and a stand-in for the library, and its effect on the training."""

import argparse
import json
import os
import signal
import subprocess
import sys
import threading
import time
import zipfile
from collections import Counter
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
import torch
from ignite.engine import Events

from ignite_engine import Trainer
from ignite_engine.handlers import ClearML, GracefulStop, MemoryLogger, MetricLogger
from tests.handlers.trackers.sent import settled
from tests.kit import saved
from tests.kit.processes import ranks, start, wait_until
from tests.kit.tiny import logging_to, numbers_loader

EACH = Events.ITERATION_COMPLETED
ONLINE = {"CLEARML_API_ACCESS_KEY": "key"}


class Library:
    """The stand-in: what it was called with."""

    def __init__(self, folder):
        self.folder = folder
        text = Path(__file__).with_name("stand_in.py").read_text()
        for name in ("__init__", "backend_interface/task/task", "config/cache"):
            path = folder / "clearml" / f"{name}.py"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text if name == "__init__" else "from clearml import SessionCache, Task\n")

    def calls(self, name):
        path = self.folder / "calls.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [each for each in map(json.loads, lines) if each["call"] == name]

    def task(self):
        """The id of the one task, however often the run was resumed."""
        (name,) = {each["id"] for each in self.calls("init")}
        return name

    def pid(self):
        return wait_until(lambda: self.calls("init"))[-1]["pid"]

    def points(self, run, name=None):
        path = self.folder / "server.jsonl"
        if not path.exists():
            path = run / "clearml" / "offline" / self.task() / "metrics.jsonl"
        events = [event for line in path.read_text().splitlines() for event in json.loads(line)]
        found = [(f"{each['metric']}/{each['variant']}", each["iter"], each["value"]) for each in events]
        return [point for point in found if name in (None, point[0])]

    def ending(self):
        last = self.calls("set_user_properties")[-1]
        return last["status"], last["reason"]


@pytest.fixture
def library(tmp_path_factory, monkeypatch):
    for name in os.environ:
        if name.startswith(("CLEARML_", "TRAINS_")):
            monkeypatch.delenv(name)
    folder = tmp_path_factory.mktemp("library")
    monkeypatch.setenv("CLEARML_CONFIG_FILE", str(folder / "none.conf"))
    monkeypatch.setenv("PYTHONPATH", str(folder))
    return Library(folder)


def built(run, die_at=None, **options):
    return logging_to(ClearML(run, **options), run, die_at)


def losses(run):
    return [
        ("loss/loss", line["iteration"], line["loss"])
        for line in map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    ]


def test_metrics_config_environment_model_and_outcome_are_reported(tmp_path, library):
    config = {"optimizer": {"lr": 0.25}, "empty": None}
    trainer = built(tmp_path, config=config, project="mine", tags=["first"])
    MemoryLogger().attach(trainer, EACH(every=6))
    (tmp_path / "report.html").write_text("<html>")
    trainer.run(numbers_loader())

    assert settled(tmp_path) == {} and str(tmp_path / "report.html") in library.calls("upload_artifact")[0]["given"]
    (init,) = library.calls("init")
    assert (init["project_name"], init["task_name"], init["tags"]) == ("mine", tmp_path.name, ["first"])
    assert library.points(tmp_path, "loss/loss") == losses(tmp_path)
    assert [point[1] for point in library.points(tmp_path, "memory/host_rss_mib")] == [6]
    assert library.calls("set_parameters_as_dict")[0]["given"] == [config]
    environment = next(
        each["given"][0] for each in library.calls("connect_configuration") if "environment" in str(each)
    )
    assert environment["torch"] == torch.__version__ and "working_directory" in environment
    (model,) = library.calls("update_weights")
    newest = saved.checkpoint(tmp_path / "checkpoints", 6)
    assert (model["register_uri"], model["iteration"]) == (newest.as_uri(), 6)
    assert library.ending() == ("completed", "max_epochs")


@pytest.mark.row("F2")
@pytest.mark.parametrize("variables", [pytest.param({}, marks=pytest.mark.nightly), ONLINE], ids=["offline", "online"])
def test_resumed_run_continues_its_task_and_no_point_appears_twice(variables, tmp_path, library, monkeypatch):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ZeroDivisionError):
        built(tmp_path, die_at=6).run(numbers_loader(24))
    settled(tmp_path)
    assert library.ending() == ("failed", "ZeroDivisionError: division by zero")
    assert [point[1] for point in library.points(tmp_path, "loss/loss")] == [1, 2, 3, 4, 5, 6]
    if not variables:
        with (tmp_path / "clearml" / "offline" / library.task() / "metrics.jsonl").open("a") as file:
            file.write('[{"metric": "lo')  # killed while writing
    built(tmp_path).run(numbers_loader(24))
    assert library.task().startswith("offline-") != bool(variables) and len(library.calls("init")) == 2
    assert library.points(tmp_path, "loss/loss") == losses(tmp_path) and len(losses(tmp_path)) == 12
    assert max(Counter(point[:2] for point in library.points(tmp_path)).values()) == 1
    assert library.ending() == ("completed", "max_epochs")
    assert len(library.calls("mark_failed")) == bool(variables)


def test_stop_is_handled_by_the_run_and_reported_to_clearml(tmp_path, library):
    """A Ctrl-C or a cluster's SIGTERM goes to every process; ClearML's own waits for the training's word."""
    trainer = built(tmp_path)
    GracefulStop(exit=False).attach(trainer)

    @trainer.on(EACH(once=3))
    def stop():
        for number in (signal.SIGINT, signal.SIGTERM):
            os.kill(library.pid(), number)
        os.kill(os.getpid(), signal.SIGINT)

    state = trainer.run(numbers_loader(24))
    settled(tmp_path)
    assert (state.status, state.reason) == ("interrupted", "SIGINT") and state.iteration < 12
    assert library.ending() == ("interrupted", "SIGINT")
    assert [point[1] for point in library.points(tmp_path, "loss/loss")] == list(range(1, state.iteration + 1))


def test_stop_waits_half_a_second_at_most_and_the_session_ends_by_itself(tmp_path, library, caplog):
    """Of a session that is slow to begin: neither the start, nor the save, nor the end waits for it."""
    caplog.set_level("INFO")
    (library.folder / "wait").touch()
    trainer, began = built(tmp_path), []

    @trainer.on(EACH(once=3))
    def stop():
        began.append(time.monotonic())
        trainer.request_stop("enough")

    starts = time.monotonic()
    assert trainer.run(numbers_loader(24)).status == "interrupted"
    assert began[0] - starts < 6 and time.monotonic() - began[0] < 6  # it was 20 s, and 10 s where the id is waited for
    assert not library.calls("init") and "ends by itself" in caplog.text and "failed" not in caplog.text
    (library.folder / "wait").unlink()
    settled(tmp_path)
    assert library.ending() == ("interrupted", "enough")


def test_training_process_stays_as_it_is(tmp_path, library):
    def everything():
        handlers = [signal.getsignal(number) for number in sorted(signal.valid_signals())]
        patched = [sys.exit, sys.excepthook, torch.save, torch.load, os.fork, os._exit, BaseProcess.run]
        # one of an earlier test may end meanwhile, and Checkpoint's deletes old ones
        new_threads = {each.name for each in threading.enumerate() if each not in threads} - {"checkpoint-pruning"}
        return [*handlers, *patched, argparse.ArgumentParser.parse_args, new_threads, dict(os.environ)]

    trainer, within, threads = built(tmp_path), [], set(threading.enumerate())
    before = everything()
    trainer.add_event_handler(EACH, lambda: within.append(everything()))
    trainer.run(numbers_loader())

    assert within == [before] * 6 and everything() == before and "clearml" not in sys.modules
    assert library.points(tmp_path, "loss/loss") == losses(tmp_path)


def test_killed_training_is_reported_as_failed(tmp_path, library):
    def train():
        trainer = built(tmp_path)
        trainer.add_event_handler(EACH(once=3), lambda: (library.pid(), os.kill(os.getpid(), signal.SIGKILL)))
        trainer.run(numbers_loader(24))

    assert start(train).wait() == -signal.SIGKILL
    settled(tmp_path)
    status, reason = library.ending()
    assert status == "failed" and "killed" in reason
    assert [point[1] for point in library.points(tmp_path, "loss/loss")] == [1, 2]


def test_value_that_is_not_finite_is_a_line_and_not_a_point(tmp_path, library):
    trainer = Trainer(lambda engine, batch: batch)
    MetricLogger(tmp_path, console=False).attach(trainer)
    ClearML(tmp_path).attach(trainer)
    trainer.add_event_handler(EACH, lambda: trainer.state.metrics.update(word="good", flag=True))
    trainer.run([1.0, float("nan"), float("inf")])

    assert [point for point in library.points(tmp_path) if point[0] != "epoch/epoch"] == [("loss/loss", 1, 1.0)]
    texts = [each["given"][0] for each in library.calls("report_text")]
    assert texts == ["iteration 2: loss is nan", "iteration 3: loss is inf"]


def test_reports_wait_for_nothing_and_all_arrive_at_the_end(tmp_path, library):
    trainer = Trainer(lambda engine, batch: 1.0)
    MetricLogger(tmp_path, console=False).attach(trainer)
    ClearML(tmp_path).attach(trainer)
    values = {f"group/name{index}": index * 1.2345 for index in range(12)}
    trainer.add_event_handler(EACH(once=3), lambda: os.kill(library.pid(), signal.SIGSTOP))
    trainer.add_event_handler(EACH, lambda: trainer.state.metrics.update(values))
    trainer.add_event_handler(Events.COMPLETED, lambda: os.kill(library.pid(), signal.SIGCONT))
    trainer.run([0] * 300, max_epochs=1)
    assert sum(point[0].startswith("group/") for point in library.points(tmp_path)) == 300 * len(values)


def test_tracker_that_fails_is_one_line_and_the_rest_is_sent_later(tmp_path, library, caplog):
    (library.folder / "fail").touch()
    state = built(tmp_path).run(numbers_loader())
    assert state.status == "completed" and len(losses(tmp_path)) == 6
    (warned,) = [each.getMessage() for each in caplog.records if "Trackers" in each.getMessage()]
    assert "clearml: ValueError: wrong key" in warned and f"track {tmp_path}" in warned

    (library.folder / "fail").unlink()
    subprocess.run([sys.executable, "-m", "ignite_engine", "track", tmp_path], check=True, timeout=120)
    assert library.points(tmp_path, "loss/loss") == losses(tmp_path)


def test_other_ranks_start_nothing(tmp_path, library):
    ranks(2, lambda rank: built(tmp_path / str(rank)).run(numbers_loader()).iteration)
    assert (tmp_path / "0" / "trackers").exists() and not (tmp_path / "1" / "trackers").exists()


@pytest.mark.parametrize(
    ("variables", "online"),
    [
        ({**ONLINE, "CLEARML_OFFLINE_MODE": "1"}, False),
        ({"CLEARML_CONFIG_FILE": __file__}, True),
    ],
)
def test_online_where_the_user_has_configured_a_server(variables, online, tmp_path, library, monkeypatch):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    built(tmp_path).run(numbers_loader(4))
    assert library.task().startswith("offline-") != online


@pytest.mark.nightly
def test_offline_session_of_the_library_itself_can_be_imported(tmp_path, monkeypatch):
    monkeypatch.setenv("CLEARML_CONFIG_FILE", str(tmp_path / "none.conf"))
    config = {"optimizer": {"lr": 0.25}}
    with pytest.raises(ZeroDivisionError):
        built(tmp_path, die_at=6, config=config).run(numbers_loader(24))
    settled(tmp_path)
    built(tmp_path, config=config).run(numbers_loader(24))
    (zipped,) = tmp_path.glob("clearml/offline/*.zip")
    with zipfile.ZipFile(zipped) as archive:
        task = json.loads(archive.read("task.json"))
        lines = archive.read("metrics.jsonl").decode().splitlines()
    points = [event for line in lines for event in json.loads(line) if event.get("metric") == "loss"]
    assert [("loss/loss", each["iter"], each["value"]) for each in points] == losses(tmp_path) and len(points) == 12
    properties = task["hyperparams"]["properties"]
    assert (properties["status"]["value"], properties["reason"]["value"]) == ("completed", "max_epochs")
    assert task["hyperparams"]["optimizer"]["lr"]["value"] == "0.25"
    assert task["configuration"].keys() >= {"config", "environment"}
    model, newest = task["offline_output_models"][-1]["weights"], saved.checkpoint(tmp_path / "checkpoints", 12)
    assert (model["register_uri"], model["iteration"]) == (newest.as_uri(), 12)
