"""Two runs with one mirror: it is that of the run that was there first, as long as that one lives."""

from __future__ import annotations

import threading
import time
from asyncio import CancelledError
from pathlib import Path
from typing import Any

import pytest

from ignite_engine.checkpointing import CheckpointStore, Retention
from ignite_engine.checkpointing.in_use import uploads
from ignite_engine.checkpointing.manifest import MANIFEST_NAME
from ignite_engine.followed_log import FollowedLog
from ignite_engine.mirror import MirrorOptions, followed, upload
from ignite_engine.mirror.followed import MEASURED, RUN, RunNotes, read_note, write_note
from ignite_engine.mirror.remote import Remote
from ignite_engine.mirror.upload import Uploader
from tests.checkpointing.states import holds, save


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(followed, "BEAT_S", 0.1)


class Beside:
    """A run as its mirror sees it: a folder of checkpoints, and an uploader."""

    def __init__(self, folder: Path, mirror: Path) -> None:
        url = str(mirror)
        self.store, self.name = CheckpointStore(folder), folder.name
        self.uploader = Uploader(
            Remote(url), MirrorOptions(url=url), Retention(keep_last=9), RunNotes(Remote(url), folder)
        )
        folder.mkdir()
        self.uploader.begin()

    def save(self, iteration: int, size: int) -> None:
        self.uploader.offer(save(self.store, iteration, size=size, run_id=self.name))

    def end(self) -> list[str]:
        """What is missing in the mirror."""
        self.uploader.end("completed")
        assert self.uploader.wait(30)
        missing = self.uploader.missing
        self.uploader.release()
        return missing


