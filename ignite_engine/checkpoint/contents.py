"""Parts as they are in the files of a checkpoint, with the pieces that other ranks' files hold of sharded tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from ignite_engine.checkpoint import nested
from ignite_engine.checkpoint.filesystem import signature
from ignite_engine.checkpoint.layout import RANK_FILE, SHARED_FILE
from ignite_engine.checkpoint.manifest import Manifest
from ignite_engine.checkpoint.pack import map_pack
from ignite_engine.checkpoint.shards import (
    PIECES,
    FoundPieces,
    add_pieces,
    join,
)
from ignite_engine.checkpoint.shards import whole as read_whole
from ignite_engine.errors import CheckpointError

Problem = Callable[[str], str | None]
"""Verifies a file of a checkpoint: what is wrong with it, as the rest of a sentence, or None."""
Parts = Mapping[str, Any]


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
