"""Slots in shared memory: files that are valid or not, in a folder that goes when nobody needs it.

A folder holds two files for each rank of this machine. A copy is written into the one that holds the older state: its
header is made invalid, the content follows, the header comes last. So the other file is valid at any moment, and a
process that is killed while it writes loses only what it was writing.

A run finds its folder again by the small file ``.memory`` beside its checkpoints: the folder's name is
made of what is in that file, and of the file's device and inode. A folder of checkpoints
that was moved finds it; a copy does not.
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
"""A link in the folder to that of the checkpoints."""
_CLEARED_WITHIN_S = 5.0
_KEPT_S = 86400.0
"""From the last copy on: a run that nobody has started again within a day is given up."""


class Boundary(NamedTuple):
    """Of which step boundary a copy is: the same on all ranks that have made one there."""

    number: int
    """Counts the copies of a run."""
    iteration: int
    epochs_completed: int
    world_size: int
    run_id: str
    settings: str
    """Digest of the run's settings."""


@dataclass(frozen=True)
class Header:
    """What a slot holds."""

    boundary: Boundary
    rank: int
    has_shared: bool
    """It holds the parts that ranks share, too."""
    is_sharded: bool
    """Tensors are sharded: the slots of all ranks hold them together."""
    sequence: int
    """Of the newest checkpoint that this rank knew to be committed."""
    size: int = 0
    """Of the content, in bytes."""
    checksum: str = ""
    """A checksum of the content, not a cryptographic one: it finds what is torn or overwritten by mistake."""

    def to_bytes(self) -> bytes:
        """One line, and the digest of it."""
        line = _MAGIC + json.dumps(asdict(self)).encode() + b"\n"
        return line + blake3(line).hexdigest().encode()

    @classmethod
    def from_bytes(cls, content: bytes) -> Header | None:
        """None: it is not a valid header of this version."""
        line, _, digest = content.rstrip(b"\0").rpartition(b"\n")
        if not content.startswith(_MAGIC) or blake3(line + b"\n").hexdigest().encode() != digest:
            return None
        values = json.loads(line.removeprefix(_MAGIC))
        return cls(Boundary(*values.pop("boundary")), **values)


class Slot:
    """One file; it may not be there yet."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._room: memoryview | None = None

    def write(self, header: Header, pack: Pack) -> None:
        """Replace what it holds.

        Raises:
            OSError: there is no room; the slot is then invalid.
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
        os.utime(self.path)  # which writing to its memory does not do

    def reserve(self, size: int) -> None:
        """Take room for a content of ``size`` bytes; what it holds is lost.

        Raises:
            OSError: there is none.
        """
        self.close()
        size = _HEADER_BYTES + _up_to_whole_rows(size)
        descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            os.pwrite(descriptor, bytes(_HEADER_BYTES), 0)
            os.posix_fallocate(descriptor, 0, size)  # a write to memory that cannot be had would end the process
            self._room = memoryview(mmap.mmap(descriptor, size))
        finally:
            os.close(descriptor)

    @property
    def header(self) -> Header | None:
        """What it says that it holds; None: nothing. The content is not verified."""
        return self._opened()[0]

    def read(self, *, in_place: bool = False) -> tuple[dict[str, Any], dict[str, Any]]:
        """The facts and the parts of the state that it holds.

        Args:
            in_place: its tensors stay there; they are to be used before the slot is written to again.

        Raises:
            CheckpointError: it holds none, or the content is not what was written.
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
        """Header and content; None: there is none, or it is not a file of this user's."""
        with contextlib.suppress(OSError), filesystem.open_regular(self.path) as file:
            status = os.fstat(file.fileno())
            if status.st_uid == os.geteuid() and status.st_size >= _HEADER_BYTES:
                room = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY))
                header = Header.from_bytes(bytes(room[:_HEADER_BYTES]))
                return header, room[_HEADER_BYTES : _HEADER_BYTES + (0 if header is None else header.size)]
        return None, memoryview(b"")

    def close(self) -> None:
        """Let go of its memory."""
        self._room = None


