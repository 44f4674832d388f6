"""Large tables saved by the rows that changed since the save before.

A chain: a base with all rows, and after it checkpoints that each hold the rows whose bits differ from those of the save
before. What that save held is kept as a copy in host memory and compared, so that nothing is ever missed, whoever
changed it. A new base is written at the first save of a process, after a save that failed, when tables appear or change
their shape, when a file of the chain is gone or no longer what was written, and when the chain is :data:`LONGEST` or as
large as its base.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path as FilePath
from typing import Any

import torch
from torch import Tensor

from ignite_engine.checkpointing.filesystem import FileRecord
from ignite_engine.checkpointing.layout import named_iteration
from ignite_engine.checkpointing.load import part_names
from ignite_engine.checkpointing.load.patterns import Patterns
from ignite_engine.checkpointing.manifest import read_manifest
from ignite_engine.checkpointing.nested import Path, dotted, walk
from ignite_engine.checkpointing.plain_data import TensorLeaf
from ignite_engine.checkpointing.rows import TABLES_FILE, RowsOfParts, Tables, records, take_out
from ignite_engine.checkpointing.threads import in_threads
from ignite_engine.checkpointing.verification import Verification
from ignite_engine.errors import CheckpointError

logger = logging.getLogger(__name__)
_Key = tuple[str, Path]
LONGEST = 64
"""Maximum chain length; loading the last checkpoint opens all of them."""
_SPAN_BYTES, _CHUNK_BYTES = 1 << 24, 1 << 17
"""Rows that a thread takes, and that it compares at once: too few for torch to share them among threads of its own,
which wait for each other after every operation, for long where other programs use the cores."""


def table_patterns(texts: Iterable[str]) -> Patterns:
    """Patterns for names inside parts; a pattern without a part, such as ``embedding.*``, holds for all parts: the
    model's tensors, the optimizer's state of them and their averages.

    Raises:
        ValueError: one of them is not a pattern.
    """
    return Patterns(
        [f"*:{text}" if isinstance(text, str) and ":" not in text else text for text in texts], "delta_rows"
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
        self._kept: dict[_Key, Tensor] = {}
        self._chain: dict[str, FileRecord] = {}
        self._pending: Tables | None = None
        self._verification = Verification()

    def take(
        self,
        parts: Mapping[str, Any],
        tensors: Sequence[TensorLeaf],
        kinds: Mapping[str, str],
        *,
        iteration: int,
        writes: bool = True,
    ) -> tuple[dict[_Key, Tensor], Tables]:
        """Placeholders for the tables by part and path, and the rows to write.

        The rows of a base are those of the kept copy: they are valid until the next call.

        Args:
            tensors: all in the parts.
            iteration: of the checkpoint. A chain has each once, as the last one saved replaces the others.
            writes: False: another rank does; nothing is compared or kept.
        """
        if not self.patterns.texts:
            return {}, Tables()
        chain, self._chain = self._chain, {}  # until this one is committed
        wanted = self._tables_of(parts, kinds)
        placeholders, rows = take_out(tensors, lambda tensor: id(tensor) in wanted)
        if not writes:
            return placeholders, Tables()
        tables = {(part, path): values for part, pieces in rows.items() for path, (_, values) in pieces.items()}
        numbers = self._changed(tables) if self._continues(chain, tables, iteration) else None
        base, after = _bytes_on_disk(chain)
        if numbers is None or after + _bytes_of(numbers, tables) > base:
            self._kept = {key: _host_copy(values, self._kept.get(key)) for key, values in tables.items()}
            pending = Tables(_by_part({key: (0, kept) for key, kept in self._kept.items()}))
        else:
            changed = {key: (numbers[key], self._update(key, tables[key], numbers[key])) for key in tables}
            pending = Tables(_by_part(changed), chain)
        whole: dict[str, list[Tensor]] = {}
        for (part, _), kept in self._kept.items():
            whole.setdefault(part, []).append(kept)
        self._pending = replace(pending, values=whole)
        return placeholders, self._pending

    def committed(self, checkpoint: FilePath) -> None:
        """The checkpoint of the last :meth:`take` is on disk: the next one may be the rows that changed since."""
        pending, self._pending = self._pending, None
        if pending is not None:
            with contextlib.suppress(CheckpointError):  # somebody deleted it: the next one is a base
                manifest = read_manifest(checkpoint)
                files = manifest.files
                own = {f"{checkpoint.name}/{name}": files[name] for name in files if TABLES_FILE.fullmatch(name)}
                self._chain = {**pending.needs, **own}
                self._verification.remember_written(checkpoint, manifest)

    def stay_whole(
        self, parts: Mapping[str, Any], tensors: Sequence[TensorLeaf], kinds: Mapping[str, str]
    ) -> list[str]:
        """Tensors that the patterns name and that are saved whole each time all the same, by part and path."""
        if not self.patterns.texts:
            return []
        wanted = self._tables_of(parts, kinds)
        placeholders, _ = take_out(tensors, lambda tensor: id(tensor) in wanted)
        staying = (leaf for leaf in tensors if id(leaf.value) in wanted and (leaf.part, leaf.path) not in placeholders)
        return [f"{leaf.part} {dotted(leaf.path)}" for leaf in staying]

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

    def _continues(self, chain: Mapping[str, FileRecord], tables: Mapping[_Key, Tensor], iteration: int) -> bool:
        """Whether the rows that changed, after this chain, would be the whole."""
        names = {name.partition("/")[0] for name in chain}
        return (
            0 < len(names) < LONGEST
            and iteration not in [named_iteration(FilePath(name)) for name in names]
            and self._is_sound(chain)
            and {key: _shape_and_type(kept) for key, kept in self._kept.items()}
            == {key: _shape_and_type(values) for key, values in tables.items()}
        )

    def _is_sound(self, chain: Mapping[str, FileRecord]) -> bool:
        """Whether its files are those that were written; one that has changed since is read again."""
        for name, record in chain.items():
            path = self._directory / name
            if problem := self._verification.problem(path, record):
                logger.warning(
                    "The next checkpoint has all rows, as %s is not what was saved: %s.",
                    *(path.parent.name, problem.rstrip(".")),
                )
                return False
        return True

    def _changed(self, tables: Mapping[_Key, Tensor]) -> dict[_Key, Tensor]:
        """Numbers of the rows of each table that are not those of its copy; one tensor for those with the same."""
        found: dict[_Key, Tensor] = {}
        last: Tensor | None = None
        for key, values in tables.items():
            numbers = _differing(self._kept[key], values)
            # of a table and its optimizer's state they are usually the same, and written once
            last = last if last is not None and torch.equal(numbers, last) else numbers
            found[key] = last
        return found

    def _update(self, key: _Key, values: Tensor, numbers: Tensor) -> Tensor:
        """Copy these rows of a table; returns them."""
        rows = values.detach().index_select(0, numbers.to(values.device)).cpu()
        records(self._kept[key])[numbers.numpy()] = records(rows)
        return rows


def _differing(before: Tensor, after: Tensor) -> Tensor:
    """Numbers of the rows whose bits differ."""
    differs = torch.empty(len(before), dtype=torch.bool)
    row_bytes = before.nbytes // len(before)
    rows_in_span, rows_in_chunk = (max(1, size // row_bytes) for size in (_SPAN_BYTES, _CHUNK_BYTES))

    def compare(span: tuple[Tensor, Tensor, Tensor]) -> None:
        found, kept, now = span
        now = now.to(kept.device)
        for place, *rows in zip(*(rows_of.split(rows_in_chunk) for rows_of in (found, kept, now)), strict=True):
            torch.any(torch.ne(*rows), 1, out=place)

    in_threads(compare, zip(*(rows.split(rows_in_span) for rows in (differs, _words(before), _words(after.detach())))))
    return differs.nonzero()[:, 0].to(torch.int32 if len(before) < 1 << 31 else torch.int64)


def _words(rows: Tensor) -> Tensor:
    """The bits of contiguous rows as whole numbers, shape ``(rows, words)``; no copy."""
    flat = rows.reshape(len(rows), -1)
    row_bytes = flat.shape[1] * flat.element_size()
    return flat.view(next(kind for kind in _WORDS if row_bytes % kind.itemsize == 0))


_WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)


def _host_copy(values: Tensor, kept: Tensor | None) -> Tensor:
    """A copy in host memory, in that of an earlier one if it fits."""
    if kept is None or _shape_and_type(kept) != _shape_and_type(values):
        kept = torch.empty_like(values, device="cpu")
    return kept.copy_(values.detach())


def _by_part(found: Mapping[_Key, tuple[int | Tensor, Tensor]]) -> RowsOfParts:
    parts: RowsOfParts = {}
    for (part, path), piece in found.items():
        parts.setdefault(part, {})[path] = piece
    return parts


def _shape_and_type(tensor: Tensor) -> tuple[torch.Size, torch.dtype]:
    return tensor.shape, tensor.dtype


def _bytes_of(numbers: Mapping[_Key, Tensor], tables: Mapping[_Key, Tensor]) -> int:
    """The bytes of these rows and of their numbers."""
    of_numbers = {id(tensor): tensor.nbytes for tensor in numbers.values()}
    of_rows = (len(numbers[key]) * (values.nbytes // len(values)) for key, values in tables.items())
    return sum(of_numbers.values()) + sum(of_rows)


def _bytes_on_disk(chain: Mapping[str, FileRecord]) -> tuple[int, int]:
    """Of the base, and of what came after it."""
    base = next(iter(chain), "").partition("/")[0]
    of_base = sum(record.bytes for name, record in chain.items() if name.partition("/")[0] == base)
    return of_base, sum(record.bytes for record in chain.values()) - of_base
