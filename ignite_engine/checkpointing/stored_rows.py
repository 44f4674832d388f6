"""Where the rows of tensors are in a file, so that several threads read them straight into the tensors.

They are read, not mapped: where a file becomes shorter, a disk fails, or a file server has deleted it, a read is an
error of one line, and to touch a mapping is the end of the process.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path as FilePath
from typing import IO, Any

import numpy as np
import torch
from torch import Tensor

from ignite_engine.checkpointing.digests import tensor_bytes
from ignite_engine.checkpointing.filesystem import open_regular
from ignite_engine.checkpointing.hashed_read import members_of, read_into
from ignite_engine.checkpointing.nested import Path, walk
from ignite_engine.checkpointing.part_file import load_plain


@dataclass(frozen=True)
class Stored:
    """Rows in a file.

    Attributes:
        numbers: of the first row, or of all.
    """

    numbers: int | Tensor
    dtype: torch.dtype
    shape: torch.Size
    _file: IO[bytes]
    _offset: int

    def read(self, into: np.ndarray[Any, Any], begin: int) -> None:
        """Fill bytes with those of the rows from the byte ``begin`` on.

        Raises:
            OSError: with the path.
        """
        read_into(self._file, into, self._offset + begin)


def stored_rows(path: FilePath, files: contextlib.ExitStack) -> Iterator[tuple[str, Path, Stored]]:
    """Part, place and rows of each tensor in a file, which stays open as long as ``files``.

    Raises:
        CheckpointError: one line; it is not plain data.
        OSError: it cannot be read.
        TypeError, ValueError, AttributeError, RuntimeError: it does not hold rows of tensors.
    """
    file = files.enter_context(open_regular(path))
    parts = load_plain(path, None, mmap=True)
    base = _address_of(parts, file)

    def offset(tensor: Tensor) -> int:
        if not tensor.is_contiguous():
            raise ValueError("rows are contiguous")
        return tensor.data_ptr() - base

    for part, pieces in parts.items():
        for place, (numbers, rows) in pieces.items():
            if isinstance(numbers, Tensor):
                at, numbers = offset(numbers), torch.empty_like(numbers)
                read_into(file, tensor_bytes(numbers).numpy(), at)
            yield part, place, Stored(numbers, rows.dtype, rows.shape, file, offset(rows))


def _address_of(parts: Any, file: IO[bytes]) -> int:
    """The address at which the file is mapped.

    The memories of its tensors are the members ``data/N`` of the zip file, in the same order.
    """
    memories = [value.untyped_storage() for _, value in walk(parts) if isinstance(value, Tensor) and value.nbytes]
    addresses = sorted({(memory.data_ptr(), memory.nbytes()) for memory in memories})
    offsets = sorted(member for member in members_of(file).values() if member.bytes)
    bases = {address - offset for (address, _), (offset, _) in zip(addresses, offsets, strict=True)}
    if len(bases) > 1 or [size for _, size in addresses] != [size for _, size in offsets]:
        raise ValueError("the tensors are not those of the zip file")
    return next(iter(bases), 0)
