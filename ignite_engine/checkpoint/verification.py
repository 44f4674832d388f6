"""Verifies files against manifests, and caches the results so that a prune need not read all files again.

The cache belongs to the process; a result is valid until the file changes (inode, size or times).
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from ignite_engine.checkpoint.filesystem import FileRecord, Signature, hash_file, in_threads, open_regular, signature
from ignite_engine.checkpoint.manifest import Manifest, read_manifest
from ignite_engine.checkpoint.pack import map_pack, read_pack
from ignite_engine.errors import CheckpointError, one_line

Kept = dict[tuple[Path, FileRecord], tuple[Signature, dict[str, Any]]]
"""The parts of files that were read for their verification."""
_FOUND: dict[Path, dict[str, tuple[Signature, FileRecord, str | None]]] = {}
"""By checkpoint and file: its signature and record when it was verified, and what is wrong with it."""
_SETTLED_NS = 2_000_000_000
"""A file changed less than this before it was read is not cached: it may change again within one clock tick."""


def problems_of(
    checkpoint: Path, manifest: Manifest | None = None, *, keep: Kept | None = None, kept: tuple[str, ...] = ()
) -> list[str]:
    """Everything that is wrong with a checkpoint; reads all files, empty if it is valid.

    Args:
        manifest: if it was just read; None: it is read here.
        keep: receives the parts of the files named in ``kept``.
    """
    try:
        files = (manifest or read_manifest(checkpoint)).files
    except CheckpointError as error:
        return [str(error)]
    found = in_threads(
        lambda name: _read(checkpoint / name, files[name], keep if name in kept else None),
        files,
    )
    return list(dict.fromkeys(filter(None, found)))


def read_parts(path: Path, record: FileRecord, kept: Kept, *, mapped: bool = False) -> dict[str, Any]:
    """The parts in a file of a checkpoint, after its hash was verified.

    Args:
        kept: filled by :func:`problems_of`; a file that is used is removed from it.
        mapped: as ``pack.map_pack``.

    Raises:
        CheckpointError: one line; the file is missing, damaged, or no pack (nothing was executed).
    """
    problem, key = None, (path, record)
    if mapped:
        problem = problem_of(path, record)
    elif key not in kept or kept[key][0] != signature(path):
        problem = _read(path, record, kept)
    if problem:
        raise CheckpointError(f"{path.parent} is damaged: {problem}.")
    return map_pack(path) if mapped else kept.pop(key)[1]


def problem_of(path: Path, record: FileRecord) -> str | None:
    """What is wrong with a file; uses the cache."""
    status, known, problem = _FOUND.get(path.parent, {}).get(path.name, (None, None, None))
    if known == record and status == signature(path):
        return problem
    return _read(path, record)


def is_valid(checkpoint: Path, manifest: Manifest) -> bool:
    """Whether all files have the right hash; uses the cache."""
    return not any(problem_of(checkpoint / name, record) for name, record in manifest.files.items())


def looks_sound(checkpoint: Path, manifest: Manifest) -> bool:
    """Whether all files have the right size and none is known to be damaged. Reads no file."""
    known = _FOUND.get(checkpoint, {})
    for name, record in manifest.files.items():
        status = signature(checkpoint / name)
        if status is None or status[1] != record.bytes:
            return False
        if name in known and known[name][:2] == (status, record) and known[name][2]:
            return False
    return True


def remember_written(checkpoint: Path, manifest: Manifest) -> None:
    """Cache that the files of a new checkpoint are sound: they were hashed while they were written."""
    states = {name: (signature(checkpoint / name), record) for name, record in manifest.files.items()}
    _FOUND[checkpoint] = {name: (status, record, None) for name, (status, record) in states.items() if status}


def forget(checkpoint: Path) -> None:
    """Drop a deleted checkpoint from the cache."""
    _FOUND.pop(checkpoint, None)


def _read(path: Path, record: FileRecord, keep: Kept | None = None) -> str | None:
    read_at, status = time.time_ns(), signature(path)  # a change from here on must not count as verified
    if status is None:
        return f"{path.name} is missing, or no regular file"
    try:
        with open_regular(path) as file:
            if keep is None:
                problem = record.problem(path.name, hash_file(file))
                if problem is None:
                    map_pack(path)
            else:
                found = read_pack(path, file, record)
                problem = found if isinstance(found, str) else None
                if not isinstance(found, str):
                    keep[path, record] = status, found
    except CheckpointError as error:  # it is no pack
        problem = one_line(error).rstrip(".")
    except OSError as error:
        return f"{path.name} cannot be read: {one_line(error)}"
    if read_at - max(status[2:]) > _SETTLED_NS:
        _FOUND.setdefault(path.parent, {})[path.name] = (status, record, problem)
    return problem
