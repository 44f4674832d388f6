"""What is uploaded, in which order, what is deleted there, and what becomes of a store that is slow or silent."""

import logging
import threading
import time

import pytest

from ignite_engine.checkpointing import CheckpointStore, Retention
from ignite_engine.checkpointing.manifest import MANIFEST_NAME
from ignite_engine.ext.mirror import remote as remote_files
from ignite_engine.ext.mirror import upload
from ignite_engine.ext.mirror.fetch import bring
from ignite_engine.ext.mirror.remote import Remote
from ignite_engine.ext.mirror.upload import Uploader
from tests.checkpointing.states import holds, save
from tests.ext.mirror.servers import CREDENTIALS


def uploader_to(url, folder, keep_last=9):
    return Uploader(Remote(url), folder / "run", Retention(keep_last=keep_last))


def until(condition, seconds=30.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def names(url):
    return [checkpoint.path.name for checkpoint in Remote(url).checkpoints()[0]]


def ended(uploader):
    uploader.end()
    return uploader.wait(30)


@pytest.mark.row("M1")
def test_the_manifest_is_the_last_file_to_come_and_the_first_to_go(tmp_path, monkeypatch):
    seen = []
    store, uploader = CheckpointStore(tmp_path / "run"), uploader_to(str(tmp_path / "mirror"), tmp_path, keep_last=1)

    def note(owner, name):
        method = getattr(owner, name)

        def call(*arguments):
            path = next(value for value in arguments if isinstance(value, str))
            seen.append((name, "/".join(path.split("/")[-2:])))
            return method(*arguments)

        monkeypatch.setattr(owner, name, call)

    note(Remote, "put")
    note(Remote, "write")
    note(uploader._remote._store, "rm_file")
    for iteration in (100, 200):
        uploader.offer(save(store, iteration, run_id="the run"))
        until(lambda: not uploader.missing)
    assert ended(uploader)

    assert [(what, path.rpartition("/")[2]) for what, path in seen[:3]] == [
        ("put", "shared.pt"),
        ("put", "rank_0.pt"),
        ("write", MANIFEST_NAME),
    ]
    removed = [path for what, path in seen if what == "rm_file"]
    assert removed[0] == f"iteration_00000100/{MANIFEST_NAME}" and len(removed) == 3
    assert seen.index(("rm_file", removed[0])) > seen.index(("write", f"iteration_00000200/{MANIFEST_NAME}"))
    assert names(str(tmp_path / "mirror")) == ["iteration_00000200"]


def test_training_does_not_wait_for_a_slow_store_and_the_newest_comes_next(tmp_path, monkeypatch):
    put, began, may_go_on = Remote.put, threading.Event(), threading.Event()

    def slow(*arguments):
        began.set()
        assert may_go_on.wait(30)
        put(*arguments)

    monkeypatch.setattr(Remote, "put", slow)
    url = str(tmp_path / "mirror")
    store, uploader = CheckpointStore(tmp_path / "run"), uploader_to(url, tmp_path)
    waited = 0.0
    for iteration in (100, 200, 300):
        path = save(store, iteration, run_id="the run")
        start = time.perf_counter()
        uploader.offer(path)
        waited += time.perf_counter() - start
        assert began.wait(10)  # the first one is under way
    gone = store.prune(Retention(keep_last=1))

    assert waited < 0.5 and uploader.missing == "iteration_00000300"
    assert [path.name for path in gone] == ["iteration_00000200"], "what is being uploaded stays"
    may_go_on.set()
    assert ended(uploader) and names(url) == ["iteration_00000100", "iteration_00000300"]
    assert [path.name for path in store.prune(Retention(keep_last=1))] == ["iteration_00000100"]


def test_an_iteration_that_is_saved_again_replaces_what_is_there(tmp_path, s3):
    store, uploader = CheckpointStore(tmp_path / "run"), uploader_to(s3, tmp_path)
    uploader.offer(save(store, 100, run_id="the run", labels=["first"]))
    until(lambda: not uploader.missing)
    uploader.offer(store.save({"model": {"x": 1}}, {}, iteration=100, epoch=1, run_id="the run", labels=["second"]))
    assert ended(uploader)

    (there,) = Remote(s3).checkpoints()[0]
    assert there.manifest.labels == ["first", "second"]
    bring(Remote(s3), tmp_path / "here", Retention())
    newest = CheckpointStore(tmp_path / "here").latest()
    assert newest.checkpoint is not None and newest.skipped == []
    assert CheckpointStore(tmp_path / "here").load(newest.checkpoint.path).shared == {"model": {"x": 1}}


def test_what_a_killed_process_has_left_there_is_replaced_or_deleted(tmp_path):
    store, mirror = CheckpointStore(tmp_path / "run"), tmp_path / "mirror"
    for name in ("iteration_00000100", "iteration_00000050"):
        (mirror / name).mkdir(parents=True)
        (mirror / name / "shared.pt").write_bytes(b"half")
    uploader = uploader_to(str(mirror), tmp_path)
    uploader.offer(save(store, 100, run_id="the run"))
    assert ended(uploader)

    there = CheckpointStore(mirror)
    assert [path.name for path in mirror.iterdir()] == ["iteration_00000100"]
    assert holds(there, mirror / "iteration_00000100", 100)


def test_checkpoints_of_another_run_stay(tmp_path):
    store, mirror = CheckpointStore(tmp_path / "run"), tmp_path / "mirror"
    save(CheckpointStore(mirror), 150, run_id="another run")
    uploader = uploader_to(str(mirror), tmp_path, keep_last=1)
    for iteration in (100, 200):
        uploader.offer(save(store, iteration, run_id="the run"))
        until(lambda: not uploader.missing)
    assert ended(uploader)

    assert sorted(names(str(mirror))) == ["iteration_00000150", "iteration_00000200"]


def test_a_damaged_file_here_is_not_uploaded_as_a_checkpoint(tmp_path, caplog):
    store, uploader = CheckpointStore(tmp_path / "run"), uploader_to(str(tmp_path / "mirror"), tmp_path)
    path = save(store, 100, run_id="the run")
    content = bytearray((path / "shared.pt").read_bytes())
    content[-100] ^= 1
    (path / "shared.pt").write_bytes(content)
    uploader.offer(path)
    assert ended(uploader)

    assert names(str(tmp_path / "mirror")) == [] and "shared.pt is not what was saved" in caplog.text


@pytest.mark.row("M1")
def test_a_store_that_refuses_is_tried_again_after_twice_the_time_before(tmp_path, monkeypatch):
    paused = []
    failures, put = iter(range(11)), Remote.put

    def refuses(*arguments):
        if next(failures, None) is not None:
            raise OSError("busy")
        return put(*arguments)

    monkeypatch.setattr(Remote, "put", refuses)
    monkeypatch.setattr(Uploader, "_pause", lambda self, seconds: paused.append(seconds))
    uploader = uploader_to(str(tmp_path / "mirror"), tmp_path)
    uploader.offer(save(CheckpointStore(tmp_path / "run"), 100, run_id="the run"))
    until(lambda: not uploader.missing)
    assert ended(uploader)

    assert paused == [*(2.0**number for number in range(9)), 300.0, 300.0]
    assert names(str(tmp_path / "mirror")) == ["iteration_00000100"]


def test_at_the_end_a_store_that_refuses_is_given_up_after_a_few_tries_and_a_run_that_goes_on_begins_again(
    tmp_path, monkeypatch
):
    tries = []
    put = Remote.put

    def refuses(self, source, name, record):
        tries.append(name)
        raise OSError("busy")

    monkeypatch.setattr(Remote, "put", refuses)
    uploader = uploader_to(str(tmp_path / "mirror"), tmp_path)
    path = save(CheckpointStore(tmp_path / "run"), 100, run_id="the run")
    uploader.offer(path)
    assert ended(uploader)
    assert 3 <= len(tries) <= 4 and uploader.missing == "iteration_00000100" and uploader.why.endswith("busy")

    monkeypatch.setattr(Remote, "put", put)
    uploader.offer(path)
    assert ended(uploader) and uploader.missing is None
    assert names(str(tmp_path / "mirror")) == ["iteration_00000100"]


def test_a_silent_store_is_given_up_at_the_end(tmp_path, s3, proxy, monkeypatch):
    monkeypatch.setattr(remote_files, "_SILENT_S", 1.0)
    proxy.mode = "silent"
    uploader = uploader_to(s3, tmp_path)
    uploader.offer(save(CheckpointStore(tmp_path / "run"), 100, run_id="the run"))
    uploader.end()

    began = time.monotonic()
    until(lambda: uploader.wait(0.1))
    assert time.monotonic() - began < 10 and uploader.missing == "iteration_00000100"


def test_what_a_store_says_is_one_line_without_credentials(tmp_path, caplog, monkeypatch):
    def denied(self):
        raise PermissionError("Forbidden: https://the-key:the-secret@host/x?Signature=the-secret")

    monkeypatch.setattr(Remote, "names", denied)
    monkeypatch.setattr(upload, "_LAST_TRIES", 1)
    uploader = uploader_to(str(tmp_path / "mirror"), tmp_path)
    uploader.offer(save(CheckpointStore(tmp_path / "run"), 100, run_id="the run"))
    assert ended(uploader)

    assert "Forbidden: https://***@host/x***" in caplog.text and "the-secret" not in caplog.text
    assert CREDENTIALS["AWS_SECRET_ACCESS_KEY"] not in caplog.text


def test_values_measured_after_a_save_come_to_the_mirror(tmp_path, caplog, monkeypatch):
    caplog.set_level(logging.INFO)
    store, url = CheckpointStore(tmp_path / "run"), str(tmp_path / "mirror")
    uploader = uploader_to(url, tmp_path)
    first = save(store, 100, run_id="the run")
    uploader.offer(first)
    until(lambda: not uploader.missing)
    store.annotate(first, metrics={"val/loss": 0.5})
    uploader.offer(save(store, 200, run_id="the run"))
    until(lambda: not uploader.missing)
    store.annotate(first, metrics={"val/acc": 0.75})
    assert ended(uploader)

    (there, _) = Remote(url).checkpoints()[0]
    assert there.manifest.metrics == {"val/loss": 0.5, "val/acc": 0.75}
    assert caplog.text.count("Uploaded iteration_00000100") == 1
