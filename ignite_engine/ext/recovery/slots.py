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
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Self

import torch
from blake3 import blake3

from ignite_engine.checkpoint import filesystem
from ignite_engine.checkpoint.lock import lock
from ignite_engine.checkpoint.pack import Pack, unpacked
from ignite_engine.checkpoint.states.tiers import marker
from ignite_engine.errors import CheckpointError, one_line

ROOT = Path("/dev/shm")
MARKER = marker("memory")
_MAGIC = b"ignite-engine memory 1\n"
_HEADER_BYTES = 4096
_ROW_BYTES = 512
_FOLDER = re.compile(r"ignite-engine-[0-9a-f]{16}-[0-9a-f]+-[0-9a-f]+")
_SLOT = re.compile(r"rank_(\d+)\.[01]")
_DIRECTORY = "directory"
_CLEARED_WITHIN_S = 5.0
_KEPT_S = 86400.0
"""From the last copy on: a run that nobody has started again within a day is given up."""

Boundary = tuple[int, int, int, int, str, str]


@dataclass(frozen=True)
class Header:
    """What a slot holds."""

    number: int
    """The number of the copy, which counts the copies of a run."""
    iteration: int
    epochs_completed: int
    world_size: int
    rank: int
    has_shared: bool
    """It holds the parts that ranks share, too."""
    is_sharded: bool
    """Tensors are sharded: the slots of all ranks hold them together."""
    sequence: int
    """Of the newest checkpoint that this rank knew to be committed."""
    run_id: str
    settings: str
    """Digest of the run's settings."""
    size: int = 0
    """Of the content, in bytes."""
    checksum: str = ""
    """A checksum of the content, not a cryptographic one: it finds what is torn or overwritten by mistake."""

    def to_bytes(self) -> bytes:
        """One line, and the digest of it."""
        line = _MAGIC + json.dumps(asdict(self)).encode() + b"\n"
        return line + blake3(line).hexdigest().encode()

    @property
    def boundary(self) -> Boundary:
        """The same on all ranks that copied at one step boundary."""
        return self.number, self.iteration, self.epochs_completed, self.world_size, self.run_id, self.settings

    @classmethod
    def from_bytes(cls, content: bytes) -> Header | None:
        """None: it is not a valid header of this version."""
        line, _, digest = content.rstrip(b"\0").rpartition(b"\n")
        if not content.startswith(_MAGIC) or blake3(line + b"\n").hexdigest().encode() != digest:
            return None
        values = json.loads(line.removeprefix(_MAGIC))
        return cls(**values) if values.keys() == cls.__dataclass_fields__.keys() else None


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
        self._room = _mapped(self.path, _HEADER_BYTES + _up_to_whole_rows(size))

    @property
    def header(self) -> Header | None:
        """What it says that it holds; None: nothing. The content is not verified."""
        with _opened(self.path) as found:
            return None if found is None else found[0]

    def read(self, *, in_place: bool = False) -> tuple[Header, dict[str, Any], dict[str, Any]]:
        """What it holds, with the facts and the parts of the state.

        Args:
            in_place: its tensors stay there; they are to be used before the slot is written to again.

        Raises:
            CheckpointError: it holds none, or the content is not what was written.
        """
        with _opened(self.path) as found:
            if found is None or not _is_sound(*found):
                raise CheckpointError(f"{self.path} is torn or damaged.")
            header, content = found
            try:
                facts, parts = unpacked(content, in_place=in_place)
            except Exception as error:  # of any type
                raise CheckpointError(f"{self.path} does not hold a state: {one_line(error)}.") from error
            return header, facts, parts

    def close(self) -> None:
        """Let go of its memory."""
        self._room = None


def _mapped(path: Path, size: int) -> memoryview:
    """A file of at least ``size`` bytes in memory, its header invalid."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        os.pwrite(descriptor, bytes(_HEADER_BYTES), 0)
        os.posix_fallocate(descriptor, 0, size)  # a write to memory that cannot be had would end the process
        return memoryview(mmap.mmap(descriptor, size))
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[tuple[Header, memoryview] | None]:
    """Header and content of a slot; None: there is none, or it is not a file of this user's."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        yield None
        return
    try:
        status = os.fstat(descriptor)
        own = stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid() and status.st_size >= _HEADER_BYTES
        room = memoryview(mmap.mmap(descriptor, 0, access=mmap.ACCESS_COPY) if own else b"")
        header = Header.from_bytes(bytes(room[:_HEADER_BYTES]))
        yield None if header is None else (header, room[_HEADER_BYTES : _HEADER_BYTES + header.size])
    finally:
        os.close(descriptor)


