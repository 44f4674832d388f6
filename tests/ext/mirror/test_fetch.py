"""Which checkpoint a resume brings from a mirror, and what it does with one that is damaged."""

import os
import shutil
import time
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from ignite_engine.checkpointing import CheckpointError, CheckpointStore, Retention
from ignite_engine.checkpointing.manifest import MANIFEST_NAME, read_manifest
from ignite_engine.ext.mirror.fetch import bring
from ignite_engine.ext.mirror.remote import Remote
from ignite_engine.ext.mirror.upload import upload
from tests.checkpointing.states import holds, save


@pytest.fixture
def there(tmp_path):
    """A mirror with the checkpoints 100 and 200 of one run."""
    store = CheckpointStore(tmp_path / "mirror")
    for iteration in (100, 200):
        save(store, iteration, run_id="the run")
    return store


def brought(tmp_path):
    bring(Remote(str(tmp_path / "mirror")), tmp_path / "here", Retention())
    return CheckpointStore(tmp_path / "here")


def flip(file):
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def cut(file):
    file.write_bytes(file.read_bytes()[:-1])


def forge(file):
    """Another file's content, with a manifest that knows nothing of it."""
    shutil.copy(file.parent.parent / "iteration_00000100" / file.name, file)


@pytest.mark.parametrize("damage", [flip, cut, forge, Path.unlink])
@pytest.mark.parametrize("name", ["shared.pt", "rank_0.pt"])
def test_a_damaged_one_is_skipped_in_one_line_and_the_one_before_is_taken(tmp_path, there, damage, name, caplog):
    damage(there.directory / "iteration_00000200" / name)

    here = brought(tmp_path)

    newest = here.latest().checkpoint
    assert newest is not None and newest.iteration == 100 and holds(here, newest.path, 100)
    skipped = [record.message for record in caplog.records if "is skipped" in record.message]
    assert len(skipped) == 1 and "iteration_00000200" in skipped[0] and name in skipped[0]


@pytest.mark.parametrize("text", [b"{", b"", b'{"format_version": 6}'])
def test_a_damaged_manifest_is_skipped_in_one_line(tmp_path, there, text, caplog):
    (there.directory / "iteration_00000200" / MANIFEST_NAME).write_bytes(text)

    newest = brought(tmp_path).latest().checkpoint

    assert newest is not None and newest.iteration == 100
    assert sum("iteration_00000200" in record.message for record in caplog.records) == 1


def test_one_without_a_manifest_does_not_exist(tmp_path, there, caplog):
    (there.directory / "iteration_00000200" / MANIFEST_NAME).unlink()

    newest = brought(tmp_path).latest().checkpoint

    assert newest is not None and newest.iteration == 100 and "iteration_00000200" not in caplog.text


def test_an_empty_folder_is_refused_where_none_is_valid(tmp_path, there):
    for checkpoint in there.checkpoints():
        flip(checkpoint.path / "shared.pt")

    with pytest.raises(CheckpointError, match=r"None of the 2 checkpoints in .*mirror is valid \(iteration_00000200"):
        brought(tmp_path)


def test_names_in_a_forged_manifest_lead_nowhere(tmp_path, there):
    path = there.directory / "iteration_00000200" / MANIFEST_NAME
    path.write_text(path.read_text().replace("shared.pt", "../../x.pt"))

    newest = brought(tmp_path).latest().checkpoint

    assert newest is not None and newest.iteration == 100 and not (tmp_path / "x.pt").exists()


def test_a_newer_one_is_fetched_beside_those_that_are_there(tmp_path, there):
    shutil.copytree(there.directory / "iteration_00000100", tmp_path / "here" / "iteration_00000100")

    here = brought(tmp_path)

    assert [one.iteration for one in here.checkpoints()] == [100, 200]
    assert holds(here, tmp_path / "here" / "iteration_00000200", 200)