def until(condition: Any) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_run_has_ended_for_its_mirror_when_its_last_checkpoint_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a follower on another machine leaves before that."""
    run, goes_on = Beside(tmp_path / "run", tmp_path / "mirror"), threading.Event()
    there, seen = Remote(str(tmp_path / "mirror")), []
    put, sign = Remote.put, followed.write_note

    def wait_and_put(*arguments: Any) -> None:
        goes_on.wait(20)
        put(*arguments)

    def look_and_sign(remote: Remote, name: str, note: dict[str, Any]) -> None:
        seen.append((note["status"], there.names()))
        sign(remote, name, note)

    monkeypatch.setattr(Remote, "put", wait_and_put)
    monkeypatch.setattr(followed, "write_note", look_and_sign)
    run.save(1, size=1)
    until(lambda: run.uploader.missing and run.uploader._sending)
    run.save(2, size=1)
    run.uploader.end("completed")
    goes_on.set()
    assert run.end() == []
    assert [names for status, names in seen if status == "completed"] == [["iteration_00000001", "iteration_00000002"]]


def test_a_run_has_ended_for_its_mirror_also_where_its_last_checkpoint_could_not_be_uploaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Beside(tmp_path / "run", tmp_path / "mirror")
    monkeypatch.setattr(Remote, "put", lambda *_: (_ for _ in ()).throw(OSError("quota")))
    run.save(1, size=1)
    assert run.end() == ["iteration_00000001"]
    assert read_note(Remote(str(tmp_path / "mirror")), RUN)["status"] == "completed"


def test_a_store_that_breaks_off_each_upload_is_given_up_though_a_newer_one_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, began = Beside(tmp_path / "run", tmp_path / "mirror"), threading.Event()

    def break_off(remote: Remote, source: Path, name: str, record: Any, moved: Any) -> None:
        moved(1)
        began.set()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Remote, "put", break_off)
    run.save(1, size=1)
    assert began.wait(20)
    run.save(2, size=1)
    assert run.end() == ["iteration_00000001", "iteration_00000002"]
    assert read_note(Remote(str(tmp_path / "mirror")), RUN)["status"] == "completed"


def test_a_run_has_ended_for_its_mirror_also_where_that_cannot_be_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Beside(tmp_path / "run", tmp_path / "mirror")
    run.save(1, size=1)
    until(lambda: not run.uploader.missing)

    def fail(*_: Any) -> Any:
        raise OSError("quota")

    for name in ("put", "checkpoints"):
        monkeypatch.setattr(Remote, name, fail)
    run.save(2, size=1)
    assert run.end() == ["iteration_00000002"]
    assert read_note(Remote(str(tmp_path / "mirror")), RUN)["status"] == "completed"


@pytest.mark.parametrize("fails", ["a value that is no number", "what a follower has measured", "the store, oddly"])
def test_a_run_has_ended_for_its_mirror_also_where_that_answers_badly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    """Its thread has ended without that; it is said once more when the run lets go of its mirror."""
    monkeypatch.setattr(followed, "_BEATS_OF_A_RUN", 1000)
    remote, run = Remote(str(tmp_path / "mirror")), Beside(tmp_path / "run", tmp_path / "mirror")
    run.save(1, size=1)
    until(lambda: not run.uploader.missing)
    if fails == "a value that is no number":
        log = FollowedLog(tmp_path / "log.jsonl")
        log.add(remote.checkpoints()[0][-1], {"val/loss": 3.0})
        remote.write(MEASURED, log.text().replace(b"3.0", b"1" + b"0" * 400))
    elif fails == "what a follower has measured":
        (tmp_path / "mirror" / MEASURED).mkdir(parents=True)
    else:
        monkeypatch.setattr(RunNotes, "look", lambda notes: (_ for _ in ()).throw(CancelledError()))
    run.end()
    assert read_note(remote, RUN)["status"] == "completed"


def test_a_run_that_begins_beside_a_push_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(followed, "_BEATS_OF_A_RUN", 1000)
    remote, run = Remote(str(tmp_path / "mirror")), Beside(tmp_path / "run", tmp_path / "mirror")
    run.end()
    assert read_note(remote, RUN)["status"] == "completed"
    with uploads(tmp_path / "run", alone=True, wait_s=20):
        run.uploader.begin()
        until(lambda: read_note(remote, RUN)["status"] == "running")
    run.end()


def test_a_run_that_goes_on_while_the_end_is_said_uploads_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, look = Beside(tmp_path / "run", tmp_path / "mirror"), RunNotes.look
    ends, goes_on = threading.Event(), threading.Event()

    def wait_and_look(notes: RunNotes) -> None:
        if notes.status == "completed" and not ends.is_set():
            ends.set()
            assert goes_on.wait(20)
        look(notes)

    monkeypatch.setattr(RunNotes, "look", wait_and_look)
    run.uploader.end("completed")
    assert ends.wait(20)
    run.uploader.release()  # with Ctrl-C
    run.uploader.begin()
    run.save(1, size=1)
    goes_on.set()
    until(lambda: not run.uploader.missing)
    assert run.end() == []


def test_a_write_that_fails_once_at_the_end_costs_no_value_that_was_measured_after_the_saves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, remote = Beside(tmp_path / "run", tmp_path / "mirror"), Remote(str(tmp_path / "mirror"))
    for iteration in (1, 2, 3):
        run.save(iteration, size=1)
        until(lambda: not run.uploader.missing)
    first, second, _ = run.store.checkpoints()
    for info in (first, second):
        run.store.add_metrics(info.path, {"val/loss": float(info.iteration)})
    log, write, failures = FollowedLog(tmp_path / "log.jsonl"), Remote.write, [OSError(5, "Input/output error")]
    log.add(remote.checkpoints()[0][-1], {"val/loss": 3.0})
    remote.write(MEASURED, log.text())

    def fails_once(self: Remote, name: str, content: bytes) -> None:
        if name.endswith(MANIFEST_NAME) and failures:
            raise failures.pop()
        write(self, name, content)

    monkeypatch.setattr(Remote, "write", fails_once)
    assert run.end() == [] and not failures
    there = {info.iteration: info.manifest.metrics for info in remote.checkpoints()[0]}
    assert there == {iteration: {"val/loss": float(iteration)} for iteration in (1, 2, 3)}


def test_a_store_that_is_silent_while_nothing_is_uploaded_is_seen_to_be_stalled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the run would wait for it at its end, for ever."""
    monkeypatch.setattr(upload, "STALLED_S", 0.2)
    monkeypatch.setattr(upload, "BEAT_S", 0.1)
    run = Beside(tmp_path / "run", tmp_path / "mirror")
    asked, goes_on = threading.Event(), threading.Event()

    def wait(*_: Any) -> dict[str, Any]:
        asked.set()
        goes_on.wait(20)
        return {}

    monkeypatch.setattr(followed, "read_note", wait)
    assert asked.wait(20)
    run.uploader.end("completed")
    until(lambda: run.uploader.stalled)
    goes_on.set()
    assert run.uploader.wait(20)
    run.uploader.release()


