"""Fetches checkpoints of a mirror into a folder: hashed while they come, committed whole or not at all."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

from ignite_engine.checkpointing import filesystem, layout
from ignite_engine.checkpointing.filesystem import FileRecord, hash_file, open_regular
from ignite_engine.checkpointing.manifest import MANIFEST_NAME, Manifest, parse_manifest
from ignite_engine.checkpointing.part_file import compare
from ignite_engine.checkpointing.retention import CheckpointInfo
from ignite_engine.checkpointing.verification import Verification
from ignite_engine.errors import CheckpointError
from ignite_engine.mirror.held import FOLDER
from ignite_engine.mirror.remote import Moved, Remote, Torn, order
from ignite_engine.mirror.threads import in_threads

logger = logging.getLogger(__name__)
_FETCHED = "fetched"
_TRIES = 3
_OF_A_RANK = re.compile(r"[a-z]+_(\d+)\.pt")


def newer_than_local(there: Sequence[CheckpointInfo], directory: Path) -> list[CheckpointInfo]:
    """Checkpoints of a mirror that would be resumed rather than those of a folder, the newest first.

    Only those of the run that saved the newest valid one of the folder count; in a folder without one, those of the
    run that has saved there last.
    """
    verification = Verification()
    for local in reversed(layout.scan(directory)[0]):
        newer = [
            checkpoint
            for checkpoint in there
            if checkpoint.manifest.run_id == local.manifest.run_id and order(checkpoint) > order(local)
        ]
        if newer:
            return newer[::-1]
        if not verification.problems(local.path, local.manifest):
            return []
    last = max(there, key=lambda checkpoint: checkpoint.manifest.created_at, default=None)
    if last is None:
        return []
    return [checkpoint for checkpoint in reversed(there) if checkpoint.manifest.run_id == last.manifest.run_id]


class Fetch:
    """The fetch of one checkpoint into a folder of checkpoints.

    Args:
        directory: is made if it is missing.
    """

    def __init__(self, remote: Remote, directory: Path, name: str, parallel: int = 4) -> None:
        self._remote, self._directory, self._name, self._parallel = remote, directory, name, parallel

    def missing(self) -> list[tuple[str, Manifest]]:
        """Which checkpoint is to be fetched.

        Raises:
            Torn: it is not there.
        """
        return [(self._name, self._manifest(self._name))]

    def _manifest(self, name: str) -> Manifest:
        try:
            return parse_manifest(f"{name}/{MANIFEST_NAME}", self._remote.read(f"{name}/{MANIFEST_NAME}"))
        except FileNotFoundError:
            raise Torn(f"{name} has no {MANIFEST_NAME}") from None
        except CheckpointError as error:
            raise Torn(str(error).rstrip(".")) from None

    def begin(self, name: str) -> Path:
        """The folder into which the files of a checkpoint are fetched; those of a fetch that was killed stay."""
        folder = self._folder(name)
        filesystem.ensure_directory(folder)
        return folder

    def _folder(self, name: str) -> Path:
        return self._directory / FOLDER / _FETCHED / name

    def files(self, name: str, manifest: Manifest, moved: Moved, rank: int = 0, world_size: int = 1) -> None:
        """Fetch the files of a checkpoint that are this rank's to fetch.

        Raises:
            Torn: one is not there, or is not what its manifest says.
        """
        share = [file for file, owner in _owners(manifest.files, world_size).items() if owner == rank]
        in_threads(lambda file: self._file(name, file, manifest.files[file], moved), share, self._parallel)

    def _file(self, name: str, file: str, record: FileRecord, moved: Moved) -> None:
        target = self._folder(name) / file
        if _is_right(target, record):
            return
        target.unlink(missing_ok=True)
        if _is_right(local := self._directory / name / file, record):
            with contextlib.suppress(OSError):  # a file system without hard links
                os.link(local, target, follow_symlinks=False)
                return
        for attempt in range(_TRIES):
            try:
                self._remote.get(f"{name}/{file}", target, record, moved)
                return
            except Torn:  # of a connection that was cut, perhaps
                if attempt == _TRIES - 1:
                    raise

    def commit(self, name: str, manifest: Manifest) -> Path:
        """Give a fetched checkpoint its name; a damaged one that has it goes.

        Raises:
            CheckpointError: it is not whole.
        """
        folder, committed = self._folder(name), self._directory / name
        for file, record in manifest.files.items():
            if not (folder / file).is_file() or (folder / file).stat().st_size != record.bytes:
                raise CheckpointError(f"{name} was not fetched whole: {file} is missing in {folder}.")
        for extra in folder.iterdir():
            if extra.name not in manifest.files:
                extra.unlink()
        filesystem.write_file(folder / MANIFEST_NAME, lambda file: file.write(manifest.to_json()))
        filesystem.synchronise_directory(folder)
        if committed.exists() and Verification().problems(committed):
            layout.discard([committed])
        if os.path.lexists(committed):
            committed = layout.free_name(self._directory, manifest.iteration)
        filesystem.rename(folder, committed)
        filesystem.synchronise_directory(self._directory)
        for empty in (folder.parent, folder.parent.parent):
            with contextlib.suppress(OSError):
                empty.rmdir()
        return committed


def clear(directory: Path) -> None:
    """Remove what fetches that were killed have left."""
    shutil.rmtree(directory / FOLDER / _FETCHED, ignore_errors=True)
    with contextlib.suppress(OSError):
        (directory / FOLDER).rmdir()


def fetch(remote: Remote, directory: Path, name: str, moved: Moved, parallel: int = 4) -> Path:
    """Fetch one checkpoint, in this process alone.

    Raises:
        Torn: it is not there, or damaged.
    """
    work = Fetch(remote, directory, name, parallel)
    committed = directory / name
    for checkpoint, manifest in work.missing():
        work.begin(checkpoint)
        work.files(checkpoint, manifest, moved)
        committed = work.commit(checkpoint, manifest)
    return committed


def _owners(files: Sequence[str] | dict[str, FileRecord], world_size: int) -> dict[str, int]:
    """The rank that fetches a file, by its name: of its own files each its own, of the others all in turn."""
    owners: dict[str, int] = {}
    shared = 0
    for file in files:
        if found := _OF_A_RANK.fullmatch(file):
            owners[file] = int(found[1]) % world_size
        else:
            owners[file], shared = shared % world_size, shared + 1
    return owners


def _is_right(path: Path, record: FileRecord) -> bool:
    try:
        with open_regular(path) as file:
            return compare(path.name, hash_file(file, record.algorithm), record) is None
    except OSError:
        return False
