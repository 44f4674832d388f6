"""The state of a run in shared memory: written at step boundaries, and found again by the ranks of the next start."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ignite_engine.checkpoint.filesystem import FileRecord
from ignite_engine.checkpoint.manifest import Manifest
from ignite_engine.checkpoint.nested import tensors_of
from ignite_engine.checkpoint.pack import Pack
from ignite_engine.checkpoint.retention import CheckpointInfo
from ignite_engine.checkpoint.shards import PIECES, add_pieces, is_placeholder, join, without_shards
from ignite_engine.checkpoint.store import Loaded
from ignite_engine.errors import CheckpointError, one_line
from ignite_engine.ext.recovery import slots
from ignite_engine.ext.recovery.slots import Boundary, Folder, Header, Slot
from ignite_engine.ranks import agreement

logger = logging.getLogger(__name__)


_Needed = list[tuple[Slot, bool]]
"""Slots, and whether more than the pieces of sharded tensors is read."""


class Memory:
    """The copies of the run that saves in a directory.

    Args:
        directory: of its checkpoints, shared by the ranks.
        settings: a copy that was made with others is not used.
    """

    def __init__(self, directory: Path, settings: str) -> None:
        self.directory, self._settings = directory, settings
        self._folder: Folder | None = None
        self._number = self._resumed = 0
        self._writes_shared = self._is_sharded = False

    def candidates(self) -> dict[Boundary, Header]:
        """What the slots of rank 0 say of each step boundary of which all ranks hold a copy; a collective."""
        name = agreement.on_rank_0(lambda: slots.folder_name(self.directory, create=False))
        if name is None:
            return {}
        if self._folder is None:
            self._folder = Folder.open(name, create=False)
        everyone = agreement.gather_objects([*self._headers()])
        on_all = [boundary for boundary in everyone[0] if all(boundary in rank for rank in everyone)]
        wanted = [boundary for boundary in on_all if boundary[-1] == self._settings]
        if on_all and not wanted:
            ignore("it is of other settings")
        elif any(everyone) and not on_all:
            ignore("the ranks do not hold the same iteration")
        elif not any(everyone) and any(agreement.gather_objects(self._folder is not None and self._folder.ranks())):
            ignore("it is torn or damaged")
        headers = self._headers()
        said = {boundary: headers[boundary][0][0].header for boundary in wanted}
        return agreement.broadcast_object({boundary: header for boundary, header in said.items() if header is not None})

    def read(self, boundary: Boundary) -> tuple[CheckpointInfo, Callable[..., Loaded]]:
        """A copy, verified; what a checkpoint of it would be, and its ``load``. A collective.

        Raises:
            CheckpointError: a rank cannot load it.
        """
        copy, problem = self._read(self._headers().get(boundary, []))
        if problems := [*filter(None, agreement.gather_objects(problem))]:
            raise CheckpointError(problems[0])
        assert copy is not None
        return copy

    def _headers(self) -> dict[Boundary, _Needed]:
        """By step boundary what this rank needs; those that it can load."""
        folder, rank = self._folder, agreement.rank()
        if folder is None:
            return {}
        found: dict[Boundary, dict[int, tuple[Slot, Header]]] = {}
        for other in folder.ranks():
            for slot in folder.of(other):
                if (header := slot.header) is not None and header.rank == other:
                    found.setdefault(header.boundary, {})[other] = slot, header
        usable = {}
        for boundary, by_rank in found.items():
            own = rank if rank < boundary[3] else 0  # a rank that did not exist then takes what rank 0 had
            with_shared = [other for other, (_, header) in by_rank.items() if header.has_shared]
            if own in by_rank and with_shared:
                whole = {own, with_shared[0]}
                needed = set(range(boundary[3])) if by_rank[own][1].is_sharded else whole
                if needed <= by_rank.keys():
                    usable[boundary] = [(by_rank[other][0], other in whole) for other in sorted(needed)]
        return usable

    def _read(self, needed: _Needed) -> tuple[tuple[CheckpointInfo, Callable[..., Loaded]] | None, str | None]:
        """The copy, or why it cannot be loaded."""
        local: dict[int, Mapping[str, Any]] = {}
        pieces: Any = {}
        of_shared: tuple[Header, dict[str, Any], Mapping[str, Any]] | None = None
        try:
            for slot, whole in needed:
                header, facts, parts = slot.read(in_place=not whole)
                add_pieces(pieces, parts.pop(PIECES, {}), lambda: None)
                names = facts.pop("shared")
                if whole and header.has_shared:
                    of_shared = header, facts, {name: parts.pop(name) for name in names}
                if whole:
                    local[header.rank] = parts
            if of_shared is None:
                raise CheckpointError("it is gone")
            header, facts, shared = of_shared
            if header.is_sharded:
                shared, local = join(shared, pieces), {rank: join(parts, pieces) for rank, parts in local.items()}
        except (CheckpointError, ValueError) as error:
            return None, one_line(error).rstrip(".")
        info, of_all = self.described(header, **facts), dict(shared)

        def load(rank: int, *, shared: bool = True, **how: object) -> Loaded:
            return Loaded(info.path, info.manifest, dict(of_all) if shared else {}, dict(local.get(rank, {})))

        return (info, load), None

    def described(self, header: Header, **facts: Any) -> CheckpointInfo:
        """A copy as if it were a checkpoint, whose path is the file that names the slots."""
        path = self.directory / slots.MARKER
        known = {"epoch": header.epochs_completed, "sequence": header.sequence, "metrics": {}, **facts}
        manifest = Manifest(
            **known,
            iteration=header.iteration,
            world_size=header.world_size,
            run_id=header.run_id,
            config=None,
            versions={},
            files={path.name: FileRecord(header.size, f"sums:{header.checksum}")},
            parts={},
            created_at="",
        )
        return CheckpointInfo(path, manifest)

    def begin(self, resumed: int | None, *, sharded: bool = False) -> str | None:
        """A run begins; a collective.

        Args:
            resumed: number of the copy that it was resumed from, which stays until the next one; None: what is there
                is stale.
            sharded: the model is, over the ranks.

        Returns:
            Why there will be no copies, as the rest of a sentence, the same on all ranks; None: there will be.
        """
        self._number = self._resumed = resumed or 0
        self._is_sharded = sharded
        try:
            agreement.agreed(slots.check_usable)
            name = agreement.on_rank_0(lambda: slots.folder_name(self.directory, create=True))
            nodes = agreement.gather_objects(slots.node())
            self._writes_shared = nodes.index(nodes[agreement.rank()]) == agreement.rank()
            if sharded and len(set(nodes)) > 1:
                raise OSError("the model is sharded over several machines")
            agreement.agreed(lambda: self._open(name or "", resumed))
        except OSError as error:
            self.end()
            return one_line(error).rstrip(".")
        return None

    def _open(self, name: str, resumed: int | None) -> None:
        if self._folder is None or self._folder.path.name != name:
            self._folder = Folder.open(name, create=True)
        assert self._folder is not None
        if resumed is None:
            self._folder.drop(agreement.rank())
        else:
            self._folder.forget_newer(agreement.rank(), resumed)
        if self._writes_shared:
            if resumed is None:
                self._drop_absent(self._folder)
            slots.clear()
            self._folder.note_owner(self.directory)

    @staticmethod
    def _drop_absent(folder: Folder) -> None:
        """Delete the slots of ranks of an earlier start that this one does not have."""
        for rank in folder.ranks():
            if rank >= agreement.world_size():
                folder.drop(rank)

    def write(
        self,
        facts: Mapping[str, Any],
        shared: Mapping[str, Any],
        local: Mapping[str, Any],
        *,
        iteration: int,
        epochs_completed: int,
        sequence: int,
        run_id: str,
    ) -> None:
        """Copy a state.

        Args:
            facts: of the manifest, as plain data.
            shared: parts that are the same on all ranks; those of one rank on each machine are written.
            local: parts of this rank.

        Raises:
            CheckpointError: a value cannot be saved; names it.
            OSError: there is no room.
        """
        assert self._folder is not None
        self._number += 1
        if self._writes_shared and self._number == self._resumed + 2:  # all ranks have made the first
            self._drop_absent(self._folder)
        if self._is_sharded:
            shared, local, _ = without_shards(shared, local)
        shared = shared if self._writes_shared else {}
        rank = agreement.rank()
        header = Header(
            number=self._number,
            iteration=iteration,
            epochs_completed=epochs_completed,
            world_size=agreement.world_size(),
            rank=rank,
            has_shared=self._writes_shared,
            is_sharded=self._is_sharded,
            sequence=sequence,
            run_id=run_id,
            settings=self._settings,
        )
        parts = {**shared, **local}
        tensors_of(parts, is_placeholder)  # which refuses what cannot be held
        pack = Pack([{**facts, "shared": list(shared)}, parts])
        own = self._folder.of(rank)
        older, newer = own[header.number % 2], own[1 - header.number % 2]
        older.write(header, pack)
        if not newer.path.exists():  # that there is room for both is known from the first copy on
            newer.reserve(pack.bytes)

    def end(self, *, keep: bool = False) -> None:
        """The run is over.

        Args:
            keep: leave this rank's copies for the next start.
        """
        if (folder := self._folder) is None:
            return
        self._folder = None
        if not keep:
            if self._writes_shared:
                with contextlib.suppress(FileNotFoundError):  # a peer has removed the folder
                    self._drop_absent(folder)
            folder.drop(agreement.rank())
            if agreement.rank() == 0:
                with contextlib.suppress(OSError):
                    os.unlink(self.directory / slots.MARKER)
        folder.close(remove_if_empty=not keep)


def ignore(reason: str) -> None:
    """Say why a run does not go on from memory."""
    if agreement.rank() == 0:
        logger.warning("The state in memory is not used: %s.", reason)
