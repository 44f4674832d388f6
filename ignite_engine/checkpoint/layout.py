"""The names in a directory of checkpoints: committed, being written, being removed."""

from __future__ import annotations

import logging
import os
import re
import secrets
from functools import lru_cache
from pathlib import Path

from ignite_engine.checkpoint import filesystem
from ignite_engine.checkpoint.filesystem import Signature, signature
from ignite_engine.checkpoint.lock import LOOKS, InUse, lock
from ignite_engine.checkpoint.manifest import MANIFEST_NAME, Manifest, read_manifest
from ignite_engine.checkpoint.retention import CheckpointInfo
from ignite_engine.errors import CheckpointError, one_line

logger = logging.getLogger(__name__)

_COMMITTED = re.compile(r"iteration_(\d{8,})(?:\.\d+)?")
_TEMPORARY = ".tmp-"
_TRASH = ".trash-"
_LEFTOVER = re.compile(
    rf"(?P<prefix>{re.escape(_TEMPORARY)}|{re.escape(_TRASH)}){_COMMITTED.pattern}-[0-9a-f]{{8}}"
    r"|\..+\.tmp-[0-9a-f]{8}"  # from an interrupted replace_file()
)


def rank_file(rank: int) -> str:
    """Name of the file with the parts of one rank."""
    return f"rank_{rank}.safetensors"


def shared_file(number: int) -> str:
    """Name of a file with parts that the ranks share; there is one for each writer."""
    return f"shared_{number}.safetensors" if number else "shared.safetensors"


RANK_FILE, SHARED_FILE = re.compile(r"rank_\d+\.safetensors"), re.compile(r"shared(_\d+)?\.safetensors")


def checkpoint_name(iteration: int) -> str:
    """Name of the directory of a committed checkpoint."""
    return f"iteration_{iteration:08d}"


def temporary_path(directory: Path, iteration: int) -> Path:
    """A new name for a checkpoint that is being written."""
    return directory / f"{_TEMPORARY}{checkpoint_name(iteration)}-{secrets.token_hex(4)}"


def named_iteration(path: Path) -> int | None:
    """The iteration in the name of a committed checkpoint; None for any other name."""
    match = _COMMITTED.fullmatch(path.name)
    return int(match.group(1)) if match else None


def manifest_of(checkpoint: Path) -> Manifest:
    """As ``read_manifest``, but cached until the file changes.

    Raises:
        CheckpointError: as ``read_manifest``.
    """
    return _manifest(checkpoint, signature(checkpoint / MANIFEST_NAME))


@lru_cache(maxsize=1024)
def _manifest(checkpoint: Path, state: Signature | None) -> Manifest:
    return read_manifest(checkpoint)


def scan(directory: Path) -> tuple[list[CheckpointInfo], list[tuple[Path, str]]]:
    """The committed checkpoints in a directory.

    Manifests are cached, so the cost of a save does not grow with the number of checkpoints.

    Returns:
        Those with a readable manifest in the order they were saved, and path and reason of those without.
    """
    for _ in range(LOOKS):
        readable: list[CheckpointInfo] = []
        unreadable: list[tuple[Path, str]] = []
        are_there = True
        for path in _committed(directory):
            if path.is_symlink():  # its target may belong to another run, and would be pruned with this run's
                unreadable.append((path, "it is a symbolic link, which is neither read nor deleted"))
                continue
            try:
                readable.append(CheckpointInfo(path, manifest_of(path)))
            except CheckpointError as error:
                if path.exists():
                    unreadable.append((path, str(error)))
                else:
                    are_there = False
        if are_there:  # else one was deleted meanwhile, and a newer one may have come
            break
    readable.sort(key=lambda checkpoint: (checkpoint.manifest.sequence, checkpoint.iteration, checkpoint.path.name))
    return readable, unreadable


def _committed(directory: Path) -> list[Path]:
    try:
        with os.scandir(directory) as found:
            return sorted(Path(each.path) for each in found if _COMMITTED.fullmatch(each.name) and each.is_dir())
    except (FileNotFoundError, NotADirectoryError):
        return []


def free_name(directory: Path, iteration: int) -> Path:
    """A free name for a checkpoint that is about to be committed: the plain name, or a revision of it."""
    plain = directory / checkpoint_name(iteration)
    path, revision = plain, 0
    while os.path.lexists(path):  # a dangling link, too
        revision += 1
        path = plain.with_name(f"{plain.name}.{revision}")
    return path


def discard(paths: list[Path]) -> None:
    """Remove committed checkpoints; a kill never leaves a partly removed one under its committed name.

    Raises:
        OSError: the first failure, raised after the other checkpoints were removed.
    """
    trash: list[Path] = []
    errors: list[OSError] = []
    for path in paths:
        target = path.with_name(f"{_TRASH}{path.name}-{secrets.token_hex(4)}")
        try:
            filesystem.rename(path, target)
        except OSError as error:
            errors.append(error)
        else:
            trash.append(target)
    for parent in {removed.parent for removed in trash}:
        filesystem.synchronise_directory(parent)  # the new name is durable before the content goes
    for removed in trash:
        try:
            filesystem.remove_tree(removed)
        except OSError as error:
            errors.append(error)
    if errors:
        raise errors[0]


def sweep(directory: Path) -> list[Path]:
    """Remove what interrupted saves and removals have left.

    A temporary directory with a living writer stays. What cannot be removed stays, with a warning. Of a symbolic link
    the link is removed.
    """
    removed: list[Path] = []
    if not directory.is_dir():
        return removed
    for path in sorted(directory.iterdir()):
        found = _LEFTOVER.fullmatch(path.name)
        if found is None:
            continue
        try:
            if found["prefix"] != _TEMPORARY or path.is_symlink() or _has_no_writer(path):
                filesystem.remove_tree(path)
                removed.append(path)
            else:
                logger.warning("%s was left: another process is writing it.", path)
        except FileNotFoundError:  # another process was faster
            continue
        except OSError as error:
            logger.warning("%s is a leftover that cannot be deleted: %s.", path, one_line(error))
    return removed


def _has_no_writer(path: Path) -> bool:
    try:
        with lock(path) as is_locked:
            return is_locked
    except InUse:
        return False
