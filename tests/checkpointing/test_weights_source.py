"""Where weights come from: a run's folder, a folder of checkpoints, a checkpoint, or a file."""

import pytest
import torch

from ignite_engine.checkpointing import CheckpointStore, find_directory, find_source, read_source
from tests.checkpointing.states import local_parts, save, shared_parts


@pytest.fixture
def run(tmp_path):
    store = CheckpointStore(tmp_path / "run" / "checkpoints")
    for iteration in (100, 200):
        save(store, iteration)
    return tmp_path / "run"


def test_a_path_means_the_newest_valid_checkpoint_in_it(run):
    newest = run / "checkpoints" / "iteration_00000200"
    assert find_directory(run) == find_directory(run / "checkpoints") == run / "checkpoints"
    assert find_source(run) == find_source(run / "checkpoints") == find_source(newest) == newest
    (newest / "shared.pt").write_bytes(b"damaged")
    assert find_source(run).name == "iteration_00000100" and find_source(newest) == newest


def test_a_new_rank_gets_what_rank_0_had_but_not_its_random_numbers(tmp_path):
    path = CheckpointStore(tmp_path).save(
        shared_parts(1), {**local_parts(1), "data": {"batch": 3}}, iteration=1, epoch=1
    )
    assert set(read_source(path, rank=0).parts) == {"model", "counters", "rng", "data"}
    assert set(read_source(path, rank=3).parts) == {"model", "counters", "data"}


@pytest.mark.parametrize("mmap", [False, True])
def test_a_source_has_the_parts_and_what_the_manifest_says(tmp_path, mmap):
    path = save(CheckpointStore(tmp_path), 7, left_out={"model": ["x"]}, kinds={"model": "model"})
    source = read_source(path, mmap=mmap)
    assert torch.equal(source.parts["model"]["bias"], shared_parts(7)["model"]["bias"])
    assert source.left_out == {"model": ["x"]} and source.kinds == {"model": "model"}
    assert source.manifest is not None and source.manifest.iteration == 7


def test_a_file_of_weights_is_a_model(tmp_path):
    torch.save({"a": torch.ones(2)}, tmp_path / "weights.pt")
    source = read_source(find_source(tmp_path / "weights.pt"))
    assert source.parts["model"]["a"].tolist() == [1.0, 1.0]
    assert source.manifest is None and source.kinds == {"model": "model"}
