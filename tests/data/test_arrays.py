"""Arrays in files as datasets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ignite_engine import Trainer, Windows, loader
from ignite_engine.data import Arrays
from ignite_engine.ext.windows import Files

COLUMNS = {"x": np.arange(15, dtype=np.float32).reshape(5, 3), "y": np.arange(5)}


def test_a_file_is_a_window_of_its_samples(tmp_path: Path) -> None:
    np.savez(tmp_path / "hour_1.npz", **COLUMNS)  # type: ignore[arg-type]  # columns
    batches: list[Any] = []
    windows = Windows(Files(tmp_path, "*.npz"), lambda path: loader(Arrays.of_npz(path), 2))
    Trainer(lambda engine, batch: batches.append(batch)).run(windows)

    for name, column in COLUMNS.items():
        assert torch.equal(torch.cat([batch[name] for batch in batches]), torch.as_tensor(column).to(batches[0][name]))
    assert batches[0]["y"].dtype == torch.int64 and batches[0]["x"].shape == (2, 3)


def test_what_is_no_column_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^Arrays needs columns of one length, got \{'x': 5, 'y': 4\}\.$"):
        Arrays({"x": np.ones(5), "y": np.ones(4)})
    with pytest.raises(ValueError, match=r"^Arrays needs columns of one length, got \{'x': 5, 'y': 'one value'\}\.$"):
        Arrays({"x": np.ones(5), "y": np.array(1)})
    np.savez(whole := tmp_path / "whole.npz", **COLUMNS)  # type: ignore[arg-type]  # columns
    data = whole.read_bytes()
    damaged = bytearray(data)
    damaged[200] ^= 1
    for torn in (data[: len(data) // 2], bytes(damaged), b"", b"words"):
        (tmp_path / "torn.npz").write_bytes(torn)
        with pytest.raises(ValueError, match=rf"^{tmp_path}/torn\.npz is no \.npz file of columns: \w"):
            Arrays.of_npz(tmp_path / "torn.npz")
