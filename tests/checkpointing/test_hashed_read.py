"""A file is hashed and loaded in one pass, to the same values as torch gives."""

import os
import zipfile

import pytest
import torch
from blake3 import blake3

from ignite_engine.checkpointing import CheckpointError, CheckpointStore, part_file
from ignite_engine.checkpointing.filesystem import open_regular
from ignite_engine.checkpointing.hashed_read import members_of, read_hashed
from ignite_engine.checkpointing.part_file import read_parts, write_parts
from tests.checkpointing.states import holds, save
from tests.checkpointing.test_store import rewrite


def parts():
    table = torch.randn(700, 1000)  # 2.8 MB: several pieces
    many = {str(number): torch.full((number,), float(number)) for number in range(12)}  # one is empty; two digits
    tied = {"tied": table, "view": table[5:9], "transposed": torch.randn(3, 4).t(), "sparse": torch.eye(3).to_sparse()}
    return {"model": {"table": table, **tied, **many}, "plain": {"a": [1, "b"]}}


def same(first, second):
    if isinstance(first, torch.Tensor):
        return (
            first.stride() == second.stride() and torch.equal(first, second)
            if first.layout == torch.strided
            else (torch.equal(first.to_dense(), second.to_dense()))
        )
    if isinstance(first, dict):
        return list(first) == list(second) and all(same(first[name], second[name]) for name in first)
    return bool(first == second)


@pytest.mark.parametrize("scale", [1, 3])  # 2.8 MB and 17 MB: with torch's CRC and without
def test_one_pass_gives_hash_and_values(tmp_path, scale, monkeypatch):
    state = parts() | {"large": {"values": torch.randn(scale * 700, 2000)}}
    record = write_parts(tmp_path / "x.pt", state)
    content = (tmp_path / "x.pt").read_bytes()
    assert (record.bytes, record.hash) == (len(content), f"blake3:{blake3(content).hexdigest()}")
    with open_regular(tmp_path / "x.pt") as file:
        found, memories = read_hashed(file, "blake3")
    assert found == record and len(memories) > 12
    monkeypatch.setattr(part_file, "hash_file", None)  # it is not read twice
    loaded = read_parts(tmp_path / "x.pt", record)
    model = loaded["model"]
    assert same(loaded, torch.load(tmp_path / "x.pt", weights_only=True)) and same(loaded, state)
    assert model["tied"].data_ptr() == model["table"].data_ptr() == model["view"].data_ptr() - 5 * 4000
    (tmp_path / "x.pt").unlink()
    model["table"].add_(1)
    assert torch.equal(model["view"], model["table"][5:9])


def test_values_are_those_that_were_hashed_whatever_the_file_holds_by_then(tmp_path, monkeypatch):
    state = {"model": {"table": torch.ones(700, 1000)}}
    record, one = write_parts(tmp_path / "x.pt", state), torch.ones(1000).numpy().tobytes()

    def read_and_overwrite(*arguments):
        read = read_hashed(*arguments)
        content = (tmp_path / "x.pt").read_bytes()
        (tmp_path / "x.pt").write_bytes(content.replace(one, bytes(len(one))))
        return read

    monkeypatch.setattr(part_file, "read_hashed", read_and_overwrite)
    assert same(read_parts(tmp_path / "x.pt", record), state)
    assert not torch.load(tmp_path / "x.pt", weights_only=True)["model"]["table"].any()


@pytest.mark.parametrize("byte", [0, 0.2, 0.5, 0.9, 1])
def test_any_byte_that_has_changed_is_seen(tmp_path, byte):
    record = write_parts(tmp_path / "x.pt", parts())
    content = bytearray((tmp_path / "x.pt").read_bytes())
    content[int(byte * (len(content) - 1))] ^= 1
    (tmp_path / "x.pt").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"is damaged: x\.pt has changed: BLAKE3 \w+, the manifest says"):
        read_parts(tmp_path / "x.pt", record)


def test_a_file_that_another_program_packed_again_is_read_as_torch_reads_it(tmp_path):
    write_parts(tmp_path / "x.pt", parts())
    for name, options in (("deflated.pt", zipfile.ZIP_DEFLATED), ("swapped.pt", zipfile.ZIP_STORED)):
        with zipfile.ZipFile(tmp_path / "x.pt") as old, zipfile.ZipFile(tmp_path / name, "w", options) as new:
            for member in sorted(old.infolist(), key=lambda info: info.filename, reverse=True):
                content = old.read(member) if not member.filename.endswith("byteorder") else b"little"
                new.writestr(member.filename, content)
    with open_regular(tmp_path / "deflated.pt") as file:
        assert members_of(file) == {}
    record = write_parts(tmp_path / "y.pt", {})
    for name in ("deflated.pt", "swapped.pt"):
        content = (tmp_path / name).read_bytes()
        record = type(record)(len(content), f"blake3:{blake3(content).hexdigest()}")
        try:
            expected = torch.load(tmp_path / name, weights_only=True)
        except RuntimeError:
            continue
        assert same(read_parts(tmp_path / name, record), expected)


def test_what_is_no_zip_file_has_no_memories(tmp_path):
    (tmp_path / "x").write_bytes(b"no zip")
    with open_regular(tmp_path / "x") as file:
        record, memories = read_hashed(file, "sha256")
    assert memories == {} and record.bytes == 6 and record.hash.startswith("sha256:")


def test_a_manifest_that_names_another_hash_is_verified_by_it(tmp_path):
    path = save(CheckpointStore(tmp_path), 1)
    rewrite(path, "sha256")
    store = CheckpointStore(tmp_path)
    assert store.verify(path) == [] and store.latest(keep=True).checkpoint is not None and holds(store, path, 1)
    content = bytearray((path / "shared.pt").read_bytes())
    content[len(content) // 2] ^= 1
    (path / "shared.pt").write_bytes(content)
    (problem,) = CheckpointStore(tmp_path).verify(path)
    assert problem.startswith("shared.pt has changed: SHA256 ")
    rewrite(path, "md5")
    with pytest.raises(CheckpointError, match=r"names the hash 'md5', this release knows blake3, sha256: update"):
        CheckpointStore(tmp_path).load(path)


def test_what_is_kept_for_the_load_that_follows_is_not_that_of_a_file_changed_since(tmp_path):
    store = CheckpointStore(tmp_path)
    path = save(store, 1)
    assert store.latest(keep=True).checkpoint is not None
    content = bytearray((path / "shared.pt").read_bytes())
    content[len(content) // 2] ^= 1
    (path / "shared.pt").write_bytes(content)
    os.utime(path / "shared.pt", ns=(1, 1))
    with pytest.raises(CheckpointError, match=r"shared\.pt has changed"):
        store.load(path)
    assert store._verification._parts == {} or all(file.name == "rank_0.pt" for file, _ in store._verification._parts)
