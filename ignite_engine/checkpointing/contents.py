"""Which files hold the parts of a checkpoint: the shared parts', each rank's, and those of what plugs in.

Sharded tensors, tables of which only changed rows are saved, and several writers plug in here: this is the one module
that knows them all. Whoever writes, commits, verifies and loads knows files by name and content.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from ignite_engine.checkpointing import nested
from ignite_engine.checkpointing.filesystem import FileRecord
from ignite_engine.checkpointing.layout import RANK_FILE, SHARED_FILE, rank_file
from ignite_engine.checkpointing.manifest import Manifest
from ignite_engine.checkpointing.part_file import is_finite, load_plain
from ignite_engine.checkpointing.plain_data import TensorLeaf, tensors_of
from ignite_engine.checkpointing.rows import RowFiles, RowsOfParts, Tables, rows_file, shared_out, tables_file, take_out
from ignite_engine.checkpointing.shard_files import ShardFiles, shards_file
from ignite_engine.checkpointing.shards import Shards, is_placeholder, is_sharded, split
from ignite_engine.checkpointing.unread import whole as read_whole

Problem = Callable[[str], str | None]
"""Verifies a file of a checkpoint, or one that it needs: what is wrong with it, as the rest of a sentence, or None."""
Parts = Mapping[str, Any]
TakeTables = Callable[[Parts, Sequence[TensorLeaf]], tuple[Mapping[tuple[str, nested.Path], Tensor], Tables]]
"""From the shared parts and all their tensors: a placeholder for each table, by part and path; and the tables' rows."""


@dataclass(frozen=True)
class Contents:
    """What one rank writes."""

    files: Mapping[str, Parts]
    """By name: plain data by part."""
    tensors: Mapping[str, Sequence[TensorLeaf]] = field(default_factory=dict)
    """All in a file, by its name, where they are known."""
    needs: Mapping[str, FileRecord] = field(default_factory=dict)
    """Files of other checkpoints, see the manifest."""
    environment: Mapping[str, Any] = field(default_factory=dict)
    """Added to the manifest's."""
    missing: Mapping[str, int] = field(default_factory=dict)
    """A count for each part, whose sum over all ranks is zero if they hold the whole part together."""
    healthy: bool = True
    """The weights are finite."""
    writers: int = 1
    """Files that are written at once."""


@dataclass(frozen=True)
class Extracted:
    """What was taken out of the parts before they were given to the store."""

    shards: Shards | None = None
    """None: nothing was, and the parts were not checked."""
    tables: Tables = field(default_factory=Tables)
    writers: int | None = None
    weights: Collection[str] = ()
    """Names of the parts that must be finite in a healthy checkpoint."""

    def copied(self, shared: Parts, local: Parts, copy: Callable[[Any], Any]) -> tuple[Parts, Parts, Extracted]:
        """Copies of the parts and of what was taken out of them; tables are copies already."""
        assert self.shards is not None
        shared, local, pieces = copy((shared, local, self.shards.of_parts))
        return shared, local, replace(self, shards=replace(self.shards, of_parts=pieces))

    def contents(self, shared: Parts, local: Parts, rank: int) -> Contents:
        """The files of a rank.

        Raises:
            CheckpointError: a value cannot be saved; names it.
        """
        tables, writers = self.tables, self.writers or 1
        tensors = [
            tensors_of(parts, is_sharded if self.shards is None else is_placeholder) for parts in (shared, local)
        ]
        of_shards, shards = split([*tensors[0], *tensors[1]]) if self.shards is None else ({}, self.shards)
        of_rows, rows = take_out(tensors[0]) if rank == 0 and writers > 1 else ({}, {})
        placeholders = [{**of_shards, **of_rows}, of_shards]
        files: dict[str, Parts] = {
            **_in_files(tables.rows, writers, tables_file),
            **_in_files(rows, writers, rows_file),
            SHARED_FILE: nested.replaced(shared, placeholders[0]) if rank == 0 else {},
            rank_file(rank): nested.replaced(local, placeholders[1]),
            shards_file(rank): shards.of_parts,
        }
        staying = [
            [leaf for leaf in leaves if (leaf.part, leaf.path) not in taken]
            for leaves, taken in zip(tensors, placeholders, strict=True)
        ]
        return Contents(
            # rank 0 has a file of pieces wherever something is sharded, which tells a reader so
            {name: parts for name, parts in files.items() if parts or (name == shards_file(0) and shards.layout)},
            {SHARED_FILE: staying[0], rank_file(rank): staying[1]},
            tables.needs,
            {"sharding": list(shards.layout)},
            shards.missing(rank),
            all(map(is_finite, self._weights([*tensors[0], *tensors[1]], shards))),
            writers,
        )

    def _weights(self, tensors: Sequence[TensorLeaf], shards: Shards) -> list[Tensor]:
        found = [leaf.value for leaf in tensors if leaf.part in self.weights and not leaf.value.is_meta]
        if self.shards is not None:  # of them the tensors hold placeholders
            found += [values for part in self.weights for _, values in shards.of_parts.get(part, {}).values()]
        return [*found, *(table for part in self.weights for table in self.tables.values.get(part, ()))]


