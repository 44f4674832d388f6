"""The machine is gone: the same command on an empty folder ends with the bits of the undisturbed run."""

import contextlib
import logging
import os
import shutil
import signal
import threading
import time

import pytest
import torch
from ignite.engine import Events

from ignite_engine.checkpointing import CheckpointError, CheckpointStore
from ignite_engine.checkpointing.filesystem import LOCK_NAME
from ignite_engine.ext.mirror.remote import Remote
from ignite_engine.handlers import Checkpoint
from ignite_engine.handlers.checkpoint import mirroring
from tests.ext.mirror.kills import problems_there
from tests.ext.mirror.runs import KILLED, MODULES, START, end_of
from tests.ext.mirror.servers import CREDENTIALS
from tests.faults.fork_server import shared
from tests.kit.faults import can_mount, in_child, mount_small_file_system
from tests.kit.tiny import numbers_loader, trainer_of, weights


def train(directory, mirror, iterations, **options):
    trainer = trainer_of()
    checkpoint = Checkpoint(directory, mirror=mirror, **options)
    checkpoint.attach(trainer, Events.ITERATION_COMPLETED(every=2))
    found = checkpoint.resume()
    trainer.run(numbers_loader(), max_iters=iterations)
    return trainer, found


@pytest.fixture(params=["directory", "memory", "s3"])
def mirror(request, tmp_path):
    places = {"directory": str(tmp_path / "mirror"), "memory": f"memory://{tmp_path.name}/mirror"}
    return places.get(request.param) or str(request.getfixturevalue("s3"))


@pytest.mark.slow
def test_a_run_whose_folder_is_gone_ends_with_the_bits_of_the_undisturbed_one(tmp_path, mirror):
    whole, _ = train(tmp_path / "whole", None, 12)
    train(tmp_path / "run", mirror, 7)
    shutil.rmtree(tmp_path / "run")

    trainer, found = train(tmp_path / "run", mirror, 12)

    assert found is not None and found.name == "iteration_00000007"
    assert torch.equal(weights(trainer), weights(whole))
    names = [checkpoint.path.name for checkpoint in Remote(mirror).checkpoints()[0]]
    assert names[-1] == "iteration_00000012" and len(names) == 2  # as many as the run keeps


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize(
    ("options", "ranks"),
    [
        ({}, (2, 2)),
        ({"invariant": True}, (2, 1)),
        pytest.param({"invariant": True}, (1, 3), marks=pytest.mark.slow),
        ({"layout": "fsdp", "background": True}, (2, 2)),
    ],
    ids=["same ranks", "fewer ranks", "more ranks", "sharded"],
)
def test_ranks_whose_folder_is_gone_end_with_the_bits_of_the_undisturbed_run(tmp_path, s3, options, ranks):
    server = shared(MODULES)

    def run(name, mirror, count, **more):
        arguments = (str(tmp_path / name), mirror, count, options | more)
        return server.call(START, *arguments, output=tmp_path / f"{name}.txt")

    assert run("whole", None, ranks[0]) == 0, (tmp_path / "whole.txt").read_text()
    assert run("run", s3, ranks[0], kill_at=9) == KILLED
    shutil.rmtree(tmp_path / "run")
    assert run("run", s3, ranks[1]) == 0, (tmp_path / "run.txt").read_text()

    resumed, whole = end_of(tmp_path / "run"), end_of(tmp_path / "whole")
    assert resumed.pop("resumed") is not None and whole.pop("resumed") is None
    assert resumed == whole