def _up_to_whole_rows(size: int) -> int:
    return -(-size // _ROW_BYTES) * _ROW_BYTES


def _is_sound(header: Header, content: memoryview) -> bool:
    return 0 < len(content) == header.size == _up_to_whole_rows(header.size) and _checksum(content) == header.checksum


def _checksum(content: memoryview) -> str:
    """Sums of rows of 512 bytes, hashed: as fast as memory is read, where a hash of everything takes ten times as long.

    A changed number is found, and so are rows in another order; numbers that changed places within a row are not.
    """
    sums = torch.frombuffer(content, dtype=torch.int64).view(-1, _ROW_BYTES // 8).sum(1)
    return blake3(sums.numpy().tobytes()).hexdigest()


class Folder:
    """The slots of a run on this machine; it is held by every process that has opened it, until it is closed."""

    def __init__(self, path: Path, held: contextlib.ExitStack) -> None:
        self.path, self._held = path, held
        self.slots: dict[int, tuple[Slot, Slot]] = {}
        """By rank."""

    @classmethod
    def open(cls, name: str, *, create: bool) -> Self | None:
        """Hold the folder of this name; None: there is none, or it is not this user's alone.

        Raises:
            OSError: it cannot be made.
        """
        path, held = ROOT / name, contextlib.ExitStack()
        while True:
            try:
                if create:
                    with contextlib.suppress(FileExistsError):
                        os.mkdir(path, 0o700)
                if not _is_own(os.lstat(path)):
                    raise PermissionError(f"{path} is another user's")
                held.enter_context(lock(path, shared=True, wait_s=_CLEARED_WITHIN_S))
            except FileNotFoundError:  # another process has cleared it meanwhile
                if not create:
                    return None
                if not ROOT.is_dir():
                    raise
            except OSError:
                if create:
                    raise
                return None
            else:
                return cls(path, held)

    def of(self, rank: int) -> tuple[Slot, Slot]:
        """The two slots of a rank."""
        if rank not in self.slots:
            self.slots[rank] = Slot(self.path / f"rank_{rank}.0"), Slot(self.path / f"rank_{rank}.1")
        return self.slots[rank]

    def ranks(self) -> list[int]:
        """The ranks that have slots here."""
        return sorted({int(match.group(1)) for name in os.listdir(self.path) if (match := _SLOT.fullmatch(name))})

    def note_owner(self, directory: Path) -> None:
        """Note who may go on from here, for :func:`clear`.

        Args:
            directory: of the run's checkpoints.
        """
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
        with os.fdopen(os.open(self.path / _DIRECTORY, flags, 0o600), "wb") as file:
            file.write(os.fsencode(directory.absolute()))

    def drop(self, rank: int) -> None:
        """Delete the slots of a rank."""
        for slot in self.of(rank):
            slot.close()
            with contextlib.suppress(FileNotFoundError):
                os.unlink(slot.path)
        del self.slots[rank]

    def forget_newer(self, rank: int, number: int) -> None:
        """Make a copy of a rank invalid that is newer than this one.

        A peer lacks it. Beside a copy that the peer makes later, with the same number, it would count as whole.
        """
        for slot in self.of(rank):
            if (header := slot.header) is not None and header.number > number:
                slot.reserve(header.size)

    def close(self, *, remove_if_empty: bool = False) -> None:
        """Let go of it."""
        for slot in (slot for slots in self.slots.values() for slot in slots):
            slot.close()
        self.slots.clear()
        if remove_if_empty:
            with contextlib.suppress(OSError):
                if not self.ranks():
                    _remove(self.path)
        self._held.close()


def clear() -> list[str]:
    """Remove the folders of this user that nobody needs: no process holds them, and none will start their ranks again.

    One of a run that has not ended, and can be started again, stays for a day.

    Returns:
        Their names.
    """
    removed = []
    for path in sorted(path for path in ROOT.iterdir() if _FOLDER.fullmatch(path.name)):
        with contextlib.suppress(OSError):
            if _is_own(os.lstat(path)):
                with lock(path):
                    if not _may_go_on(path):
                        _remove(path)
                        removed.append(path.name)
    return removed


def _is_own(status: os.stat_result) -> bool:
    """Whether it is a folder of this user alone."""
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and not stat.S_IMODE(status.st_mode) & 0o077


def _remove(path: Path) -> None:
    for name in os.listdir(path):
        if _SLOT.fullmatch(name) or name == _DIRECTORY:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path / name)
    os.rmdir(path)


def _may_go_on(folder: Path) -> bool:
    """Whether the run that has copied into it was not ended, has its checkpoints where they were, and died lately."""
    try:
        directory = Path(os.fsdecode((folder / _DIRECTORY).read_bytes()))
        copied_at = max(entry.stat().st_mtime for entry in os.scandir(folder) if _SLOT.fullmatch(entry.name))
    except (OSError, ValueError):
        return False
    return folder_name(directory, create=False) == folder.name and time.time() - copied_at < _KEPT_S


def folder_name(directory: Path, *, create: bool) -> str | None:
    """Name of the folder of the run that saves in ``directory``; None: its file is missing.

    Args:
        create: write the file if it is missing.

    Raises:
        OSError: it cannot be written.
    """
    path = directory / MARKER
    while True:
        try:
            with filesystem.open_regular(path) as file:
                token, status = file.read(64).decode("ascii", "replace").strip(), os.fstat(file.fileno())
            if re.fullmatch("[0-9a-f]{16}", token):
                return f"ignite-engine-{token}-{status.st_dev:x}-{status.st_ino:x}"
        except OSError:
            if create and os.path.lexists(path):
                raise
        if not create:
            return None
        filesystem.ensure_directory(directory)
        filesystem.replace_file(path, lambda file: file.write(f"{secrets.token_hex(8)}\n".encode()))


def check_usable() -> None:
    """Refuse a machine without shared memory, by an OSError whose message is the rest of a sentence."""
    if not ROOT.is_dir():
        raise OSError(f"there is no {ROOT}")
    if not os.access(ROOT, os.W_OK | os.X_OK):
        raise OSError(f"{ROOT} cannot be written to")


def node() -> str:
    """The same for all processes that share this memory, and for no others."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    with contextlib.suppress(OSError):
        return f"{boot.read_text().strip()} {os.stat(ROOT).st_dev}"
    return os.uname().nodename
