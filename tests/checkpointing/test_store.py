"""What goes into a checkpoint comes out of it, bit for bit and of the same types."""

import hashlib
import json
import os
import sys
from collections import Counter, OrderedDict
from pathlib import Path

import pytest
import torch
from blake3 import blake3

from ignite_engine.checkpointing import (
    CheckpointStore,
    Retention,
    filesystem,
    part_file,
    read_manifest,
    verification,
)
from ignite_engine.checkpointing import manifest as manifest_module
from ignite_engine.checkpointing.filesystem import hash_file
from ignite_engine.checkpointing.manifest import MANIFEST_NAME
from ignite_engine.checkpointing.part_file import is_finite
from tests.checkpointing.states import holds, local_parts, save, shared_parts

VALUES = {
    "none": None, "true": True, "large": 2**200, "float": 0.1, "complex": 1j, "bytes": b"\x00\xff", "text": "é",
    "nested": {"list": [1, (2, {3})], 7: "integer key"}, "ordered": OrderedDict(b=1, a=2), "counter": Counter("aab"),
    "size": torch.Size([2, 3]), "dtype": torch.bfloat16, "device": torch.device("cpu"),
}  # fmt: skip
TENSORS = {
    "bf16": torch.randn(5).bfloat16(),
    "fp16": torch.randn(5).half(),
    "fp8": torch.randn(5).to(torch.float8_e4m3fn),
    "int": torch.arange(5),
    "bool": torch.tensor([True, False]),
    "scalar": torch.tensor(3.0),
    "empty": torch.empty(0, 3),
    "transposed": torch.randn(3, 4).t(),
    "nan": torch.tensor([float("nan"), -0.0]),
}


@pytest.mark.parametrize("mmap", [False, True])
def test_plain_data_comes_back_with_the_same_bits_and_types(tmp_path, mmap):
    store = CheckpointStore(tmp_path)
    path = store.save({"values": VALUES, "tensors": TENSORS}, {"own": [TENSORS["nan"]]}, iteration=1, epoch=0)
    loaded = CheckpointStore(tmp_path).load(path, mmap=mmap)
    assert loaded.shared["values"] == VALUES
    for name, value in VALUES.items():
        assert type(loaded.shared["values"][name]) is type(value)
    for name, tensor in TENSORS.items():
        back = loaded.shared["tensors"][name]
        assert (back.dtype, back.shape) == (tensor.dtype, tensor.shape)
        assert back.contiguous().reshape(-1).view(torch.uint8).equal(tensor.contiguous().reshape(-1).view(torch.uint8))
    assert loaded.local["own"][0].view(torch.uint8).equal(TENSORS["nan"].view(torch.uint8))


def test_tensors_that_share_memory_share_it_again(tmp_path):
    weight = torch.randn(4, 4)
    path = CheckpointStore(tmp_path).save({"model": {"a": weight, "b": weight}}, {}, iteration=1, epoch=0)
    model = CheckpointStore(tmp_path).load(path).shared["model"]
    assert model["a"].data_ptr() == model["b"].data_ptr()


def test_the_manifest_says_all_of_it(tmp_path):
    store = CheckpointStore(tmp_path)
    path = store.save(
        shared_parts(7),
        local_parts(7),
        iteration=7,
        epoch=2,
        metrics={"val/loss": torch.tensor(0.5), "n": 3},
        reproducibility=["the loader has no state"],
        config={"run": {"seed": 1, "betas": (0.9, 0.95)}},
        labels=["kept by hand"],
        parent="iteration_00000003",
        healthy=False,
    )
    (info,) = CheckpointStore(tmp_path).checkpoints()
    manifest = info.manifest
    assert info.path == path == tmp_path / "iteration_00000007"
    assert (manifest.iteration, manifest.epoch, manifest.world_size, manifest.format_version) == (7, 2, 1, 6)
    assert manifest.metrics == {"val/loss": 0.5, "n": 3.0}
    assert manifest.reproducibility == ["the loader has no state"] and not manifest.exact and not manifest.healthy
    assert manifest.config == {"run": {"seed": 1, "betas": [0.9, 0.95]}}
    assert manifest.labels == ["kept by hand"] and manifest.parent == "iteration_00000003"
    assert manifest.parts == {"shared.pt": ["model", "counters"], "rank_0.pt": ["rng"]}
    assert manifest.versions["torch"] == torch.__version__ and manifest.created_at.endswith("+00:00")
    assert manifest.environment["threads"] == torch.get_num_threads() and manifest.environment["command"] == sys.argv
    for name, record in manifest.files.items():
        data = (path / name).read_bytes()
        assert (record.bytes, record.hash) == (len(data), f"blake3:{blake3(data).hexdigest()}")
    assert sorted(each.name for each in path.iterdir()) == ["manifest.json", *sorted(manifest.files)]


def test_a_large_file_is_hashed_as_it_is_written(tmp_path):
    store = CheckpointStore(tmp_path)
    tensors = {str(n): torch.randn(700, 1000) for n in range(3)}  # 2.8 MB each: several pieces, and small ones between
    path = store.save({"model": tensors}, {}, iteration=1, epoch=0)
    record = store.checkpoints()[0].manifest.files["shared.pt"]
    assert record.hash == f"blake3:{blake3((path / 'shared.pt').read_bytes()).hexdigest()}"
    assert store.verify(path) == []
    loaded = store.load(path).shared["model"]
    assert all(torch.equal(loaded[name], tensors[name]) for name in tensors)


def test_a_part_that_nobody_has_makes_no_file(tmp_path):
    store = CheckpointStore(tmp_path)
    path = store.save({"model": {}}, {}, iteration=1, epoch=0)
    assert sorted(each.name for each in path.iterdir()) == ["manifest.json", "shared.pt"]
    assert store.load(path).local == {}


