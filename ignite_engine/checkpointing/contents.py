"""Which files hold the parts of a checkpoint: the shared parts', each rank's, and those of sharded tensors."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ignite_engine.checkpointing import nested
from ignite_engine.checkpointing.layout import RANK_FILE, SHARED_FILE, rank_file, shared_file
from ignite_engine.checkpointing.manifest import Manifest
from ignite_engine.checkpointing.part_file import is_finite, load_plain
from ignite_engine.checkpointing.plain_data import TensorLeaf, tensors_of
from ignite_engine.checkpointing.shard_files import ShardFiles, shards_file
from ignite_engine.checkpointing.shards import Shards, is_placeholder, is_sharded, split
from ignite_engine.checkpointing.unread import whole as read_whole

Problem = Callable[[str], str | None]
"""Verifies a file of a checkpoint: what is wrong with it, as the rest of a sentence, or None."""
Parts = Mapping[str, Any]


@dataclass(frozen=True)
class Contents:
    """What one rank writes."""

    files: Mapping[str, Parts]
    """By name: plain data by part."""
    tensors: Mapping[str, Sequence[TensorLeaf]] = field(default_factory=dict)
    """All in a file, by its name, where they are known."""
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
    writers: int | None = None
    weights: Collection[str] = ()
    """Names of the parts that must be finite in a healthy checkpoint."""
    wait: Callable[[], None] = lambda: None
    """Called before a value of the parts is read: what is being copied is there after it."""

    def copied(self, shared: Parts, local: Parts, copy: Callable[[Any], Any]) -> tuple[Parts, Parts, Extracted]:
        """Copies of the parts and of what was taken out of them."""
        assert self.shards is not None
        shared, local, pieces = copy((shared, local, self.shards.of_parts))
        return shared, local, replace(self, shards=replace(self.shards, of_parts=pieces))

    def contents(self, shared: Parts, local: Parts, rank: int) -> Contents:
        """The files of a rank.

        Raises:
            CheckpointError: a value cannot be saved; names it.
        """
        self.wait()
        writers = self.writers or 1
        tensors = [
            tensors_of(parts, is_sharded if self.shards is None else is_placeholder) for parts in (shared, local)
        ]
        taken, shards = split([*tensors[0], *tensors[1]]) if self.shards is None else ({}, self.shards)
        weights = [leaf.value for leaf in (*tensors[0], *tensors[1]) if leaf.part in self.weights]
        if self.shards is not None:  # of them the tensors hold placeholders
            weights += [values for part in self.weights for _, values in shards.of_parts.get(part, {}).values()]
        shared_tensors, local_tensors = (
            [leaf for leaf in leaves if (leaf.part, leaf.path) not in taken] for leaves in tensors
        )
        shared = nested.replaced(shared, taken)
        names = _file_of_parts(shared, shared_tensors, writers)
        files: dict[str, dict[str, Any]] = {}
        for part, state in shared.items() if rank == 0 else ():
            files.setdefault(names[part], {})[part] = state
        files |= {rank_file(rank): nested.replaced(local, taken), shards_file(rank): shards.of_parts}
        found: dict[str, list[TensorLeaf]] = {rank_file(rank): local_tensors}
        for leaf in shared_tensors:
            found.setdefault(names[leaf.part], []).append(leaf)
        return Contents(
            # rank 0 has a file of pieces wherever something is sharded, which tells a reader so
            {name: parts for name, parts in files.items() if parts or (name == shards_file(0) and shards.layout)},
            {name: found.get(name, []) for name in files if name != shards_file(rank)},
            {"sharding": list(shards.layout)},
            shards.missing(rank),
            all(is_finite(value) for value in weights if not value.is_meta),
            writers,
        )


def _file_of_parts(parts: Parts, tensors: Sequence[TensorLeaf], writers: int) -> dict[str, str]:
    """The file of each part: whole parts, the largest first, each in the smallest of so many files."""
    sizes = dict.fromkeys(parts, 0)
    for leaf in tensors:
        sizes[leaf.part] += leaf.value.numel() * leaf.value.element_size()
    filled = [0] * writers
    names: dict[str, str] = {}
    for part in sorted(sizes, key=sizes.__getitem__, reverse=True):
        number = filled.index(min(filled))
        filled[number] += sizes[part]
        names[part] = shared_file(number)
    return names


def check_parts(parts: Parts) -> None:
    """Refuse what no checkpoint could hold.

    Raises:
        CheckpointError: a value cannot be saved; names it.
    """
    split(tensors_of(parts, is_sharded))


def extracted(shared: Parts, local: Parts) -> tuple[Parts, Parts, Extracted]:
    """Parts with placeholders for the sharded tensors, and what was taken out of them.

    Raises:
        CheckpointError: a value cannot be saved; names it.
    """
    taken, shards = split([*tensors_of(shared, is_sharded), *tensors_of(local, is_sharded)])
    return nested.replaced(shared, taken), nested.replaced(local, taken), Extracted(shards)


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
    found = [shared or {}, local]
    if shards.names:
        found = [shards.join(parts) for parts in found]
        if whole:
            found = [nested.rebuilt(parts, read_whole) for parts in found]
    return found[0], found[1]


def check_whole(checkpoint: Path, manifest: Manifest) -> None:
    """Check that files that are sound hold all pieces of their tensors.

    Raises:
        CheckpointError: one line; they do not.
        OSError: a file cannot be read.
    """
    shards = ShardFiles(checkpoint, manifest, lambda name: None)
    for name in manifest.files if shards.names else ():
        if SHARED_FILE.fullmatch(name) or RANK_FILE.fullmatch(name):
            shards.join(load_plain(checkpoint / name, None, mmap=True))
