"""A manifest that is forged, with a right checksum, is refused in one line and leads nowhere."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ignite_engine.checkpointing import CheckpointError, CheckpointStore, Retention, read_manifest
from ignite_engine.checkpointing.manifest import _checksum
from tests.checkpointing.states import save

Content = dict[str, Any]


def forge(checkpoint: Path, change: Callable[[Content], object]) -> None:
    """Change the manifest as somebody would who knows how its checksum is made."""
    path = checkpoint / "manifest.json"
    content = json.loads(path.read_bytes())
    del content["checksum"]
    change(content)
    path.write_text(json.dumps({**content, "checksum": _checksum(content)}))


def nested(depth: int) -> Any:
    value: Any = 0
    for _ in range(depth):
        value = [value]
    return value


RECORD = {"bytes": 3, "hash": "blake3:" + "0" * 64}
WRONG_TYPES: dict[str, list[Any]] = {
    "iteration": ["7", None, 1.5, True, -1, [7]],
    "epoch": [None, "1", -1],
    "sequence": ["1", None, {}],
    "metrics": [None, [], {"loss": "low"}, {"loss": None}, {"loss": [1]}, {"loss": 10**400}],
    "world_size": [None, "2"],
    "config": [[], 7, "text"],
    "versions": [None, {"torch": 2}],
    "files": [None, [], {"shared.pt": None}, {"shared.pt": {"bytes": "3", "hash": "blake3:"}}, {"shared.pt": {}}],
    "parts": [None, [], {"shared.pt": "model"}, {"shared.pt": [1]}],
    "created_at": [None, 7],
    "reproducibility": [None, "reason", [1]],
    "healthy": [None, "yes", 1],
    "labels": [None, "label", [None]],
    "parent": [7, []],
    "environment": [None, []],
    "left_out": [None, [], {"model": None}],
    "kinds": [None, {"model": 1}],
    "best": ["loss", {"metric": "loss"}, {"metric": 1, "mode": "min"}],
}


@pytest.mark.parametrize(
    ("key", "value"),
    [(key, value) for key, values in WRONG_TYPES.items() for value in values],
    ids=lambda value: str(value)[:30],
)
def test_a_value_of_another_type_is_one_line(tmp_path: Path, key: str, value: Any) -> None:
    store = CheckpointStore(tmp_path)
    good, bad = save(store, 100), save(store, 200)
    forge(bad, lambda content: content.__setitem__(key, value))
    with pytest.raises(CheckpointError, match=r"manifest\.json is damaged") as error:
        read_manifest(bad)
    assert "\n" not in str(error.value)
    newest = store.latest()
    assert newest.checkpoint is not None and newest.checkpoint.path == good
    store.prune(Retention(keep_last=1))
    assert good.is_dir() and bad.is_dir()


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 100_000, "9" * 10_000, "", "null", "[]", "\x00"])
def test_what_is_not_a_json_object_is_one_line(tmp_path: Path, text: str) -> None:
    path = save(CheckpointStore(tmp_path), 100)
    (path / "manifest.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"manifest.json is damaged") as error:
        read_manifest(path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "name", ["../secret.pt", "/etc/passwd", "..", ".", "", "a/b.pt", "shared.pt\n", "\nshared.pt", "a\\b", ".hidden"]
)
def test_a_file_name_never_leads_out_of_the_checkpoint(tmp_path: Path, name: str) -> None:
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


@pytest.mark.parametrize("where", ["parts", "left_out", "kinds"])
@pytest.mark.parametrize("name", ["model\nCheckpoint /x is valid", "model\x1b[2J"])
def test_a_part_is_named_by_printable_text(tmp_path: Path, where: str, name: str) -> None:
    path = save(CheckpointStore(tmp_path), 100)
    values: Content = {"parts": {"shared.pt": [name]}, "left_out": {name: []}, "kinds": {name: "model"}}
    forge(path, lambda content: content.__setitem__(where, values[where]))
    with pytest.raises(CheckpointError, match="is not the name of a part") as error:
        read_manifest(path)
    assert str(error.value).isprintable()


@pytest.mark.parametrize("name", ["../outside", "/tmp/outside", "a/b"])
def test_a_part_may_have_any_printable_name_and_is_no_path(tmp_path: Path, name: str) -> None:
    store = CheckpointStore(tmp_path / "run")
    path = store.save({name: {"x": 1}}, {}, iteration=1, epoch=1)
    assert store.load(path).shared == {name: {"x": 1}}
    assert sorted(each.name for each in tmp_path.iterdir()) == ["run"]
    assert sorted(each.name for each in path.iterdir()) == ["manifest.json", "shared.pt"]


def test_the_parent_and_the_labels_are_words_and_no_paths(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "run")
    path = save(store, 100)
    (tmp_path / "precious").mkdir()
    forge(path, lambda content: content.update(parent="../precious", labels=["../precious"], sequence=10**30))
    save(store, 200)
    store.prune(Retention(keep_last=1))
    assert (tmp_path / "precious").is_dir() and [each.iteration for each in store.checkpoints()] == [200]


def test_a_manifest_reads_back_as_it_was_written(tmp_path: Path) -> None:
    path = save(
        CheckpointStore(tmp_path), 7, metrics={"a": float("nan"), "b": 1e308}, best={"metric": "a", "mode": "max"}
    )
    manifest = read_manifest(path)
    assert str(manifest.metrics["a"]) == "nan" and manifest.best == {"metric": "a", "mode": "max"}
    (path / "manifest.json").write_bytes(manifest.to_json())
    assert str(read_manifest(path)) == str(manifest)
