"""What is uploaded, in which order, what is deleted there, and what becomes of a store that is slow or silent."""

from __future__ import annotations

import contextlib
import logging
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ignite_engine.checkpointing import CheckpointStore, Retention
from ignite_engine.checkpointing.manifest import MANIFEST_NAME, read_manifest
from ignite_engine.mirror import MirrorOptions, waiting
from ignite_engine.mirror.bring import bring
from ignite_engine.mirror.remote import Remote
from ignite_engine.mirror.upload import Uploader
from tests.checkpointing.states import holds, save
from tests.mirror.servers import CREDENTIALS, Proxy


def uploader_to(url: str, keep_last: int = 9, **options: Any) -> Uploader:
    return Uploader(Remote(url), MirrorOptions(url=url, **options), Retention(keep_last=keep_last))


def until(condition: Any, seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def names(url: str) -> list[str]:
    return [checkpoint.path.name for checkpoint in Remote(url).checkpoints()[0]]


def test_the_manifest_is_the_last_file_to_come_and_the_first_to_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[str, str]] = []

    def noted(name: str) -> Any:
        method = getattr(Remote, name)

        def call(self: Remote, *arguments: Any) -> Any:
            path = next(value for value in arguments if isinstance(value, str))
            seen.append((name, path))
            return method(self, *arguments)

        return call

    for name in ("put", "write", "_remove"):
        monkeypatch.setattr(Remote, name, noted(name))
    store, uploader = CheckpointStore(tmp_path / "run"), uploader_to(str(tmp_path / "mirror"), keep_last=1, parallel=1)
    for iteration in (100, 200):
        uploader.offer(save(store, iteration, run_id="the run"))
        until(lambda: not uploader.missing)
    uploader.end()
    assert uploader.wait(10)

    assert [(what, path.rpartition("/")[2]) for what, path in seen[:3]] == [
        ("put", "shared.pt"),
        ("put", "rank_0.pt"),
        ("write", MANIFEST_NAME),
    ]
    removed = [path for what, path in seen if what == "_remove"]
    assert removed[0] == f"iteration_00000100/{MANIFEST_NAME}" and len(removed) == 3
    assert seen.index(("_remove", removed[0])) > seen.index(("write", f"iteration_00000200/{MANIFEST_NAME}"))
    assert names(str(tmp_path / "mirror")) == ["iteration_00000200"]


