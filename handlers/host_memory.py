"""Memory of this process on the host, and what a limit leaves of it."""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

MIB = 2**20
_STATUS, _STATM, _MEMINFO = Path("/proc/self/status"), Path("/proc/self/statm"), Path("/proc/meminfo")
_PAGE = resource.getpagesize()
_UNLIMITED = 2**60  # version 1 has no word for it, but the largest number of pages


@dataclass(frozen=True)
class Limit:
    """Memory of a group of processes, such as a container, or of the machine; in MiB."""

    limit_mib: float
    headroom_mib: float
    """What may be taken yet; pages of files that the kernel can give back are free."""
    of: str


def rss_mib() -> float:
    """What the process holds now."""
    try:
        return int(_content(_STATM).split()[1]) * _PAGE / MIB  # psutil takes four times as long
    except OSError:
        return float(psutil.Process().memory_info().rss) / MIB


def peak_mib() -> float:
    """The largest that the process has held so far; the kernel keeps none of an interval."""
    try:
        # not ru_maxrss: a child started by a larger process inherits its parent's
        _, _, after = _content(_STATUS).partition(b"VmHWM:")
        return int(after.split(maxsplit=1)[0]) / 1024
    except (OSError, IndexError):
        pass
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / MIB if sys.platform == "darwin" else peak / 1024


def _content(path: Path) -> bytes:
    """A file of the kernel's, without Python's buffered files, which cost more than the kernel's answer.

    It is opened anew each time: a descriptor that a forked child inherits would still read its parent's memory.

    Raises:
        OSError: it cannot be read.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(descriptor, 1 << 16)
    finally:
        os.close(descriptor)


class Limits:
    """The limits on this process's memory, which are read once.

    Args:
        groups: of :func:`memory_groups`.
    """

    def __init__(self, groups: Sequence[Path]) -> None:
        self._machine_mib = psutil.virtual_memory().total / MIB
        self._groups = [(group, files) for group in groups if (files := _files_of(group)) is not None]

    def tightest(self) -> Limit:
        """The limit that leaves the least now, of the groups and the machine."""
        limits = [Limit(self._machine_mib, _available_mib(), "this machine")]
        limits += [limit for group, files in self._groups if (limit := _left_of(group, files)) is not None]
        return min(limits, key=lambda limit: limit.headroom_mib)


def _available_mib() -> float:
    """Memory of the machine that can be taken without swapping."""
    try:
        _, _, after = _content(_MEMINFO).partition(b"MemAvailable:")  # psutil takes four times as long
        return int(after.split(maxsplit=1)[0]) / 1024
    except (OSError, IndexError, ValueError):
        return float(psutil.virtual_memory().available) / MIB


def memory_groups(process: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")) -> list[Path]:
    """The folders of the control groups (cgroup) with a limit on this process's memory: its own, and those above it.

    Versions 1 and 2; empty where there are none. Source: man 7 cgroups.
    """
    try:
        lines = [line.split(":", 2) for line in process.read_text(encoding="utf-8").splitlines()]
    except OSError:
        return []
    paths = {controllers: path for _, controllers, path in (line for line in lines if len(line) == 3)}
    of_version_1 = next((controllers for controllers in paths if "memory" in controllers.split(",")), None)
    top = root if of_version_1 is None else root / "memory"
    path = paths.get(of_version_1 or "")
    if path is None:
        return []
    # within a container its own group may be mounted as the top
    own_folder = top / path.strip("/")
    folders = [own_folder, *own_folder.parents] if own_folder.is_dir() else [top]
    return [folder for folder in folders if folder.is_relative_to(top) and _files_of(folder) is not None]


@dataclass(frozen=True)
class _Files:
    """What a control group says of its memory."""

    limit_mib: float
    used: Path
    cached: str
    """Name of the statistic of pages that the kernel can give back."""


def _files_of(group: Path) -> _Files | None:
    """The limit of a control group and the names of its files; None: it has no limit."""
    for limit, used, cached in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        try:
            most = (group / limit).read_text(encoding="ascii").strip()
            if most == "max" or int(most) >= _UNLIMITED:
                return None
            files = _Files(int(most) / MIB, group / used, cached)
        except (OSError, ValueError):
            continue
        if _left_of(group, files) is not None:
            return files
    return None


def _left_of(group: Path, files: _Files) -> Limit | None:
    try:
        used = int(files.used.read_text(encoding="ascii"))
        statistics = dict(line.split() for line in (group / "memory.stat").read_text(encoding="ascii").splitlines())
        free = files.limit_mib - (used - int(statistics.get(files.cached, 0))) / MIB
    except (OSError, ValueError):
        return None
    return Limit(files.limit_mib, max(free, 0), f"the control group {group}")
