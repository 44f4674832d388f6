"""Arrays in files as datasets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from pyarrow import parquet

from ignite_engine import Trainer, Windows, loader
from ignite_engine.data import Arrays, Files

COLUMNS = {"x": np.arange(15, dtype=np.float32).reshape(5, 3), "y": np.arange(5)}


def write(kind: str, path: Path, columns: Any = COLUMNS) -> Path:
    if kind == "npz":
        np.savez(path, **columns)
    elif kind == "npy":
        path.mkdir()
        for name, column in columns.items():
            np.save(path / f"{name}.npy", column)
    else:
        parquet.write_table(pa.table({"x": columns["x"].tolist(), "y": columns["y"]}), path)
    return path


READERS = {"npz": Arrays.of_npz, "npy": Arrays.of_npy_files, "parquet": Arrays.of_parquet}


@pytest.mark.parametrize("kind", READERS)
def test_each_kind_of_file_is_a_window_of_the_same_samples(tmp_path: Path, kind: str) -> None:
    write(kind, tmp_path / f"hour_1.{kind}")
    batches: list[Any] = []
    windows = Windows(Files(tmp_path, f"*.{kind}"), lambda path: loader(READERS[kind](path), 2))
    Trainer(lambda engine, batch: batches.append(batch)).run(windows)

    for name, column in COLUMNS.items():
        assert torch.equal(torch.cat([batch[name] for batch in batches]), torch.as_tensor(column).to(batches[0][name]))
    assert batches[0]["y"].dtype == torch.int64 and batches[0]["x"].shape == (2, 3)


def test_a_folder_is_memory_mapped(tmp_path: Path) -> None:
    arrays = Arrays.of_npy_files(write("npy", tmp_path / "window"))
    assert all(isinstance(column, np.memmap) for column in arrays.columns.values())


def test_what_is_no_column_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^Arrays needs columns of one length, got \{'x': 5, 'y': 4\}\.$"):
        Arrays({"x": np.ones(5), "y": np.ones(4)})
    with pytest.raises(ValueError, match=r"^Arrays needs columns of one length, got \{'x': 5, 'y': 'one value'\}\.$"):
        Arrays({"x": np.ones(5), "y": np.array(1)})
    with pytest.raises(ValueError, match=rf"^{tmp_path} is no folder of \.npy files\.$"):
        Arrays.of_npy_files(tmp_path)
    np.savez(whole := tmp_path / "whole.npz", **COLUMNS)
    data = whole.read_bytes()
    damaged = bytearray(data)
    damaged[200] ^= 1
    for torn in (data[: len(data) // 2], bytes(damaged), b"", b"words"):
        (tmp_path / "torn.npz").write_bytes(torn)
        with pytest.raises(ValueError, match=rf"^{tmp_path}/torn\.npz is no \.npz file of columns: \w"):
            Arrays.of_npz(tmp_path / "torn.npz")
    for values, line in (
        ([[1], [1, 2]], "has lists of several lengths: pad them"),
        ([1, None], "has 1 missing values"),
    ):
        parquet.write_table(pa.table({"ids": values}), tmp_path / "file.parquet")
        with pytest.raises(ValueError, match=rf"^The column 'ids' {line}"):
            Arrays.of_parquet(tmp_path / "file.parquet")
