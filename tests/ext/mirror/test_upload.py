"""What is uploaded, in which order, what is deleted there, and what becomes of a store that is slow or silent."""

import os
import shutil
import signal
import threading
import time

import pytest
import torch
from ignite.engine import Events
from s3fs import S3FileSystem

from tests.ext.mirror import faulty
from tests.ext.mirror.runs import there, train
from tests.ext.mirror.servers import CREDENTIALS, Proxy, make_bucket, s3_server
from tests.kit.faults import kill_this_process
from tests.kit.processes import ended, wait_until
from tests.kit.refusals import command
from tests.kit.tiny import weights

KILLED = -signal.SIGKILL


@pytest.fixture
def store():
    return faulty.install()


@pytest.fixture
def mirror(tmp_path):
    return f"faulty://{tmp_path / 'mirror'}"


def writes(store, kind="write"):
    return [name for operation, name in store.seen if operation == kind]


def warnings(caplog, mirror):
    return [record.message for record in caplog.records if record.levelname == "WARNING" and mirror in record.message]


def uploaded_first(folder):
    """The run waits until its first checkpoint is there."""

    def attach(trainer):
        there = (folder / "mirror" / "iteration_00000002" / "manifest.json").exists
        trainer.add_event_handler(Events.ITERATION_COMPLETED(once=3), lambda: wait_until(there))

    return attach


def busy(operation, name):
    raise OSError("busy")


@pytest.mark.row("M1")
def test_the_manifest_is_the_last_file_to_come_and_the_first_to_go(tmp_path, store, mirror):
    train(tmp_path / "run", mirror, 4, keep_last=1, attach=uploaded_first(tmp_path))

    first, second = (
        [f"iteration_0000000{n}/{f}" for f in ("shared.safetensors", "rank_0.safetensors", "manifest.json")]
        for n in (2, 4)
    )
    assert list(dict.fromkeys(writes(store))) == [*first, *second]
    removed = writes(store, "remove")
    assert removed[0] == first[-1] and sorted(removed) == sorted(first)
    assert store.seen.index(("remove", first[-1])) > store.seen.index(("write", second[-1]))
    assert there(tmp_path / "mirror") == [4]


@pytest.mark.parametrize("step", [3, pytest.param(1, marks=pytest.mark.nightly)], ids=["each third one", "each"])
def test_killed_at_any_operation_the_mirror_holds_whole_checkpoints_alone_and_the_next_start_goes_on(step, tmp_path):
    """Of two uploads and a deletion; each is one of the store's operations."""
    folder, mirror = tmp_path / "run", f"faulty://{tmp_path / 'mirror'}"
    train(folder, None, 2)

    def work(kill_at):
        store = faulty.install()
        store.fault = lambda operation, name: len(store.seen) == kill_at and kill_this_process()
        train(folder, mirror, 4, keep_last=1)
        return len(store.seen)

    for kill_at in range(1, 100, step):
        if ended(work, kill_at)[0] != KILLED:
            break
        assert there(tmp_path / "mirror") in ([], [2], [2, 4], [4])
        if (folder / "iteration_00000004").exists():  # it has trained: again from the first checkpoint
            shutil.rmtree(folder)
            train(folder, None, 2)
            shutil.rmtree(tmp_path / "mirror", ignore_errors=True)
    assert kill_at > 8 and there(tmp_path / "mirror") == [4]


def test_training_does_not_wait_for_a_slow_store_and_the_newest_comes_next(tmp_path, store, mirror):
    goes_on, names = threading.Event(), []
    store.fault = lambda operation, name: goes_on.wait(30) if operation == "write" else None

    def attach(trainer):
        trainer.add_event_handler(Events.ITERATION_COMPLETED(once=3), lambda: wait_until(lambda: writes(store)))

        @trainer.on(Events.ITERATION_COMPLETED(once=7))
        def look():
            wait_until(lambda: not (tmp_path / "run" / "iteration_00000004").exists())  # it goes beside training
            names.extend(sorted(path.name for path in (tmp_path / "run").glob("iteration_*")))
            goes_on.set()

    train(tmp_path / "run", mirror, 8, attach=attach, keep_last=1)

    assert names == ["iteration_00000002", "iteration_00000006"], "what is being uploaded stays"
    assert "iteration_00000004/shared.safetensors" not in writes(store)
    assert there(tmp_path / "mirror") == there(tmp_path / "run") == [8]


