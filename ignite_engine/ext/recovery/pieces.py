"""States that are sharded over ranks: each rank copies its pieces, and whoever resumes reads what it needs of all."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ignite_engine.checkpointing import nested
from ignite_engine.checkpointing.plain_data import tensors_of
from ignite_engine.checkpointing.shards import Piece, Region, is_sharded, join, split
from ignite_engine.errors import CheckpointError

PIECES = "pieces of sharded tensors"
"""Name of the part of a rank that holds them."""


def with_pieces_apart(
    shared: Mapping[str, Any], local: Mapping[str, Any]
) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Parts with a placeholder for each sharded tensor; this rank's pieces are a part of their own.

    Raises:
        CheckpointError: a tensor is sharded in a way that cannot be saved; names it.
    """
    placeholders, shards = split([leaf for parts in (shared, local) for leaf in tensors_of(parts, is_sharded)])
    return nested.replaced(shared, placeholders), {**nested.replaced(local, placeholders), PIECES: shards.of_parts}


def joined(parts: Mapping[str, Any], pieces_of_ranks: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Parts with their sharded tensors, each of which is read from the pieces when it is needed.

    Raises:
        CheckpointError: one line; pieces are missing.
    """
    found: dict[tuple[str, nested.Path], list[Piece]] = {}
    for of_parts in pieces_of_ranks:
        for part, pieces in of_parts.items():
            for path, (offset, values) in pieces.items():
                region = Region(tuple(offset), tuple(values.shape))
                found.setdefault((part, path), []).append(Piece(region, values, lambda: None))
    try:
        return join(parts, lambda part, path: found.get((part, path), []))
    except ValueError as error:
        raise CheckpointError(f"The copy in memory is damaged: {error}.") from None
