"""What fails on one rank is named on all of them, in every log and in the summary; real processes."""

import json
import logging
import multiprocessing
import os
import re
import resource
import signal
import time
from dataclasses import asdict
from pathlib import Path

import pytest

from ignite_engine import Trainer
from ignite_engine.ranks import agreement, heartbeats, watch, watching
from ignite_engine.ranks.heartbeats import Failure
from tests.faults.fork_server import shared
from tests.faults.processes import CONFIG, group_is_gone, summary, write_config_like
from tests.ranks.forkserver import on_ranks

pytestmark = [pytest.mark.distributed, pytest.mark.faults]

HERE = Path(__file__).parent
HEARTBEAT = r"iteration \d+, epoch 1, after [A-Z_]+"


def config_of(folder, **options):
    task = {"task": f"{HERE / 'failing.py'}:build"}
    sections = {"task_options": options, "run": {"max_epochs": 1}, "update": {"accumulation_steps": None}}
    return write_config_like({**CONFIG, **task}, folder, sections)


def logs(folder):
    paths = (folder / "run" / "logs").glob("rank_*.log")
    return {int(path.stem.split("_")[1]): path.read_text() for path in paths}


@pytest.fixture(scope="module")
def server():
    return shared(["tests.ranks.failing"])


BEGUN = r"iteration \d+, epoch [01](, after [A-Z_]+)?"
LAST = rf"Last heartbeat: {BEGUN}"
SILENT = r"gave no sign of life for \d\.\d s: .*"
# how a rank fails, which, what the others say of it, and the exit code
SHAPES = r"\(The micro-batch: \[Tensor \[4, 4\] float32, Tensor \[4, 1\] float32\]\)"
CASES = {
    "an exception": ("raise", 1, rf"rank 1 failed at {HEARTBEAT}: ValueError: a sample is broken {SHAPES}", 1),
    "a handler": (
        "handler",
        1,
        r"rank 1 failed at iteration 5, epoch 1, after ITERATION_COMPLETED: KeyError: 'no such key' "
        r"\(Raised by handler Broken on ITERATION_COMPLETED\)",
        1,
    ),
    "a sample that cannot be read": (
        "read",
        1,
        rf"rank 1 failed at {HEARTBEAT}: a sample is damaged \(Raised for Unreadable\[\d+\]\)",
        1,
    ),
    "an exit": ("exit", 1, rf"rank 1 called sys\.exit\(3\) at {HEARTBEAT}, while ranks? [02, ]+ waited for it", 3),
    "a kill": ("kill", 1, rf"rank 1 exited without reporting: .*{LAST}", 1),
    "a stopped process": ("stop", 1, rf"rank 1 {SILENT}{LAST}", 1),
    "a hang": (
        "hang",
        1,
        rf"rank 1 did not come while ranks? [02, ]+ waited .* {HEARTBEAT}",
        1,
    ),
    "an exception on rank 0": (
        "raise",
        0,
        rf"rank 0 failed at {HEARTBEAT}: ValueError: a sample is broken {SHAPES}",
        1,
    ),
    "an exit of rank 0": ("exit", 0, rf"rank 0 called sys\.exit\(3\) at {HEARTBEAT}", 3),
    "a kill of rank 0": ("kill", 0, rf"rank 0 exited without reporting: .*{LAST}", 1),
    "a stopped rank 0": ("stop", 0, rf"rank 0 {SILENT}{LAST}", 1),
}


@pytest.mark.row("G6")
@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_every_rank_and_the_summary_name_what_failed_on_one(tmp_path, server, case):
    how, failing, line, code = CASES[case]
    config = config_of(tmp_path, how=how, rank=failing)
    # short only where it is waited for: a machine that is busy may keep a rank from its heartbeat
    options = {"heartbeat_timeout": 2.0 if how == "stop" else 20.0, "timeout": 4.0 if how == "hang" else None}
    child = server.start("tests.ranks.failing:train", str(config), 3, options, output=tmp_path / "output.txt")
    ended = child.wait(60.0)
    output = (tmp_path / "output.txt").read_text()

    assert ended == code, output
    assert group_is_gone(child.pid), "a rank is left"
    assert summary(tmp_path)["status"] == "failed"
    assert re.fullmatch(line, summary(tmp_path)["reason"]), summary(tmp_path)["reason"]
    if how != "read":  # ahead of the iterations
        assert summary(tmp_path)["iteration"] in (4, 5, 6) and summary(tmp_path)["metrics"]["loss"] > 0
    others = {0, 1, 2} - {failing}
    assert others <= logs(tmp_path).keys()
    for rank in others:
        assert re.search(f" ERROR .*: {line}", logs(tmp_path)[rank]), (rank, logs(tmp_path)[rank])
        assert how != "stop" or "most recent call first" in logs(tmp_path)[rank], "no stack of those that run"
    assert how != "hang" or "in fail" in logs(tmp_path)[failing], "no stack of the rank that hangs"
    assert re.search(line, output) or "a sample is" in output


def test_error_while_one_rank_builds_is_named_by_the_others(tmp_path, server):
    config = config_of(tmp_path, how="build")
    code = server.call("tests.ranks.failing:train", str(config), 2, {}, output=tmp_path / "output.txt")

    assert code == 2
    assert (tmp_path / "output.txt").read_text().count("no model here") == 1


def test_an_interrupt_is_named_with_and_without_a_reason():
    assert watch._called(KeyboardInterrupt()) == "was interrupted"
    assert watch._called(KeyboardInterrupt("forced to end")) == "was forced to end"


def test_an_error_that_cannot_be_sent_whole_is_named_all_the_same():
    error = ValueError("x" * 2**21)
    error.__notes__ = [3, "y" * 2**21, "two\nlines", "short."]

    failure = watch.Watch()._failure_of(error)

    assert failure.line.endswith(" ... (3) (short)") and failure.line.count("x") == 2000
    assert len(json.dumps(asdict(failure))) < heartbeats._LIMIT


def test_after_a_run_within_a_run_the_outer_one_is_where_it_is(monkeypatch):
    with watch.Watch() as made:
        monkeypatch.setattr(agreement, "world_size", lambda: 2)
        with watching.watched_run(lambda: "iteration 3"):
            with watching.watched_run(lambda: "iteration 1"):
                assert made._heartbeat().startswith("iteration 1")
            assert made._heartbeat().startswith("iteration 3")
        assert made._heartbeat().startswith("outside of run()")
        monkeypatch.undo()


def _with_many_descriptors(rank, folder):
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, hard), hard))
    held = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]  # as of tensors that loader workers have sent
    said = list[str]()
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("ignite_engine").addHandler(handler)
    trainer = Trainer(lambda engine, batch: time.sleep(0.05))
    trainer.run([0] * 20)
    for descriptor in held:
        os.close(descriptor)
    assert (said, trainer.state.status) == ([], "completed")


def test_a_rank_with_more_descriptors_than_select_takes_is_watched(tmp_path):
    on_ranks(2, _with_many_descriptors, tmp_path)


def test_a_rank_that_is_ended_leaves_no_loader_worker(monkeypatch):
    worker = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,), daemon=True)
    worker.start()
    codes = list[int]()
    monkeypatch.setattr(os, "_exit", codes.append)
    made = watch.Watch()
    made.failure, made._end_at = Failure("rank 1 failed", code=3), 0.0
    made._end_if_due()
    worker.join(5)
    assert codes == [3] and worker.exitcode == -signal.SIGKILL
