"""Damaged and hostile checkpoints: the one before is taken, the reason is said, nothing in them is executed."""

import json
import logging
import os
import pickle
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ignite_engine.checkpointing import CheckpointError, CheckpointStore, Retention, read_manifest
from ignite_engine.checkpointing.filesystem import hash_file
from ignite_engine.checkpointing.manifest import _checksum
from tests.checkpointing.states import holds, save
from tests.kit.faults import environment

pytestmark = pytest.mark.faults


def truncate(checkpoint):
    file = checkpoint / "shared.pt"
    os.truncate(file, file.stat().st_size // 2)
    return r"shared\.pt has \d+ bytes, the manifest says \d+"


def flip_a_byte(checkpoint):
    data = bytearray((checkpoint / "shared.pt").read_bytes())
    data[len(data) // 2] ^= 1
    (checkpoint / "shared.pt").write_bytes(data)
    return r"shared\.pt has changed: BLAKE3 \w+, the manifest says \w+"


def remove_a_file(checkpoint):
    (checkpoint / "rank_0.pt").unlink()
    return r"rank_0\.pt is missing"


def remove_the_manifest(checkpoint):
    (checkpoint / "manifest.json").unlink()
    return r"has no manifest\.json: it is not a committed checkpoint"


def break_the_manifest(checkpoint):
    os.truncate(checkpoint / "manifest.json", 100)
    return r"manifest\.json is damaged: it is not JSON"


def edit_the_manifest(checkpoint):
    text = (checkpoint / "manifest.json").read_text()
    assert '"epoch": 1' in text
    (checkpoint / "manifest.json").write_text(text.replace('"epoch": 1', '"epoch": 2'))
    return r"manifest\.json is damaged: its content does not match its checksum"


def rewrite_manifest(checkpoint, drop="", **changes):
    """Change a manifest and make its checksum right again, as another program could."""
    content = json.loads((checkpoint / "manifest.json").read_bytes())
    content.update(changes)
    content = {name: value for name, value in content.items() if name not in (drop, "checksum")}
    (checkpoint / "manifest.json").write_text(json.dumps({**content, "checksum": _checksum(content)}))


def make_it_newer(checkpoint):
    rewrite_manifest(checkpoint, format_version=99)
    return "has format version 99, this release reads up to 6: update ignite_engine"


def make_it_older(checkpoint):
    rewrite_manifest(checkpoint, format_version=0)
    return "has format version 0, this release reads from 6: load it with the release that wrote it"


def drop_the_version(checkpoint):
    rewrite_manifest(checkpoint, format_version="one")
    return "its format_version is 'one', expected a whole number"


def drop_a_field(checkpoint):
    rewrite_manifest(checkpoint, drop="world_size")
    return r"manifest\.json is damaged: TypeError: .*world_size"


def lead_outside(checkpoint):
    rewrite_manifest(checkpoint, files={"../iteration_00000100/shared.pt": {"bytes": 1, "hash": ""}})
    return "'../iteration_00000100/shared.pt' is not the name of a file beside it"


def make_it_a_list(checkpoint):
    (checkpoint / "manifest.json").write_text("[]")
    return "it holds a list, not an object"


DAMAGES = [
    truncate, flip_a_byte, remove_a_file, remove_the_manifest, break_the_manifest, edit_the_manifest, make_it_newer,
    make_it_older, drop_the_version, drop_a_field, lead_outside, make_it_a_list,
]  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_newest_falls_back_to_the_one_before_and_says_why(tmp_path, damage, caplog):
    save(CheckpointStore(tmp_path), 100)
    path = save(CheckpointStore(tmp_path), 200)
    store = CheckpointStore(tmp_path)
    assert store.latest().checkpoint is not None and store.verify(path) == []
    reason = damage(path)

    with caplog.at_level(logging.WARNING):
        newest, skipped = store.latest()
    assert newest is not None and newest.iteration == 100 and holds(store, newest.path, 100)
    ((skipped_path, why),) = skipped
    assert skipped_path == path
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith(f"Checkpoint {path} is skipped: ") and "\n" not in line
    with pytest.raises(CheckpointError) as refused:
        store.load(path)
    for said in (why, line, "; ".join(store.verify(path))):
        assert re.search(reason, said)
    assert "\n" not in str(refused.value) and str(path) in str(refused.value)


@pytest.mark.parametrize("damage", DAMAGES)
def test_prune_never_deletes_the_last_valid_one(tmp_path, damage):
    save(CheckpointStore(tmp_path), 100)
    path = save(CheckpointStore(tmp_path), 200)
    damage(path)
    store = CheckpointStore(tmp_path)
    assert store.prune(Retention(keep_last=1)) == []
    newest = store.latest().checkpoint
    assert newest is not None and holds(store, newest.path, 100)
    # with a valid one again, the old one may go; the damaged one is left to whoever wants to look at it
    save(store, 300)
    assert tmp_path / "iteration_00000100" in store.prune(Retention(keep_last=1))
    assert holds(store, tmp_path / "iteration_00000300", 300)


@pytest.mark.parametrize("damage", [truncate, remove_a_file, break_the_manifest])
def test_a_damaged_one_is_not_counted_among_the_last(tmp_path, damage):
    for iteration in (100, 200, 300):
        save(CheckpointStore(tmp_path), iteration)
    damage(tmp_path / "iteration_00000200")
    assert CheckpointStore(tmp_path).prune(Retention(keep_last=2)) == []
    save(CheckpointStore(tmp_path), 400)
    assert [each.name for each in CheckpointStore(tmp_path).prune(Retention(keep_last=2))] == ["iteration_00000100"]


def test_a_store_that_verified_a_file_sees_when_it_changes(tmp_path):
    store = CheckpointStore(tmp_path)
    save(store, 100)
    path = save(store, 200)
    assert store.latest().checkpoint == store.checkpoints()[-1]
    status = (path / "shared.pt").stat()
    flip_a_byte(path)
    os.utime(path / "shared.pt", ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    with pytest.raises(CheckpointError, match=r"is damaged: shared\.pt has changed"):
        store.load(path)
    assert store.prune(Retention(keep_last=1)) == []


class Hostile:
    """Unpickling it makes a directory."""

    def __init__(self, proof):
        self.proof = proof

    def __reduce__(self):
        return os.mkdir, (str(self.proof),)


def zip_with_code(file, proof):
    torch.save({"model": {"weight": torch.ones(2)}, "payload": Hostile(proof)}, file)


def plain_pickle_with_code(file, proof):
    file.write_bytes(pickle.dumps({"model": Hostile(proof)}))


@pytest.mark.parametrize("plant", [zip_with_code, plain_pickle_with_code])
@pytest.mark.parametrize("unsafe_environment", [False, True])
def test_pickle_with_code_is_refused_in_one_line_and_does_not_run(tmp_path, plant, unsafe_environment):
    directory = tmp_path / "checkpoints"
    save(CheckpointStore(directory), 100)
    path = save(CheckpointStore(directory), 200)
    proof = tmp_path / "the code ran"
    plant(path / "shared.pt", proof)
    with open(path / "shared.pt", "rb") as file:  # the attacker knows how to hash
        record = hash_file(file)
    manifest = read_manifest(path)
    (path / "manifest.json").write_bytes(replace(manifest, files={**manifest.files, "shared.pt": record}).to_json())

    store = CheckpointStore(directory)
    with environment(TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD=str(int(unsafe_environment))):
        for mmap in (False, True):
            with pytest.raises(CheckpointError) as refused:
                store.load(path, mmap=mmap)
        assert len(store.verify(path)) == 1
        newest = store.latest().checkpoint
    message = str(refused.value)
    assert "\n" not in message and str(path / "shared.pt") in message
    assert "is not plain data" in message and "nothing in it was executed" in message
    assert newest is not None and newest.iteration == 100
    assert not proof.exists()

    # the bait was real: read the usual way, it does run
    if plant is zip_with_code:
        torch.load(path / "shared.pt", weights_only=False)
    else:
        pickle.loads((path / "shared.pt").read_bytes())
    assert proof.is_dir()


def test_a_file_is_not_even_opened_as_a_checkpoint_before_its_hash_is_right(tmp_path, monkeypatch):
    path = save(CheckpointStore(tmp_path), 100)
    flip_a_byte(path)
    loads = []
    real = torch.load

    def counting(source, **options):
        loads.append(Path(getattr(source, "name", source)).name)
        return real(source, **options)

    monkeypatch.setattr(torch, "load", counting)
    store = CheckpointStore(tmp_path)
    with pytest.raises(CheckpointError, match="is damaged"):
        store.load(path)
    assert store.verify(path) != [] and store.latest().checkpoint is None
    assert "shared.pt" not in loads
    shutil.rmtree(path)
    store.load(save(store, 100))
    assert "shared.pt" in loads  # the counter counts