def test_a_rank_that_did_not_exist_gets_the_shared_parts_and_no_local_ones(tmp_path):
    store = CheckpointStore(tmp_path)
    loaded = store.load(save(store, 1), rank=3)
    assert loaded.local == {} and loaded.manifest.world_size == 1 and loaded.shared["counters"] == {"iteration": 1}


def test_annotating_changes_the_manifest_and_no_data(tmp_path):
    store = CheckpointStore(tmp_path)
    path = save(store, 1, metrics={"loss": 1.0}, labels=["a"])
    before = {each.name: each.read_bytes() for each in path.iterdir() if each.suffix == ".pt"}
    changed = store.annotate(path, labels=["b", "c"], metrics={"val/loss": 0.5})
    (info,) = CheckpointStore(tmp_path).checkpoints()
    assert info.manifest == changed
    assert changed.labels == ["b", "c"] and changed.metrics == {"loss": 1.0, "val/loss": 0.5}
    assert before == {each.name: each.read_bytes() for each in path.iterdir() if each.suffix == ".pt"}
    assert store.verify(path) == [] and holds(store, path, 1)


def test_other_files_in_the_directory_are_left_alone(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "iteration_final").mkdir()
    (tmp_path / "iteration_00000009").write_text("a file, no checkpoint")
    store = CheckpointStore(tmp_path)
    for iteration in (1, 2):
        save(store, iteration)
    store.sweep()
    store.prune(Retention(keep_last=1))
    assert sorted(each.name for each in tmp_path.iterdir()) == [
        "iteration_00000002",
        "iteration_00000009",
        "iteration_final",
        "notes.txt",
    ]


def rewrite(path, algorithm):
    """Let the manifest name another hash."""
    content = json.loads((path / MANIFEST_NAME).read_text())
    for name, record in content["files"].items():
        record["hash"] = f"{algorithm}:{hashlib.new(algorithm, (path / name).read_bytes()).hexdigest()}"
    del content["checksum"]
    content["checksum"] = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    (path / MANIFEST_NAME).write_text(json.dumps(content))


def test_keys_unknown_to_this_release_are_ignored_within_a_format_version(tmp_path):
    path = save(CheckpointStore(tmp_path), 1)
    content = json.loads((path / "manifest.json").read_bytes())
    del content["checksum"]
    content["of_a_later_release"] = 1
    checksum = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    (path / "manifest.json").write_text(json.dumps({**content, "checksum": checksum}))
    assert CheckpointStore(tmp_path).latest().checkpoint is not None


def test_a_verified_checkpoint_is_not_read_again_by_a_prune(tmp_path, monkeypatch):
    read = []

    def counting(file, algorithm):
        read.append(Path(file.name).parent.name)
        return hash_file(file, algorithm)

    monkeypatch.setattr(verification, "hash_file", counting)
    store = CheckpointStore(tmp_path)
    for iteration in range(1, 5):
        save(store, iteration)
        store.prune(Retention(keep_last=1))
    assert read == []
    save(store, 5)
    CheckpointStore(tmp_path).prune(Retention(keep_last=1))  # a new process knows nothing
    assert read == ["iteration_00000005"] * 2


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.complex64])
def test_one_value_that_is_not_finite_is_seen(bad, dtype):
    value = torch.ones(3, 4, dtype=dtype)
    assert is_finite(value)
    value[1, 2] = bad
    assert not is_finite(value)


def test_finite_is_also_what_would_overflow_in_a_sum():
    assert all(map(is_finite, [torch.full((10,), 3e38), torch.empty(0), torch.tensor([1, 2])]))
    assert is_finite(torch.eye(3).to_sparse()) and not is_finite((torch.eye(3) / 0).to_sparse())
    assert is_finite(torch.ones(2).to(torch.float8_e4m3fn))


def test_a_save_opens_as_many_files_however_many_checkpoints_there_are(tmp_path, monkeypatch):
    store, retention = CheckpointStore(tmp_path), Retention(keep_last=1000)
    opened = []
    system_open, python_open = os.open, filesystem.open_regular

    def counting(path, *options):
        opened.append(Path(path).name)
        return system_open(path, *options)

    def counting_regular(path):
        opened.append(path.name)
        return python_open(path)

    monkeypatch.setattr(os, "open", counting)
    for module in (filesystem, manifest_module, part_file):
        monkeypatch.setattr(module, "open_regular", counting_regular)
    counts = []
    for iteration in range(1, 31):
        opened.clear()
        save(store, iteration, size=1)
        store.prune(retention)
        counts.append(len(opened))
    assert len(store.checkpoints()) == 30 and set(counts[1:]) == {counts[1]} and counts[1] > 3
    assert opened.count(MANIFEST_NAME) == 2  # the one that is written, and read once by `apply`


def test_type_hints_are_compiled_once(tmp_path):
    path = save(CheckpointStore(tmp_path), 1)
    read_manifest(path)
    compiled = manifest_module._type_hints.cache_info().misses
    read_manifest(path)
    assert manifest_module._type_hints.cache_info().misses == compiled


def test_a_manifest_that_changed_is_read_again(tmp_path):
    store, elsewhere = CheckpointStore(tmp_path), CheckpointStore(tmp_path)
    path = save(store, 1)
    assert store.checkpoints()[0].manifest.labels == []
    elsewhere.annotate(path, labels=["kept"])
    assert store.checkpoints()[0].manifest.labels == ["kept"]
    (path / MANIFEST_NAME).unlink()
    assert not store.checkpoints()
