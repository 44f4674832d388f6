"""Large tensors in files of their own, by rows, so that several threads write them at once.

In the file that the ranks share such a tensor is a tensor on the meta device: its shape and type. The values are in the
files ``rows_N.pt``: by part and path the number of the first row, and consecutive rows. A row is what has one index in
the first dimension.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path as FilePath
from typing import Any, TypeVar

import torch
from torch import Tensor

from ignite_engine.checkpointing.digests import tensor_bytes
from ignite_engine.checkpointing.layout import ROWS_FILE
from ignite_engine.checkpointing.manifest import Manifest
from ignite_engine.checkpointing.nested import Path, dotted, rebuilt_with_paths, walk
from ignite_engine.checkpointing.part_file import load_plain
from ignite_engine.errors import CheckpointError

SMALLEST_BYTES = 1 << 20
"""Smaller tensors stay in the file that the ranks share: a file of their own gains nothing."""
_Piece = tuple[int, Tensor]
_Pieces = dict[Path, _Piece]
RowsOfParts = dict[str, _Pieces]
"""By part and path: the number of the first row, and the rows from there on."""
T = TypeVar("T")
R = TypeVar("R")


def take_out(parts: Mapping[str, Any], least_bytes: int = SMALLEST_BYTES) -> tuple[dict[str, Any], RowsOfParts]:
    """Take the large tensors out of states.

    One stays that does not come back as it was from its rows alone: with a gradient or a memory layout of its own, or
    one that shares its memory with another.

    Returns:
        The parts with a placeholder for each of them, and all their rows, which are no copies.
    """
    users = Counter(_memory(value) for _, value in walk(parts) if _has_memory(value))
    taken: RowsOfParts = {}

    def placeholder(part: str, path: Path, value: Any) -> Any:
        if not (_has_memory(value) and value.nbytes >= least_bytes and users[_memory(value)] == 1 and _is_plain(value)):
            return value
        taken.setdefault(part, {})[path] = 0, value
        return torch.empty(value.shape, dtype=value.dtype, device="meta")

    without = {
        part: rebuilt_with_paths(state, lambda path, value: placeholder(part, path, value))  # noqa: B023
        for part, state in parts.items()
    }
    return without, taken


def shared_out(rows: RowsOfParts, writers: int) -> list[RowsOfParts]:
    """The rows in at most ``writers`` shares of about the same number of bytes; a tensor on a device is not cut."""
    total = sum(values.nbytes for pieces in rows.values() for _, values in pieces.values())
    shares: list[RowsOfParts] = [{} for _ in range(writers)]
    before = 0
    for part, pieces in rows.items():
        for path, (first, values) in pieces.items():
            begin = 0
            for index, share in enumerate(shares):
                end = _row_at(values, (index + 1) * total // writers - before)
                if end > begin:
                    share.setdefault(part, {})[path] = first + begin, _alone(values, begin, end)
                    begin = end
            before += values.nbytes
    return [share for share in shares if share]


def _row_at(values: Tensor, byte: int) -> int:
    """The number of rows that end at this byte or before."""
    rows = len(values)
    if values.device.type != "cpu":
        return rows if byte >= values.nbytes else 0
    return max(0, min(rows, byte * rows // values.nbytes))


def _alone(values: Tensor, begin: int, end: int) -> Tensor:
    """Rows as a tensor whose memory has nothing else, as ``torch.save`` writes all of it; no copy."""
    if end - begin == len(values):
        return values
    rows = tensor_bytes(values[begin:end])
    return torch.from_numpy(rows.numpy()).view(values.dtype).view(end - begin, *values.shape[1:])


def _has_memory(value: Any) -> bool:
    return isinstance(value, Tensor) and value.layout == torch.strided and not value.is_meta


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _is_plain(tensor: Tensor) -> bool:
    """Whether a tensor is nothing but its shape, its type and its values in row-major order."""
    return (
        type(tensor) is Tensor
        and tensor.dim() > 0
        and tensor.is_contiguous()
        and tensor.untyped_storage().nbytes() == tensor.nbytes
        and not (tensor.requires_grad or tensor.is_conj() or tensor.is_neg() or tensor.is_quantized)
    )


class RowFiles:
    """The files ``rows_N.pt`` of a checkpoint.

    Args:
        checkpoint: its directory.
        manifest: of it.
        problem: verifies a file by its name: what is wrong with it, as the rest of a sentence, or None.
    """

    def __init__(self, checkpoint: FilePath, manifest: Manifest, problem: Callable[[str], str | None]) -> None:
        self._checkpoint, self._problem, self._sharded = checkpoint, problem, bool(manifest.sharding)
        self.names = [name for name in manifest.files if ROWS_FILE.fullmatch(name)]

    def join(self, parts: Mapping[str, Any]) -> dict[str, Any]:
        """Parts as they are in ``shared.pt``, with their large tensors.

        Raises:
            CheckpointError: one line; a file is damaged, or does not hold the rows that it must.
        """
        return self._joined(parts, _whole)

    def checked(self, parts: Mapping[str, Any]) -> dict[str, Any]:
        """As :meth:`join`, with None in the place of each large tensor: nothing is read but where its rows are."""
        return self._joined(parts, lambda placeholder, pieces: None)

    def _joined(self, parts: Mapping[str, Any], read: Callable[[Tensor, list[_Piece]], Any]) -> dict[str, Any]:
        if not self.names:
            return dict(parts)
        for found in in_threads(self._problem, self.names):
            if found:
                raise self._damaged(found)
        try:
            index: dict[tuple[str, Path], list[_Piece]] = {}
            for name in self.names:
                for part, pieces in load_plain(self._checkpoint / name, None, mmap=True).items():
                    for path, (first, values) in pieces.items():
                        index.setdefault((part, path), []).append((first, values))

            def leaf(part: str, path: Path, value: Any) -> Any:
                if not (isinstance(value, Tensor) and value.is_meta):
                    return value
                pieces = sorted(index.get((part, path), []), key=lambda piece: piece[0])
                if self._sharded and not pieces:
                    return value
                if problem := _gap(value, pieces):
                    raise self._damaged(f"{part} {dotted(path)} {problem}")
                return read(value, pieces)

            return {
                part: rebuilt_with_paths(state, lambda path, value: leaf(part, path, value))  # noqa: B023
                for part, state in parts.items()
            }
        except (TypeError, ValueError, AttributeError) as error:  # other plain data than rows
            raise self._damaged("a file of rows does not hold rows of tensors") from error

    def _damaged(self, problem: str) -> CheckpointError:
        return CheckpointError(f"{self._checkpoint} is damaged: {problem}.")


def _gap(placeholder: Tensor, pieces: list[_Piece]) -> str | None:
    """Why pieces, in order, are not the rows of a tensor, as the rest of a sentence; None: they are."""
    end = 0
    for first, rows in pieces:
        if first != end or rows.dtype != placeholder.dtype or rows.shape[1:] != placeholder.shape[1:]:
            return f"has other rows than its own from row {end} on"
        end += len(rows)
    return None if end == len(placeholder) else f"has {end} of its {len(placeholder)} rows"


def _whole(placeholder: Tensor, pieces: list[_Piece]) -> Tensor:
    values = torch.empty(placeholder.shape, dtype=placeholder.dtype)
    for first, rows in pieces:
        values[first : first + len(rows)] = rows
    return values


def in_threads(work: Callable[[T], R], items: Iterable[T], threads: int = 4) -> list[R]:
    """``work`` of each item, by several threads if there are several items; all have ended when one has failed."""
    todo = list(items)
    if len(todo) < 2 or threads < 2:
        return [work(each) for each in todo]
    with ThreadPoolExecutor(min(threads, len(todo)), "checkpoint-file") as pool:
        return list(pool.map(work, todo))
