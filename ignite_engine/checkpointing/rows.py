"""Large tensors in files of their own, by rows, so that several threads write them at once.

In the file that the ranks share such a tensor is a tensor on the meta device: its shape and type. The values are in the
files ``rows_N.pt``: by part and path the number of the first row, and consecutive rows. A row is what has one index in
the first dimension. Of a table of which later checkpoints hold only the rows that changed, they are in ``tables_N.pt``:
there rows with a number for each take the place of those in the checkpoints before, which the manifest names.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path as FilePath
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ignite_engine.checkpointing.digests import tensor_bytes
from ignite_engine.checkpointing.filesystem import FileRecord
from ignite_engine.checkpointing.layout import file_of
from ignite_engine.checkpointing.manifest import Manifest
from ignite_engine.checkpointing.memories import has_memory, is_row_major, memory_of
from ignite_engine.checkpointing.nested import Path, dotted, rebuilt_with_paths
from ignite_engine.checkpointing.plain_data import TensorLeaf
from ignite_engine.checkpointing.stored_rows import Stored, stored_rows
from ignite_engine.checkpointing.threads import in_threads
from ignite_engine.errors import CheckpointError, one_line

TABLES_FILE = re.compile(r"tables_\d+\.pt")
ROWS_FILE = re.compile(r"rows_\d+\.pt")
SMALLEST_BYTES = 1 << 20
"""Smaller tensors stay in the file that the ranks share: a file of their own gains nothing."""
_SPAN_BYTES = 1 << 22
"""Bytes of a tensor that are read at once: fewer than a processor's cache has."""
_Piece = tuple[int | Tensor, Tensor]
"""The number of the first row, or those of all; and the rows."""
_Span = Callable[[], None]
"""Reads some rows of a tensor."""
_Pieces = dict[Path, _Piece]
RowsOfParts = dict[str, _Pieces]
"""By part and path: rows of a tensor."""


@dataclass(frozen=True)
class Tables:
    """Tables that were taken out of the parts of a checkpoint: what is written of them, and what is not."""

    rows: RowsOfParts = field(default_factory=dict)
    """All rows, or those that changed since the last of the checkpoints in ``needs``."""
    needs: Mapping[str, FileRecord] = field(default_factory=dict)
    """See the manifest."""
    values: Mapping[str, Sequence[Tensor]] = field(default_factory=dict)
    """The whole tables, by part."""


def rows_file(number: int) -> str:
    """Name of a file with rows of large tensors."""
    return f"rows_{number}.pt"


def tables_file(number: int) -> str:
    """Name of a file with rows of tables, all or those that changed."""
    return f"tables_{number}.pt"


def take_out(
    tensors: Sequence[TensorLeaf], wanted: Callable[[Tensor], bool] = lambda tensor: tensor.nbytes >= SMALLEST_BYTES
) -> tuple[dict[tuple[str, Path], Tensor], RowsOfParts]:
    """Take tensors out of their states: the large ones, or those that are ``wanted``.

    One stays that does not come back as it was from its rows alone: with a gradient or a memory layout of its own, or
    one that shares its memory with another.

    Returns:
        A placeholder for each of them, by part and path; and all their rows, which are no copies.
    """
    users = Counter(memory_of(leaf.value) for leaf in tensors if has_memory(leaf.value))
    placeholders: dict[tuple[str, Path], Tensor] = {}
    taken: RowsOfParts = {}
    for part, path, value in tensors:
        if has_memory(value) and wanted(value) and users[memory_of(value)] == 1 and is_row_major(value):
            placeholders[part, path] = torch.empty(value.shape, dtype=value.dtype, device="meta")
            taken.setdefault(part, {})[path] = 0, value
    return placeholders, taken