def _up_to_whole_rows(size: int) -> int:
    return -(-size // _ROW_BYTES) * _ROW_BYTES


def _checksum(content: memoryview) -> str:
    """Sums of rows of 512 bytes, hashed: as fast as memory is read, where a hash of everything takes ten times as long.

    A changed number is found, and so are rows in another order; numbers that changed places within a row are not.
    """
    sums = torch.frombuffer(content, dtype=torch.int64).view(-1, _ROW_BYTES // 8).sum(1)
    return blake3(sums.numpy().tobytes()).hexdigest()


class Slots:
    """Those of a run on this machine, in a folder; every process that has opened it holds it until it is closed."""

    def __init__(self, path: Path) -> None:
        """Hold the folder.

        Raises:
            OSError: it is not there, or not this user's alone.
        """
        if not _is_own(path):
            raise PermissionError(f"{path} is another user's")
        self.path, self._held = path, contextlib.ExitStack()
        self._held.enter_context(lock(path, shared=True, wait_s=_CLEARED_WITHIN_S))
        self._slots: dict[int, tuple[Slot, Slot]] = {}

    @classmethod
    def open(cls, name: str) -> Self | None:
        """The slots in the folder of this name; None: there is none, or it is not this user's alone."""
        with contextlib.suppress(OSError):
            return cls(ROOT / name)
        return None

    @classmethod
    def made(cls, name: str) -> Self:
        """As :meth:`open`; the folder is made if there is none.

        Raises:
            OSError: it cannot be made.
        """
        while True:
            (ROOT / name).mkdir(0o700, exist_ok=True)
            with contextlib.suppress(FileNotFoundError):  # another process has cleared it meanwhile
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
        """By step boundary what a rank needs to load a copy; those that it can load.

        Returns:
            Slots with their headers, and whether more than the pieces of sharded tensors is needed of each.
        """
        found: dict[Boundary, dict[int, tuple[Slot, Header]]] = {}
        for other in self.ranks():
            for slot in self.of(other):
                if (header := slot.header) is not None and header.boundary.settings == settings:
                    found.setdefault(header.boundary, {})[other] = slot, header
        usable = {}
        for boundary, by_rank in found.items():
            own = rank if rank < boundary.world_size else 0  # a rank that did not exist then takes what rank 0 had
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
            OSError: there is no room.
        """
        slots, number = self.of(header.rank), header.boundary.number
        slots[number % 2].write(header, pack)
        if not slots[1 - number % 2].path.exists():  # that there is room for both is known from the first copy on
            slots[1 - number % 2].reserve(pack.bytes)

    def note_owner(self, directory: Path) -> None:
        """Note who may go on from here, for :func:`clear`.

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
        """Make a copy of a rank invalid that is newer than this one.

        A peer lacks it. Beside a copy that the peer makes later, with the same number, it would count as whole.
        """
        for slot in self.of(rank):
            if (header := slot.header) is not None and header.boundary.number > number:
                slot.reserve(header.size)

    def close(self, *, remove_if_empty: bool) -> None:
        """Let go of it."""
        self._slots.clear()
        if remove_if_empty and not self.ranks():
            with contextlib.suppress(OSError):
                filesystem.remove_tree(self.path)
        self._held.close()


def clear() -> None:
    """Remove the folders of this user that nobody needs: no process holds them, and none will start their ranks again.

    One of a run that has not ended, and can be started again, stays for a day.
    """
    for path in ROOT.iterdir():
        with contextlib.suppress(OSError):
            if _FOLDER.fullmatch(path.name) and _is_own(path):
                with lock(path):
                    if not _may_go_on(path):
                        filesystem.remove_tree(path)


def remove(path: Path) -> None:
    """Remove a file, if it is there and can be removed."""
    with contextlib.suppress(OSError):
        os.unlink(path)


def _is_own(path: Path) -> bool:
    """Whether it is a folder of this user alone."""
    status = os.lstat(path)
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and not stat.S_IMODE(status.st_mode) & 0o077


def _may_go_on(folder: Path) -> bool:
    """Whether the run that has copied into it was not ended, has its checkpoints where they were, and died lately."""
    copied_at = max((slot.stat().st_mtime for slot in folder.glob("rank_*")), default=0.0)
    return folder_name(folder / _OWNER) == folder.name and time.time() - copied_at < _KEPT_S


def folder_name(directory: Path) -> str | None:
    """Name of the folder of the run that saves in ``directory``; None: its file is missing."""
    with contextlib.suppress(OSError), filesystem.open_regular(directory / MARKER) as file:
        token, status = file.read(64).decode("ascii", "replace").strip(), os.fstat(file.fileno())
        if re.fullmatch("[0-9a-f]{16}", token):
            return f"ignite-engine-{token}-{status.st_dev:x}-{status.st_ino:x}"
    return None


def named_folder(directory: Path) -> str:
    """As :func:`folder_name`; the file is written if it is missing.

    Raises:
        OSError: it cannot be written, or read.
    """
    if (name := folder_name(directory)) is None:
        filesystem.ensure_directory(directory)
        filesystem.replace_file(directory / MARKER, lambda file: file.write(f"{secrets.token_hex(8)}\n".encode()))
        name = folder_name(directory)
    if name is None:
        raise OSError(f"{directory / MARKER} cannot be read")
    return name


def node() -> str:
    """The same for all processes that share this memory, and for no others.

    Raises:
        OSError: there is none that can be used.
    """
    if not os.access(ROOT, os.W_OK | os.X_OK):
        raise OSError(f"there is no {ROOT} that can be written to")
    return f"{Path('/proc/sys/kernel/random/boot_id').read_text()} {os.stat(ROOT).st_dev}"
