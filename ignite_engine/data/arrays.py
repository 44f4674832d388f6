"""Datasets of arrays in files, such as the windows of a stream are made of."""

from __future__ import annotations

import os
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
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

    @classmethod
    def of_npy_files(cls, folder: str | os.PathLike[str]) -> Arrays:
        """Of the ``.npy`` files of a folder, a column each, memory-mapped: only what is read is loaded.

        Raises:
            ValueError: there is none, or their lengths differ.
        """
        paths = sorted(Path(folder).glob("*.npy"))
        if not paths:
            raise ValueError(f"{os.fspath(folder)} is no folder of .npy files.")
        return cls({path.stem: np.load(path, mmap_mode="r", allow_pickle=False) for path in paths})

    @classmethod
    def of_parquet(cls, path: str | os.PathLike[str]) -> Arrays:
        """Of a Parquet file, read whole; a column of lists of one length has two dimensions. Needs pyarrow.

        Raises:
            ModuleNotFoundError: pyarrow is not installed: ``pip install ignite-engine[parquet]``.
            ValueError: a column has missing values, or lists of several lengths.
        """
        from pyarrow import parquet

        table = parquet.read_table(path)
        return cls({name: _array(name, table.column(name)) for name in table.column_names})

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {name: np.array(column[index]) for name, column in self.columns.items()}


def _array(name: str, column: Any) -> np.ndarray[Any, Any]:
    if column.null_count:
        raise ValueError(f"The column {name!r} has {column.null_count} missing values: fill them.")
    values = column.combine_chunks()
    if not hasattr(values, "flatten") or not hasattr(values.type, "value_type"):
        return values.to_numpy(zero_copy_only=False)  # type: ignore[no-any-return]  # pyarrow is untyped
    flat = values.flatten().to_numpy(zero_copy_only=False)
    rows = len(values)
    if (rows and len(flat) % rows) or len(set(values.value_lengths().to_pylist())) > 1:
        raise ValueError(f"The column {name!r} has lists of several lengths: pad them to one.")
    return flat.reshape(rows, -1) if rows else flat.reshape(0, 0)  # type: ignore[no-any-return]
