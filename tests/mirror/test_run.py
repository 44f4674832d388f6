"""The machine is gone: the same command on an empty folder ends with the bits of the undisturbed run."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from ignite.engine import Events

from ignite_engine import Trainer
from ignite_engine.checkpointing import CheckpointError, CheckpointStore
from ignite_engine.checkpointing.filesystem import LOCK_NAME
from ignite_engine.handlers import Checkpoint
from ignite_engine.handlers.checkpoint import mirroring
from ignite_engine.mirror.followed import RUN, read_note
from ignite_engine.mirror.remote import Remote
from ignite_engine.ranks import signals
from tests.builders import numbers_loader, trainer_of, weights
from tests.checkpointing.file_faults import can_mount, in_child, mount_small_file_system
from tests.faults.fork_server import shared
from tests.mirror.runs import KILLED, MODULES, START, end_of
from tests.mirror.servers import CREDENTIALS, Proxy


def train(directory: Path, mirror: Any, iterations: int, **options: Any) -> tuple[Trainer, Path | None]:
    trainer = trainer_of()
    checkpoint = Checkpoint(directory, mirror=mirror, **options)
    checkpoint.attach(trainer, Events.ITERATION_COMPLETED(every=2))
    found = checkpoint.resume()
    trainer.run(numbers_loader(), max_iters=iterations)
    return trainer, found


@pytest.fixture(params=["directory", "memory", "s3"])
def mirror(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    places = {"directory": str(tmp_path / "mirror"), "memory": f"memory://{tmp_path.name}/mirror"}
    return places.get(request.param) or str(request.getfixturevalue("s3"))


@pytest.mark.slow
def test_a_run_whose_folder_is_gone_ends_with_the_bits_of_the_undisturbed_one(tmp_path: Path, mirror: str) -> None:
    whole, _ = train(tmp_path / "whole", None, 12)
    train(tmp_path / "run", mirror, 7)
    shutil.rmtree(tmp_path / "run")

    trainer, found = train(tmp_path / "run", mirror, 12)

    assert found is not None and found.name == "iteration_00000007"
    assert torch.equal(weights(trainer), weights(whole))
    names = [checkpoint.path.name for checkpoint in Remote(mirror).checkpoints()[0]]
    assert names[-1] == "iteration_00000012" and len(names) == 2  # as many as the run keeps
    assert not (tmp_path / "run" / ".mirror").exists()


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
def test_ranks_whose_folder_is_gone_end_with_the_bits_of_the_undisturbed_run(
    tmp_path: Path, s3: str, options: dict[str, Any], ranks: tuple[int, int]
) -> None:
    server = shared(MODULES)

    def run(name: str, mirror: Any, count: int, **more: Any) -> int:
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
def test_a_mirror_that_is_gone_never_stops_training_and_is_one_line(
    tmp_path: Path, s3: str, proxy: Proxy, caplog: pytest.LogCaptureFixture
) -> None:
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


def test_an_empty_folder_and_a_mirror_that_is_gone_is_refused(tmp_path: Path, s3: str, proxy: Proxy) -> None:
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
def test_a_mirror_that_fails_for_a_while_gets_what_is_saved_then(
    tmp_path: Path, s3: str, proxy: Proxy, mode: str, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = trainer_of()
    checkpoint = Checkpoint(tmp_path / "run", mirror=s3)
    checkpoint.attach(trainer, Events.ITERATION_COMPLETED(every=2))
    checkpoint.resume()

    def fail() -> None:
        proxy.mode = mode

    def recover() -> None:
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
    assert all(Remote(s3).problem(f"{one.path.name}/{file}", record, lambda count: None) is None
               for one in there for file, record in one.manifest.files.items())  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_gives_up_the_last_upload_and_names_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, number: signal.Signals
) -> None:
    """Until then no other process may begin to save and upload there."""
    began, lock, is_held = time.monotonic(), tmp_path / "run" / LOCK_NAME, list[bool]()
    threading.Timer(3.0, lambda: is_held.append(lock.exists())).start()
    threading.Timer(4.0, os.kill, [os.getpid(), number]).start()

    train(tmp_path / "run", {"url": str(tmp_path / "mirror"), "max_mib_per_s": 1e-4}, 3)

    assert time.monotonic() - began < 30 and is_held == [True]
    assert "Uploading iteration_00000003 to" in caplog.text or "Uploading iteration_00000002" in caplog.text
    assert "left. Ctrl-C gives up." in caplog.text
    assert f"is not in {tmp_path / 'mirror'}" in caplog.text
    which = "--all " if "iteration_00000002, iteration_00000003 is" in caplog.text else ""
    assert f"checkpoints push {which}{tmp_path / 'run'} {tmp_path / 'mirror'}" in caplog.text
    assert Remote(str(tmp_path / "mirror")).checkpoints() == ([], [])
    assert read_note(Remote(str(tmp_path / "mirror")), RUN)["status"] == "completed"


@pytest.mark.parametrize("forwarded", [signals.FORWARDED, {number: number for number in signals.SIGNALS}])
def test_ctrl_c_gives_up_where_the_stop_of_the_run_has_left_it_ignored(
    monkeypatch: pytest.MonkeyPatch, forwarded: dict[int, int]
) -> None:
    """As GracefulStop does; and the handlers are those of before afterwards, also without signals to forward by."""
    monkeypatch.setattr(signals, "FORCE_AFTER_S", 0.0)
    monkeypatch.setattr(signals, "FORWARDED", forwarded)
    before = {number: signal.signal(number, signal.SIG_IGN) for number in signals.STOPS}
    try:
        with mirroring._interrupted() as came:
            signal.raise_signal(signal.SIGTERM)
            assert not came(), "it has ended the run"
            signal.raise_signal(signal.SIGINT)
            assert came()
        assert {signal.getsignal(number) for number in signals.STOPS} == {signal.SIG_IGN}
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@pytest.mark.parametrize("silent", ["put", "write"])
def test_a_mirror_says_that_its_run_has_ended_whose_last_upload_was_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, silent: str
) -> None:
    """``put`` sends the files of a checkpoint, ``write`` what is said of the run, too: then it cannot be said."""
    monkeypatch.setattr(signals, "FORCE_AFTER_S", 0.0)
    goes_on, waited, method = threading.Event(), list[bool](), getattr(Remote, silent)

    def wait(remote: Remote, *arguments: Any) -> Any:
        if b'"running"' not in bytes(arguments[1] if silent == "write" else b""):
            waited.append(goes_on.wait(20))
        return method(remote, *arguments)

    def give_up() -> None:
        deadline = time.monotonic() + 20
        while "left. Ctrl-C gives up." not in caplog.text and time.monotonic() < deadline:
            time.sleep(0.01)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(Remote, silent, wait)
    threading.Thread(target=give_up).start()
    train(tmp_path / "run", str(tmp_path / "mirror"), 2)

    status = read_note(Remote(str(tmp_path / "mirror")), RUN)["status"]
    assert waited == [] and status == ("completed" if silent == "put" else "running")
    assert f"iteration_00000002 is not in {tmp_path / 'mirror'}" in caplog.text
    goes_on.set()


def test_what_retention_deletes_here_is_still_uploaded(tmp_path: Path) -> None:
    options = {"url": str(tmp_path / "mirror"), "keep_last": 9, "max_mib_per_s": 0.02}
    train(tmp_path / "run", options, 8, keep_last=1)

    assert [one.path.name for one in CheckpointStore(tmp_path / "run").checkpoints()] == ["iteration_00000008"]
    there = [one.path.name for one in CheckpointStore(tmp_path / "mirror").checkpoints()]
    assert there[0] == "iteration_00000002" and there[-1] == "iteration_00000008"
    assert all(CheckpointStore(tmp_path / "mirror").verify(tmp_path / "mirror" / name) == [] for name in there)


def test_values_measured_after_a_save_are_in_the_mirror(tmp_path: Path) -> None:
    trainer = trainer_of()
    checkpoint = Checkpoint(tmp_path / "run", mirror=str(tmp_path / "mirror"), best="val/loss")
    checkpoint.attach(trainer, Events.ITERATION_COMPLETED(every=2))

    @trainer.on(Events.COMPLETED)
    def measure() -> None:
        trainer.state.metrics["val/loss"] = 0.25

    trainer.run(numbers_loader(), max_iters=4)

    newest = CheckpointStore(tmp_path / "mirror").checkpoints()[-1]
    assert newest.iteration == 4 and newest.manifest.metrics["val/loss"] == 0.25
    assert CheckpointStore(tmp_path / "mirror").verify(newest.path) == []


def test_another_run_that_starts_afresh_is_warned_and_leaves_what_the_mirror_holds(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    train(tmp_path / "first", str(tmp_path / "mirror"), 5)
    assert "of another run" not in caplog.text
    trainer = trainer_of()
    Checkpoint(tmp_path / "second", mirror=str(tmp_path / "mirror")).attach(
        trainer, Events.ITERATION_COMPLETED(every=2)
    )
    trainer.run(numbers_loader(), max_iters=8)

    there = CheckpointStore(tmp_path / "mirror").checkpoints()
    assert len({one.manifest.run_id for one in there}) == 2
    assert (
        caplog.text.count("mirror holds iteration_00000004 and 1 more of another run, too: a resume in an empty") == 1
    )
    shutil.rmtree(tmp_path / "second")
    _, found = train(tmp_path / "second", str(tmp_path / "mirror"), 8)
    assert found is not None and found.name == "iteration_00000008"  # of the run that has saved last


def test_a_mirror_with_checkpoints_is_refused_where_a_run_must_be_new(tmp_path: Path) -> None:
    train(tmp_path / "first", str(tmp_path / "mirror"), 4)

    with pytest.raises(CheckpointError, match="but must_be_new was given"):
        train(tmp_path / "second", str(tmp_path / "mirror"), 4, must_be_new=True)


@pytest.mark.slow
def test_a_roll_back_does_not_wait_for_uploads(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trainer = trainer_of(non_finite="rollback")
    checkpoint = Checkpoint(tmp_path / "run", mirror={"url": str(tmp_path / "mirror"), "max_mib_per_s": 0.005})
    checkpoint.attach(trainer, Events.ITERATION_COMPLETED(every=2))
    uploader = checkpoint.places[0]._uploader  # type: ignore[attr-defined]  # it has one
    missing: list[int] = []

    @trainer.on(Events.ITERATION_STARTED)
    def damage() -> None:
        if trainer.state.iteration == 5 and not missing:
            missing.append(len(uploader.missing))
            trainer.state.batch[0].fill_(torch.nan)

    @trainer.on(Events.ITERATION_COMPLETED(once=6))
    def let_it_go() -> None:
        missing.append(len(uploader.missing))
        assert "goes back to a checkpoint" in caplog.text and "Uploading" not in caplog.text
        uploader._throttle._bytes_per_s = None

    trainer.run(numbers_loader(), max_iters=8)

    assert min(missing) > 0 and len(missing) == 2
    assert CheckpointStore(tmp_path / "mirror").checkpoints()[-1].iteration == 8


def test_a_mirror_in_the_folder_itself_or_of_another_handler_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is in the folder of the checkpoints itself"):
        Checkpoint(tmp_path / "run", mirror=str(tmp_path / "run" / "mirror")).attach(trainer_of())
    trainer = trainer_of()
    Checkpoint(tmp_path / "run", mirror="memory://mirror", name="first").attach(trainer)
    with pytest.raises(ValueError, match="'first' has the mirror memory://mirror, too"):
        Checkpoint(tmp_path / "other", mirror="memory://mirror", name="second").attach(trainer)


def test_links_that_a_killed_process_has_left_are_removed(tmp_path: Path) -> None:
    left = tmp_path / "run" / ".mirror" / "held" / "0123abcd" / "iteration_00000100"
    left.mkdir(parents=True)
    (left / "shared.pt").write_bytes(b"x")

    train(tmp_path / "run", str(tmp_path / "mirror"), 3)

    assert not (tmp_path / "run" / ".mirror").exists()


def train_with_a_mirror_that_is_full_for_a_while(folder: Path) -> dict[str, Any]:
    mirror, said = folder / "mirror", list[str]()
    mirror.mkdir()
    mount_small_file_system(mirror, 256)
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("ignite_engine").addHandler(handler)
    found: dict[str, Any] = {}

    def note(name: str) -> None:
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
def test_a_full_disk_is_one_line_and_what_is_missing_is_named_and_what_is_there_stays_whole(tmp_path: Path) -> None:
    code, found = in_child(lambda: train_with_a_mirror_that_is_full_for_a_while(tmp_path))

    assert code == 0 and found["iteration"] == 12
    before, full, after = found["before"], found["full"], found["after"]
    assert before["there"] == full["there"] and list(full["there"])[-1] == "iteration_00000004"
    assert not any(problems for each in (before, after) for problems in each["there"].values())
    said = [line for line in full["said"] if not line.startswith("Uploading ")]
    assert len(said) == 2 and "was not uploaded" in said[0] and "No space left on device" in said[0]
    assert f"iteration_00000012 is not in {tmp_path / 'mirror'}" in said[1] and "checkpoints push" in said[1]
    assert list(after["there"])[-1] == "iteration_00000014" and after["said"] == []
