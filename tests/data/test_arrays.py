"""Arrays in files as datasets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
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