@pytest.mark.slow
def test_a_mirror_that_is_gone_never_stops_training_and_is_one_line(tmp_path, s3, proxy, caplog):
    train(tmp_path / "run", s3, 4)
    proxy.mode = "gone"
    whole, _ = train(tmp_path / "whole", None, 12)
    caplog.clear()
    with caplog.at_level(logging.INFO, "ignite_engine"):
        trainer, found = train(tmp_path / "run", s3, 12)
    said = [record.message for record in caplog.records if record.levelno == logging.WARNING and s3 in record.message]

    assert found is not None and found.name == "iteration_00000004"
    assert torch.equal(weights(trainer), weights(whole))
    assert "cannot be read" in said[0] and f"resumes from what {tmp_path / 'run'} holds" in said[0]
    assert sum("was not uploaded" in line for line in said) == 1
    assert f"iteration_00000012 is not in {s3}" in said[-1] and "checkpoints push" in said[-1]
    for line in caplog.text.splitlines():
        assert CREDENTIALS["AWS_SECRET_ACCESS_KEY"] not in line and CREDENTIALS["AWS_ACCESS_KEY_ID"] not in line


def test_an_empty_folder_and_a_mirror_that_is_gone_is_refused(tmp_path, s3, proxy):
    train(tmp_path / "run", s3, 4)
    shutil.rmtree(tmp_path / "run")
    proxy.mode = "gone"

    with pytest.raises(CheckpointError, match="holds no checkpoint, so the run would start over") as raised:
        train(tmp_path / "run", s3, 8)

    assert "\n" not in str(raised.value) and s3 in str(raised.value)
    proxy.mode = "open"
    _, found = train(tmp_path / "run", s3, 8)
    assert found is not None and found.name == "iteration_00000004"


@pytest.mark.parametrize("mode", ["error", pytest.param("cut", marks=pytest.mark.slow)])
def test_a_mirror_that_fails_for_a_while_gets_what_is_saved_then(tmp_path, s3, proxy, mode, caplog):
    trainer = trainer_of()
    checkpoint = Checkpoint(tmp_path / "run", mirror=s3)
    checkpoint.attach(trainer, Events.ITERATION_COMPLETED(every=2))
    checkpoint.resume()

    def fail():
        proxy.mode = mode

    def recover():
        deadline = time.monotonic() + 30
        while "was not uploaded" not in caplog.text:  # the fault has happened
            assert time.monotonic() < deadline
            time.sleep(0.02)
        proxy.mode = "open"

    trainer.add_event_handler(Events.ITERATION_STARTED(once=2), fail)
    trainer.add_event_handler(Events.ITERATION_STARTED(once=6), recover)
    trainer.run(numbers_loader(), max_iters=8)

    there = Remote(s3).checkpoints()[0]
    assert there[-1].path.name == "iteration_00000008"
    assert "takes uploads again" in caplog.text and caplog.text.count("was not uploaded") == 1
    assert problems_there(Remote(s3)) == []


@pytest.mark.slow
def test_ctrl_c_gives_up_the_last_upload_and_names_it(tmp_path, caplog, monkeypatch):
    """Until then no other process may begin to save there."""
    goes_on = threading.Event()
    monkeypatch.setattr(Remote, "put", lambda *arguments: goes_on.wait(60))
    began, lock, is_held = time.monotonic(), tmp_path / "run" / LOCK_NAME, list[bool]()
    threading.Timer(3.0, lambda: is_held.append(lock.exists())).start()
    threading.Timer(4.0, os.kill, [os.getpid(), signal.SIGINT]).start()

    train(tmp_path / "run", str(tmp_path / "mirror"), 3)

    assert time.monotonic() - began < 30 and is_held == [True]
    assert "Uploading iteration_00000003 to" in caplog.text and "Ctrl-C gives up." in caplog.text
    assert f"is not in {tmp_path / 'mirror'}" in caplog.text
    assert f"checkpoints push {tmp_path / 'run'} {tmp_path / 'mirror'}" in caplog.text
    assert Remote(str(tmp_path / "mirror")).checkpoints() == ([], [])
    goes_on.set()


