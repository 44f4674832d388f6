"""Slots for copies in shared memory: files, valid or invalid, in a folder that is deleted when no longer needed.

The folder holds two files for each rank of this machine. A copy overwrites the older one: its header is invalidated,
the content is written, then the new header. So the other file is always valid, and a process that is killed while it
writes loses only the copy that it was writing.

A run finds its folder by the small file ``.memory`` beside its checkpoints: the folder's name consists of the content
of that file, and its device and inode. A moved folder of checkpoints finds it; a copied one does not.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import re
import secrets
import stat
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from blake3 import blake3

from ignite_engine.checkpoint import filesystem
from ignite_engine.checkpoint.lock import lock
from ignite_engine.checkpoint.pack import Pack, unpacked
from ignite_engine.checkpoint.states.tiers import marker
from ignite_engine.errors import CheckpointError, one_line

ROOT = Path("/dev/shm")
MARKER = marker("memory")
_MAGIC = b"ignite-engine memory 2\n"
_HEADER_BYTES = 4096
_ROW_BYTES = 512
_FOLDER = re.compile(r"ignite-engine-[0-9a-f]{16}-[0-9a-f]+-[0-9a-f]+")
_SLOT = re.compile(r"rank_(\d+)\.[01]")
_OWNER = "directory"
"""A link to the folder of checkpoints."""
_CLEARED_WITHIN_S = 5.0
_KEPT_S = 86400.0
"""Copies of a run that was not started again within a day are deleted, in seconds."""


class Boundary(NamedTuple):
    """Identifies the step boundary of a copy; equal on all ranks."""

    number: int
    """The number of the copy within the run."""
    iteration: int
    epochs_completed: int
    world_size: int
    run_id: str
    settings: str
    """A digest of the run's settings."""


@dataclass(frozen=True)
class Header:
    """Describes the content of a slot."""

    boundary: Boundary
    rank: int
    has_shared: bool
    """Whether it also holds the parts that the ranks share."""
    is_sharded: bool
    """Whether tensors are sharded, so that the slots of all ranks hold them together."""
    sequence: int
    """The sequence number of the newest committed checkpoint that this rank knew."""
    size: int = 0
    """The size of the content, in bytes."""
    checksum: str = ""
    """A checksum of the content; not cryptographic, it detects torn and overwritten content."""

    def to_bytes(self) -> bytes:
        """The header as one line, with its digest."""
        line = _MAGIC + json.dumps(asdict(self)).encode() + b"\n"
        return line + blake3(line).hexdigest().encode()

    @classmethod
    def from_bytes(cls, content: bytes) -> Header | None:
        """Parse a header; None if it is not valid or of another version."""
        line, _, digest = content.rstrip(b"\0").rpartition(b"\n")
        if not content.startswith(_MAGIC) or blake3(line + b"\n").hexdigest().encode() != digest:
            return None
        values = json.loads(line.removeprefix(_MAGIC))
        return cls(Boundary(*values.pop("boundary")), **values)