@pytest.mark.slow
def test_training_does_not_wait_for_a_slow_store_and_the_newest_comes_next(
    tmp_path: Path, s3: str, proxy: Proxy, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    store, uploader = CheckpointStore(tmp_path / "run"), uploader_to(s3)
    proxy.bytes_per_s = 10_000
    waited = 0.0
    for iteration in (100, 200, 300):
        path = save(store, iteration, size=100, run_id="the run")
        began = time.perf_counter()
        uploader.offer(path)
        waited += time.perf_counter() - began
        until(lambda: uploader.sent_bytes > 0)  # the first one is under way
    store.prune(Retention(keep_last=1))

    assert waited < 0.5 and "iteration_00000100" in uploader.missing
    uploader.end()
    assert uploader.wait(60)
    assert names(s3) == ["iteration_00000100", "iteration_00000300"]
    assert "iteration_00000200 is not uploaded" in caplog.text


def test_an_iteration_that_is_saved_again_replaces_what_is_there(tmp_path: Path, s3: str) -> None:
    store, uploader = CheckpointStore(tmp_path / "run"), uploader_to(s3)
    uploader.offer(save(store, 100, run_id="the run", labels=["first"]))
    until(lambda: not uploader.missing)
    uploader.offer(store.save({"model": {"x": 1}}, {}, iteration=100, epoch=1, run_id="the run", labels=["second"]))
    uploader.end()
    assert uploader.wait(20)

    (there,) = Remote(s3).checkpoints()[0]
    assert there.manifest.labels == ["first", "second"]
    bring(Remote(s3), tmp_path / "here")
    newest = CheckpointStore(tmp_path / "here").latest()
    assert newest.checkpoint is not None and newest.skipped == []
    assert CheckpointStore(tmp_path / "here").load(newest.checkpoint.path).shared == {"model": {"x": 1}}


def test_what_a_killed_process_has_left_there_is_replaced_or_deleted(tmp_path: Path) -> None:
    store, mirror = CheckpointStore(tmp_path / "run"), tmp_path / "mirror"
    for name in ("iteration_00000100", "iteration_00000050"):
        (mirror / name).mkdir(parents=True)
        (mirror / name / "shared.pt").write_bytes(b"half")
    uploader = uploader_to(str(mirror))
    uploader.offer(save(store, 100, run_id="the run"))
    uploader.end()
    assert uploader.wait(20)

    there = CheckpointStore(mirror)
    assert [path.name for path in mirror.iterdir()] == ["iteration_00000100"]
    assert holds(there, mirror / "iteration_00000100", 100)


def test_what_another_process_puts_there_meanwhile_stays(tmp_path: Path) -> None:
    store, mirror = CheckpointStore(tmp_path / "run"), tmp_path / "mirror"
    uploader = uploader_to(str(mirror), keep_last=1)
    uploader.offer(save(store, 100, run_id="the run"))
    until(lambda: not uploader.missing)
    save(CheckpointStore(mirror), 150, run_id="another run")
    uploader.offer(save(store, 200, run_id="the run"))
    uploader.end()
    assert uploader.wait(20)

    assert sorted(names(str(mirror))) == ["iteration_00000150", "iteration_00000200"]


@pytest.mark.slow
def test_what_is_deleted_before_it_was_uploaded_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_links(*arguments: Any, **options: Any) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr("os.link", no_links)
    caplog.set_level(logging.INFO)
    store, uploader = (
        CheckpointStore(tmp_path / "run"),
        uploader_to(str(tmp_path / "mirror"), max_mib_per_s=0.05, parallel=1),
    )
    path = save(store, 100, run_id="the run")
    uploader.offer(path)
    uploader.offer(save(store, 200, run_id="the run"))
    shutil.rmtree(path)
    uploader.end()
    assert uploader.wait(30)

    assert "iteration_00000100 is not uploaded" in caplog.text
    assert names(str(tmp_path / "mirror")) == ["iteration_00000200"]


def test_a_damaged_file_here_is_not_uploaded_as_a_checkpoint(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    store, uploader = CheckpointStore(tmp_path / "run"), uploader_to(str(tmp_path / "mirror"))
    path = save(store, 100, run_id="the run")
    content = bytearray((path / "shared.pt").read_bytes())
    content[-100] ^= 1
    (path / "shared.pt").write_bytes(content)
    uploader.offer(path)
    uploader.end()
    assert uploader.wait(20)

    assert names(str(tmp_path / "mirror")) == [] and "shared.pt is not what was saved" in caplog.text


def test_a_store_that_refuses_is_tried_again_after_twice_the_time_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paused: list[float] = []
    failures, put = iter(range(11)), Remote.put

    class Ending(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            paused.append(timeout or 0.0)
            return False

    def refuses(self: Remote, *arguments: Any) -> Any:
        if next(failures, None) is not None:
            raise OSError("busy")
        return put(self, *arguments)

    monkeypatch.setattr(Remote, "put", refuses)
    uploader = uploader_to(str(tmp_path / "mirror"), parallel=1)
    uploader._ending = Ending()
    uploader.offer(save(CheckpointStore(tmp_path / "run"), 100, run_id="the run"))
    until(lambda: not uploader.missing)
    uploader.end()
    assert uploader.wait(10)

    assert paused == [*(2.0**number for number in range(9)), 300.0, 300.0]
    assert names(str(tmp_path / "mirror")) == ["iteration_00000100"]


def test_a_file_that_was_uploaded_before_a_failure_is_not_sent_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[str] = []
    put = Remote.put

    def fails_once(self: Remote, source: Any, path: str, *arguments: Any) -> Any:
        sent.append(path.rpartition("/")[2])
        if sent == ["shared.pt", "rank_0.pt"]:
            raise OSError("busy")
        return put(self, source, path, *arguments)

    monkeypatch.setattr(Remote, "put", fails_once)
    uploader = uploader_to(str(tmp_path / "mirror"), parallel=1)
    uploader.offer(save(CheckpointStore(tmp_path / "run"), 100, run_id="the run"))
    uploader.end()
    assert uploader.wait(10)

    assert sent == ["shared.pt", "rank_0.pt", "rank_0.pt"]
    assert names(str(tmp_path / "mirror")) == ["iteration_00000100"]


def test_what_a_store_tells_of_a_file_is_no_md5_where_it_is_not_known_to_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save(CheckpointStore(tmp_path / "run"), 100, run_id="the run")
    remote = Remote("memory://tells-something-else")
    info, read = remote._store.info, list[str]()
    monkeypatch.setattr(remote._store, "info", lambda *arguments: info(*arguments) | {"ETag": "0" * 32})
    monkeypatch.setattr(remote, "problem", lambda name, *_: read.append(name))

    remote.put(path / "shared.pt", "shared.pt", read_manifest(path).files["shared.pt"], lambda _: None)

    assert read == [] and remote.read("shared.pt") == (path / "shared.pt").read_bytes()


def test_a_silent_store_is_given_up_at_the_end_and_named_as_stalled(
    tmp_path: Path, s3: str, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ignite_engine.mirror.upload.STALLED_S", 1.0)
    proxy.mode = "silent"
    uploader = uploader_to(s3)
    uploader.offer(save(CheckpointStore(tmp_path / "run"), 100, run_id="the run"))
    uploader.end()

    until(lambda: uploader.stalled)
    assert uploader.missing == ["iteration_00000100"]


def test_a_silent_store_is_unreachable_after_a_while(tmp_path: Path, s3: str, proxy: Proxy) -> None:
    proxy.mode = "silent"

    with pytest.raises(waiting.Unreachable, match="no byte has come for 1 s"):
        waiting.patiently(lambda _: Remote(s3).names(), stalled_s=1.0)


def test_an_answer_that_takes_longer_than_a_look_for_it_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    ended, looks, may_answer = waiting.Patience.ended, list[bool](), threading.Event()

    def look(self: waiting.Patience[str]) -> bool:
        looks.append(ended(self, 0.01))
        if looks == [False]:
            may_answer.set()
        return looks[-1]

    def answer(_: waiting.Throttle) -> str:
        may_answer.wait()
        return "it"

    monkeypatch.setattr(waiting.Patience, "ended", look)
    assert waiting.patiently(answer) == "it" and looks[0] is False


def test_wrong_credentials_are_one_line_without_them(
    tmp_path: Path, s3: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def denied(self: Remote) -> list[str]:
        raise PermissionError("Forbidden: https://the-key:the-secret@host/x?Signature=the-secret")

    monkeypatch.setattr(Remote, "names", denied)
    monkeypatch.setattr("ignite_engine.mirror.upload._LAST_TRIES", 1)
    uploader = uploader_to(s3)
    uploader.offer(save(CheckpointStore(tmp_path / "run"), 100, run_id="the run"))
    uploader.end()
    assert uploader.wait(30)

    assert "PermissionError: Forbidden: https://***@host/x***" in caplog.text and "the-secret" not in caplog.text
    assert CREDENTIALS["AWS_SECRET_ACCESS_KEY"] not in caplog.text


def test_uploads_take_no_more_than_the_bandwidth_that_is_set() -> None:
    throttle = waiting.Throttle(bytes_per_s=1e6)
    began = time.monotonic()
    threads = [threading.Thread(target=lambda: [throttle(50_000) for _ in range(3)]) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert throttle.moved == 300_000 and time.monotonic() - began >= 0.3


@pytest.mark.slow
@pytest.mark.parametrize("damage", [lambda piece: piece[:-1], lambda piece: piece[:-1] + bytes([piece[-1] ^ 1])])
def test_a_store_that_keeps_something_else_than_was_sent_is_found_and_gets_it_again(
    tmp_path: Path, s3: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, damage: Any
) -> None:
    writer, damaged = Remote._writer, []

    @contextlib.contextmanager
    def damaging(self: Remote, name: str, size: int) -> Iterator[Any]:
        with writer(self, name, size) as write:
            first = not damaged and name.endswith("shared.pt")
            damaged.extend([name] if first else [])
            yield (lambda piece: write(damage(piece))) if first else write

    monkeypatch.setattr(Remote, "_writer", damaging)
    uploader = uploader_to(s3)
    uploader.offer(save(CheckpointStore(tmp_path / "run"), 100, run_id="the run"))
    uploader.end()
    assert uploader.wait(30)

    assert len(damaged) == 1 and caplog.text.count("was not uploaded") == 1
    bring(Remote(s3), tmp_path / "here")
    assert holds(CheckpointStore(tmp_path / "here"), tmp_path / "here" / "iteration_00000100", 100)