def test_what_is_saved_at_the_last_moment_is_uploaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Beside(tmp_path / "run", tmp_path / "mirror")

    def save_and_end() -> bool:
        monkeypatch.undo()
        run.save(1, size=1)
        run.uploader.end("completed")
        return True

    monkeypatch.setattr(run.uploader._ending, "is_set", save_and_end)  # it has just seen that there is nothing
    assert run.uploader.wait(20) and run.uploader.missing == []
    assert Remote(str(tmp_path / "mirror")).names() == ["iteration_00000001"]
    run.uploader.release()


@pytest.mark.slow
def test_the_second_uploads_nothing_and_says_so_until_the_first_has_ended(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    mirror = tmp_path / "mirror"
    first = Beside(tmp_path / "first", mirror)
    first.save(100, 300)
    until(lambda: not first.uploader.missing)
    second = Beside(tmp_path / "second", mirror)
    second.save(100, 400)
    until(lambda: "was not uploaded" in caplog.text)
    first.save(200, 300)
    until(lambda: not first.uploader.missing)

    assert second.end() == ["iteration_00000100"]
    assert first.end() == []
    there = CheckpointStore(mirror)
    assert [info.iteration for info in there.checkpoints()] == [100, 200]
    assert all(holds(there, info.path, info.iteration, 300) for info in there.checkpoints())
    said = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert len(said) == 1 and said[0].startswith(f"iteration_00000100 was not uploaded to {mirror}: ")
    assert ": it is the mirror of another run, process " in said[0] and "give each run its own; it is tried" in said[0]
    assert read_note(Remote(str(mirror)), RUN)["status"] == "completed", "of the first"

    third = Beside(tmp_path / "third", mirror)
    third.save(300, 300)
    assert third.end() == [] and len(there.checkpoints()) == 3


def test_a_run_that_gives_signs_during_a_long_upload_keeps_its_mirror(tmp_path: Path) -> None:
    mirror, may_end = tmp_path / "mirror", threading.Event()
    first = Beside(tmp_path / "first", mirror)
    put = first.uploader._remote.put

    def slowly(*arguments: Any) -> None:
        assert may_end.wait(20)
        put(*arguments)

    first.uploader._remote.put = slowly  # type: ignore[method-assign]
    first.save(100, 300)
    until(lambda: read_note(Remote(str(mirror)), RUN).get("count", 0) > 3)
    may_end.set()
    assert first.end() == []


def test_one_that_was_killed_on_another_machine_is_succeeded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(followed, "_ALIVE_S", 1.0)
    remote = Remote(str(tmp_path / "mirror"))
    write_note(remote, RUN, {"who": "process 7 on m", "where": "m:/x", "status": "running", "count": 3})
    began = time.monotonic()
    run = Beside(tmp_path / "run", tmp_path / "mirror")
    run.save(100, 300)

    assert run.end() == [] and time.monotonic() - began >= 1.0
    assert read_note(remote, RUN)["where"].endswith("/run") and read_note(remote, RUN)["status"] == "completed"
    assert not [record for record in caplog.records if record.levelname == "WARNING"], "it is dead"
