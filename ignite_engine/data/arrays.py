"""Datasets of arrays in files, such as the windows of a stream are made of."""

from __future__ import annotations

import os
import zipfile
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np
from torch.utils.data import Dataset

from ignite_engine.errors import one_line


class Arrays(Dataset[dict[str, Any]]):
    """Columns of the same length; sample i is a dict of the i-th value of each.

    Args:
        columns: arrays by name, perhaps memory-mapped: a sample is copied out of them when it is read.

    Raises:
        ValueError: their lengths differ, or there is none.
    """

    def __init__(self, columns: Mapping[str, np.ndarray[Any, Any]]) -> None:
        lengths = {name: column.shape[0] if column.ndim else "one value" for name, column in columns.items()}
        if len(set(lengths.values())) != 1:
            raise ValueError(f"Arrays needs columns of one length, got {lengths or 'no column'}.")
        self.columns = dict(columns)

    @classmethod
    def of_npz(cls, path: str | os.PathLike[str]) -> Arrays:
        """Of a ``.npz`` file, read whole; nothing pickled is read.

        Raises:
            ValueError: it is no such file, or not all of it; it holds objects, or columns of other lengths.
        """
        try:
            with zipfile.ZipFile(path):  # numpy takes whatever else it is for a pickle
                pass
            with np.load(path, allow_pickle=False) as file:
                return cls({name: file[name] for name in file.files})
        except (ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
            raise ValueError(f"{os.fspath(path)} is no .npz file of columns: {one_line(error)}") from error

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {name: np.array(column[index]) for name, column in self.columns.items()}
