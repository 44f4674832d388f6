"""A manifest that is forged, with a right checksum, is refused in one line and leads nowhere."""

import json
from typing import Any

import pytest

from ignite_engine.checkpointing import CheckpointError, CheckpointStore, Retention, read_manifest
from ignite_engine.checkpointing.manifest import _checksum
from tests.checkpointing.states import save

Content = dict[str, Any]


def forge(checkpoint, change):
    """Change the manifest as somebody would who knows how its checksum is made."""
    path = checkpoint / "manifest.json"
    content = json.loads(path.read_bytes())
    del content["checksum"]
    change(content)
    path.write_text(json.dumps({**content, "checksum": _checksum(content)}))


def nested(depth):
    value = 0
    for _ in range(depth):
        value = [value]
    return value


RECORD = {"bytes": 3, "hash": "blake3:" + "0" * 64}


@pytest.mark.parametrize(
    "name", ["../secret.pt", "/etc/passwd", "..", ".", "", "a/b.pt", "shared.pt\n", "\nshared.pt", "a\\b", ".hidden"]
)
def test_a_file_name_never_leads_out_of_the_checkpoint(tmp_path, name):
    store = CheckpointStore(tmp_path / "run")
    path = save(store, 100)
    (tmp_path / "run" / "secret.pt").write_bytes(b"abc")
    forge(path, lambda content: content["files"].__setitem__(name, RECORD))
    with pytest.raises(CheckpointError, match="is not the name of a file beside it") as error:
        store.load(path)
    assert "\n" not in str(error.value)
    assert len(store.verify(path)) == 1 and store.latest().checkpoint is None
    store.prune(Retention(keep_last=1))
    store.sweep()
    assert (tmp_path / "run" / "secret.pt").read_bytes() == b"abc"


@pytest.mark.parametrize("name", ["../outside", "/tmp/outside", "a/b"])
def test_a_part_may_have_any_printable_name_and_is_no_path(tmp_path, name):
    store = CheckpointStore(tmp_path / "run")
    path = store.save({name: {"x": 1}}, {}, iteration=1, epoch=1)
    assert store.load(path).shared == {name: {"x": 1}}
    assert sorted(each.name for each in tmp_path.iterdir()) == ["run"]
    assert sorted(each.name for each in path.iterdir()) == ["manifest.json", "shared.pt"]


def test_the_parent_and_the_labels_are_words_and_no_paths(tmp_path):
    store = CheckpointStore(tmp_path / "run")
    path = save(store, 100)
    (tmp_path / "precious").mkdir()
    forge(path, lambda content: content.update(parent="../precious", labels=["../precious"], sequence=10**30))
    save(store, 200)
    store.prune(Retention(keep_last=1))
    assert (tmp_path / "precious").is_dir() and [each.iteration for each in store.checkpoints()] == [200]


def test_a_manifest_reads_back_as_it_was_written(tmp_path):
    path = save(
        CheckpointStore(tmp_path), 7, metrics={"a": float("nan"), "b": 1e308}, best={"metric": "a", "mode": "max"}
    )
    manifest = read_manifest(path)
    assert str(manifest.metrics["a"]) == "nan" and manifest.best == {"metric": "a", "mode": "max"}
    (path / "manifest.json").write_bytes(manifest.to_json())
    assert str(read_manifest(path)) == str(manifest)
