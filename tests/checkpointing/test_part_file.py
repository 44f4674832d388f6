"""One file of named parts: what it accepts, how large it is, what comes back."""

import io
import os
import threading
import zipfile

import pytest
import torch
from torch import nn

from ignite_engine.checkpointing.filesystem import FileRecord
from ignite_engine.checkpointing.part_file import (
    is_finite,
    plain_data_problem,
    read_parts,
    write_parts,
)
from ignite_engine.checkpointing.plain_data import refuse_what_cannot_be_loaded
from ignite_engine.errors import CheckpointError


def roundtrip(tmp_path, parts):
    return read_parts(tmp_path / "x.pt", write_parts(tmp_path / "x.pt", parts))


def test_keys_may_be_numbers_and_tuples_of_them(tmp_path):
    parts = {"a": {1: 2, (1, "b"): 3, None: 4}}
    refuse_what_cannot_be_loaded(parts)
    assert roundtrip(tmp_path, parts) == parts


def test_a_view_is_saved_without_the_memory_around_it(tmp_path):
    whole = torch.randn(1000, 1000)
    parts = {"a": {"loss": whole[0, 0], "again": whole[0, 0], "row": whole[3:4], "column": whole[:, 1]}}
    back = roundtrip(tmp_path, parts)
    assert (tmp_path / "x.pt").stat().st_size < 20_000
    assert all(torch.equal(back["a"][name], value) for name, value in parts["a"].items())
    assert back["a"]["loss"].data_ptr() == back["a"]["again"].data_ptr()


def test_views_that_fill_their_memory_share_it_again(tmp_path):
    flat = torch.randn(6)
    back = roundtrip(tmp_path, {"a": {"first": flat[:2], "rest": flat[2:]}, "b": flat})
    assert back["a"]["rest"].untyped_storage().data_ptr() == back["b"].untyped_storage().data_ptr()


def test_a_parameter_that_is_a_view_stays_a_parameter(tmp_path):
    parameter = nn.Parameter(torch.randn(100, 100)[:1], requires_grad=False)
    back = roundtrip(tmp_path, {"a": parameter})["a"]
    assert type(back) is nn.Parameter and not back.requires_grad and torch.equal(back, parameter)


@pytest.mark.parametrize(
    "tensor", [torch.randn(5, 3).t(), torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)]
)
def test_strides_come_back(tmp_path, tensor):
    back = roundtrip(tmp_path, {"a": tensor})["a"]
    assert torch.equal(back, tensor) and back.stride() == tensor.stride()


def test_a_file_that_differs_from_its_record_is_not_loaded(tmp_path):
    record = write_parts(tmp_path / "x.pt", {"a": 1})
    with pytest.raises(CheckpointError, match=r"x\.pt has changed"):
        read_parts(tmp_path / "x.pt", FileRecord(record.bytes, "blake3:" + "0" * 64))
    with pytest.raises(CheckpointError, match=r"x\.pt has \d+ bytes, the manifest says 1"):
        read_parts(tmp_path / "x.pt", FileRecord(1, record.hash))
    with pytest.raises(CheckpointError, match="cannot be read: No such file"):
        read_parts(tmp_path / "y.pt", record)
    assert plain_data_problem(tmp_path / "x.pt") is None
    (tmp_path / "z.pt").write_bytes(b"no zip")
    assert "is not plain data" in (plain_data_problem(tmp_path / "z.pt") or "")


def test_a_large_file_has_no_crc_of_torch_and_no_other_thread_saves_without(tmp_path, monkeypatch):
    """Where it does, torch's options of saving have become those of the process, or are no longer."""
    large = {"a": torch.arange(5 << 20, dtype=torch.int32)}
    small = {"a": torch.ones(1 << 18)}
    theirs = []
    write = os.write

    def write_while_another_saves(descriptor, data):
        theirs.append(io.BytesIO())
        thread = threading.Thread(target=torch.save, args=(small, theirs[-1]))
        thread.start()
        thread.join()
        return write(descriptor, data)

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", write_while_another_saves)
        record = write_parts(tmp_path / "large.pt", large)
    assert theirs and torch.serialization.get_crc32_options()
    write_parts(tmp_path / "small.pt", small)
    for file in (*theirs, tmp_path / "small.pt"):
        assert zipfile.ZipFile(file).testzip() is None
    tested = zipfile.ZipFile(tmp_path / "large.pt").testzip()
    assert (tested is not None) == (torch.__version__ >= "2.12")  # before, the option was that of the process
    for mmap in (False, True):
        assert torch.equal(read_parts(tmp_path / "large.pt", record, mmap=mmap)["a"], large["a"])


def test_finite_looks_into_every_layout():
    bad = torch.tensor([[0.0, float("nan")]])
    assert is_finite(bad[:, :1])
    for value in (bad, bad.to_sparse(), bad.to(torch.complex64), bad.to(torch.float8_e4m3fn)):
        assert not is_finite(value)