class Slot:
    """A slot's file, which may not exist yet."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._room: memoryview | None = None

    def write(self, header: Header, pack: Pack) -> None:
        """Replace the content.

        Raises:
            OSError: there is not enough memory; the slot is then invalid.
        """
        size = _HEADER_BYTES + _up_to_whole_rows(pack.bytes)
        if self._room is None or len(self._room) < size:
            self.reserve(pack.bytes)
        assert self._room is not None
        self._room[:_HEADER_BYTES] = bytes(_HEADER_BYTES)
        content = self._room[_HEADER_BYTES:size]
        pack.write(content)
        complete = replace(header, size=len(content), checksum=_checksum(content)).to_bytes()
        self._room[: len(complete)] = complete
        os.utime(self.path)  # writing to mapped memory does not update the time

    def reserve(self, size: int) -> None:
        """Reserve memory for a content of ``size`` bytes; the present content is lost.

        Raises:
            OSError: there is not enough memory.
        """
        self.close()
        size = _HEADER_BYTES + _up_to_whole_rows(size)
        descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            os.pwrite(descriptor, bytes(_HEADER_BYTES), 0)
            os.posix_fallocate(descriptor, 0, size)  # without it, writing to missing memory would kill the process
            self._room = memoryview(mmap.mmap(descriptor, size))
        finally:
            os.close(descriptor)

    @property
    def header(self) -> Header | None:
        """The header; None: the slot is invalid. The content is not verified."""
        return self._opened()[0]

    def read(self, *, in_place: bool = False) -> tuple[dict[str, Any], dict[str, Any]]:
        """The facts and the parts of the state that it holds.

        Args:
            in_place: tensors refer to the slot's memory; use them before the slot is written again.

        Raises:
            CheckpointError: the slot is invalid, or its content is damaged.
        """
        header, content = self._opened()
        if header is None or len(content) != header.size or _checksum(content) != header.checksum:
            raise CheckpointError(f"{self.path} is torn or damaged.")
        try:
            facts, parts = unpacked(content, in_place=in_place)
        except Exception as error:  # of any type
            raise CheckpointError(f"{self.path} does not hold a state: {one_line(error)}.") from error
        return facts, parts

    def _opened(self) -> tuple[Header | None, memoryview]:
        """Header and content; the header is None if there is none, or the file belongs to another user."""
        with contextlib.suppress(OSError), filesystem.open_regular(self.path) as file:
            status = os.fstat(file.fileno())
            if status.st_uid == os.geteuid() and status.st_size >= _HEADER_BYTES:
                room = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY))
                header = Header.from_bytes(bytes(room[:_HEADER_BYTES]))
                return header, room[_HEADER_BYTES : _HEADER_BYTES + (0 if header is None else header.size)]
        return None, memoryview(b"")

    def close(self) -> None:
        """Unmap the memory."""
        self._room = None


def _up_to_whole_rows(size: int) -> int:
    return -(-size // _ROW_BYTES) * _ROW_BYTES


def _checksum(content: memoryview) -> str:
    """A hash of the sums of rows of 512 bytes; runs at the speed of memory, ten times faster than a hash of all bytes.

    It detects changed numbers and reordered rows, but not numbers exchanged within a row.
    """
    sums = torch.frombuffer(content, dtype=torch.int64).view(-1, _ROW_BYTES // 8).sum(1)
    return blake3(sums.numpy().tobytes()).hexdigest()


class Slots:
    """The slots of a run on this machine, in a folder that is locked against deletion until it is closed."""

    def __init__(self, path: Path) -> None:
        """Lock the folder.

        Raises:
            OSError: it is missing, or accessible to other users.
        """
        if not _is_own(path):
            raise PermissionError(f"{path} is another user's")
        self.path, self._held = path, contextlib.ExitStack()
        self._held.enter_context(lock(path, shared=True, wait_s=_CLEARED_WITHIN_S))
        self._slots: dict[int, tuple[Slot, Slot]] = {}

    @classmethod
    def open(cls, name: str) -> Self | None:
        """The slots in the folder of this name; None: it is missing, or accessible to other users."""
        with contextlib.suppress(OSError):
            return cls(ROOT / name)
        return None

    @classmethod
    def made(cls, name: str) -> Self:
        """As :meth:`open`, but makes the folder if it is missing.

        Raises:
            OSError: it cannot be made.
        """
        while True:
            (ROOT / name).mkdir(0o700, exist_ok=True)
            with contextlib.suppress(FileNotFoundError):  # another process has deleted it meanwhile
                return cls(ROOT / name)

    def of(self, rank: int) -> tuple[Slot, Slot]:
        """The two slots of a rank."""
        if rank not in self._slots:
            self._slots[rank] = Slot(self.path / f"rank_{rank}.0"), Slot(self.path / f"rank_{rank}.1")
        return self._slots[rank]

    def ranks(self) -> list[int]:
        """The ranks that have slots here."""
        return sorted({int(match[1]) for path in self.path.glob("rank_*") if (match := _SLOT.fullmatch(path.name))})

    def copies(self, rank: int, settings: str) -> dict[Boundary, list[tuple[Slot, Header, bool]]]:
        """The copies that a rank can load, with the slots that it needs, by step boundary.

        Returns:
            Slots with their headers, and whether all parts are needed, or only the pieces of sharded tensors.
        """
        found: dict[Boundary, dict[int, tuple[Slot, Header]]] = {}
        for other in self.ranks():
            for slot in self.of(other):
                if (header := slot.header) is not None and header.boundary.settings == settings:
                    found.setdefault(header.boundary, {})[other] = slot, header
        usable = {}
        for boundary, by_rank in found.items():
            own = rank if rank < boundary.world_size else 0  # a rank that did not exist then takes rank 0's parts
            with_shared = [other for other, (_, header) in by_rank.items() if header.has_shared]
            if own in by_rank and with_shared:
                whole = {own, with_shared[0]}
                needed = set(range(boundary.world_size)) if by_rank[own][1].is_sharded else whole
                if needed <= by_rank.keys():
                    usable[boundary] = [(*by_rank[other], other in whole) for other in sorted(needed)]
        return usable

    def write(self, header: Header, pack: Pack) -> None:
        """Write a copy into the older slot of its rank.

        Raises:
            OSError: there is not enough memory.
        """
        slots, number = self.of(header.rank), header.boundary.number
        slots[number % 2].write(header, pack)
        if not slots[1 - number % 2].path.exists():  # so that a lack of memory shows at the first copy
            slots[1 - number % 2].reserve(pack.bytes)

    def note_owner(self, directory: Path) -> None:
        """Record which run may continue from here, for :func:`clear`.

        Args:
            directory: of the run's checkpoints.
        """
        remove(self.path / _OWNER)
        (self.path / _OWNER).symlink_to(directory.absolute())

    def drop(self, *ranks: int) -> None:
        """Delete the slots of these ranks."""
        for rank in ranks:
            for slot in self.of(rank):
                slot.close()
                remove(slot.path)

    def forget_newer(self, rank: int, number: int) -> None:
        """Invalidate the copies of a rank that are newer than this one.

        A peer lacks them; together with a later copy of the peer with the same number they would seem complete.
        """
        for slot in self.of(rank):
            if (header := slot.header) is not None and header.boundary.number > number:
                slot.reserve(header.size)

    def close(self, *, remove_if_empty: bool) -> None:
        """Release the folder."""
        self._slots.clear()
        if remove_if_empty and not self.ranks():
            with contextlib.suppress(OSError):
                filesystem.remove_tree(self.path)
        self._held.close()


def clear() -> None:
    """Remove this user's folders that no process has locked and no run will continue from.

    The folder of a run that has not ended, and can be started again, stays for a day.
    """
    for path in ROOT.iterdir():
        with contextlib.suppress(OSError):
            if _FOLDER.fullmatch(path.name) and _is_own(path):
                with lock(path):
                    if not _may_go_on(path):
                        filesystem.remove_tree(path)


def remove(path: Path) -> None:
    """Remove a file if possible."""
    with contextlib.suppress(OSError):
        os.unlink(path)


def _is_own(path: Path) -> bool:
    """Whether a folder is accessible to this user only."""
    status = os.lstat(path)
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and not stat.S_IMODE(status.st_mode) & 0o077


def _may_go_on(folder: Path) -> bool:
    """Whether the run of these copies has not ended, still has its checkpoints, and died less than a day ago."""
    copied_at = max((slot.stat().st_mtime for slot in folder.glob("rank_*")), default=0.0)
    return folder_name(folder / _OWNER) == folder.name and time.time() - copied_at < _KEPT_S


def folder_name(directory: Path) -> str | None:
    """The name of the folder for the run that saves in ``directory``; None: the marker is missing."""
    with contextlib.suppress(OSError), filesystem.open_regular(directory / MARKER) as file:
        token, status = file.read(64).decode("ascii", "replace").strip(), os.fstat(file.fileno())
        if re.fullmatch("[0-9a-f]{16}", token):
            return f"ignite-engine-{token}-{status.st_dev:x}-{status.st_ino:x}"
    return None


def named_folder(directory: Path) -> str:
    """As :func:`folder_name`, but writes the marker if it is missing.

    Raises:
        OSError: the marker cannot be written or read.
    """
    if (name := folder_name(directory)) is None:
        filesystem.ensure_directory(directory)
        filesystem.replace_file(directory / MARKER, lambda file: file.write(f"{secrets.token_hex(8)}\n".encode()))
        name = folder_name(directory)
    if name is None:
        raise OSError(f"{directory / MARKER} cannot be read")
    return name


def node() -> str:
    """A value shared by exactly those processes that share this memory.

    Raises:
        OSError: there is no usable shared memory.
    """
    if not os.access(ROOT, os.W_OK | os.X_OK):
        raise OSError(f"there is no {ROOT} that can be written to")
    return f"{Path('/proc/sys/kernel/random/boot_id').read_text()} {os.stat(ROOT).st_dev}"