def test_one_that_the_folder_keeps_is_uploaded_whatever_came_after_it(tmp_path, store, mirror):
    """The best one waits while a slow store takes another, and newer ones are saved."""
    goes_on = threading.Event()
    store.fault = lambda operation, name: goes_on.wait(30) if operation == "write" else None

    def attach(trainer):
        @trainer.on(Events.ITERATION_COMPLETED(every=2))
        def measure():
            trainer.state.metrics["score"] = float(trainer.state.iteration == 4)

        trainer.add_event_handler(Events.ITERATION_COMPLETED(once=3), lambda: wait_until(lambda: writes(store)))
        trainer.add_event_handler(Events.ITERATION_COMPLETED(once=9), goes_on.set)

    train(tmp_path / "run", mirror, 10, attach=attach, keep_last=1, best="score", mode="max")
    assert there(tmp_path / "mirror") == there(tmp_path / "run") == [4, 10]


def test_what_is_there_is_replaced_by_the_same_iteration_and_what_a_kill_has_left_goes(tmp_path, store):
    place = tmp_path / "mirror"
    for name in ("iteration_00000004", "iteration_00000001"):
        (place / name).mkdir(parents=True)
        (place / name / "shared.safetensors").write_bytes(b"half")
    train(tmp_path / "run", str(place), 4)
    assert sorted(path.name for path in place.iterdir()) == ["iteration_00000002", "iteration_00000004"]
    train(tmp_path / "other", None, 4, lr=0.2)
    command("checkpoints", "push", tmp_path / "other" / "iteration_00000004", place)
    command("checkpoints", "diff", tmp_path / "other" / "iteration_00000004", place / "iteration_00000004")


def test_checkpoints_of_another_run_stay(tmp_path, store, mirror):
    train(tmp_path / "other", mirror, 1, resume=False)
    train(tmp_path / "run", mirror, 4, keep_last=1, resume=False, attach=uploaded_first(tmp_path))
    assert there(tmp_path / "mirror") == [1, 4]


def test_a_damaged_file_here_is_not_uploaded_as_a_checkpoint(tmp_path, store, mirror, caplog):
    def damage(operation, name):
        path = tmp_path / "run" / "iteration_00000002" / "shared.safetensors"
        if path.exists():
            path.write_bytes(path.read_bytes()[:-8] + bytes(8))

    store.fault = damage
    train(tmp_path / "run", mirror, 2)
    assert there(tmp_path / "mirror") == [] and "shared.safetensors is not what was saved" in caplog.text


@pytest.mark.row("M1")
def test_a_store_that_refuses_is_tried_again_after_twice_the_time_before(tmp_path, store, mirror, monkeypatch, caplog):
    """And never stops training; what is saved when it takes uploads again is there."""
    paused, real, went_on = [], threading.Condition.wait_for, threading.Event()

    def wait_for(condition, predicate, timeout=None):
        if timeout is None or timeout < 1.0:
            return real(condition, predicate, timeout)
        paused.append(timeout)
        if len(paused) == 1100:  # after some days
            store.fault = lambda operation, name: None
            went_on.set()
        return predicate()

    monkeypatch.setattr(threading.Condition, "wait_for", wait_for)

    def attach(trainer):
        trainer.add_event_handler(Events.ITERATION_COMPLETED(once=3), lambda: went_on.wait(30))

    store.fault = busy
    train(tmp_path / "run", mirror, 4, attach=attach, resume=False)
    assert paused[:9] == [2.0**number for number in range(9)] and set(paused[9:]) == {300.0} and len(paused) == 1100
    said = warnings(caplog, mirror)
    assert len(said) == 2 and "not uploaded" in said[0] and "busy" in said[0] and "again" in said[1]
    assert there(tmp_path / "mirror")[-1] == 4


def test_a_store_that_refuses_to_the_end_is_named_and_a_run_that_goes_on_begins_again(
    tmp_path, store, mirror, monkeypatch, caplog
):
    real = threading.Condition.wait_for
    short = lambda condition, predicate, timeout=None: real(condition, predicate, timeout and 0.0)  # noqa: E731
    monkeypatch.setattr(threading.Condition, "wait_for", short)
    expected, _ = train(tmp_path / "whole", None, 6)
    train(tmp_path / "run", mirror, 4)
    caplog.clear()
    store.fault, tries = busy, len(store.seen)
    trainer, resumed = train(tmp_path / "run", mirror, 6)

    assert resumed == "iteration_00000004" and torch.equal(weights(trainer), weights(expected))
    said = warnings(caplog, mirror)
    assert "cannot be read" in said[0] and "iteration_00000006 is not in" in said[-1]
    assert f"checkpoints push {tmp_path / 'run'} {mirror}" in said[-1]
    assert len(store.seen) - tries >= 4
    store.fault = lambda operation, name: None
    train(tmp_path / "run", mirror, 6)
    assert there(tmp_path / "mirror") == [4, 6]


