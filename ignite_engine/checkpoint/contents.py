"""Joins the parts in a checkpoint's files with the pieces of sharded tensors that other ranks' files hold."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

from ignite_engine.checkpoint import nested
from ignite_engine.checkpoint.manifest import Manifest
from ignite_engine.checkpoint.pack import map_pack
from ignite_engine.checkpoint.shards import PIECES, FoundPieces, add_pieces, join
from ignite_engine.checkpoint.shards import whole as read_whole
from ignite_engine.checkpoint.verification import problem_of
from ignite_engine.errors import CheckpointError

Parts = Mapping[str, Any]


def joined(checkpoint: Path, manifest: Manifest, *groups: Parts, whole: bool = True) -> list[dict[str, Any]]:
    """The parts with their sharded tensors, whose pieces are in the files of all ranks.

    Each file with pieces is verified before a value in it is used.

    Args:
        groups: mappings of parts, as read from their files.
        whole: read sharded tensors; False: return them as ``Sharded``, to be read later.

    Raises:
        CheckpointError: one line; a file is damaged, or does not hold what it must.
    """
    pieces: FoundPieces = {}

    @cache
    def verify(name: str) -> None:
        if problem := problem_of(checkpoint / name, manifest.files[name]):
            raise CheckpointError(f"{checkpoint} is damaged: {problem}.")

    names = [name for name, parts in manifest.parts.items() if PIECES in parts and name in manifest.files]
    for name in names:
        try:
            add_pieces(pieces, map_pack(checkpoint / name)[PIECES], partial(verify, name))
        except Exception as error:
            verify(name)  # if it is damaged, that is the reason
            raise CheckpointError(f"{checkpoint} is damaged: {name} does not hold pieces of tensors.") from error
    found = [{name: part for name, part in parts.items() if name != PIECES} for parts in groups]
    if not names:
        return found
    try:
        found = [join(parts, pieces) for parts in found]
    except ValueError as error:
        raise CheckpointError(f"{checkpoint} is damaged: {error}.") from None
    return [nested.rebuilt(parts, read_whole) for parts in found] if whole else found