def tensors_to_save(parts: Parts) -> list[TensorLeaf]:
    """All tensors in the parts, sharded ones, too.

    Raises:
        CheckpointError: a value cannot be saved; names it.
    """
    tensors = tensors_of(parts, is_sharded)
    split(tensors)
    return tensors


def extracted(shared: Parts, local: Parts, take_tables: TakeTables) -> tuple[Parts, Parts, Extracted]:
    """Parts with placeholders for the tensors that have files of their own, and what was taken out of them.

    Raises:
        CheckpointError: a value cannot be saved; names it.
    """
    tensors = [tensors_of(parts, is_sharded) for parts in (shared, local)]
    of_shards, shards = split([*tensors[0], *tensors[1]])
    of_tables, tables = take_tables(shared, tensors[0])
    without = nested.replaced(shared, {**of_shards, **of_tables}), nested.replaced(local, of_shards)
    return *without, Extracted(shards, tables)


def _in_files(rows: RowsOfParts, files: int, name: Callable[[int], str]) -> dict[str, RowsOfParts]:
    return {name(number): share for number, share in enumerate(shared_out(rows, files))} if rows else {}


def joined(
    checkpoint: Path,
    manifest: Manifest,
    problem: Problem,
    shared: dict[str, Any] | None,
    local: dict[str, Any],
    *,
    whole: bool = True,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Parts as they are in their files, with the tensors that are in others.

    Args:
        shared: None: not read; empty in the result.
        whole: read sharded tensors whole; False: they are ``Sharded``.

    Raises:
        CheckpointError: one line; a file is damaged, or does not hold what it must.
    """
    shards = ShardFiles(checkpoint, manifest, problem)
    rows = RowFiles(checkpoint, manifest, problem, others=bool(shards.names))
    found = [{} if shared is None else rows.join(shared), local]
    if shards.names:
        found = [shards.join(parts) for parts in found]
        if whole:
            found = [nested.rebuilt(parts, read_whole) for parts in found]
    return found[0], found[1]


def check_whole(checkpoint: Path, manifest: Manifest) -> None:
    """Check that files that are sound hold all rows and all pieces of their tensors.

    Raises:
        CheckpointError: one line; they do not.
        OSError: a file cannot be read.
    """
    shards = ShardFiles(checkpoint, manifest, lambda name: None)
    rows = RowFiles(checkpoint, manifest, lambda name: None, others=bool(shards.names))
    for name in manifest.files if shards.names or rows.names else ():
        if name != SHARED_FILE and not RANK_FILE.fullmatch(name):
            continue
        parts = load_plain(checkpoint / name, None, mmap=True)
        if name == SHARED_FILE:
            parts = rows.checked(parts)
        if shards.names:
            shards.join(parts)
