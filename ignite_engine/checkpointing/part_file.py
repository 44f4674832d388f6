"""The parts of a checkpoint: plain data in, plain data out, one ``torch.save`` file for a mapping of named parts."""

from __future__ import annotations

import contextvars
import re
from collections import Counter, OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from ignite_engine.checkpointing.filesystem import PIECE_BYTES, FileRecord, hash_file, open_regular, write_file
from ignite_engine.checkpointing.hashed_read import Memory, read_hashed, unpickled
from ignite_engine.checkpointing.nested import TooDeep, rebuilt, walk
from ignite_engine.checkpointing.shards import is_sharded, local_piece
from ignite_engine.errors import CheckpointError, one_line

# What torch.load(weights_only=True) gives back as it was, tried on torch 2.13.
_LEAVES = (
    type(None), bool, int, float, complex, str, bytes, bytearray,
    torch.Size, torch.dtype, torch.device, Tensor, torch.nn.Parameter,
)  # fmt: skip
_LEAF_TYPES = frozenset(_LEAVES)
_SMALLEST_WITHOUT_CRC = 1 << 24
"""A smaller file is one that zip programs can test, too."""
_CONFIG_IS_OF_THE_CONTEXT = torch.__version__ >= "2.12"
"""Before, torch's options are of the process: a user's own ``torch.save`` in another thread would see ours."""
_SCALARS = frozenset((type(None), bool, int, float, str))
_MAPPINGS = frozenset((dict, OrderedDict, Counter))
_SEQUENCES = frozenset((list, tuple, set))


def refuse_what_cannot_be_loaded(parts: Mapping[str, Any]) -> None:
    """Check that ``weights_only=True`` can load these parts, before anything is written.

    Raises:
        CheckpointError: names the first value that is not plain data, by its path in the parts.
    """
    try:
        for name, value in parts.items():
            if not isinstance(name, str) or not name:
                raise CheckpointError(f"A part of a checkpoint is named by a non-empty string, got {name!r}.")
            if not name.isprintable():
                raise CheckpointError(f"A part of a checkpoint is named by printable text, got {name!r}.")
            for path, found in walk(value, whole=_is_foreign_container):
                if type(found) in _SCALARS:
                    continue
                if problem := _problem(found):
                    inside = "".join(f"[{key!r}]" for key in path)
                    raise CheckpointError(f"{name}{inside} is {problem}")
    except TooDeep as error:
        raise CheckpointError(f"The part {name!r} cannot be saved: {error}.") from None


def _is_foreign_container(value: Any) -> bool:
    kind = type(value)
    return not (
        kind in _SEQUENCES
        or (kind in _MAPPINGS and (_LEAF_TYPES.issuperset(map(type, value)) or all(map(_is_key, value))))
    )


def _is_key(key: Any) -> bool:
    return type(key) in _LEAF_TYPES or (type(key) is tuple and all(map(_is_key, key)))


def _problem(value: Any) -> str | None:
    """The rest of a sentence about a value that a checkpoint cannot hold; None: it can."""
    kind = type(value)
    if is_lazy(value):
        return "a parameter of a lazy module, which has no values yet: call the model on a batch before training."
    if kind in _MAPPINGS:
        key = type(next(key for key in value if not _is_key(key)))
        what = f"a {kind.__qualname__} with a key of type {key.__module__}.{key.__qualname__}"
    elif is_sharded(value):
        return None
    elif kind not in _LEAF_TYPES:
        what = f"a {kind.__module__}.{kind.__qualname__}"
    elif isinstance(value, Tensor) and value.is_meta:
        return "a tensor on the meta device, which has no values to save: give it some before training."
    else:
        return None
    return (
        f"{what}, which a checkpoint cannot hold: return tensors, numbers, strings, lists and dicts from state_dict() "
        "instead."
    )


def all_finite(state: Any) -> bool:
    """Whether every floating point tensor in a nested state is finite; of a sharded one, this rank's piece.

    Reads each tensor once, without a copy.
    """
    return all(_is_finite(value) for _, value in walk(state) if isinstance(value, Tensor) and not value.is_meta)


def _is_finite(value: Tensor) -> bool:
    value = local_piece(value).detach()
    if value.layout != torch.strided:
        value = value.coalesce().values() if value.layout == torch.sparse_coo else value.values()
    if value.numel() == 0 or not (value.is_floating_point() or value.is_complex()):
        return True
    if value.is_complex():
        value = torch.view_as_real(value.resolve_conj())
    if value.element_size() == 1:
        value = value.float()  # the 8-bit formats have no aminmax
    return all(bool(torch.isfinite(extreme)) for extreme in torch.aminmax(value))


def write_parts(path: Path, parts: Mapping[str, Any]) -> FileRecord:
    """Write named parts to a new file, fsynced; the hash is taken while writing."""
    content, size = _compact(dict(parts))
    save = torch.save if size < _SMALLEST_WITHOUT_CRC or not _CONFIG_IS_OF_THE_CONTEXT else _save_without_crc
    return write_file(path, lambda file: save(content, file))


def _save_without_crc(content: dict[str, Any], file: IO[bytes]) -> None:
    """Without the CRC that torch computes of each tensor and never reads: it takes longer than our hash."""

    def save() -> None:
        torch.serialization.set_crc32_options(False)
        torch.save(content, file)

    contextvars.copy_context().run(save)  # the option goes with the context: no other thread ever sees it


def _compact(parts: dict[str, Any]) -> tuple[dict[str, Any], int]:
    """The parts with copies in the place of views into a memory that they do not fill together, and their bytes.

    ``torch.save`` writes the whole memory of a view. Tensors that fill their memory stay as they are, so that those
    that share it share it again when they are loaded.
    """
    used: dict[int, dict[tuple[Any, ...], int]] = {}
    sizes: dict[int, int] = {}
    size = 0
    for _, value in walk(parts):
        if type(value) not in _SCALARS and _has_memory(value):
            memory = value.untyped_storage()
            used.setdefault(memory.data_ptr(), {})[_place(value)] = value.nbytes
            sizes[memory.data_ptr()] = memory.nbytes()
            size += value.nbytes
    partly_used = {address for address, places in used.items() if sum(places.values()) < sizes[address]}
    copies: dict[tuple[Any, ...], Tensor] = {}

    def copy_of_view(value: Any) -> Any:
        if not _has_memory(value) or _memory(value) not in partly_used:
            return value
        key = (type(value), *_place(value))
        if key not in copies:
            copy = value.detach().clone()
            copies[key] = torch.nn.Parameter(copy, value.requires_grad) if type(value) is torch.nn.Parameter else copy
        return copies[key]

    return (rebuilt(parts, copy_of_view) if partly_used else parts), size


def _has_memory(value: Any) -> bool:
    return isinstance(value, Tensor) and value.layout == torch.strided and not value.is_meta


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _place(tensor: Tensor) -> tuple[Any, ...]:
    """What two tensors have in common if they are the same view of the same memory."""
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


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
