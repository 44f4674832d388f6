"""The files ``shards_N.safetensors`` of a checkpoint: an index of the pieces, which are read when needed."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from torch import Tensor

from ignite_engine.checkpointing import nested
from ignite_engine.checkpointing.filesystem import signature
from ignite_engine.checkpointing.manifest import Manifest
from ignite_engine.checkpointing.pack import map_pack
from ignite_engine.checkpointing.shards import Piece, Region, join
from ignite_engine.errors import CheckpointError

_Key = tuple[str, nested.Path]
_SHARDS_FILE = re.compile(r"shards_\d+\.safetensors")


def shards_file(rank: int) -> str:
    """Name of the file with the pieces of sharded tensors that one rank wrote."""
    return f"shards_{rank}.safetensors"


class ShardFiles:
    """The pieces of all ranks.

    Args:
        checkpoint: its directory.
        manifest: of it.
        problem: verifies a file by its name: what is wrong with it, as the rest of a sentence, or None. Called before
            a value of the file is used, and once only if nothing is wrong.
    """

    def __init__(self, checkpoint: Path, manifest: Manifest, problem: Callable[[str], str | None]) -> None:
        self._checkpoint, self._manifest, self._problem = checkpoint, manifest, problem
        self.names = list(filter(_SHARDS_FILE.fullmatch, manifest.files))
        self._verified: set[str] = set()

    def join(self, parts: Mapping[str, Any]) -> dict[str, Any]:
        """Parts as they are in another file of the checkpoint, with their sharded tensors.

        Raises:
            CheckpointError: one line; pieces are missing or overlap, or a file of them is damaged.
        """
        try:
            return join(parts, lambda part, path: self._index.get((part, path), []))
        except ValueError as error:
            raise self._damaged(str(error)) from None

    @cached_property
    def _index(self) -> dict[_Key, list[Piece]]:
        index: dict[_Key, list[Piece]] = {}
        for name in self.names:
            status = signature(self._checkpoint / name)
            if status is None or status[1] != self._manifest.files[name].bytes:
                self._verify(name)  # which says what is wrong
            try:
                pieces = map_pack(self._checkpoint / name)
                for key, region, values in _pieces_of(pieces):
                    index.setdefault(key, []).append(Piece(region, values, partial(self._verify, name)))
            except Exception as error:
                self._verify(name)  # if it is damaged, that is the reason
                if isinstance(error, CheckpointError):
                    raise
                raise self._damaged(f"{name} does not hold pieces of tensors") from error
        return index

    def _verify(self, name: str) -> None:
        if name in self._verified:
            return
        if found := self._problem(name):
            raise self._damaged(found)
        self._verified.add(name)

    def _damaged(self, problem: str) -> CheckpointError:
        return CheckpointError(f"{self._checkpoint} is damaged: {problem}.")


def _pieces_of(pieces: Mapping[str, Any]) -> Iterator[tuple[_Key, Region, Tensor]]:
    for part, found in pieces.items():
        for path, (offset, values) in found.items():
            yield (part, path), Region(tuple(offset), tuple(values.shape)), values
