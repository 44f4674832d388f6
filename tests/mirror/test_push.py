"""``checkpoints push`` beside the run whose folder it uploads from."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ignite_engine.checkpointing import CheckpointStore, Retention, SaveOptions
from ignite_engine.checkpointing.in_use import uploads
from ignite_engine.checkpointing.manifest import MANIFEST_NAME
from ignite_engine.checkpointing.verification import Verification
from ignite_engine.cli import main, mirrors
from ignite_engine.handlers.checkpoint.mirroring import Mirroring
from ignite_engine.mirror import upload
from ignite_engine.mirror.held import hold
from ignite_engine.mirror.remote import Remote
from ignite_engine.mirror.upload import Contents
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


def test_the_start_of_a_run_leaves_what_another_process_uploads(store: CheckpointStore, mirror: str) -> None:
    """A push, or a run whose mirror fails for a while: then it holds no lock of the folder."""
    held = hold(save(store, 100, run_id="the run"))
    assert held.links is not None

    def start() -> None:
        Mirroring(SaveOptions(mirror=mirror), store.directory)._uploader  # noqa: B018  # it is made

    start()
    assert (held.links / "iteration_00000100" / MANIFEST_NAME).exists()
    held.in_use.close()  # its process is killed
    start()
    assert not held.links.exists() and [path.name for path in store.directory.iterdir()] == ["iteration_00000100"]


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


def test_a_push_before_the_end_of_a_run_does_not_shorten_its_wait(
    store: CheckpointStore, mirror: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upload, "STALLED_S", 1.0)
    monkeypatch.setattr(upload, "_LOOKS_FOR_A_PUSH_S", 0.05)
    path, uploader = save(store, 100, run_id="the run"), uploader_to(mirror)
    with uploads(store.directory, alone=True):
        uploader.offer(path)
        assert not uploader.wait(1.5)
        uploader.end()
        assert not uploader.wait(0.5) and not uploader.stalled
        until(lambda: uploader.stalled)
    assert uploader.wait(20) and names(mirror) == ["iteration_00000100"]


def test_a_push_begins_beside_an_upload_that_was_given_up(
    store: CheckpointStore,
    tmp_path: Path,
    mirror: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(mirrors, "_WAITS_S", 0.1)
    slow, uploader, elsewhere = Slow(monkeypatch), uploader_to(mirror), tmp_path / "elsewhere"
    uploader.offer(save(store, 100, run_id="the run"))
    assert slow.began.wait(20)
    uploader.end()
    assert main(["checkpoints", "push", str(store.directory), str(elsewhere)]) == 2
    uploader.release()
    assert main(["checkpoints", "push", str(store.directory), str(elsewhere)]) == 0, capsys.readouterr().err
    slow.goes_on.set()
    assert uploader.wait(20)


@pytest.mark.parametrize("protocol", ["", "memory://"])
def test_a_push_leaves_what_a_follower_has_added_there(store: CheckpointStore, tmp_path: Path, protocol: str) -> None:
    mirror = f"{protocol}{tmp_path / 'mirror'}"
    path = save(store, 100, run_id="the run", metrics={"loss": 1.0})
    assert main(["checkpoints", "push", str(path), mirror]) == 0
    contents = Contents(Remote(mirror), None)
    added = replace(contents.complete[path.name], metrics={"loss": 1.0, "val/loss": 0.25})
    contents.replace_manifest(path.name, added)
    store.add_metrics(path, {"val/acc": 0.5})

    def there() -> dict[str, float]:
        return Remote(mirror).checkpoints()[0][0].manifest.metrics

    assert main(["checkpoints", "push", str(path), mirror]) == 0
    assert there() == {"loss": 1.0, "val/loss": 0.25, "val/acc": 0.5}
    uploader = uploader_to(mirror)
    uploader.offer(path)
    until(lambda: not uploader.missing)
    store.add_metrics(path, {"val/f1": 0.75})
    uploader.end()
    assert uploader.wait(20) and there() == {"loss": 1.0, "val/loss": 0.25, "val/acc": 0.5, "val/f1": 0.75}


@pytest.mark.parametrize("by", ["push", "run"])
@pytest.mark.parametrize("protocol", ["", "memory://"])
def test_a_checkpoint_that_lacks_a_file_there_is_uploaded_again(
    store: CheckpointStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, protocol: str, by: str
) -> None:
    mirror = f"{protocol}{tmp_path / by}"
    path = save(store, 100, run_id="the run")
    assert main(["checkpoints", "push", str(path), mirror]) == 0
    Remote(mirror).delete_file(f"{path.name}/rank_0.pt")
    assert main(["checkpoints", "verify", mirror]) == 1
    monkeypatch.setattr(Remote, "delete", None)  # what is there stays, should this process be killed
    if by == "push":
        assert main(["checkpoints", "push", str(path), mirror]) == 0
    else:
        uploader = uploader_to(mirror)
        uploader.offer(path)
        uploader.end()
        assert uploader.wait(20)
    assert main(["checkpoints", "verify", mirror]) == 0


def test_a_push_leaves_out_what_its_run_deletes_meanwhile(
    store: CheckpointStore, mirror: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for iteration in (100, 200, 300):
        save(store, iteration, run_id="the run")

    def prune_and_list(*arguments: Any) -> Contents:
        store.prune(Retention(keep_last=1))
        return Contents(*arguments)

    monkeypatch.setattr(mirrors, "Contents", prune_and_list)
    assert main(["checkpoints", "push", "--all", str(store.directory), mirror]) == 0
    assert names(mirror) == ["iteration_00000300"]
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == [f"iteration_00000{n}  is not uploaded: it was deleted meanwhile" for n in (100, 200)]

    problems = Verification.problems

    def prune_and_verify(*arguments: Any) -> list[str]:
        store.prune(Retention(keep_last=1))
        return problems(*arguments)

    save(store, 400, run_id="the run")
    monkeypatch.setattr(Verification, "problems", prune_and_verify)
    assert main(["checkpoints", "push", "--all", str(store.directory), mirror]) == 0, "what is verified stays"
    assert names(mirror) == ["iteration_00000300", "iteration_00000400"]


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