def test_a_run_that_has_failed_waits_for_its_last_upload_for_a_few_seconds(tmp_path, monkeypatch, caplog):
    goes_on = threading.Event()
    monkeypatch.setattr(Remote, "put", lambda *arguments: goes_on.wait(60))
    monkeypatch.setattr(mirroring, "_OF_A_FAILED_RUN_S", 1.0)
    trainer = trainer_of()
    Checkpoint(tmp_path / "run", mirror=str(tmp_path / "mirror")).attach(trainer, Events.ITERATION_COMPLETED(every=2))
    times = []

    @trainer.on(Events.ITERATION_COMPLETED(once=3))
    def fail():
        times.append(time.monotonic())
        raise RuntimeError("a mistake")

    with pytest.raises(RuntimeError, match="a mistake"):
        trainer.run(numbers_loader(), max_iters=4)
    assert 1.0 <= time.monotonic() - times[0] < 10
    assert f"iteration_00000002 is not in {tmp_path / 'mirror'}" in caplog.text
    goes_on.set()


def test_a_mirror_with_checkpoints_is_refused_where_a_run_must_be_new(tmp_path):
    train(tmp_path / "first", str(tmp_path / "mirror"), 4)

    with pytest.raises(CheckpointError, match="but must_be_new was given"):
        train(tmp_path / "second", str(tmp_path / "mirror"), 4, must_be_new=True)


def test_a_roll_back_does_not_wait_for_uploads(tmp_path, caplog, monkeypatch):
    put, goes_on = Remote.put, threading.Event()
    monkeypatch.setattr(Remote, "put", lambda *arguments: goes_on.wait(60) and put(*arguments))
    trainer = trainer_of(non_finite="rollback")
    checkpoint = Checkpoint(tmp_path / "run", mirror=str(tmp_path / "mirror"))
    checkpoint.attach(trainer, Events.ITERATION_COMPLETED(every=2))
    damaged = []

    @trainer.on(Events.ITERATION_STARTED)
    def damage():
        if trainer.state.iteration == 5 and not damaged:
            damaged.append(5)
            trainer.state.batch[0].fill_(torch.nan)

    @trainer.on(Events.ITERATION_COMPLETED(once=6))
    def let_it_go():
        assert "goes back to a checkpoint" in caplog.text and "Uploading" not in caplog.text
        goes_on.set()

    trainer.run(numbers_loader(), max_iters=8)

    assert damaged and goes_on.is_set()
    assert CheckpointStore(tmp_path / "mirror").checkpoints()[-1].iteration == 8


def train_with_a_mirror_that_is_full_for_a_while(folder):
    mirror, said = folder / "mirror", list[str]()
    mirror.mkdir()
    mount_small_file_system(mirror, 256)
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("ignite_engine").addHandler(handler)
    found = {}

    def note(name):
        store = CheckpointStore(mirror)
        there = {one.path.name: store.verify(one.path) for one in store.checkpoints()}
        found[name] = {"there": there, "said": [line for line in said if str(mirror) in line]}
        said.clear()

    train(folder / "run", str(mirror), 4)
    note("before")
    with contextlib.suppress(OSError), open(mirror / "filler", "wb", buffering=0) as file:
        while True:
            file.write(bytes(256))
    found["iteration"] = train(folder / "run", str(mirror), 12)[0].state.iteration
    note("full")
    (mirror / "filler").unlink()
    train(folder / "run", str(mirror), 14)
    note("after")
    return found


@pytest.mark.slow
@pytest.mark.faults
@pytest.mark.skipif(not can_mount(), reason="a file system cannot be mounted here")
def test_a_full_disk_is_one_line_and_what_is_missing_is_named_and_what_is_there_stays_whole(tmp_path):
    code, found = in_child(lambda: train_with_a_mirror_that_is_full_for_a_while(tmp_path))

    assert code == 0 and found["iteration"] == 12
    before, full, after = found["before"], found["full"], found["after"]
    assert before["there"] == full["there"] and list(full["there"])[-1] == "iteration_00000004"
    assert not any(problems for each in (before, after) for problems in each["there"].values())
    said = [line for line in full["said"] if not line.startswith("Uploading ")]
    assert len(said) == 2 and "was not uploaded" in said[0] and "No space left on device" in said[0]
    assert f"iteration_00000012 is not in {tmp_path / 'mirror'}" in said[1] and "checkpoints push" in said[1]
    assert list(after["there"])[-1] == "iteration_00000014" and after["said"] == []
