"""The state of a run in shared memory: written at step boundaries, and found again by the ranks of the next start."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ignite_engine.checkpointing.filesystem import FileRecord
from ignite_engine.checkpointing.layout import MEMORY_TOKEN
from ignite_engine.checkpointing.manifest import Manifest
from ignite_engine.checkpointing.pack import Pack
from ignite_engine.checkpointing.plain_data import tensors_of
from ignite_engine.checkpointing.retention import CheckpointInfo
from ignite_engine.checkpointing.shards import PIECES, add_pieces, is_placeholder, join, without_shards
from ignite_engine.checkpointing.store import Checkpoints, Loaded, Newest
from ignite_engine.errors import CheckpointError, one_line
from ignite_engine.ext.recovery import slots
from ignite_engine.ext.recovery.slots import Boundary, Folder, Header, Slot
from ignite_engine.ranks import agreement

logger = logging.getLogger(__name__)


_Needed = list[tuple[Slot, bool]]
"""Slots, and whether more than the pieces of sharded tensors is read."""


class Copy:
    """A state in memory that was read and verified on this rank, and is valid on all of them.

    Args:
        path: the file that names the slots.
        header, facts, shared: of the rank that has written what ranks share.
        local: by rank, the parts of this rank, or of rank 0 for a rank that did not exist.
    """

    def __init__(
        self,
        path: Path,
        header: Header,
        facts: Mapping[str, Any],
        shared: Mapping[str, Any],
        local: Mapping[int, Mapping[str, Any]],
    ) -> None:
        self.header, self._shared, self._local = header, shared, local
        manifest = Manifest(
            **facts,
            iteration=header.iteration,
            world_size=header.world_size,
            run_id=header.run_id,
            config=None,
            versions={},
            files={path.name: FileRecord(header.size, f"sums:{header.checksum}")},
            parts={},
            created_at="",
        )
        self.info = CheckpointInfo(path, manifest)

    def is_newer_than(self, on_disk: CheckpointInfo) -> bool:
        """Whether a checkpoint was saved before this copy was made, or of an earlier boundary of the same run."""
        manifest, own = on_disk.manifest, self.info.manifest
        if manifest.sequence <= own.sequence:
            return True
        return manifest.run_id == own.run_id and manifest.iteration <= own.iteration

    def load(self, rank: int, *, shared: bool) -> Loaded:
        path, manifest = self.info.path, self.info.manifest
        return Loaded(path, manifest, dict(self._shared) if shared else {}, dict(self._local.get(rank, {})))


class NewestState:
    """A store of checkpoints whose newest state is the copy in memory, where that is newer.

    Args:
        copy: None: there is none.
    """

    def __init__(self, store: Checkpoints, copy: Copy | None) -> None:
        self._store, self._copy = store, copy
        self.directory = store.directory

    def checkpoints(self) -> list[CheckpointInfo]:
        """On disk."""
        return self._store.checkpoints()

    def latest(self, *, healthy_only: bool = False, keep: bool = False) -> Newest:
        """The newest state, in memory or on disk, as the store's; a checkpoint is verified only if it may be newer."""
        copy, on_disk = self._copy, self._store.checkpoints()
        if copy is None or healthy_only:
            return self._store.latest(healthy_only=healthy_only, keep=keep)
        newest = max((checkpoint.manifest.sequence for checkpoint in on_disk), default=0)
        if newest < copy.info.manifest.sequence:
            _ignore("the newest checkpoint that it knew is gone")
            return self._store.latest(keep=keep)
        if all(map(copy.is_newer_than, on_disk)):
            return Newest(copy.info, [])
        found = self._store.latest(keep=keep)
        if found.checkpoint is None or copy.is_newer_than(found.checkpoint):
            return Newest(copy.info, found.skipped)
        _ignore(f"{found.checkpoint.path.name} is newer than iteration {copy.header.iteration}")
        return found

    def load(
        self, path: str | Path, rank: int = 0, *, mmap: bool = False, whole: bool = True, shared: bool = True
    ) -> Loaded:
        """Load a state, as the store's ``load``."""
        if self._copy is not None and path == self._copy.info.path:
            return self._copy.load(rank, shared=shared)
        return self._store.load(path, rank, mmap=mmap, whole=whole, shared=shared)


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

    def newest(self) -> Copy | None:
        """The newest copy that all ranks can load, read and verified; a collective. None: there is none."""
        path = self.directory / MEMORY_TOKEN
        name = agreement.on_rank_0(lambda: slots.folder_name(self.directory, create=False))
        if name is None:
            return None
        if self._folder is None:
            self._folder = Folder.open(name, create=False)
        headers = self._headers()
        everyone = agreement.gather_objects([*headers])
        on_all = [boundary for boundary in everyone[0] if all(boundary in rank for rank in everyone)]
        wanted = sorted(boundary for boundary in on_all if boundary[-1] == self._settings)
        for boundary in reversed(wanted):
            copy, problem = self._read(path, headers[boundary])
            problems = agreement.gather_objects(problem)
            if not any(problems):
                return copy
            _ignore(next(filter(None, problems)))
        if on_all and not wanted:
            _ignore("it is of other settings")
        elif any(everyone) and not on_all:
            _ignore("the ranks do not hold the same iteration")
        elif not any(everyone) and any(agreement.gather_objects(self._folder is not None and self._folder.ranks())):
            _ignore("it is torn or damaged")
        return None

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

    def _read(self, path: Path, needed: _Needed) -> tuple[Copy | None, str | None]:
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
            assert of_shared is not None
            header, facts, shared = of_shared
            if header.is_sharded:
                shared, local = join(shared, pieces), {rank: join(parts, pieces) for rank, parts in local.items()}
        except (CheckpointError, ValueError) as error:
            return None, one_line(error).rstrip(".")
        return Copy(path, header, facts, shared, local), None

    def begin(self, resumed: int | None, *, sharded: bool = False) -> str | None:
        """A run begins; a collective.

        Args:
            resumed: number of the copy that it was resumed from, which stays until the next one; None: what is there
                is stale.
            sharded: the model is, over the ranks.

        Returns:
            Why there will be no copies, as the rest of a sentence, the same on all ranks; None: there will be.
        """
        problem = next(filter(None, agreement.gather_objects(slots.why_unusable())), None)
        if problem is None:
            name, problem = agreement.on_rank_0(self._name)
        if problem is None:
            nodes = agreement.gather_objects(slots.node())
            self._writes_shared = nodes.index(nodes[agreement.rank()]) == agreement.rank()
            if sharded and len(set(nodes)) > 1:
                problem = "the model is sharded over several machines"
        if problem is None:
            problem = next(filter(None, agreement.gather_objects(self._open(name, resumed))), None)
        self._number = self._resumed = resumed or 0
        self._is_sharded = sharded
        if problem is not None:
            self.end()
        return problem

    def _name(self) -> tuple[str, str | None]:
        try:
            return slots.folder_name(self.directory, create=True) or "", None
        except OSError as error:
            return "", one_line(error).rstrip(".")

    def _open(self, name: str, resumed: int | None) -> str | None:
        try:
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
        except OSError as error:
            return one_line(error).rstrip(".")
        return None

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
            run_id=run_id,
            settings=self._settings,
        )
        parts = {**shared, **local}
        tensors_of(parts, is_placeholder)  # which refuses what cannot be held
        self._write(header, Pack([{**facts, "shared": list(shared)}, parts]))

    def _write(self, header: Header, pack: Pack) -> None:
        assert self._folder is not None
        own = self._folder.of(header.rank)
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
                    os.unlink(self.directory / MEMORY_TOKEN)
        folder.close(remove_if_empty=not keep)


def _ignore(reason: str) -> None:
    if agreement.rank() == 0:
        logger.warning("The state in memory is not used: %s.", reason)
