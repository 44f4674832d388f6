"""``checkpoints push`` beside the run whose folder it uploads from."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from ignite_engine.checkpointing import CheckpointStore, SaveOptions
from ignite_engine.checkpointing.in_use import uploads
from ignite_engine.cli import main, mirrors
from ignite_engine.handlers.checkpoint.mirroring import Mirroring
from ignite_engine.mirror import upload
from ignite_engine.mirror.held import hold
from ignite_engine.mirror.remote import Remote
from tests.checkpointing.states import save
from tests.mirror.test_upload import names, until, uploader_to


class Slow:
    """The first upload of ``rank_0.pt`` waits until it may go on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.began, self.goes_on, put = threading.Event(), threading.Event(), Remote.put

        def wait_and_put(remote: Remote, source: Path, name: str, *more: Any) -> None:
            if name.endswith("rank_0.pt") and not self.began.is_set():
                until(lambda: name.replace("rank_0.pt", "shared.pt") in files(remote.url))
                self.began.set()
                assert self.goes_on.wait(30)
            put(remote, source, name, *more)

        monkeypatch.setattr(Remote, "put", wait_and_put)


def files(url: str) -> list[str]:
    return [str(path.relative_to(url)) for path in Path(url).rglob("*.pt")]


@pytest.fixture
def mirror(tmp_path: Path) -> str:
    return str(tmp_path / "mirror")


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(tmp_path / "run" / "checkpoints")


def test_a_run_waits_for_a_push_and_deletes_nothing_of_it(
    tmp_path: Path,
    store: CheckpointStore,
    mirror: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    slow, codes = Slow(monkeypatch), list[int]()
    path = save(store, 100, run_id="the run")
    push = threading.Thread(target=lambda: codes.append(main(["checkpoints", "push", str(path), mirror])))
    push.start()
    assert slow.began.wait(20)
    uploader = uploader_to(mirror)
    uploader.offer(save(store, 200, run_id="the run"))
    until(lambda: "wait until a push" in caplog.text or not uploader.missing)
    assert names(mirror) == []
    uploader.end()
    assert not uploader.wait(1)

    slow.goes_on.set()
    push.join(20)
    assert uploader.wait(20) and codes == [0] and not uploader.missing
    assert main(["checkpoints", "verify", mirror]) == 0
    assert names(mirror) == ["iteration_00000100", "iteration_00000200"]
    assert sorted(path.name for path in store.directory.iterdir()) == names(mirror)
    assert caplog.text.count("wait until a push") == 1


def test_a_push_while_its_run_uploads_is_refused(
    store: CheckpointStore, mirror: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(mirrors, "_WAITS_S", 0.1)
    slow, uploader = Slow(monkeypatch), uploader_to(mirror)
    uploader.offer(save(store, 100, run_id="the run"))
    assert slow.began.wait(20)

    assert main(["checkpoints", "push", str(store.directory), mirror]) == 2
    assert capsys.readouterr().err == (
        f"error: Another process, its run or a push, uploads from {store.directory}: push again when it has ended.\n"
    )
    slow.goes_on.set()
    uploader.end()
    assert uploader.wait(20)
    assert main(["checkpoints", "push", str(store.directory), mirror]) == 0


@pytest.mark.parametrize("protocol", ["", "memory://"])
def test_without_a_file_that_is_deleted_there_meanwhile_it_is_no_checkpoint(
    store: CheckpointStore,
    tmp_path: Path,
    protocol: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """As by a run on another machine, which takes it for what a killed process has left."""
    mirror, put = f"{protocol}{tmp_path / 'mirror'}", Remote.put

    def put_and_delete(remote: Remote, source: Path, name: str, *more: Any) -> None:
        put(remote, source, name, *more)
        if name.endswith("rank_0.pt"):
            monkeypatch.undo()
            remote.delete_file(name)

    monkeypatch.setattr(Remote, "put", put_and_delete)
    path = save(store, 100, run_id="the run")
    assert main(["checkpoints", "push", str(path), mirror]) == 1
    said = "iteration_00000100/rank_0.pt was deleted there, or replaced, after its upload"
    assert capsys.readouterr().out == f"iteration_00000100  is not uploaded: {said}; push it again\n"
    assert names(mirror) == []

    monkeypatch.setattr(Remote, "put", put_and_delete)
    uploader = uploader_to(mirror, parallel=1)
    uploader.offer(path)
    uploader.end()
    assert uploader.wait(20) and names(mirror) == ["iteration_00000100"]
    assert main(["checkpoints", "verify", mirror]) == 0


def test_the_start_of_a_run_leaves_what_a_push_holds(store: CheckpointStore, mirror: str) -> None:
    held = hold(save(store, 100, run_id="the run"))
    assert held.links is not None

    def start() -> None:
        Mirroring(SaveOptions(mirror=mirror), store.directory)._uploader  # noqa: B018  # it is made

    with uploads(store.directory, alone=True) as is_alone:
        assert is_alone
        start()
        assert held.links.exists()
    start()
    assert not held.links.exists(), "its process has ended"


def test_the_end_of_a_run_waits_for_a_push_no_longer_than_for_a_silent_store(
    store: CheckpointStore, mirror: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upload, "STALLED_S", 0.2)
    monkeypatch.setattr(upload, "_LOOKS_FOR_A_PUSH_S", 0.05)
    path, uploader = save(store, 100, run_id="the run"), uploader_to(mirror)
    with uploads(store.directory, alone=True):
        uploader.offer(path)
        assert not uploader.wait(0.5) and not uploader.stalled, "it trains on"
        uploader.end()
        until(lambda: uploader.stalled)
    assert uploader.wait(20) and names(mirror) == ["iteration_00000100"]


def test_a_run_that_goes_on_while_its_end_waits_for_a_push_uploads_on(
    store: CheckpointStore, mirror: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(upload, "_LOOKS_FOR_A_PUSH_S", 0.05)
    uploader = uploader_to(mirror)
    uploader.offer(save(store, 100, run_id="the run"))
    until(lambda: not uploader.missing)
    with uploads(store.directory, alone=True, wait_s=20):
        uploader.end()
        until(lambda: "wait until a push" in caplog.text)
        uploader.offer(save(store, 200, run_id="the run"))
    until(lambda: not uploader.missing)
    assert names(mirror) == ["iteration_00000100", "iteration_00000200"]
    uploader.end()
    assert uploader.wait(20)


def test_what_is_given_up_while_a_push_is_waited_for_is_no_failure(
    store: CheckpointStore, mirror: str, caplog: pytest.LogCaptureFixture
) -> None:
    path, uploader = save(store, 100, run_id="the run"), uploader_to(mirror)
    with uploads(store.directory, alone=True):
        uploader.offer(path)
        until(lambda: "wait until a push" in caplog.text)
        uploader.end()
        uploader.release()
    assert uploader.wait(20) and names(mirror) == [] and "was not uploaded" not in caplog.text