def silent_until(store, mirror, event, act):
    """The store does not answer; ``act`` is called in a thread when it was asked."""
    asked = threading.Event()

    def fault(operation, name):
        asked.set()
        event.wait(60)

    def wait():
        asked.wait(60)
        act()

    store.fault = fault
    threading.Thread(target=wait, daemon=True).start()


def test_a_silent_store_is_given_up_at_the_end_and_named(tmp_path, store, mirror, clock, caplog):
    goes_on = threading.Event()
    silent_until(store, mirror, goes_on, lambda: clock.move(400))
    train(tmp_path / "run", mirror, 3, resume=False)
    assert "iteration_00000003 is not in" in caplog.text
    goes_on.set()


def test_ctrl_c_gives_up_the_last_upload_and_names_it(tmp_path, store, mirror, caplog):
    goes_on = threading.Event()

    def interrupt():
        wait_until(lambda: "Ctrl-C gives up" in caplog.text)
        os.kill(os.getpid(), signal.SIGINT)

    silent_until(store, mirror, goes_on, interrupt)
    train(tmp_path / "run", mirror, 3, resume=False)
    assert "iteration_00000003 is not in" in caplog.text and there(tmp_path / "mirror") == []
    goes_on.set()


@pytest.mark.nightly  # it waits for five seconds
def test_a_run_that_has_failed_waits_for_its_last_upload_for_a_few_seconds(tmp_path, store, mirror, caplog):
    goes_on = threading.Event()
    silent_until(store, mirror, goes_on, lambda: None)
    began = time.monotonic()
    with pytest.raises(ZeroDivisionError):
        train(tmp_path / "run", mirror, 4, resume=False, attach=fails)
    assert 1.0 <= time.monotonic() - began < 20
    assert "iteration_00000002 is not in" in caplog.text
    goes_on.set()


def fails(trainer):
    trainer.add_event_handler(Events.ITERATION_COMPLETED(once=3), lambda: 1 / 0)


def test_what_a_run_that_has_failed_has_saved_is_uploaded(tmp_path, store, mirror):
    with pytest.raises(ZeroDivisionError):
        train(tmp_path / "run", mirror, 4, attach=fails)
    assert there(tmp_path / "mirror") == [2]


def test_a_roll_back_does_not_wait_for_uploads(tmp_path, store, mirror, caplog):
    goes_on, damaged = threading.Event(), []
    silent_until(store, mirror, goes_on, lambda: None)

    def attach(trainer):
        @trainer.on(Events.ITERATION_STARTED)
        def damage():
            if trainer.state.iteration == 5 and not damaged:
                damaged.append(5)
                trainer.state.batch[0].fill_(torch.nan)

        @trainer.on(Events.ITERATION_COMPLETED(once=6))
        def let_it_go():
            assert "goes back to a checkpoint" in caplog.text and "Uploading" not in caplog.text
            goes_on.set()

    train(tmp_path / "run", mirror, 8, resume=False, attach=attach, non_finite="rollback")
    assert damaged and goes_on.is_set() and there(tmp_path / "mirror")[-1] == 8


@pytest.mark.nightly  # starts a server
def test_an_s3_server_that_is_broken_for_a_while_keeps_the_run(tmp_path, monkeypatch, caplog):
    with s3_server() as port:
        proxy = Proxy(port)
        for name, value in {**CREDENTIALS, "AWS_ENDPOINT_URL": f"http://127.0.0.1:{proxy.port}"}.items():
            monkeypatch.setenv(name, value)
        S3FileSystem.clear_instance_cache()
        make_bucket(port, "bucket")
        expected, _ = train(tmp_path / "whole", None, 12)
        train(tmp_path / "run", "s3://bucket/run", 4)
        for mode in ("error", "cut"):
            proxy.mode = mode
            train(tmp_path / "run", "s3://bucket/run", 6)
        assert "cannot be read" in caplog.text and CREDENTIALS["AWS_SECRET_ACCESS_KEY"] not in caplog.text
        proxy.mode = "open"
        train(tmp_path / "run", "s3://bucket/run", 8)
        shutil.rmtree(tmp_path / "run")
        trainer, resumed = train(tmp_path / "run", "s3://bucket/run", 12)
        proxy.close()
    S3FileSystem.clear_instance_cache()
    assert resumed == "iteration_00000008" and torch.equal(weights(trainer), weights(expected))
