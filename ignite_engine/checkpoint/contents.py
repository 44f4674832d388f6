"""Which files hold the parts of a checkpoint: the shared parts', each rank's, and those of sharded tensors."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ignite_engine.checkpoint import nested
from ignite_engine.checkpoint.filesystem import signature
from ignite_engine.checkpoint.layout import RANK_FILE, SHARED_FILE, rank_file, shared_file
from ignite_engine.checkpoint.manifest import Manifest
from ignite_engine.checkpoint.nested import TensorLeaf, is_made_of_tensors, taken_apart, tensors_of
from ignite_engine.checkpoint.pack import map_pack
from ignite_engine.checkpoint.shards import (
    PIECES,
    FoundPieces,
    Shards,
    add_pieces,
    is_placeholder,
    join,
    without_shards,
)
from ignite_engine.checkpoint.shards import whole as read_whole
from ignite_engine.errors import CheckpointError

Problem = Callable[[str], str | None]
"""Verifies a file of a checkpoint: what is wrong with it, as the rest of a sentence, or None."""
Parts = Mapping[str, Any]


@dataclass(frozen=True)
class Contents:
    """What one rank writes."""

    files: Mapping[str, Parts]
    """By name: plain data by part."""
    environment: Mapping[str, Any] = field(default_factory=dict)
    """Added to the manifest's."""
    missing: Mapping[str, int] = field(default_factory=dict)
    """A count for each part, whose sum over all ranks is zero if they hold the whole part together."""
    healthy: bool = True
    """The weights are finite."""
    writers: int = 1
    """Files that are written at once."""


def contents_of(
    shared: Parts, local: Parts, rank: int, *, shards: Shards | None, writers: int, weights: Collection[str]
) -> Contents:
    """The files of a rank.

    Args:
        shards: what was taken out of the parts; None: nothing was.
        writers: see :class:`Contents`; the shared parts are spread over so many files.
        weights: names of the parts that must be finite in a healthy checkpoint.

    Raises:
        CheckpointError: a value cannot be saved; names it.
    """
    if shards is None:
        shared, local, shards = without_shards(shared, local)
    tensors, own = tensors_of(shared, is_placeholder), tensors_of(local, is_placeholder)
    values = [leaf.value for leaf in (*tensors, *own) if leaf.part in weights and not leaf.value.is_meta]
    pieces = local.get(PIECES, {})
    values += [values for part in weights for _, values in pieces.get(part, {}).values()]
    names = _file_of_parts(shared, tensors, writers)
    files: dict[str, dict[str, Any]] = {}
    for part, state in shared.items() if rank == 0 else ():
        files.setdefault(names[part], {})[part] = state
    files[rank_file(rank)] = dict(local)
    return Contents(
        {name: parts for name, parts in files.items() if parts},
        {"sharding": list(shards.layout)},
        shards.missing(rank, pieces),
        all(map(is_finite, values)),
        writers,
    )


def is_finite(value: Tensor) -> bool:
    """Whether a floating point tensor is finite; of a sharded one, this rank's piece. Reads it once, without a copy."""
    if is_made_of_tensors(value):
        return all(map(is_finite, taken_apart(value)[0].values()))
    value = value.detach()
    if hasattr(value, "to_local"):
        value = value.to_local()
    if value.layout != torch.strided:
        value = value.coalesce().values() if value.layout == torch.sparse_coo else value.values()
    if value.numel() == 0 or not (value.is_floating_point() or value.is_complex()):
        return True
    if value.is_complex():
        value = torch.view_as_real(value.resolve_conj())
    if value.element_size() == 1:
        value = value.float()  # the 8-bit formats have no aminmax
    smallest, largest = torch.aminmax(value)
    return bool(torch.isfinite(smallest)) and bool(torch.isfinite(largest))


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


def joined(
    checkpoint: Path, manifest: Manifest, problem: Problem, shared: Parts, local: Parts, *, whole: bool = True
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Parts as they are in their files, with the tensors whose pieces are in those of all ranks.

    Args:
        whole: read sharded tensors whole; False: they are ``Sharded``.

    Raises:
        CheckpointError: one line; a file is damaged, or does not hold what it must.
    """
    pieces = _pieces_in(checkpoint, manifest, problem)
    found = []
    for parts in (shared, local):
        own = {name: part for name, part in parts.items() if name != PIECES}
        if pieces is not None:
            own = _join(checkpoint, own, pieces)
            own = nested.rebuilt(own, read_whole) if whole else own
        found.append(own)
    return found[0], found[1]


def check_whole(checkpoint: Path, manifest: Manifest) -> None:
    """Check that files that are sound hold all pieces of their tensors.

    Raises:
        CheckpointError: one line; they do not.
        OSError: a file cannot be read.
    """
    pieces = _pieces_in(checkpoint, manifest, lambda name: None)
    for name in manifest.files if pieces is not None else ():
        if SHARED_FILE.fullmatch(name) or RANK_FILE.fullmatch(name):
            parts = map_pack(checkpoint / name)
            parts.pop(PIECES, None)
            _join(checkpoint, parts, pieces or {})


def _join(checkpoint: Path, parts: Parts, pieces: FoundPieces) -> dict[str, Any]:
    try:
        return join(parts, pieces)
    except ValueError as error:
        raise CheckpointError(f"{checkpoint} is damaged: {error}.") from None


def _pieces_in(checkpoint: Path, manifest: Manifest, problem: Problem) -> FoundPieces | None:
    """The pieces of all ranks, whose values are read when they are needed; None: nothing is sharded.

    A file is verified before a value of it is used.
    """
    names = [name for name, parts in manifest.parts.items() if PIECES in parts and name in manifest.files]
    verified = set[str]()

    def verify(name: str) -> None:
        if name not in verified and (found := problem(name)):
            raise CheckpointError(f"{checkpoint} is damaged: {found}.")
        verified.add(name)

    pieces: FoundPieces = {}
    for name in names:
        status = signature(checkpoint / name)
        if status is None or status[1] != manifest.files[name].bytes:
            verify(name)  # which says what is wrong
        try:
            add_pieces(pieces, map_pack(checkpoint / name)[PIECES], partial(verify, name))
        except Exception as error:
            verify(name)  # if it is damaged, that is the reason
            if isinstance(error, CheckpointError):
                raise
            raise CheckpointError(f"{checkpoint} is damaged: {name} does not hold pieces of tensors.") from error
    return pieces if names else None
