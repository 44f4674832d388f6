"""The parts of a checkpoint: plain data in, plain data out, one ``torch.save`` file for a mapping of named parts."""

from __future__ import annotations

import contextvars
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from ignite_engine.checkpointing.filesystem import PIECE_BYTES, FileRecord, hash_file, open_regular, write_file
from ignite_engine.checkpointing.hashed_read import Memory, read_hashed, unpickled
from ignite_engine.checkpointing.memories import compacted
from ignite_engine.checkpointing.nested import replaced, walk
from ignite_engine.checkpointing.plain_data import TensorLeaf
from ignite_engine.errors import CheckpointError, one_line

_SMALLEST_WITHOUT_CRC = 1 << 24
"""A smaller file is one that zip programs can test, too."""
_CONFIG_IS_OF_THE_CONTEXT = torch.__version__ >= "2.12"
"""Before, torch's options are of the process: a user's own ``torch.save`` in another thread would see ours."""


def is_finite(value: Tensor) -> bool:
    """Whether a floating point tensor is finite; of a sharded one, this rank's piece. Reads it once, without a copy."""
    value = value.detach()
    if hasattr(value, "to_local"):
        value = value.to_local()
    if value.layout != torch.strided:
        value = value.coalesce().values() if value.layout == torch.sparse_coo else value.values()
    if value.numel() == 0 or not (value.is_floating_point() or value.is_complex()):
        return True
    if value.is_complex():
        value = torch.view_as_real(value.resolve_conj())
    if value.element_size() == 1:
        value = value.float()  # the 8-bit formats have no aminmax
    smallest, largest = torch.aminmax(value)
    return bool(torch.isfinite(smallest)) and bool(torch.isfinite(largest))


def write_parts(path: Path, parts: Mapping[str, Any], tensors: Sequence[TensorLeaf] | None = None) -> FileRecord:
    """Write named parts to a new file, fsynced; the hash is taken while writing.

    Args:
        tensors: all in the parts; None: they are looked for.
    """
    if tensors is None:
        tensors = [
            TensorLeaf(part, where, value)
            for part, state in parts.items()
            for where, value in walk(state)
            if isinstance(value, Tensor)
        ]
    copies, size = compacted([leaf.value for leaf in tensors])
    if copies:
        places = {(leaf.part, leaf.path): id(leaf.value) for leaf in tensors}
        parts = replaced(parts, {place: copies[key] for place, key in places.items() if key in copies})
    content = dict(parts)
    save = torch.save if size < _SMALLEST_WITHOUT_CRC or not _CONFIG_IS_OF_THE_CONTEXT else _save_without_crc
    return write_file(path, lambda file: save(content, file))


def _save_without_crc(content: dict[str, Any], file: IO[bytes]) -> None:
    """Without the CRC that torch computes of each tensor and never reads: it takes longer than our hash."""

    def save() -> None:
        torch.serialization.set_crc32_options(False)
        torch.save(content, file)

    contextvars.copy_context().run(save)  # the option goes with the context: no other thread ever sees it


def read_parts(path: Path, record: FileRecord, *, verified: bool = False, mmap: bool = False) -> dict[str, Any]:
    """The parts of one file, on the CPU, after its hash was verified.

    Args:
        path: the file.
        record: what the manifest says of it.
        verified: the caller has just verified this very file; it is not hashed again.
        mmap: tensors are read when they are touched. For looking at a few tensors of a large file; not for training:
            optimizers keep the loaded tensors, and with them the disk space of a file deleted since.

    Raises:
        CheckpointError: one line; the file is missing, damaged, or holds more than plain data (nothing was executed).
    """
    try:
        with open_regular(path) as file:
            if mmap or verified:
                problem = None if verified else compare(path.name, hash_file(file, record.algorithm), record)
            else:
                problem, parts = read_verified(path, file, record)
                if parts is not None:
                    return parts
            if problem:
                raise CheckpointError(f"{path.parent} is damaged: {problem}.")
            file.seek(0)
            return load_plain(path, file, mmap)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {one_line(error)}.") from error


def read_verified(path: Path, file: IO[bytes], record: FileRecord) -> tuple[str, None] | tuple[None, dict[str, Any]]:
    """Verify and load an open file, which is read once if it is large.

    Returns:
        What is wrong with it, as the rest of a sentence; or its parts.

    Raises:
        CheckpointError: it is what was written, but not plain data.
        OSError: it cannot be read.
    """
    memories: Mapping[int, Memory] = {}
    if record.bytes < PIECE_BYTES:
        found = hash_file(file, record.algorithm)
    else:
        found, memories = read_hashed(file, record.algorithm)
    if problem := compare(path.name, found, record):
        return problem, None
    parts = unpickled(lambda location: load_plain(path, None, True, location), memories) if memories else None
    if parts is None:
        file.seek(0)
        parts = load_plain(path, file, mmap=False)
    return None, parts


def plain_data_problem(path: Path) -> str | None:
    """Why a file is not plain data, or None. Reads the pickle, not the tensors."""
    try:
        load_plain(path, None, mmap=True)
    except CheckpointError as error:
        return str(error).rstrip(".")
    return None


def compare(name: str, found: FileRecord, expected: FileRecord) -> str | None:
    """In words, how a file differs from its record; None if it does not."""
    if found.bytes != expected.bytes:
        return f"{name} has {found.bytes} bytes, the manifest says {expected.bytes}"
    if found.hash != expected.hash:
        digest, said = (record.hash.partition(":")[2][:12] for record in (found, expected))
        return f"{name} has changed: {expected.algorithm.upper()} {digest}, the manifest says {said}"
    return None


def load_plain(path: Path, file: IO[bytes] | None, mmap: bool, map_location: Any = "cpu") -> dict[str, Any]:
    """A file of ``torch.save`` with a mapping of plain data.

    Args:
        file: it, open; not used with ``mmap``.
        map_location: see ``torch.load``.

    Raises:
        CheckpointError: one line; it holds something else, of which nothing was executed.
        OSError: it cannot be read.
    """
    source: Any = path if mmap or file is None else file
    try:
        loaded = torch.load(source, map_location=map_location, weights_only=True, mmap=mmap)
    except OSError:
        raise
    except Exception as error:  # torch raises pickle, zip and runtime errors of many types here
        named = re.search(r"(?:GLOBAL |Unsupported (?:global|class|operand)[: ]+)([\w.]+)", str(error))
        reason = f"it refers to {named.group(1)}" if named else one_line(error)
        raise CheckpointError(
            f"{path} is not plain data ({reason}): it was not loaded and nothing in it was executed."
        ) from error
    if not isinstance(loaded, dict):
        raise CheckpointError(f"{path} holds a {type(loaded).__name__}, a checkpoint file holds a dict of parts.")
    return loaded
