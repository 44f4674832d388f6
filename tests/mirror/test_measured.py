"""Values that are measured beside a run, in its own folder, come to the mirror."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from ignite_engine.checkpointing import CheckpointStore, Retention
from ignite_engine.followed_log import FollowedLog
from ignite_engine.mirror import upload
from ignite_engine.mirror.followed import RUN
from ignite_engine.mirror.remote import Remote
from tests.checkpointing.states import save
from tests.mirror.test_two_runs import Beside, until


@pytest.fixture
def run(tmp_path: Path) -> Beside:
    return Beside(tmp_path / "run", tmp_path / "mirror")


def values(mirror: Path) -> dict[int, dict[str, float]]:
    return {info.iteration: dict(info.manifest.metrics) for info in Remote(str(mirror)).checkpoints()[0]}


def measure(store: CheckpointStore) -> None:
    """As a follower does."""
    newest = store.checkpoints()[-1]
    FollowedLog.beside(store.directory).add(newest, {"val/loss": float(newest.iteration)})
    store.add_metrics(newest.path, {"val/loss": float(newest.iteration)})


def test_values_are_there_soon_while_nothing_is_uploaded(
    run: Beside, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upload, "BEAT_S", 0.1)
    run.save(1, size=1)
    until(lambda: not run.uploader.missing)
    run.store.add_metrics(run.store.checkpoints()[0].path, {"val/acc": 0.5})
    until(lambda: values(tmp_path / "mirror") == {1: {"val/acc": 0.5}})

    written: list[str] = []
    monkeypatch.setattr(Remote, "write", lambda _, name, content: written.append(name))
    look, looks = run.uploader._write_manifests, list[int]()
    monkeypatch.setattr(run.uploader, "_write_manifests", lambda: (look(), looks.append(1)))
    until(lambda: len(looks) > 3)
    assert {*written} <= {RUN}, "nothing but the count of the run has changed"
    monkeypatch.undo()
    assert run.end() == []


@pytest.mark.parametrize("when", ["before the upload", "after it"])
def test_values_of_what_retention_has_deleted_since_are_there(
    run: Beside, tmp_path: Path, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_upload, put = [when == "after it"], Remote.put

    def wait_and_put(*arguments: object) -> None:
        until(lambda: may_upload[0])
        put(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(Remote, "put", wait_and_put)
    uploaded: Callable[[], bool] = lambda: not run.uploader.missing  # noqa: E731
    run.save(1, size=1)
    if may_upload[0]:
        until(uploaded)
    else:
        until(lambda: run.uploader._current is not None)
    measure(run.store)
    path = save(run.store, 2, size=1, run_id="run")
    run.store.prune(Retention(keep_last=1))
    assert [info.path for info in run.store.checkpoints()] == [path]
    may_upload[0] = True
    until(uploaded)
    run.uploader.offer(path)
    assert run.end() == []
    assert values(tmp_path / "mirror") == {1: {"val/loss": 1.0}, 2: {}}
