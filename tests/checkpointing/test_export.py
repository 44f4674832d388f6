"""Weights for other programs."""

import errno
from pathlib import Path

import pytest
import torch

from ignite_engine.checkpointing import CheckpointError, Source
from ignite_engine.checkpointing.export import weights_of, write_weights
from tests.kit.faults import FileOperations

MODEL = {"a": torch.ones(2), "b": torch.zeros(3)}
PARTS = {"model": MODEL, "ema": {"updates": 1, "weights": {"a": torch.full((2,), 5.0)}}}


def test_an_average_replaces_what_it_averages():
    source = Source(Path("x"), PARTS)
    assert weights_of(source)["a"].tolist() == [1.0, 1.0]
    averaged = weights_of(source, "ema")
    assert averaged["a"].tolist() == [5.0, 5.0] and averaged["b"] is MODEL["b"]
    with pytest.raises(CheckpointError, match="x holds no average 'swa'; expected raw or ema"):
        weights_of(source, "swa")
    with pytest.raises(CheckpointError, match="x holds no model; its parts: data"):
        weights_of(Source(Path("x"), {"data": {}}))


@pytest.mark.parametrize("kind", ["state_dict", "safetensors"])
def test_tied_and_strided_weights_are_read_back(tmp_path, kind):
    weights = {"a": MODEL["a"], "tied": MODEL["a"], "strided": torch.randn(3, 4).t()}
    path = tmp_path / "w"
    write_weights(path, weights, kind, about={"by": "test"})
    if kind == "safetensors":
        back = pytest.importorskip("safetensors.torch").load_file(path)
    else:
        back = torch.load(path, weights_only=True)
    assert back.keys() == weights.keys() and all(torch.equal(back[name], weights[name]) for name in weights)


@pytest.mark.parametrize("kind", ["state_dict", "safetensors"])
def test_a_file_that_cannot_be_written_leaves_the_one_before(tmp_path, kind):
    path = tmp_path / "w"
    path.write_bytes(b"before")

    def full():
        raise OSError(errno.ENOSPC, "No space left on device")

    with (
        FileOperations(tmp_path, at=("write", ""), action=full) as seen,
        pytest.raises(CheckpointError, match="w cannot be written: No space left on device"),
    ):
        write_weights(path, MODEL, kind)
    assert seen.acted == 1 and path.read_bytes() == b"before" and [each.name for each in tmp_path.iterdir()] == ["w"]


def test_safetensors_holds_tensors_only(tmp_path):
    with pytest.raises(CheckpointError, match="b is a str, safetensors holds tensors only: use the format state_dict"):
        write_weights(tmp_path / "w", {"a": torch.ones(1), "b": "text"}, "safetensors")
    assert not list(tmp_path.iterdir())
