"""Which files were found sound, so that a prune after each save need not read all of them again."""

from __future__ import annotations

import time
from collections.abc import Container
from pathlib import Path
from typing import Any

from ignite_engine.checkpoint.contents import check_whole
from ignite_engine.checkpoint.filesystem import FileRecord, Signature, hash_file, in_threads, open_regular, signature
from ignite_engine.checkpoint.manifest import Manifest, read_manifest
from ignite_engine.checkpoint.pack import map_pack, read_pack
from ignite_engine.errors import CheckpointError, one_line

_Found = tuple[Signature, FileRecord, str | None]
_READ: dict[Path, dict[str, _Found]] = {}
"""Process-wide cache by checkpoint and file, shared by all stores; bypassed by a full verification."""
_SETTLED_NS = 2_000_000_000
"""A file that changed less than this before it was read may change again within one tick of its file system's clock."""


class Verification:
    """Verifies files against manifests and remembers what it found until a file changes (inode, size or times)."""

    def __init__(self) -> None:
        self._found: dict[Path, dict[str, _Found]] = {}
        self._parts: dict[tuple[Path, FileRecord], tuple[Signature, dict[str, Any]]] = {}

    def problems(self, checkpoint: Path, manifest: Manifest | None = None, keep: Container[str] = ()) -> list[str]:
        """All that is wrong with a checkpoint, everything read again; empty if it is valid.

        Args:
            manifest: it was just read; None: it is read here.
            keep: names of files whose parts are kept for :meth:`take_parts`.
        """
        self._parts.clear()
        try:
            manifest = manifest or read_manifest(checkpoint)
        except CheckpointError as error:
            return [str(error)]
        read = in_threads(
            lambda name: self._read(checkpoint / name, manifest.files[name], name in keep), manifest.files
        )
        return list(dict.fromkeys(filter(None, read))) or self._missing_pieces(checkpoint, manifest)

    def take_parts(self, path: Path, record: FileRecord) -> dict[str, Any] | None:
        """What was kept of a file when it was verified, once; None: nothing, or it has changed since."""
        status, parts = self._parts.pop((path, record), (None, None))
        return parts if status is not None and status == signature(path) else None

    def problem(self, path: Path, record: FileRecord) -> str | None:
        """What is wrong with a file; one verified before and unchanged since is not read again."""
        found = self.known(path, record)
        return self._read(path, record) if found is None else found[2]

    def is_valid(self, checkpoint: Path, manifest: Manifest) -> bool:
        """Whether all files have the right hash; a file verified before and unchanged since is not read again."""
        return not any(self.problem(checkpoint / name, record) for name, record in manifest.files.items())

    def looks_sound(self, checkpoint: Path, manifest: Manifest) -> bool:
        """Whether all files are there in their right size and none is known to be damaged. Reads nothing."""
        for name, record in manifest.files.items():
            path = checkpoint / name
            status, known = signature(path), self.known(path, record)
            if status is None or status[1] != record.bytes or (known is not None and known[2]):
                return False
        return True

    def remember_written(self, checkpoint: Path, manifest: Manifest) -> None:
        """The files of a checkpoint that was hashed while it was written."""
        for name, record in manifest.files.items():
            if (status := signature(checkpoint / name)) is not None:
                self._found.setdefault(checkpoint, {})[name] = (status, record, None)

    def forget(self, checkpoint: Path) -> None:
        """A checkpoint that is gone."""
        for memory in (self._found, _READ):
            memory.pop(checkpoint, None)

    def _missing_pieces(self, checkpoint: Path, manifest: Manifest) -> list[str]:
        """What a checkpoint lacks whose files are sound."""
        try:
            check_whole(checkpoint, manifest)
        except (CheckpointError, OSError) as error:
            return [one_line(error)]
        return []

    def known(self, path: Path, record: FileRecord) -> _Found | None:
        """What was found when a file was verified; None: it was not, or has changed since."""
        for memory in (self._found, _READ):
            found = memory.get(path.parent, {}).get(path.name)
            if found is not None and found[1] == record and found[0] == signature(path):
                return found
        return None

    def _read(self, path: Path, record: FileRecord, keep: bool = False) -> str | None:
        read_at, status = time.time_ns(), signature(path)  # a change from here on must not count as verified
        if status is None:
            return f"{path.name} is missing"
        try:
            with open_regular(path) as file:
                if keep:
                    found = read_pack(path, file, record)
                    problem = found if isinstance(found, str) else None
                    if not isinstance(found, str):
                        self._parts[path, record] = status, found
                else:
                    problem = record.problem(path.name, hash_file(file, record.algorithm))
                    if problem is None:
                        map_pack(path)
        except CheckpointError as error:  # it is no pack
            problem = one_line(error).rstrip(".")
        except OSError as error:
            return f"{path.name} cannot be read: {one_line(error)}"
        self._found.setdefault(path.parent, {})[path.name] = (status, record, problem)
        if read_at - max(status[2:]) > _SETTLED_NS:
            _READ.setdefault(path.parent, {})[path.name] = (status, record, problem)
        return problem