def shared_out(rows: RowsOfParts, writers: int) -> list[RowsOfParts]:
    """The rows in at most ``writers`` shares of about the same number of bytes; a tensor on a device is not cut."""
    total = sum(values.nbytes for pieces in rows.values() for _, values in pieces.values())
    shares: list[RowsOfParts] = [{} for _ in range(writers)]
    before = 0
    for part, pieces in rows.items():
        for path, (first, values) in ((path, piece) for path, piece in pieces.items() if len(piece[1])):
            begin = 0
            for index, share in enumerate(shares):
                end = _row_at(values, (index + 1) * total // writers - before)
                if end > begin:
                    numbers = first + begin if isinstance(first, int) else _alone(first, begin, end)
                    share.setdefault(part, {})[path] = numbers, _alone(values, begin, end)
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


class RowFiles:
    """The files of rows of a checkpoint, and of those before it that it needs.

    Args:
        checkpoint: its directory.
        manifest: of it.
        problem: verifies a file, by its name or as the manifest's ``needs`` have it: what is wrong with it, as the rest
            of a sentence, or None.
        others: placeholders without rows are those of tensors in other files, and stay.
    """

    def __init__(
        self, checkpoint: FilePath, manifest: Manifest, problem: Callable[[str], str | None], *, others: bool = False
    ) -> None:
        self._checkpoint, self._problem, self._others = checkpoint, problem, others
        own = [name for name in manifest.files if ROWS_FILE.fullmatch(name) or TABLES_FILE.fullmatch(name)]
        self.names = [*manifest.needs, *own]
        """The oldest first."""

    def join(self, parts: Mapping[str, Any]) -> dict[str, Any]:
        """Parts as they are in ``shared.pt``, with their large tensors.

        Raises:
            CheckpointError: one line; a file is damaged, or does not hold the rows that it must.
        """
        return self._joined(parts, _whole)

    def checked(self, parts: Mapping[str, Any]) -> dict[str, Any]:
        """As :meth:`join`, with None in the place of each large tensor: nothing is read but where its rows are."""
        return self._joined(parts, lambda placeholder, pieces, spans: None)

    def _joined(
        self, parts: Mapping[str, Any], read: Callable[[Tensor, list[Stored], list[_Span]], Any]
    ) -> dict[str, Any]:
        if not self.names:
            return dict(parts)
        for found in in_threads(self._problem, self.names):
            if found:
                raise self._damaged(found)
        try:
            with contextlib.ExitStack() as files:
                return self._read(parts, read, files)
        except CheckpointError:
            raise
        except OSError as error:
            raise CheckpointError(f"{self._checkpoint} cannot be read: {one_line(error)}.") from error
        except (TypeError, ValueError, AttributeError, RuntimeError) as error:  # other plain data than rows
            raise self._damaged("a file of rows does not hold rows of tensors") from error

    def _read(
        self,
        parts: Mapping[str, Any],
        read: Callable[[Tensor, list[Stored], list[_Span]], Any],
        files: contextlib.ExitStack,
    ) -> dict[str, Any]:
        index: dict[tuple[str, Path], list[Stored]] = {}
        spans: list[_Span] = []
        for name in self.names:
            for part, place, stored in stored_rows(file_of(self._checkpoint, name), files):
                index.setdefault((part, place), []).append(stored)

        def leaf(part: str, place: Path, value: Any) -> Any:
            if not (isinstance(value, Tensor) and value.is_meta):
                return value
            pieces = index.get((part, place), [])
            if self._others and not pieces:
                return value
            if problem := _fault(value, pieces):
                raise self._damaged(f"{part} {dotted(place)} {problem}")
            return read(value, pieces, spans)

        joined = {
            part: rebuilt_with_paths(state, lambda place, value: leaf(part, place, value))  # noqa: B023
            for part, state in parts.items()
        }
        in_threads(lambda span: span(), spans)
        return joined

    def _damaged(self, problem: str) -> CheckpointError:
        return CheckpointError(f"{self._checkpoint} is damaged: {problem}.")


def records(tensor: Tensor) -> np.ndarray[Any, Any]:
    """The rows of a contiguous tensor on the CPU, each as one value of raw bytes; no copy.

    To gather and scatter such records takes a third of the time that it takes with rows of numbers.
    """
    row_bytes = math.prod(tensor.shape[1:]) * tensor.element_size()
    return tensor_bytes(tensor).numpy().view(f"V{row_bytes}")


def _fault(placeholder: Tensor, pieces: list[Stored]) -> str | None:
    """Why pieces are not the rows of a tensor, as the rest of a sentence; None: they are."""
    if any(piece.dtype != placeholder.dtype or piece.shape[1:] != placeholder.shape[1:] for piece in pieces):
        return f"has rows of another type or shape than {placeholder.dtype} {tuple(placeholder.shape[1:])}"
    end = 0
    for first, piece in _consecutive(pieces):
        if first != end:
            return f"has other rows than its own from row {end} on"
        end += piece.shape[0]
    if end != len(placeholder):
        return f"has {end} of its {len(placeholder)} rows"
    for numbers, count in ((piece.numbers, piece.shape[0]) for piece in pieces):
        if isinstance(numbers, int):
            continue
        if numbers.dtype not in (torch.int32, torch.int64) or numbers.shape != (count,):
            return "has rows without a number for each"
        if not bool((numbers[1:] > numbers[:-1]).all()):
            return "has changed rows out of their order"
        if count and not 0 <= int(numbers[0]) <= int(numbers[-1]) < end:
            return f"has changed rows beyond its {end}"
    return None


def _consecutive(pieces: list[Stored]) -> list[tuple[int, Stored]]:
    found = [(piece.numbers, piece) for piece in pieces if not isinstance(piece.numbers, Tensor)]
    return sorted(found, key=lambda piece: piece[0])


def _whole(placeholder: Tensor, pieces: list[Stored], spans: list[_Span]) -> Tensor:
    """The tensor, filled by what is added to ``spans``.

    Span by span what later checkpoints changed is written where the processor has it at hand.
    """
    values = torch.empty(placeholder.shape, dtype=placeholder.dtype)
    into, into_bytes = records(values), tensor_bytes(values).numpy()
    row_bytes = into.itemsize
    whole = _consecutive(pieces)
    changed = [(piece.numbers.numpy(), piece) for piece in pieces if isinstance(piece.numbers, Tensor)]

    def read(begin: int) -> None:
        end = min(begin + span, len(values))
        for first, piece in whole:
            start, stop = (min(max(row, first), first + piece.shape[0]) for row in (begin, end))
            piece.read(into_bytes[start * row_bytes : stop * row_bytes], (start - first) * row_bytes)
        for numbers, piece in changed:
            start, stop = numbers.searchsorted(np.array([begin, end], numbers.dtype))  # of one type: no copy
            rows = np.empty(stop - start, into.dtype)
            piece.read(rows.view(np.uint8), int(start) * row_bytes)
            into[numbers[start:stop]] = rows

    span = max(1, _SPAN_BYTES // row_bytes)
    spans += [partial(read, begin) for begin in range(0, len(values), span)]
    return values