@pytest.mark.parametrize("mode", ["min", "max"])
def test_the_best_one_is_fetched_with_the_newest(tmp_path, mode):
    store = CheckpointStore(tmp_path / "mirror")
    for iteration, loss in ((100, 0.5), (200, 0.1), (300, 0.9), (400, 0.3)):
        save(store, iteration, run_id="the run", metrics={"loss": loss})
    save(store, 150, run_id="another run", metrics={"loss": 0.0 if mode == "min" else 2.0})
    save(store, 500, run_id="the run", metrics={"loss": 0.2})

    bring(Remote(str(store.directory)), tmp_path / "here", retention=Retention(best="loss", mode=mode))

    here = CheckpointStore(tmp_path / "here").checkpoints()
    assert [one.iteration for one in here] == [200 if mode == "min" else 300, 500]


def test_a_best_one_that_is_here_is_not_fetched_again(tmp_path, caplog):
    store = CheckpointStore(tmp_path / "mirror")
    save(store, 100, run_id="the run", metrics={"loss": 0.1})
    shutil.copytree(store.directory, tmp_path / "here")
    save(store, 200, run_id="the run", metrics={"loss": 0.9})

    bring(Remote(str(store.directory)), tmp_path / "here", retention=Retention(best="loss", mode="min"))

    assert [line.partition(" from ")[0] for line in caplog.messages] == ["Fetched iteration_00000200"]


def test_a_newer_one_of_another_run_is_not_taken(tmp_path, there):
    save(CheckpointStore(tmp_path / "here"), 10, run_id="another run")

    assert [one.iteration for one in brought(tmp_path).checkpoints()] == [10]


def test_one_that_is_damaged_here_is_fetched_again(tmp_path, there):
    shutil.copytree(there.directory, tmp_path / "here")
    flip(tmp_path / "here" / "iteration_00000200" / "rank_0.pt")

    here = brought(tmp_path)

    newest = here.latest().checkpoint
    assert newest is not None and newest.iteration == 200 and holds(here, newest.path, 200)
    assert sorted(path.name for path in here.directory.iterdir()) == ["iteration_00000100", "iteration_00000200"]


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["error", "cut", "gone"])
def test_a_store_that_fails_in_the_middle_is_a_refusal_and_then_goes_on(tmp_path, there, s3, proxy, mode, monkeypatch):
    remote = Remote(s3)
    for checkpoint in there.checkpoints():
        upload(remote, checkpoint.path)
    get = Remote.get

    def get_and_fail(self, name, *arguments):
        if name.endswith("shared.pt"):
            proxy.mode = mode
        get(self, name, *arguments)

    monkeypatch.setattr(Remote, "get", get_and_fail)
    with pytest.raises(CheckpointError, match="so the run would start over") as raised:
        bring(remote, tmp_path / "here", Retention())
    assert "\n" not in str(raised.value)

    monkeypatch.setattr(Remote, "get", get)
    proxy.mode = "open"
    bring(remote, tmp_path / "here", Retention())
    newest = CheckpointStore(tmp_path / "here").latest().checkpoint
    assert newest is not None and newest.iteration == 200


def test_no_clock_says_which_one_of_a_run_is_the_newest(tmp_path, there):
    first, second = (info.path for info in there.checkpoints())
    for path, years in ((first, 10), (second, -10)):  # saved on machines whose clocks are wrong, to a store of a third
        manifest = read_manifest(path)
        saved = (datetime.now(UTC) + timedelta(days=365 * years)).isoformat(timespec="milliseconds")
        (path / MANIFEST_NAME).write_bytes(replace(manifest, created_at=saved).to_json())
        for file in (*path.iterdir(), path):
            os.utime(file, (time.time() + 3e7 * years,) * 2)

    newest = brought(tmp_path).latest().checkpoint
    assert newest is not None and newest.iteration == 200
    shutil.rmtree(newest.path)
    shutil.copytree(first, tmp_path / "here" / first.name)
    newest = brought(tmp_path).latest().checkpoint
    assert newest is not None and newest.iteration == 200
