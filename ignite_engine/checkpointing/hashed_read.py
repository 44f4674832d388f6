"""A file of ``torch.save`` read once: each piece is hashed while the processor has it at hand, then it is unpickled."""

from __future__ import annotations

import errno
import os
import struct
import sys
import zipfile
from collections.abc import Callable, Mapping
from itertools import count
from typing import IO, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ignite_engine.checkpointing.filesystem import PIECE_BYTES, FileRecord, hash_file, new_hash

_LOCAL_HEADER_BYTES = 30
"""Bytes of the header of a zip file's member before its name; the last four are the lengths of name and extra field."""


class Member(NamedTuple):
    """Where the memory of a tensor is in a file."""

    offset: int
    bytes: int


class Memory(NamedTuple):
    """The memory of a tensor, read from a file."""

    offset: int
    values: Tensor


_NO_MEMORY = Memory(0, torch.empty(0, dtype=torch.uint8))
MapLocation = Callable[[torch.UntypedStorage, str], torch.UntypedStorage]


def read_hashed(file: IO[bytes], algorithm: str) -> tuple[FileRecord, dict[int, Memory]]:
    """Hash an open file from its start, and keep the memories of its tensors.

    Args:
        file: open for reading, without a buffer.
        algorithm: of the hash, see ``filesystem.HASHES``.

    Returns:
        Size and hash; and each memory by its number, none if the file is not one that ``torch.save`` writes on such a
        machine.

    Raises:
        OSError: with the path.
    """
    members = members_of(file)
    if not members:
        return hash_file(file, algorithm), {}
    digest, position, size = new_hash(algorithm), 0, os.fstat(file.fileno()).st_size
    gap = np.empty(PIECE_BYTES, np.uint8)
    memories: dict[int, Memory] = {}

    def hashed(into: np.ndarray[Any, Any], offset: int) -> None:
        for begin in range(0, len(into), PIECE_BYTES):
            piece = into[begin : begin + PIECE_BYTES]
            read_into(file, piece, offset + begin)
            digest.update(piece.data)

    def hashed_until(end: int) -> None:
        for begin in range(position, end, PIECE_BYTES):
            hashed(gap[: min(PIECE_BYTES, end - begin)], begin)

    for number, member in sorted(members.items(), key=lambda item: item[1]):
        hashed_until(member.offset)
        values = torch.empty(member.bytes, dtype=torch.uint8)
        hashed(values.numpy(), member.offset)
        memories[number] = Memory(member.offset, values)
        position = member.offset + member.bytes
    hashed_until(size)
    return FileRecord(size, f"{algorithm}:{digest.hexdigest()}"), memories


def unpickled(
    unpickle: Callable[[MapLocation], dict[str, Any]], memories: Mapping[int, Memory]
) -> dict[str, Any] | None:
    """What a file holds, in memories that are filled already.

    Args:
        unpickle: loads the file mapped, with this ``map_location``.
        memories: of the file, by number.

    Returns:
        None if its tensors do not have these memories in the order of their numbers.
    """
    bases: set[int] = set()
    calls = count()

    def filled(mapped: torch.UntypedStorage, location: str) -> torch.UntypedStorage:
        offset, values = memories.get(next(calls), _NO_MEMORY)
        if mapped.nbytes():
            bases.add(mapped.data_ptr() - offset if mapped.nbytes() == values.nbytes else -1)
        return values.untyped_storage() if mapped.nbytes() == values.nbytes else mapped

    parts = unpickle(filled)
    return parts if len(bases) < 2 and -1 not in bases else None


def members_of(file: IO[bytes]) -> dict[int, Member]:
    """The memories of the tensors in a file of ``torch.save`` by number; none if they cannot be used as they are.

    Their number is that of the order in which the pickle names them.
    """
    found: dict[int, Member] = {}
    order = ""
    try:
        with zipfile.ZipFile(file) as archive:
            for info in archive.infolist():
                folder, _, name = info.filename.rpartition("/")
                if info.compress_type != zipfile.ZIP_STORED:
                    return {}
                if folder.endswith("/data"):
                    found[int(name)] = Member(_data_offset(file, info), info.file_size)
                elif name == "byteorder":  # not by `archive.read`: it has no CRC
                    order = os.pread(file.fileno(), info.file_size, _data_offset(file, info)).decode()
    except (zipfile.BadZipFile, ValueError, NotImplementedError):
        return {}
    end = 0
    for member in sorted(found.values()):
        if member.offset < end:
            return {}
        end = member.offset + member.bytes
    return found if order == sys.byteorder and end <= os.fstat(file.fileno()).st_size else {}


def _data_offset(file: IO[bytes], member: zipfile.ZipInfo) -> int:
    header = os.pread(file.fileno(), _LOCAL_HEADER_BYTES, member.header_offset)
    try:
        name, extra = struct.unpack("<HH", header[-4:])
    except struct.error as error:
        raise ValueError("a member of the zip file has no header") from error
    return member.header_offset + len(header) + int(name) + int(extra)


def read_into(file: IO[bytes], into: np.ndarray[Any, Any], offset: int) -> None:
    """Fill bytes with those of a file from ``offset`` on.

    Raises:
        OSError: with the path.
    """
    left = into.data
    while len(left):
        try:
            received = os.preadv(file.fileno(), [left], offset)
        except OSError as error:
            raise OSError(error.errno, error.strerror, file.name) from error
        if received == 0:
            raise OSError(errno.EIO, "It has become shorter while it was read", file.name)
        left, offset = left[received:], offset + received
