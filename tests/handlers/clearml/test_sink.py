"""What is reported to ClearML, read back from its offline session and from a server; and its effect on the training."""

import fcntl
import json
import logging
import os
import signal
import sys
import threading
import time
import zipfile
from collections import Counter
from pathlib import Path

import pytest
import torch
from ignite.engine import Events

from ignite_engine import Trainer, TrainingEvents
from ignite_engine.handlers import Checkpoint, ClearMLLogger, GracefulStop, MemoryLogger, MetricLogger
from ignite_engine.handlers.clearml import sink as clearml_log
from tests.faults.commands import program
from tests.handlers.clearml.server import clearml_server
from tests.kit.tiny import numbers_loader, trainer_of

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(autouse=True)
def nothing_configured(tmp_path, monkeypatch):
    for name in os.environ:
        if name.startswith(("CLEARML_", "TRAINS_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("CLEARML_CONFIG_FILE", str(tmp_path / "none.conf"))


class Reported:
    """An offline session, read from its zip."""

    def __init__(self, run):
        (zipped,) = run.glob("clearml/offline/*.zip")  # one session, however often the run was resumed
        with zipfile.ZipFile(zipped) as archive:
            self.task = json.loads(archive.read("task.json"))
            lines = archive.read("metrics.jsonl").decode().splitlines() if "metrics.jsonl" in archive.namelist() else []
            self.log = archive.read("log.jsonl").decode()
        self.events = [event for line in lines for event in json.loads(line)]
        scalars = [event for event in self.events if "value" in event]
        self.points = [(event["metric"], event["variant"], event["iter"], event["value"]) for event in scalars]
        properties = self.task["hyperparams"]["properties"]
        self.ending = (properties["status"]["value"], properties["reason"]["value"])


def built(run, *, every=1, saves=True, **options):
    """A trainer that logs to ``run`` at each ``every``-th iteration, resumed where there is something to resume."""
    # on a busy machine ClearML sends for longer than a run waits
    trainer, sink = trainer_of(), ClearMLLogger(run, **{"close_within_s": 60.0, **options})
    MetricLogger(run, sinks=[sink], console=False).attach(trainer, Events.ITERATION_COMPLETED(every=every))
    if saves:
        checkpoint = Checkpoint(run / "checkpoints")
        checkpoint.attach(trainer, Events.ITERATION_COMPLETED(every=4))
        checkpoint.resume()
    return trainer, sink


def lines(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def warnings_of(caplog):
    return [each.getMessage() for each in caplog.records if each.levelno == logging.WARNING]


def test_offline_session_has_metrics_memory_config_environment_model_and_outcome(tmp_path):
    trainer, sink = built(tmp_path, config={"optimizer": {"lr": 0.25}, "empty": None}, project="mine", tags=["first"])
    MemoryLogger().attach(trainer, Events.ITERATION_COMPLETED(every=6))

    trainer.run(numbers_loader())

    reported = Reported(tmp_path)
    assert (reported.task["id"], reported.task["project_name"], reported.task["tags"]) == (
        sink.task_id,
        "mine",
        ["first"],
    )
    assert reported.task["name"] == tmp_path.name
    assert [point[2:] for point in reported.points if point[0] == "loss"] == [
        (line["iteration"], line["loss"]) for line in lines(tmp_path)
    ]
    memory = {point[1]: point[2:] for point in reported.points if point[0] == "memory"}
    assert memory["host_rss_mib"] == (6, lines(tmp_path)[-1]["memory/host_rss_mib"])
    assert reported.task["hyperparams"]["optimizer"]["lr"]["value"] == "0.25"
    assert "lr = 0.25" in reported.task["configuration"]["config"]["value"]
    environment = reported.task["configuration"]["environment"]["value"]
    assert f'torch = "{torch.__version__}"' in environment and "working_directory" in environment
    models = [model["weights"] for model in reported.task["offline_output_models"]]
    assert [(model["register_uri"], model["iteration"]) for model in models] == [
        ((tmp_path / "checkpoints" / "iteration_00000006").as_uri(), 6)
    ]
    assert reported.ending == ("completed", "max_epochs")


@pytest.mark.slow
def test_resumed_run_continues_its_task_and_no_point_appears_twice(tmp_path):
    trainer, first = built(tmp_path)
    trainer.add_event_handler(TrainingEvents.RESUME_POINT(once=6), lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        trainer.run(numbers_loader(24))
    failed = Reported(tmp_path)
    trainer, second = built(tmp_path)
    trainer.run(numbers_loader(24))
    expected = [(line["iteration"], line["loss"]) for line in lines(tmp_path)]
    trainer, third = built(tmp_path)  # at its end already: its last point is there
    trainer.add_event_handler(Events.STARTED, lambda: trainer.state.metrics.update(loss=0.0))
    trainer.run(numbers_loader(24), max_epochs=1)

    assert failed.ending == ("failed", "ZeroDivisionError: division by zero")
    assert [point[2] for point in failed.points if point[0] == "loss"] == [1, 2, 3, 4, 5, 6]  # two of them to be cut
    assert first.task_id == second.task_id == third.task_id == Reported(tmp_path).task["id"]
    reported = Reported(tmp_path)
    assert [point[2:] for point in reported.points if point[0] == "loss"] == expected
    assert max(Counter(point[:3] for point in reported.points).values()) == 1
    assert reported.ending == ("completed", "max_epochs")


def test_checkpoint_saved_before_the_task_is_known_continues_it(tmp_path, monkeypatch):
    """No save waits without end for a ClearML that is slow to begin, as on a busy machine."""
    monkeypatch.setattr(clearml_log, "_ID_WITHIN_S", 0.0)
    (tmp_path / "clearml").mkdir()
    trainer, first = built(tmp_path)
    known = []

    @trainer.on(TrainingEvents.RESUME_POINT(once=6))
    def fail():
        known.append(first.task_id)
        fcntl.flock(held, fcntl.LOCK_UN)
        raise ZeroDivisionError

    with (tmp_path / "clearml" / "session.lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)  # ClearML's process waits for it before it makes the task
        with pytest.raises(ZeroDivisionError):
            trainer.run(numbers_loader(24))
    trainer, second = built(tmp_path)
    assert second.task_id is None and known == [None]  # it is not in the checkpoint
    trainer.run(numbers_loader(24))

    assert first.task_id == second.task_id
    assert Reported(tmp_path).task["id"] == first.task_id
    assert [point[2:] for point in Reported(tmp_path).points if point[0] == "loss"] == [
        (line["iteration"], line["loss"]) for line in lines(tmp_path)
    ]


def test_stop_is_handled_by_the_run_and_reported_to_clearml(tmp_path):
    """A Ctrl-C or a cluster's SIGTERM goes to every process; ClearML's own waits for the training's word."""
    trainer, sink = built(tmp_path)
    GracefulStop(exit=False).attach(trainer)
    processes = []

    @trainer.on(Events.ITERATION_COMPLETED(once=3))
    def stop():
        assert sink._session is not None and sink._session.task_id(30)
        processes.append(sink._session.process)
        for number in (signal.SIGINT, signal.SIGTERM):
            os.kill(sink._session.process.pid, number)
        os.kill(os.getpid(), signal.SIGINT)

    state = trainer.run(numbers_loader(24))
    processes[0].wait(60)  # the run does not wait as long

    assert (state.status, state.reason) == ("interrupted", "SIGINT") and state.iteration < 12
    assert Reported(tmp_path).ending == ("interrupted", "SIGINT")
    assert [point[2] for point in Reported(tmp_path).points if point[0] == "loss"] == list(
        range(1, state.iteration + 1)
    )


def test_stop_waits_half_a_second_at_most_and_the_session_ends_by_itself(tmp_path, monkeypatch, caplog):
    """Of a session that is slow to begin: neither the start, nor the save, nor the end waits for it."""
    slow = tmp_path / "slow.py"
    slow.write_text("import sys, time\nfor line in sys.stdin:\n    if '\"status\"' in line: break\ntime.sleep(15)\n")
    monkeypatch.setattr(clearml_log, "_SCRIPT", slow)
    trainer, sink = built(tmp_path / "run")
    began = []

    @trainer.on(Events.ITERATION_COMPLETED(once=3))
    def stop():
        assert sink._session is not None
        processes.append(sink._session.process)
        began.append(time.monotonic())
        trainer.request_stop("enough")

    processes = []
    caplog.set_level("INFO")
    starts = time.monotonic()
    state = trainer.run(numbers_loader(24))
    assert began[0] - starts < 6  # 10 s where the id is waited for
    assert time.monotonic() - began[0] < 6  # 0.5 s and the save; it was 20 s
    assert state.status == "interrupted" and processes[0].poll() is None  # the session does take long
    assert "ClearML's process still writes, and ends by itself." in caplog.messages
    assert "failed" not in caplog.text
    processes[0].kill()
    processes[0].wait()


@pytest.mark.slow
def test_training_process_stays_as_it_is(tmp_path):
    import argparse
    from multiprocessing.process import BaseProcess

    def everything():
        handlers = [signal.getsignal(number) for number in sorted(signal.valid_signals())]
        patched = [sys.exit, sys.excepthook, torch.save, torch.load, os.fork, os._exit, BaseProcess.run]
        return [*handlers, *patched, argparse.ArgumentParser.parse_args, threading.active_count(), dict(os.environ)]

    trainer, sink = built(tmp_path, saves=False)
    before, within, pids = everything(), [], []

    @trainer.on(Events.ITERATION_COMPLETED)
    def look():
        assert sink._session is not None
        within.append(everything())
        pids.append(sink._session.process.pid)

    trainer.run(numbers_loader())

    assert within == [before] * 6 and everything() == before
    assert "clearml" not in sys.modules
    with pytest.raises(ProcessLookupError):
        os.kill(pids[0], 0)
    assert Reported(tmp_path).points


@pytest.mark.slow
def test_forked_loader_workers_and_the_task_leave_each_other_alone(tmp_path):
    trainer, _ = built(tmp_path, saves=False)
    trainer.run(numbers_loader(num_workers=2, multiprocessing_context="fork"))

    assert [point[2] for point in Reported(tmp_path).points if point[0] == "loss"] == [1, 2, 3, 4, 5, 6]
    assert Reported(tmp_path).ending == ("completed", "max_epochs")


@pytest.mark.slow
def test_killed_training_is_reported_as_failed(tmp_path):
    script = f"""
import os, signal
from ignite.engine import Events
from tests.handlers.clearml.test_sink import Path, built, numbers_loader
trainer, sink = built(Path({str(tmp_path)!r}))
trainer.add_event_handler(Events.ITERATION_COMPLETED(once=3), lambda: os.kill(os.getpid(), signal.SIGKILL))
trainer.run(numbers_loader(24))
"""
    training = program(ROOT, script)
    training.communicate()
    until = time.monotonic() + 60
    while not list(tmp_path.glob("clearml/offline/*.zip")) or b"Offline session stored" not in _log(tmp_path):
        assert time.monotonic() < until, _log(tmp_path)
        time.sleep(0.05)

    assert training.returncode == -signal.SIGKILL
    assert Reported(tmp_path).ending[0] == "failed" and "probably killed" in Reported(tmp_path).ending[1]
    assert [point[2] for point in Reported(tmp_path).points if point[0] == "loss"] == [1, 2]


def _log(run):
    return (run / "clearml" / "session.log").read_bytes()


@pytest.mark.slow
def test_value_that_is_not_finite_is_a_line_and_not_a_point(tmp_path):
    sink = ClearMLLogger(tmp_path)
    trainer = Trainer(lambda engine, batch: batch)
    MetricLogger(sinks=[sink], console=False).attach(trainer)
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: trainer.state.metrics.update(word="good", flag=True))
    trainer.run([1.0, float("nan"), float("inf")])

    reported = Reported(tmp_path)
    assert [point for point in reported.points if point[0] != "epoch"] == [("loss", "loss", 1, 1.0)]
    assert "iteration 2: loss is nan" in reported.log and "iteration 3: loss is inf" in reported.log


@pytest.mark.slow
def test_reports_wait_for_nothing_and_all_arrive_at_the_end(tmp_path):
    sink, trainer = ClearMLLogger(tmp_path), Trainer(lambda engine, batch: batch)
    sink._start(trainer)
    assert sink._session is not None and sink._session.task_id(60)
    values = {f"group/name{index}": index * 1.2345 for index in range(12)}
    process = sink._session.process
    process.send_signal(signal.SIGSTOP)  # it reads nothing, and the pipe is full before the last of them
    for iteration in range(1, 301):
        sink.write(iteration, values)
    assert sink._session._unsent
    process.send_signal(signal.SIGCONT)
    trainer.state.status = "completed"
    sink._end(trainer)

    assert len(Reported(tmp_path).points) == 300 * len(values)


def test_session_that_fails_is_one_warning_and_training_continues(tmp_path, monkeypatch, caplog):
    script = tmp_path / "failing.py"
    script.write_text("""import sys; print('{"error": "ValueError: wrong key"}', flush=True); sys.exit(1)""")
    monkeypatch.setattr(clearml_log, "_SCRIPT", script)
    trainer, sink = built(tmp_path)
    trainer.add_event_handler(Events.ITERATION_COMPLETED(once=1), lambda: sink._session.process.wait(60))
    state = trainer.run(numbers_loader())

    assert (state.status, len(lines(tmp_path))) == ("completed", 6)
    reported = [text for text in warnings_of(caplog) if "sink" in text]
    assert len(reported) == 1 and reported[0].startswith("The sink clearml (ClearMLLogger) failed: RuntimeError: ")
    assert "ended: ValueError: wrong key; see " in reported[0]


def test_other_ranks_start_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr("ignite.distributed.get_rank", lambda: 1)
    trainer, sink = trainer_of(), ClearMLLogger(tmp_path)
    sink.attach(trainer)
    trainer.run(numbers_loader())

    assert not (tmp_path / "clearml").exists()
    assert sink.state_dict() == {"task_id": None, "run": None, "written": {}}


@pytest.mark.parametrize(
    ("variables", "online"),
    [
        ({}, False),
        ({"CLEARML_API_ACCESS_KEY": "key"}, True),
        ({"CLEARML_API_HOST": "http://127.0.0.1:1"}, True),
        ({"CLEARML_API_HOST": "http://127.0.0.1:1", "CLEARML_OFFLINE_MODE": "1"}, False),
        ({"CLEARML_CONFIG_FILE": __file__}, True),
    ],
)
def test_online_where_the_user_has_configured_a_server(variables, online, monkeypatch):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)

    assert clearml_log.server_is_configured() is online


@pytest.mark.slow
def test_server_gets_all_of_it_once_over_a_failure_and_a_resume(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    with clearml_server() as (server, variables):
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        trainer, first = built(tmp_path, config={"optimizer": {"lr": 0.25}})
        trainer.add_event_handler(TrainingEvents.RESUME_POINT(once=6), lambda: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            trainer.run(numbers_loader(24))
        failed, sent = dict(server.tasks["task0"]), len(server.scalars)
        trainer, second = built(tmp_path, config={"optimizer": {"lr": 0.25}})
        trainer.run(numbers_loader(24))

    assert first.task_id == second.task_id == "task0" and list(server.tasks) == ["task0"]
    assert (failed["status"], failed["status_reason"]) == ("failed", "ZeroDivisionError: division by zero")
    assert sent == 2 * 6
    task = server.tasks["task0"]
    assert task["status"] == "completed" and task["hyperparams"]["optimizer"]["lr"]["value"] == "0.25"
    assert task["configuration"].keys() == {"config", "environment"}
    assert [point[2:] for point in sorted(server.scalars) if point[0] == "loss"] == [
        (line["iteration"], line["loss"]) for line in lines(tmp_path)
    ]
    uris = [model["uri"] for model in server.models.values()]
    assert uris[-1] == (tmp_path / "checkpoints" / "iteration_00000012").as_uri()
