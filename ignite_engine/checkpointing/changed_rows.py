"""Large tables saved by the rows that changed since the save before.

A chain: a base with all rows, and after it checkpoints that each hold the rows whose bits differ from those of the save
before. What that save held is kept as a copy in host memory and compared, so that nothing is ever missed, whoever
changed it. A new base is written at the first save of a process, after a save that failed, when tables appear or change
their shape, when a file of the chain is gone, and when the chain is :data:`LONGEST` or as large as its base.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from pathlib import Path as FilePath
from typing import Any

import torch
from torch import Tensor

from ignite_engine.checkpointing.filesystem import FileRecord, signature
from ignite_engine.checkpointing.layout import TABLES_FILE, named_iteration
from ignite_engine.checkpointing.load import part_names
from ignite_engine.checkpointing.load.patterns import Patterns
from ignite_engine.checkpointing.manifest import read_manifest
from ignite_engine.checkpointing.nested import Path, dotted, walk
from ignite_engine.checkpointing.rows import RowsOfParts, Tables, records, take_out
from ignite_engine.errors import CheckpointError

LONGEST = 64
"""Checkpoints in a chain: each is opened by whoever loads the last."""
_CHUNK_BYTES = 1 << 24
"""Rows that are compared at once: enough for all threads, and what is computed of them stays in the cache."""


def table_patterns(texts: Iterable[str]) -> Patterns:
    """Patterns for names inside parts; one that names no part, such as ``embedding.*``, is meant for all of them: the
    model's tensors, the optimizer's state of them and their averages.

    Raises:
        ValueError: one of them is not a pattern.
    """
    return Patterns(
        [f"*:{each}" if isinstance(each, str) and ":" not in each else each for each in texts], "delta_rows"
    )


class ChangedRows:
    """Takes tables out of the parts of each save: all of their rows, or those that changed since the save before.

    Args:
        directory: of the checkpoints.
        patterns: see :func:`table_patterns`. Empty: nothing is taken out.

    Raises:
        ValueError: a pattern is not one.
    """

    def __init__(self, directory: FilePath, patterns: Iterable[str]) -> None:
        self.patterns = table_patterns(patterns)
        self._directory = directory
        self._kept: dict[tuple[str, Path], Tensor] = {}
        self._chain: dict[str, FileRecord] = {}
        self._pending: Tables | None = None

    def take(
        self, parts: Mapping[str, Any], kinds: Mapping[str, str], *, iteration: int, writes: bool = True
    ) -> tuple[Mapping[str, Any], Tables]:
        """The parts with placeholders for the tables, and the rows to write.

        The rows of a base are those of the kept copy: they are valid until the next call.

        Args:
            iteration: of the checkpoint. A chain has each once, as the last one saved replaces the others.
            writes: False: another rank does; nothing is compared or kept.
        """
        if not self.patterns.texts:
            return parts, Tables()
        chain, self._chain = self._chain, {}  # until this one is committed
        wanted = self._tables_of(parts, kinds)
        parts, rows = take_out(parts, lambda tensor: id(tensor) in wanted)
        if not writes:
            return parts, Tables()
        tables = {(part, path): values for part, pieces in rows.items() for path, (_, values) in pieces.items()}
        if self._continues(chain, tables, iteration):
            changed = self._changed(tables)
            base, after = _bytes_on_disk(chain)
            is_base = after + _bytes_of(changed) > base
        else:
            self._kept = {key: values.to("cpu", copy=True) for key, values in tables.items()}
            is_base = True
        if is_base:
            changed = _by_part({key: (0, kept) for key, kept in self._kept.items()})
        self._pending = Tables(changed, {} if is_base else chain)
        return parts, self._pending

    def committed(self, checkpoint: FilePath) -> None:
        """The checkpoint of the last :meth:`take` is on disk: the next one may be the rows that changed since."""
        pending, self._pending = self._pending, None
        if pending is not None:
            with contextlib.suppress(CheckpointError):  # somebody deleted it: the next one is a base
                files = read_manifest(checkpoint).files
                own = {f"{checkpoint.name}/{name}": files[name] for name in files if TABLES_FILE.fullmatch(name)}
                self._chain = {**pending.needs, **own}

    def stay_whole(self, parts: Mapping[str, Any], kinds: Mapping[str, str]) -> list[str]:
        """Tensors that the patterns name and that are saved whole each time all the same, by part and path."""
        if not self.patterns.texts:
            return []
        wanted = self._tables_of(parts, kinds)
        without, _ = take_out(parts, lambda tensor: id(tensor) in wanted)
        return [
            f"{part} {dotted(path)}"
            for part, state in without.items()
            for path, value in walk(state)
            if id(value) in wanted
        ]

    def kept(self, part: str) -> list[Tensor]:
        """What the tables of a part held at the last :meth:`take`."""
        return [values for (of_part, _), values in self._kept.items() if of_part == part]

    def _tables_of(self, parts: Mapping[str, Any], kinds: Mapping[str, str]) -> set[int]:
        """Identities of the tensors that the patterns name."""
        return {
            id(value)
            for part, state in parts.items()
            for name, entry in (part_names.named(state, kinds.get(part)) or {}).items()
            if self.patterns.has_name(part, name)
            for _, value in walk(entry)
            if isinstance(value, Tensor) and value.dim() > 0 and value.numel() > 0
        }

    def _continues(
        self, chain: Mapping[str, FileRecord], tables: Mapping[tuple[str, Path], Tensor], iteration: int
    ) -> bool:
        """Whether the rows that changed, after this chain, would be the whole."""
        names = {name.partition("/")[0] for name in chain}
        return (
            0 < len(names) < LONGEST
            and iteration not in [named_iteration(FilePath(name)) for name in names]
            and all(_is_there(self._directory / name, record) for name, record in chain.items())
            and {key: _form(kept) for key, kept in self._kept.items()}
            == {key: _form(values) for key, values in tables.items()}
        )

    def _changed(self, tables: Mapping[tuple[str, Path], Tensor]) -> RowsOfParts:
        """The rows of each table that are not those of its copy, which gets them."""
        found: dict[tuple[str, Path], tuple[int | Tensor, Tensor]] = {}
        numbers: Tensor | None = None
        for key, values in tables.items():
            kept = self._kept[key]
            differing = _differing(kept, values)
            # of a table and its optimizer's state they are usually the same, and written once
            numbers = numbers if numbers is not None and torch.equal(differing, numbers) else differing
            rows = values.detach().index_select(0, differing.to(values.device)).cpu()
            records(kept)[differing.numpy()] = records(rows)
            found[key] = numbers, rows
        return _by_part(found)


def _differing(before: Tensor, after: Tensor) -> Tensor:
    """Numbers of the rows whose bits differ."""
    step = max(1, _CHUNK_BYTES * len(before) // before.nbytes)
    chunks = (
        (_words(kept) != _words(now).to(kept.device)).any(1).nonzero()[:, 0] + index * step
        for index, (kept, now) in enumerate(zip(before.split(step), after.detach().split(step), strict=True))
    )
    return torch.cat(list(chunks)).to(torch.int32 if len(before) < 1 << 31 else torch.int64)


def _words(rows: Tensor) -> Tensor:
    """The bits of contiguous rows as whole numbers, shape ``(rows, words)``; no copy."""
    flat = rows.reshape(len(rows), -1)
    row_bytes = flat.shape[1] * flat.element_size()
    return flat.view(next(kind for kind in _WORDS if row_bytes % kind.itemsize == 0))


_WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)


def _by_part(found: Mapping[tuple[str, Path], tuple[int | Tensor, Tensor]]) -> RowsOfParts:
    parts: RowsOfParts = {}
    for (part, path), piece in found.items():
        parts.setdefault(part, {})[path] = piece
    return parts


def _form(tensor: Tensor) -> tuple[torch.Size, torch.dtype]:
    return tensor.shape, tensor.dtype


def _is_there(path: FilePath, record: FileRecord) -> bool:
    status = signature(path)
    return status is not None and status[1] == record.bytes


def _bytes_of(rows: RowsOfParts) -> int:
    pieces = [piece for of_part in rows.values() for piece in of_part.values()]
    numbers = {id(each): each.nbytes for each, _ in pieces if isinstance(each, Tensor)}
    return sum(numbers.values()) + sum(values.nbytes for _, values in pieces)


def _bytes_on_disk(chain: Mapping[str, FileRecord]) -> tuple[int, int]:
    """Of the base, and of what came after it."""
    base = next(iter(chain)).partition("/")[0]
    of_base = sum(record.bytes for name, record in chain.items() if name.partition("/")[0] == base)
    return of_base, sum(record.bytes for record in chain.values()) - of_base
