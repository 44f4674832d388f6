"""Which files hold the parts of a checkpoint: the shared parts', each rank's, and those of what plugs in.

Sharded tensors, tables of which only changed rows are saved, and several writers plug in here: this is the one module
that knows them all. Whoever writes, commits, verifies and loads knows files by name and content.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ignite_engine.checkpointing.filesystem import FileRecord
from ignite_engine.checkpointing.layout import (
    ROWS_FILE,
    SHARDS_FILE,
    SHARED_FILE,
    TABLES_FILE,
    rank_file,
    rows_file,
    shards_file,
    tables_file,
)
from ignite_engine.checkpointing.manifest import Manifest
from ignite_engine.checkpointing.nested import rebuilt
from ignite_engine.checkpointing.part_file import load_plain, refuse_what_cannot_be_loaded
from ignite_engine.checkpointing.rows import RowFiles, RowsOfParts, Tables, shared_out, take_out
from ignite_engine.checkpointing.shard_files import ShardFiles
from ignite_engine.checkpointing.shards import Shards, missing_numbers, split
from ignite_engine.checkpointing.shards import whole as read_whole

Problem = Callable[[str], str | None]
"""Verifies a file of a checkpoint, or one that it needs: what is wrong with it, as the rest of a sentence, or None."""


@dataclass(frozen=True)
class Contents:
    """What one rank writes."""

    files: Mapping[str, Mapping[str, Any]]
    """By name: plain data by part."""
    needs: Mapping[str, FileRecord] = field(default_factory=dict)
    """Files of other checkpoints, see the manifest."""
    sharding: tuple[str, ...] = ()
    """See the manifest."""
    missing: Mapping[str, int] = field(default_factory=dict)
    """By part a count that is zero over all ranks if they hold the whole of it together."""
    writers: int = 1
    """Files that are written at once."""


@dataclass(frozen=True)
class Extracted:
    """What was taken out of the parts before they were given to the store."""

    shards: Shards | None = None
    """None: nothing was, and the parts were not checked."""
    tables: Tables = field(default_factory=Tables)
    writers: int | None = None

    def contents(self, shared: Mapping[str, Any], local: Mapping[str, Any], rank: int) -> Contents:
        """The files of a rank.

        Raises:
            CheckpointError: a value cannot be saved; names it.
        """
        shards, tables, writers = self.shards, self.tables, self.writers or 1
        if shards is None:
            for parts in (shared, local):
                refuse_what_cannot_be_loaded(parts)
            shared, local, shards = split(shared, local)
        mine = {**shared, **local} if rank == 0 else {}
        missing = missing_numbers(mine, shards, tables.rows) if shards.layout else {}
        without, rows = take_out(shared) if rank == 0 and writers > 1 else (shared, {})
        files: dict[str, Mapping[str, Any]] = {
            **_in_files(tables.rows, writers, tables_file),
            **_in_files(rows, writers, rows_file),
            SHARED_FILE: without if rank == 0 else {},
            rank_file(rank): local,
            shards_file(rank): shards.of_parts,
        }
        files = {name: parts for name, parts in files.items() if parts}
        return Contents(files, tables.needs, shards.layout, missing, writers)


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
    found = [{} if shared is None else RowFiles(checkpoint, manifest, problem).join(shared), local]
    if manifest.sharding:
        shards = ShardFiles(checkpoint, manifest, problem)
        found = [shards.join(parts) for parts in found]
        if whole:
            found = [rebuilt(parts, read_whole) for parts in found]
    return found[0], found[1]


def check_whole(checkpoint: Path, manifest: Manifest) -> None:
    """Check that files that are sound hold all rows and all pieces of their tensors.

    Raises:
        CheckpointError: one line; they do not.
        OSError: a file cannot be read.
    """
    rows = RowFiles(checkpoint, manifest, lambda name: None)
    shards = ShardFiles(checkpoint, manifest, lambda name: None)
    for name in manifest.files if manifest.sharding or rows.names else ():
        if any(kind.fullmatch(name) for kind in (ROWS_FILE, TABLES_FILE, SHARDS_FILE)):
            continue
        parts = load_plain(checkpoint / name, None, mmap=True)
        if name == SHARED_FILE:
            parts = rows.checked(parts)
        if manifest.sharding:
            shards.join(parts)
